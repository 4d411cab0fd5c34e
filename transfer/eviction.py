"""Which checkpoint goes first, and how space is made for a reservation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Protocol

from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.transfer.entries import Checkpoint, Entry
from backhaul.transfer.eviction_queue import EvictionQueue, HeapQueue, Recency
from backhaul.transfer.objects import ObjectTable


class EvictionStrategy(Protocol):
    """Exchangeable order of eviction. ``order`` states the rule; what ``queue`` makes follows it
    without sorting all there is."""

    def order(self, checkpoints: Sequence[Checkpoint], now: float) -> Iterable[Checkpoint]:
        """All of ``checkpoints``, the first to go first. Pure: changes nothing."""
        ...

    def queue(self) -> EvictionQueue:
        """An empty queue in this order, for one index."""
        ...


class LeastRecentlyUsed:
    """Least recently used first.

    A use refreshes every checkpoint that the used one extends, so those of one living
    conversation are equally recent. Among them decode ends go first, since a rewritten history
    (reasoning dropped at the next user message) leaves them unreachable while the ends of its
    inputs still match. The ends of users' messages go last: a tool loop's own inputs are rewritten
    with it. Otherwise shallow ones go before deep ones, which resume later.
    """

    def order(self, checkpoints: Sequence[Checkpoint], now: float) -> list[Checkpoint]:
        """See ``EvictionStrategy``."""
        return sorted(checkpoints, key=recency)

    def queue(self) -> HeapQueue:
        """See ``EvictionStrategy``."""
        return HeapQueue(recency)


def recency(checkpoint: Checkpoint) -> Recency:
    """The order of ``LeastRecentlyUsed``; the others break ties by it. It only grows: uses come
    later, kinds and the users' turn are added."""
    kinds = checkpoint.kinds
    outlives_rewriting = len(kinds) > 1 or CheckpointKind.DECODE_END not in kinds
    return (
        checkpoint.used_at,
        outlives_rewriting,
        checkpoint.user_turn,
        checkpoint.boundary,
        checkpoint.serial,
    )


class Reclaimer:
    """Makes space for one batch of reservations, or leaves everything as it is.

    Loose objects go first, then whole checkpoints in the strategy's order as it is after each
    eviction, those that free nothing at their turn (all their objects are shared) put off. If not
    even evicting all of it would make room for the whole batch, nothing is evicted.
    """

    def __init__(
        self,
        objects: ObjectTable,
        pinned: set[Entry],
        candidates: Generator[Checkpoint, None, None],
        evict: Callable[[Checkpoint], None],
        drop_loose: Callable[[Entry], None],
        sizes: Sequence[int],
    ) -> None:
        """``pinned``: objects that must stay. ``candidates``: checkpoints that need not, in
        order. ``evict`` must free what only that checkpoint used. ``sizes``: bytes of each
        object of the batch."""
        self._objects = objects
        self._pinned = pinned
        self._candidates = candidates
        self._waiting: Iterator[Checkpoint] = candidates
        self._put_off: deque[Checkpoint] = deque()
        self._progress = False
        self._evict = evict
        self._drop_loose = drop_loose
        self.feasible = self._feasible(sizes)

    def close(self) -> None:
        """The batch is over; ``candidates`` is closed."""
        self._candidates.close()

    def make_room(self, nbytes: int) -> bool:
        """Evict until an object of ``nbytes`` fits; False where it cannot."""
        arena = self._objects.arena
        while not arena.fits(nbytes):
            if not self.feasible or not self._evict_something():
                return False
        return True

    def _feasible(self, sizes: Sequence[int]) -> bool:
        arena = self._objects.arena
        kept = [entry.offset for entry in self._pinned]
        kept += [offset for _, offset in self._objects.quarantine]
        kept_bytes = sum(arena.extent_bytes(offset) for offset in kept)
        wanted = sum(arena.rounded(size) for size in sizes)
        if kept_bytes + wanted > arena.capacity_bytes:
            return False
        return arena.rounded(max(sizes)) <= arena.largest_gap_bytes(kept)

    def _evict_something(self) -> bool:
        if self._objects.loose:
            self._drop_loose(next(iter(self._objects.loose)))
            return True
        while True:
            checkpoint = next(self._waiting, None)
            if checkpoint is None:
                if not self._put_off:
                    return False
                if not self._progress:
                    # Only shared objects are left: part with them one checkpoint at a time.
                    self._evict(self._put_off.popleft())
                    self._progress = True
                    return True
                self._waiting, self._put_off = iter(self._put_off), deque()
                self._progress = False
                continue
            if _frees_something(checkpoint):
                self._evict(checkpoint)
                self._progress = True
                return True
            if not all(entry in self._pinned for entry in checkpoint.entries()):
                self._put_off.append(checkpoint)


def pinned_entries(
    held: Iterable[Iterable[Entry]], pinned_checkpoints: Iterable[Checkpoint]
) -> set[Entry]:
    """Every object that may not be freed now: used by an open publication, or part of a leased
    or pending checkpoint."""
    pinned: set[Entry] = set()
    for entries in held:
        pinned.update(entries)
    for checkpoint in pinned_checkpoints:
        for part in checkpoint.parts.values():
            pinned.update(part)
    return pinned


def _frees_something(checkpoint: Checkpoint) -> bool:
    return any(entry.refs == 1 and entry.holds == 0 for entry in checkpoint.entries())
