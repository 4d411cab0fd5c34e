"""Why a prompt reuses what it does: candidates, their tags, where histories part. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from backhaul.deploy.as_it_ran import ANY_TIME, Moment
from backhaul.protocols.candidates import Limits, deepest_usable, tag_candidates
from backhaul.protocols.checkpoint import CheckpointMatch, DomainId, PassedOver, Reason
from backhaul.protocols.record import Candidate
from backhaul.transfer.base import CheckpointInfo, Visibility

CONTEXT_TOKENS = 12
"""Shown on either side of the first difference."""
PARTLY_MAX = 8
"""Candidates that share only a beginning: a system prompt is shared by every conversation."""

_VISIBILITY = {Reason.EVICTED: Visibility.EVICTED, Reason.UNCOMMITTED: Visibility.PENDING}

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a store holds along a prompt.

    Attributes:
        candidates: what a request's lookup answers, deepest first, with its tags; then what only a
            listing shows: checkpoints at the prompt's own boundaries, and ones that share a
            beginning with it, the longest first.
        looked_up: how many of them a lookup answers.
        common: tokens shared with the prompt, per candidate.
        later: per candidate, whether it came into the store after the request had looked.
        closest: the visible checkpoint that shares most and yet does not match; None also where it
            shares less than what matches, since that is not where this prompt departs. What came
            later counts for neither.
        strangers: checkpoints that share not even the first block.
    """

    candidates: tuple[Candidate, ...]
    common: tuple[int, ...]
    later: tuple[bool, ...]
    looked_up: int
    closest: CheckpointInfo | None
    strangers: int


def explain(
    infos: Sequence[CheckpointInfo],
    matches: Sequence[CheckpointMatch],
    domain: DomainId,
    prompt_tokens: int,
    differing: Mapping[DomainId, str] = MappingProxyType({}),
    moment: Moment = ANY_TIME,
) -> Explanation:
    """Tags of every checkpoint that has something in common with a prompt.

    ``matches`` are a lookup's, so that tags and reasons are those of a request, but for the
    engine's own prefix cache, which is not known here and counts as empty. ``infos``, of a listing,
    carry ``common_tokens`` and add what a lookup does not answer. ``moment``: when the request
    looked, where it is one that has run.
    """
    limits = Limits(local_tokens=0, limit_tokens=prompt_tokens - 1)
    selected = deepest_usable(
        (match.boundary for match in matches if match.consumable),
        local_tokens=0,
        limit_tokens=limits.limit_tokens,
        denied=(),
    )
    answered = tag_candidates(matches, selected, limits)
    left = list(infos)
    common = [_take_common(match, left, domain, selected) for match in matches]
    matching = [info for info in left if _matches(info)]
    partly = [info for info in left if info.common_tokens and not _matches(info)]
    matching.sort(key=lambda one: one.boundary, reverse=True)
    partly.sort(key=lambda one: one.common_tokens, reverse=True)
    mine = matching + partly[:PARTLY_MAX]
    visible = [
        info
        for info in infos
        if info.visibility is Visibility.VISIBLE
        and info.domain == domain
        and not moment.is_later(info.boundary, info.age_s, "", matched=_matches(info))
    ]
    deepest = max((info.boundary for info in visible if _matches(info)), default=0)
    diverged = [i for i in visible if not _matches(i) and i.common_tokens >= deepest]
    listed = (
        _candidate(
            info,
            domain,
            differing.get(info.domain),
            selected=False,
            over=_passed_over(info.boundary, selected, prompt_tokens),
        )
        for info in mine
    )
    candidates = (*answered, *listed)
    return Explanation(
        candidates=candidates,
        common=(*common, *(info.common_tokens for info in mine)),
        later=tuple(
            one.retained
            and moment.is_later(one.boundary, one.age_s, one.domain, matched=one.hash_matched)
            for one in candidates
        ),
        looked_up=len(answered),
        closest=max(diverged, key=lambda one: one.common_tokens, default=None),
        strangers=sum(not info.common_tokens for info in infos),
    )


def _take_common(
    match: CheckpointMatch, left: list[CheckpointInfo], domain: DomainId, selected: int
) -> int:
    """Tokens that a match shares with the prompt. Its row of the listing, where there is one, is
    taken out of ``left``; a lookup names no hash of what goes on by other tokens, but it is one of
    those that share at least what is selected."""
    other = match.reason is Reason.HASH_MISMATCH
    visibility = _VISIBILITY.get(match.reason or Reason.INTERNAL, Visibility.VISIBLE)
    rows = [
        info
        for info in left
        if info.boundary == match.boundary
        and info.domain == (match.domain or domain)
        and _matches(info) != other
        and info.visibility is visibility
        and info.common_tokens >= (selected if other else 0)
    ]
    if not rows:
        return selected if other else match.boundary
    newest = min(rows, key=lambda info: info.age_s)
    left.remove(newest)
    return newest.common_tokens


def tag(
    infos: Sequence[CheckpointInfo],
    domain: DomainId,
    prompt_tokens: int,
    differing: Mapping[DomainId, str] = MappingProxyType({}),
) -> tuple[Candidate, ...]:
    """Each checkpoint's tags for a prompt and a worker of ``domain``. ``infos`` carry
    ``common_tokens`` and hold whatever matches. Selected is the deepest consumable one; where
    several domains hold it, the worker's own, else the first of ``infos``. ``differing``: of other
    domains the first field that keeps their bytes from this worker; "" where they can be
    converted."""
    usable = [
        (info.boundary, info.domain == domain, -index)
        for index, info in enumerate(infos)
        if _matches(info)
        and (info.domain == domain or differing.get(info.domain) == "")
        and info.visibility is Visibility.VISIBLE
        and info.boundary < prompt_tokens
    ]
    deepest, _, index = max(usable, default=(0, False, 1))  # 1 is nobody's
    return tuple(
        _candidate(
            info,
            domain,
            differing.get(info.domain),
            selected=place == -index,
            over=_passed_over(info.boundary, deepest, prompt_tokens),
        )
        for place, info in enumerate(infos)
    )


def _matches(info: CheckpointInfo) -> bool:
    return info.common_tokens == info.boundary


def _candidate(
    info: CheckpointInfo,
    domain: DomainId,
    field: str | None,
    *,
    selected: bool,
    over: PassedOver,
) -> Candidate:
    """``over``: why it is passed over, where it is."""
    reason = _reason(info, domain, convertible=field == "")
    retained = info.visibility is Visibility.VISIBLE
    return Candidate(
        boundary=info.boundary,
        kinds=info.kinds,
        retained=retained,
        hash_matched=retained and _matches(info),
        consumable=reason is None,
        selected=selected,
        reason=reason,
        passed_over=over if reason is None and not selected else None,
        age_s=info.age_s,
        field=field or "" if reason is Reason.DOMAIN_MISMATCH else "",
        domain=info.domain if info.domain != domain else "",
    )


def goes_on(boundary: int, common_tokens: int, prompt_tokens: int, compared_tokens: int) -> bool:
    """Whether a checkpoint lies past a prompt's end and departs from it nowhere that can be seen,
    as the end of its own reply does: it is no rewritten history's.

    ``compared_tokens``: of the whole blocks by which the two are compared.
    """
    whole = prompt_tokens // compared_tokens * compared_tokens
    return boundary > prompt_tokens and 0 < whole <= common_tokens


def _passed_over(boundary: int, selected: int, prompt_tokens: int) -> PassedOver:
    if boundary >= prompt_tokens:
        return PassedOver.NO_TOKEN_LEFT
    return PassedOver.SHALLOWER if boundary < selected else PassedOver.SAME_BOUNDARY


def _reason(info: CheckpointInfo, domain: DomainId, *, convertible: bool) -> Reason | None:
    if info.visibility is Visibility.EVICTED:
        return Reason.EVICTED
    if info.visibility is Visibility.PENDING:
        return Reason.UNCOMMITTED
    if not _matches(info):
        return Reason.HASH_MISMATCH
    return None if info.domain == domain or convertible else Reason.DOMAIN_MISMATCH


class Divergence(NamedTuple):
    """The first difference of two token sequences.

    Attributes:
        position: index of the first token that differs; where one sequence ends, its length.
        left, right: what comes there, decoded (or as ids); "" at a sequence's end.
        before: what both share right before it.
        left_ids, right_ids: the tokens of ``left`` and ``right``.
    """

    position: int
    before: str
    left: str
    right: str
    left_ids: tuple[int, ...]
    right_ids: tuple[int, ...]


def first_difference(
    left: Sequence[int], right: Sequence[int], decode: Decode
) -> Divergence | None:
    """Where two token sequences part, with surroundings; None where they are equal."""
    shorter = min(len(left), len(right))
    position = next((i for i in range(shorter) if left[i] != right[i]), shorter)
    if position == len(left) == len(right):
        return None
    end = position + CONTEXT_TOKENS
    return Divergence(
        position,
        decode(left[max(position - CONTEXT_TOKENS, 0) : position]),
        decode(left[position:end]),
        decode(right[position:end]),
        tuple(left[position:end]),
        tuple(right[position:end]),
    )
