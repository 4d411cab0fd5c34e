"""From a lookup's matches to a request's candidates: which one may be used, and what becomes of the
others. Plain decisions on plain data, the same for a request and for whoever explains one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from backhaul.protocols.checkpoint import CheckpointMatch, PassedOver, Reason
from backhaul.protocols.record import Candidate


class Limits(NamedTuple):
    """What decides which consumable candidate a request may use.

    Attributes:
        local_tokens: the engine's own hit, in whole boundaries.
        limit_tokens: deepest boundary that leaves a token to be computed.
        min_gain_tokens: shortest gain worth a load.
        denied: boundary -> why its load failed for this request.
        loads_over: no load is tried any more.
    """

    local_tokens: int
    limit_tokens: int
    min_gain_tokens: int = 1
    denied: Mapping[int, Reason] = MappingProxyType({})
    loads_over: bool = False


def deepest_usable(
    boundaries: Iterable[int], *, local_tokens: int, limit_tokens: int, denied: Collection[int]
) -> int:
    """The boundary to load, or 0: the deepest one above the local hit, at most ``limit_tokens``
    (one token must remain to be computed) and not denied after a failed load."""
    usable = (b for b in boundaries if local_tokens < b <= limit_tokens and b not in denied)
    return max(usable, default=0)


def tag_candidates(
    matches: Iterable[CheckpointMatch], selected: int, limits: Limits
) -> tuple[Candidate, ...]:
    """Every match with its tags; the one at ``selected`` (0: none) was loaded."""
    candidates = []
    for match in matches:
        failure = limits.denied.get(match.boundary) if match.consumable else None
        failed = failure is not None
        consumable = match.consumable and not failed
        chosen = consumable and match.boundary == selected
        candidates.append(
            Candidate(
                boundary=match.boundary,
                kinds=match.kinds,
                retained=match.retained,
                hash_matched=match.hash_matched,
                consumable=consumable,
                selected=chosen,
                reason=_why_denied(failure) if failure else match.reason,
                passed_over=passed_over(match.boundary, selected, limits)
                if consumable and not chosen
                else None,
                age_s=round(match.age_s, 3),
                field=match.field,
                domain=match.domain,
            )
        )
    return tuple(candidates)


def _why_denied(failure: Reason) -> Reason:
    """Of a candidate whose load failed: nobody answered for its bytes, or else."""
    return failure if failure is Reason.UNREACHABLE else Reason.LOAD_FAILED


def passed_over(boundary: int, selected: int, limits: Limits) -> PassedOver:
    """Why a consumable checkpoint at ``boundary`` is not the selected one."""
    gain = boundary - limits.local_tokens
    if boundary > limits.limit_tokens:
        return PassedOver.NO_TOKEN_LEFT
    if gain <= 0:
        return PassedOver.LOCAL_HIT
    if boundary < selected:
        return PassedOver.SHALLOWER
    if limits.loads_over:
        return PassedOver.LOADS_OVER
    return PassedOver.SMALL_GAIN if gain < limits.min_gain_tokens else PassedOver.NOT_TAKEN
