"""When what runs out runs out, without a clock of its own."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Mortal(Protocol):
    """Something that ends by itself at ``expires_at`` (seconds) unless ``ended`` before."""

    expires_at: float
    ended: bool


_COMPACT_MIN = 1024
"""Queue length below which ended owners are left to come up by themselves."""

_M = TypeVar("_M", bound=Mortal)


class Deadlines(Generic[_M]):
    """Moving ``expires_at`` later needs no call here: an owner that is met too early is queued
    again. So a lively publication costs one entry, however often it is kept alive. At most half of
    a long queue are owners that ended before their time."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, _M]] = []
        self._pushed = 0  # breaks ties, first come first
        self._compact_at = _COMPACT_MIN

    def __len__(self) -> int:
        """Queued deadlines, those of ended owners included."""
        return len(self._queue)

    def push(self, owner: _M) -> None:
        """Watch a new owner, or one whose ``expires_at`` moved earlier."""
        if len(self._queue) >= self._compact_at:
            self._queue = [item for item in self._queue if not item[2].ended]
            heapq.heapify(self._queue)
            self._compact_at = max(2 * len(self._queue), _COMPACT_MIN)
        self._pushed += 1
        heapq.heappush(self._queue, (owner.expires_at, self._pushed, owner))

    def due(self, now: float) -> Iterator[_M]:
        """Every owner whose time has come, each once; the caller ends it before the next."""
        while self._queue and self._queue[0][0] <= now:
            owner = heapq.heappop(self._queue)[2]
            if owner.ended:
                continue
            if owner.expires_at > now:
                self.push(owner)
            else:
                yield owner
