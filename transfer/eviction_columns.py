"""Candidates in an order that changes by itself, as time passes or others come and go.

No heap holds such an order: the values of two checkpoints that nobody touches pass each other. What
they are made of stays, though, and is kept in columns, so that the next one to go is found by a few
passes of NumPy over them: a millisecond for a hundred thousand. A change costs O(1).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backhaul.transfer.entries import Checkpoint
from backhaul.transfer.eviction_queue import Recency

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_ROWS_MIN = 64
_NO_TURN = -1


class Columns(NamedTuple):
    """One row a checkpoint: time of its last use (seconds), FLOPs saved per byte, whether several
    others extend it."""

    used_at: Floats
    efficiency: Floats
    shared: Flags


Worth = Callable[[Columns, float], tuple[Floats, Flags]]
"""Candidates and now -> what each is worth, and those that go after all others."""


class ColumnQueue:
    """An ``EvictionQueue`` by the least worth, ties by ``eviction.recency``. The end of a users'
    turn is worth no less than what extends it up to the next users' turn."""

    def __init__(
        self,
        worth: Worth,
        efficiency: Callable[[Checkpoint], float],
        recency: Callable[[Checkpoint], Recency],
    ) -> None:
        self._worth = worth
        self._efficiency_of = efficiency
        self._recency_of = recency
        self._rows: dict[Checkpoint, int] = {}
        self._at: list[Checkpoint | None] = []
        self._free: list[int] = []
        self._dirty: dict[Checkpoint, None] = {}
        self._used_at = np.zeros(0)
        self._efficiency = np.zeros(0)
        self._shared = np.zeros(0, np.bool_)
        self._present = np.zeros(0, np.bool_)
        self._user = np.zeros(0, np.bool_)
        self._turn = np.zeros(0, np.int64)  # row of the users' turn that it extends, or _NO_TURN

    def add(self, checkpoint: Checkpoint) -> None:
        """See ``EvictionQueue``."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._rows[checkpoint] = row
        self._at[row] = checkpoint
        self._present[row] = True
        self._dirty[checkpoint] = None

    def remove(self, checkpoint: Checkpoint) -> None:
        """See ``EvictionQueue``."""
        row = self._rows.pop(checkpoint)
        self._dirty.pop(checkpoint, None)
        if self._user[row]:
            for below in np.flatnonzero(self._turn == row):
                if (one := self._at[below]) is not None:
                    self._dirty[one] = None
        self._at[row] = None
        self._present[row] = self._user[row] = False
        self._turn[row] = _NO_TURN
        self._free.append(row)

    def changed(self, checkpoint: Checkpoint) -> None:
        """See ``EvictionQueue``."""
        if checkpoint in self._rows:
            self._dirty[checkpoint] = None

    def candidates(
        self, now: float, leased: Collection[Checkpoint]
    ) -> Generator[Checkpoint, None, None]:
        """See ``EvictionQueue``."""
        given: list[Checkpoint] = []
        while (first := self._first(now, leased, given)) is not None:
            given.append(first)
            yield first

    def _first(
        self, now: float, leased: Collection[Checkpoint], given: Collection[Checkpoint]
    ) -> Checkpoint | None:
        while self._dirty:
            self._refresh(self._dirty.popitem()[0])
        unleased = self._present.copy()
        unleased[self._rows_of(leased)] = False
        rows = np.flatnonzero(unleased)
        columns = Columns(self._used_at[rows], self._efficiency[rows], self._shared[rows])
        worth, last = self._worth(columns, now)
        worth = self._raised(worth, rows)
        unleased[self._rows_of(given)] = False
        left = np.flatnonzero(unleased[rows])
        if not left.size:
            return None
        if not last[left].all():
            left = left[~last[left]]
        for values in (worth, columns.used_at):  # recency begins with the last use
            left = left[values[left] == values[left].min()]
        tied: list[Checkpoint] = [one for row in rows[left] if (one := self._at[row]) is not None]
        return min(tied, key=self._recency_of)

    def _raised(self, worth: Floats, rows: npt.NDArray[np.int64]) -> Floats:
        """Users' turns as much as the loops that extend them."""
        turn = self._turn[rows]
        (loops,) = np.nonzero(turn != _NO_TURN)
        if not loops.size:
            return worth
        position = np.full(len(self._at), _NO_TURN)
        position[rows] = np.arange(rows.size)
        turns = position[turn[loops]]  # _NO_TURN: leased
        known = turns != _NO_TURN
        raised = worth.copy()
        np.maximum.at(raised, turns[known], worth[loops[known]])
        return raised

    def _refresh(self, checkpoint: Checkpoint) -> None:
        row = self._rows[checkpoint]
        self._used_at[row] = checkpoint.used_at
        self._efficiency[row] = self._efficiency_of(checkpoint)
        self._shared[row] = len(checkpoint.children) > 1
        if checkpoint.user_turn and not self._user[row]:
            self._user[row] = True
            below = list(checkpoint.children)
            while below:  # they belonged to an earlier turn, or to none
                one = below.pop()
                if not one.user_turn:
                    self._dirty[one] = None
                    below += one.children
        self._turn[row] = _NO_TURN if checkpoint.user_turn else self._turn_above(checkpoint)

    def _turn_above(self, checkpoint: Checkpoint) -> int:
        above = checkpoint.parent
        while above is not None:
            row = self._rows[above]
            if above.user_turn:
                return row
            if above not in self._dirty:
                return int(self._turn[row])
            above = above.parent
        return _NO_TURN

    def _rows_of(self, checkpoints: Iterable[Checkpoint]) -> list[int]:
        return [self._rows[one] for one in checkpoints if one in self._rows]

    def _grow(self) -> None:
        rows = len(self._at)
        more = max(rows, _ROWS_MIN)
        self._at += [None] * more
        self._free += range(rows + more - 1, rows - 1, -1)
        self._used_at = np.concatenate([self._used_at, np.zeros(more)])
        self._efficiency = np.concatenate([self._efficiency, np.zeros(more)])
        self._shared = np.concatenate([self._shared, np.zeros(more, np.bool_)])
        self._present = np.concatenate([self._present, np.zeros(more, np.bool_)])
        self._user = np.concatenate([self._user, np.zeros(more, np.bool_)])
        self._turn = np.concatenate([self._turn, np.full(more, _NO_TURN)])


def scaled(values: Floats) -> Floats:
    """To 0 ... 1; all 0 where all are equal."""
    if not values.size or not (span := values.max() - values.min()) > 0:
        return np.zeros(values.size)
    return np.asarray((values - values.min()) / span)
