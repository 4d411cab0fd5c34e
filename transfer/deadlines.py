"""When what runs out runs out, without a clock of its own."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Mortal(Protocol):
    """Something that ends by itself at ``expires_at`` (seconds) unless ``ended`` before."""

    expires_at: float
    ended: bool


_COMPACT_MIN = 1024
"""Queue length below which entries that mean nothing any more are left to come up by themselves."""

_M = TypeVar("_M", bound=Mortal)


class Deadlines(Generic[_M]):
    """Moving ``expires_at`` later needs no call here: an owner that is met too early is queued
    again. Of the entries of one owner only the earliest counts: it costs one, however often it is
    kept alive, and is met once. At most half of a long queue are entries of owners that ended
    before their time or were moved earlier."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, _M]] = []
        self._earliest: dict[_M, float] = {}
        self._pushed = 0  # breaks ties, first come first
        self._compact_at = _COMPACT_MIN

    def __len__(self) -> int:
        """Queued entries, those that mean nothing any more included."""
        return len(self._queue)

    def push(self, owner: _M) -> None:
        """Watch a new owner, or one whose ``expires_at`` moved earlier."""
        if self._earliest.get(owner, math.inf) <= owner.expires_at:
            return
        if len(self._queue) >= self._compact_at:
            self._compact()
        self._pushed += 1
        self._earliest[owner] = owner.expires_at
        heapq.heappush(self._queue, (owner.expires_at, self._pushed, owner))

    def due(self, now: float) -> Iterator[_M]:
        """Every owner whose time has come, each once; the caller ends it before the next."""
        while self._queue and self._queue[0][0] <= now:
            at, _, owner = heapq.heappop(self._queue)
            if self._earliest.get(owner) != at:
                continue
            del self._earliest[owner]
            if owner.ended:
                continue
            if owner.expires_at > now:
                self.push(owner)
            else:
                yield owner

    def _compact(self) -> None:
        self._queue = [
            item
            for item in self._queue
            if not item[2].ended and self._earliest.get(item[2]) == item[0]
        ]
        heapq.heapify(self._queue)
        self._earliest = {owner: at for at, _, owner in self._queue}
        self._compact_at = max(2 * len(self._queue), _COMPACT_MIN)
