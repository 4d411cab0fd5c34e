"""What a lookup came to for one request: the tags of its candidates, and what is counted.

Plain decisions on plain data. An outcome is settled once, when the request's prefill begins; a
later preemption and its new lookup change nothing in it, as in vLLM's own statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointMatch,
    ProducerAge,
    Reason,
    Reuse,
    Tag,
    primary_kind,
)
from backhaul.protocols.metrics import NONE
from backhaul.protocols.record import CANDIDATES_MAX, Candidate, MatchedTokens, Selected
from backhaul.protocols.work import ModelWork

if TYPE_CHECKING:  # it imports vLLM, which the simulator runs without
    from backhaul.connector.stats import StatsRecorder


class Answered(NamedTuple):
    """What the store last answered for a request.

    Attributes:
        attention_tokens, recurrent_tokens: see ``LookupResult``.
        reason: why the store could not be asked; None where it answered.
    """

    matches: tuple[CheckpointMatch, ...] = ()
    attention_tokens: int = 0
    recurrent_tokens: int = 0
    reason: Reason | None = None


class Outcome(NamedTuple):
    """A settled request; see ``RequestRecord`` for the numbers. ``junction`` is the end of a prefix
    that an earlier request shares and that no recurrent group had cached locally; 0: none."""

    prompt_tokens: int
    local_tokens: int
    loaded_tokens: int
    other_tokens: int
    selected: Selected | None
    candidates: tuple[Candidate, ...]
    matched: MatchedTokens
    reuse: Reuse | None = None
    junction: int = 0
    work: ModelWork | None = None

    @property
    def missed_junction(self) -> int:
        """The junction, where the prefill began before it."""
        return self.junction if self.junction > self.resumed_tokens else 0

    @property
    def resumed_tokens(self) -> int:
        """Where the prefill began."""
        return self.local_tokens + self.loaded_tokens + self.other_tokens

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return max(self.prompt_tokens - self.resumed_tokens, 0)


def producer_age(matches: Iterable[CheckpointMatch], selected: CheckpointMatch) -> ProducerAge:
    """How many requests ago ``selected`` was made: each request of a history leaves at most one end
    of a kind, so the ends of the same kind that lie deeper are of later ones, whatever became of
    them. What the store has forgotten is not counted."""
    kind = primary_kind(selected.kinds)
    later = sum(m.boundary > selected.boundary and kind in m.kinds for m in matches)
    return (ProducerAge.PREVIOUS, ProducerAge.TWO_EARLIER, ProducerAge.OLDER)[min(later, 2)]


def reuse_of(matches: Iterable[CheckpointMatch]) -> Reuse | None:
    """From a request's first answer, deepest first: whether the deepest checkpoint known of its
    very prefix had been looked up before. None where none is known."""
    for match in matches:
        if match.kinds and match.reason is not Reason.HASH_MISMATCH:
            return Reuse.STEADY if match.hits else Reuse.FIRST
    return None


def matched_tokens(answered: Answered, *, has_recurrent: bool) -> MatchedTokens:
    """How far the store matched; a backend that does not know the extents gives the joint one."""
    joint = max((m.boundary for m in answered.matches if m.consumable), default=0)
    attention = max(answered.attention_tokens, joint)
    recurrent = max(answered.recurrent_tokens, joint) if has_recurrent else 0
    same = max((m.boundary for m in answered.matches if m.hash_matched), default=0)
    return MatchedTokens(
        attention=attention,
        recurrent=recurrent,
        joint=joint,
        exact_hash=max(same, attention, recurrent),
    )


def shown(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The ``CANDIDATES_MAX`` deepest; a selected one below them takes the last place."""
    kept = list(candidates[:CANDIDATES_MAX])
    for candidate in candidates[CANDIDATES_MAX:]:
        if candidate.selected:
            kept[-1] = candidate
    return tuple(kept)


def count_outcome(outcome: Outcome, stats: StatsRecorder, *, asked: bool) -> None:
    """Count a settled request. ``asked``: the store answered a lookup of it."""
    selected = outcome.selected
    stats.count("requests", selected.kind if selected else NONE)
    stats.count("prompt_tokens", "local", n=outcome.local_tokens)
    stats.count("prompt_tokens", "loaded", n=outcome.loaded_tokens)
    stats.count("prompt_tokens", "other", n=outcome.other_tokens)
    stats.count("prompt_tokens", "recomputed", n=outcome.recomputed_tokens)
    stats.observe("recomputed_tokens", outcome.recomputed_tokens)
    if outcome.reuse is not None:
        stats.count("continuations", outcome.reuse)
        stats.count("continuation_tokens", outcome.reuse, "reused", n=_reused(outcome))
        stats.count("continuation_tokens", outcome.reuse, "recomputed", n=outcome.recomputed_tokens)
    if outcome.missed_junction:
        stats.count("branch_learning_misses")
        missed = outcome.missed_junction - outcome.resumed_tokens
        stats.count("branch_learning_tokens", n=missed)
    for candidate in outcome.candidates:
        _count_candidate(candidate, stats)
    if any(
        CheckpointKind.DECODE_END in c.kinds
        and not c.consumable
        and c.boundary > outcome.resumed_tokens
        for c in outcome.candidates
    ):
        stats.count("decode_end_missed", selected.kind if selected else NONE)
    if asked:
        for extent in MatchedTokens.__struct_fields__:
            stats.observe("matched_tokens", getattr(outcome.matched, extent), extent)
    if selected is not None:
        _count_selected(outcome, selected, stats)


def _reused(outcome: Outcome) -> int:
    return outcome.local_tokens + outcome.loaded_tokens


def _count_candidate(candidate: Candidate, stats: StatsRecorder) -> None:
    kind = primary_kind(candidate.kinds)
    stats.count("candidates", "known", kind)
    for tag in Tag:
        if getattr(candidate, tag):
            stats.count("candidates", tag, kind)
    if candidate.reason is not None:
        stats.count("candidates_unconsumable", candidate.reason, kind)
    if candidate.passed_over is not None:
        stats.count("candidates_passed_over", candidate.passed_over, kind)


def _count_selected(outcome: Outcome, selected: Selected, stats: StatsRecorder) -> None:
    kind = selected.kind
    stats.observe("selected_boundary_tokens", selected.boundary, kind)
    stats.observe("selected_age_seconds", selected.age_s, kind)
    stats.count("selections", kind, selected.producer_age)
    others = (
        c.boundary
        for c in outcome.candidates
        if c.consumable
        and c.boundary <= selected.boundary
        and any(str(other) != kind for other in c.kinds)
    )
    without = max((b for b in others if b > outcome.local_tokens), default=0)
    stats.count("incremental_hits", kind, n=not without)
    without = max(without, outcome.local_tokens)
    stats.count("incremental_tokens", kind, n=selected.boundary - without)
    if outcome.work is not None:
        avoided = outcome.work.flops(outcome.local_tokens, selected.boundary)
        stats.count("avoided_prefill_flops", kind, n=float(avoided))
        spared = outcome.work.flops(without, selected.boundary)
        stats.count("incremental_prefill_flops", kind, n=float(spared))
