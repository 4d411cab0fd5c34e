"""What a request could reuse of the one before it, from the content of the turns; and what it did.

The same functions judge real engines and the simulator: the turns say which ends a prompt still
begins with, the engine's own record says which candidate was taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from backhaul.benchmarks.reuse.record import EndFate, Relation
from backhaul.benchmarks.reuse.trace import Turn, shared_prefix
from backhaul.protocols.checkpoint import CheckpointKind, Reason
from backhaul.protocols.record import Candidate, RequestRecord

_ENDS = (CheckpointKind.DECODE_END, CheckpointKind.INPUT_END, CheckpointKind.PROMPT_END)


_NO_CHECKPOINT = (Reason.HASH_MISMATCH, Reason.STATE_MISSING, Reason.ATTENTION_MISSING)
"""Of a candidate that is no checkpoint of these tokens, at most parts of one."""


class Ends(NamedTuple):
    """Materialised ends of one request, in tokens; 0 where no boundary lies there."""

    decode_end: int
    input_end: int
    prompt_end: int


def ends_of(turn: Turn, grid: int, *, handed_tokens: int = 0) -> Ends:
    """Where a request's ends materialise on a boundary grid.

    ``handed_tokens``: tokens at the prompt's end that the hand-over leaves to decode, so that the
    prefill worker's P_end comes that much earlier. A decode end needs a state that decode wrote:
    there is none below the position where decode starts.
    """
    prompt, output = turn.prompt_tokens, turn.output_tokens
    decode = max(prompt + output - 1, 0) // grid * grid
    start = max(prompt - 1, 0) if handed_tokens else prompt
    return Ends(
        decode_end=decode if decode >= start else 0,
        input_end=min(turn.u_end or 0, prompt) // grid * grid,
        prompt_end=max(prompt - handed_tokens - 1, 0) // grid * grid,
    )


class Relations:
    """Relates the turns of a trace in the order in which they are seen."""

    def __init__(self, grid: int, *, handed_tokens: int = 0) -> None:
        """See ``ends_of``."""
        self._grid = grid
        self._handed = handed_tokens
        self._turns: dict[str, Turn] = {}
        self._roots: dict[str, str] = {}
        self._reused: Counter[str] = Counter()
        self._input_ends: dict[str, tuple[int, ...]] = {}
        self._continued: Counter[str] = Counter()
        self._opened: Counter[tuple[str, int]] = Counter()

    def add(self, turn: Turn) -> Relation:
        """How ``turn`` relates to those added before."""
        predecessor = self._turns.get(turn.after) if turn.after else None
        self._turns[turn.request] = turn
        if predecessor is None:
            self._roots[turn.request] = turn.request
            self._keep_input_end(turn, ())
            reuse = 0
            if turn.prompt:
                opening = (turn.prompt[0].source, turn.prompt[0].start)
                reuse = self._opened[opening]
                self._opened[opening] += 1
            return Relation(reuse=reuse, tool_continuation=turn.tool_continuation)
        self._continued[turn.after] += 1
        continuation = self._continued[turn.after]
        root = self._roots[turn.request] = self._roots[turn.after]
        self._reused[root] += 1
        common = shared_prefix((*predecessor.prompt, *predecessor.output), turn.prompt)
        ends = ends_of(predecessor, self._grid, handed_tokens=self._handed)
        depths = dict(zip(_ENDS, ends, strict=True))
        input_ends = tuple(end for end in self._input_ends[turn.after] if end <= common)
        self._keep_input_end(turn, input_ends)
        return Relation(
            continuation=continuation,
            reuse=self._reused[root],
            tool_continuation=turn.tool_continuation,
            decode_end=ends.decode_end if ends.decode_end <= common else 0,
            input_end=ends.input_end if ends.input_end <= common else 0,
            prompt_end=ends.prompt_end if ends.prompt_end <= common else 0,
            input_ends=input_ends,
            rewritten=tuple(kind for kind, depth in depths.items() if depth > common),
        )

    def _keep_input_end(self, turn: Turn, earlier: tuple[int, ...]) -> None:
        """Note a turn's U_end with those ``earlier`` ones that its prompt begins with."""
        own = ends_of(turn, self._grid, handed_tokens=self._handed).input_end
        self._input_ends[turn.request] = tuple(sorted({*earlier, own} - {0}))

    def producer_age(self, turn: Turn, kind: str, boundary: int) -> int:
        """How many requests back, along ``after``, the end of that kind at ``boundary`` was made;
        0 where none of them has it there (a shared prefix of another conversation)."""
        age, name = 0, turn.after
        while name and (producer := self._turns.get(name)) is not None:
            age += 1
            ends = ends_of(producer, self._grid, handed_tokens=self._handed)
            if kind in _ENDS and getattr(ends, kind) == boundary:
                return age
            name = producer.after
        return 0


def judged(
    turn: Turn, relation: Relation, relations: Relations, said: RequestRecord
) -> dict[str, Any]:
    """Fields of a request's line, from what its prefill said of itself and of the store: all but
    arm, output, work and times."""
    selected = said.selected
    boundary = selected.boundary if selected else 0
    kind = selected.kind if selected else ""
    fates = {end.value: fate(end, relation, said.candidates, boundary) for end in _ENDS}
    return fates | {
        "request": turn.request,
        "conversation": turn.conversation,
        "relation": relation,
        "prompt_tokens": said.prompt_tokens,
        "local_tokens": said.local_tokens,
        "loaded_tokens": said.loaded_tokens,
        "other_tokens": said.other_tokens,
        "selected": kind,
        "selected_kinds": selected.kinds if selected else (),
        "selected_boundary": boundary,
        "producer_age": relations.producer_age(turn, kind, boundary) if selected else 0,
        "without": hits_without(said.candidates, local_tokens=said.local_tokens, selected=boundary),
        "junction_known": any(
            c.consumable and CheckpointKind.SHARED_PREFIX in c.kinds for c in said.candidates
        ),
        "reason": said.reason.value if said.reason else "",
        "forced_splits": len(said.forced_chunk_ends),
    }


def fate(
    kind: CheckpointKind, relation: Relation, candidates: Iterable[Candidate], selected: int
) -> EndFate:
    """What became of the predecessor's end of that kind. ``selected``: boundary loaded, or 0."""
    if not relation.continuation:
        return EndFate.NO_PREDECESSOR
    if kind in relation.rewritten:
        return EndFate.REWRITTEN
    boundary = int(getattr(relation, kind))
    for candidate in candidates if boundary else ():
        if candidate.boundary != boundary or candidate.reason in _NO_CHECKPOINT:
            continue
        if candidate.kinds and kind not in candidate.kinds:
            continue
        if not candidate.consumable:
            return EndFate.UNUSABLE
        return EndFate.SELECTED if boundary == selected else EndFate.PASSED_OVER
    return EndFate.NOT_KEPT


def hits_without(
    candidates: Sequence[Candidate], *, local_tokens: int, selected: int, min_gain_tokens: int = 1
) -> dict[CheckpointKind, int]:
    """Kind -> the hit there would have been without the checkpoints that stand for it alone; only
    kinds that were decisive. ``selected``: boundary loaded, or 0."""
    if not selected:
        return {}
    without: dict[CheckpointKind, int] = {}
    kinds = {kind for c in candidates if c.boundary == selected for kind in c.kinds}
    for kind in kinds:
        others = (
            c.boundary
            for c in candidates
            if c.consumable
            and local_tokens + min_gain_tokens <= c.boundary <= selected
            and any(other != kind for other in c.kinds)
        )
        hit = max(others, default=local_tokens)
        if hit < selected:
            without[kind] = hit
    return without
