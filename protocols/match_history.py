"""What matched so far, by template and client: bounded, and without a clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from backhaul.protocols.checkpoint import CheckpointKind, Reason
from backhaul.protocols.policy import Matched

KEYS_MAX = 4096
"""Pairs of template and client that are remembered; the one unused longest gives way."""

WINDOW = 32
"""Outcomes after which all counts of a pair are halved: a client that changes is learnt again
within as many requests, and structure decides again once only U_end was used for long."""


class Answer(Protocol):
    """A lookup's candidate: ``CheckpointMatch``, or ``Candidate`` of a request's record."""

    @property
    def boundary(self) -> int: ...
    @property
    def kinds(self) -> tuple[CheckpointKind, ...]: ...
    @property
    def hash_matched(self) -> bool: ...
    @property
    def reason(self) -> Reason | None: ...


class Observation(NamedTuple):
    """What one request says. ``decode_end``: a D_end of its history matched (True), lies behind a
    point where the history was rewritten (False), or there was none (None)."""

    decode_end: bool | None = None
    input_end: bool = False


def observe(candidates: Iterable[Answer], continues: int | None = None) -> Observation:
    """Read a request's candidates: what matched deepest, and which D_end beyond it did not.

    A rewritten history and a branched one look the same here; where conversations branch on
    purpose, D_end misses as truly.

    Args:
        continues: boundary of the U_end of the request that this one continues, where a D_end was
            chosen there. A store cannot name a D_end that missed while nothing else of the history
            is in it; but then no D_end beyond that boundary is among the candidates.
    """
    candidates = tuple(candidates)
    if continues is not None and not any(
        CheckpointKind.DECODE_END in one.kinds and one.boundary > continues for one in candidates
    ):
        met_input = any(CheckpointKind.INPUT_END in c.kinds and c.hash_matched for c in candidates)
        return Observation(False, met_input)
    matched = [one for one in candidates if one.hash_matched]
    deepest = max(matched, key=lambda one: one.boundary, default=None)
    reach = deepest.boundary if deepest else 0
    missed = any(
        one.reason is Reason.HASH_MISMATCH
        and CheckpointKind.DECODE_END in one.kinds
        and one.boundary > reach
        for one in candidates
    )
    kinds = deepest.kinds if deepest else ()
    if missed:
        return Observation(False, CheckpointKind.INPUT_END in kinds)
    met = CheckpointKind.DECODE_END in kinds
    return Observation(True if met else None, CheckpointKind.INPUT_END in kinds and not met)


class MatchHistory:
    """Counts of observations per template and client. Not thread-safe."""

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._counts: OrderedDict[tuple[str, str], Matched] = OrderedDict()
        self._expected: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, template: str, client: str) -> Matched:
        """What is known of the pair."""
        return self._counts.get((template, client), Matched())

    def expect(self, name: bytes, boundary: int, prompt_tokens: int) -> None:
        """A D_end was chosen for a request of so many tokens; ``name`` is the prefix hash at the
        boundary of its U_end. Whoever continues it will show whether the D_end matches."""
        self._expected[name] = (boundary, prompt_tokens)
        self._expected.move_to_end(name)
        if len(self._expected) > self._keys_max:
            self._expected.popitem(last=False)

    def continued(self, names: Iterable[bytes], prompt_tokens: int) -> int | None:
        """Boundary of the U_end that a request of so many tokens goes on from, and forget it.

        Args:
            names: the request's prefix hashes at its boundaries, the deepest first.
        """
        for name in names if self._expected else ():
            expected = self._expected.get(name)
            if expected is not None:
                if prompt_tokens <= expected[1]:
                    return None  # the same request again
                del self._expected[name]
                return expected[0]
        return None

    def add(self, template: str, client: str, seen: Observation) -> None:
        """Count one request of the pair."""
        if seen.decode_end is None and not seen.input_end:
            return
        key = (template, client)
        before = self.of(template, client)
        counts = (
            before.decode_end_matched + (seen.decode_end is True),
            before.decode_end_missed + (seen.decode_end is False),
            before.input_end_matched + seen.input_end,
        )
        if sum(counts) > WINDOW:
            counts = (counts[0] // 2, counts[1] // 2, counts[2] // 2)
        self._counts[key] = Matched(
            decode_end_matched=counts[0],
            decode_end_missed=counts[1],
            input_end_matched=counts[2],
        )
        self._counts.move_to_end(key)
        if len(self._counts) > self._keys_max:
            self._counts.popitem(last=False)
