"""The candidates of an eviction in a strategy's order, kept up to date instead of sorted anew.

A reservation under pressure evicts a few of very many checkpoints, so what it pays must not grow
with their number as sorting does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Generator
from typing import Protocol

from backhaul.transfer.entries import Checkpoint


class EvictionQueue(Protocol):
    """The visible checkpoints of one index. Not thread-safe."""

    def add(self, checkpoint: Checkpoint) -> None:
        """One became visible."""
        ...

    def remove(self, checkpoint: Checkpoint) -> None:
        """One was evicted."""
        ...

    def changed(self, checkpoint: Checkpoint) -> None:
        """One was used, or got another parent, child, kind or work. Others are ignored."""
        ...

    def candidates(
        self, now: float, leased: Collection[Checkpoint]
    ) -> Generator[Checkpoint, None, None]:
        """All but ``leased``, the first to go first; each is the first, by the strategy's
        ``order``, of those that are there when it is asked for and were not given yet. What is
        given may be removed meanwhile. Close the iterator before anything else happens to the
        queue."""
        ...


Recency = tuple[float, bool, bool, int, int]
"""See ``eviction.recency``."""


class HeapQueue:
    """For keys of one checkpoint alone that only grow, as the time of the last use does.

    Whatever changes is noticed when it comes to the top and sinks to its place then, so that a
    change costs nothing by itself and O(log n) later, once.
    """

    def __init__(self, key: Callable[[Checkpoint], Recency]) -> None:
        """``key`` must tell any two checkpoints apart."""
        self._key = key
        self._heap: list[tuple[Recency, Checkpoint]] = []
        self._members: set[Checkpoint] = set()

    def add(self, checkpoint: Checkpoint) -> None:
        """See ``EvictionQueue``."""
        self._members.add(checkpoint)
        heapq.heappush(self._heap, (self._key(checkpoint), checkpoint))

    def remove(self, checkpoint: Checkpoint) -> None:
        """See ``EvictionQueue``."""
        self._members.remove(checkpoint)

    def changed(self, checkpoint: Checkpoint) -> None:
        """See ``EvictionQueue``."""

    def candidates(
        self, now: float, leased: Collection[Checkpoint]
    ) -> Generator[Checkpoint, None, None]:
        """See ``EvictionQueue``."""
        taken: list[Checkpoint] = []
        try:
            while self._heap:
                filed, checkpoint = self._heap[0]
                if checkpoint not in self._members:
                    heapq.heappop(self._heap)
                elif (key := self._key(checkpoint)) != filed:
                    heapq.heapreplace(self._heap, (key, checkpoint))
                else:
                    heapq.heappop(self._heap)
                    taken.append(checkpoint)
                    if checkpoint not in leased:
                        yield checkpoint
        finally:
            for checkpoint in taken:
                if checkpoint in self._members:
                    heapq.heappush(self._heap, (self._key(checkpoint), checkpoint))
