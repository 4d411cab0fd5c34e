"""The embedded store's bytes: objects between attached memory and the daemon's pool."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from backhaul.transfer.base import MemoryKind, MemoryRegion, Segments
from backhaul.transfer.checksum import NO_CHECKSUM, ChecksumFunction, ObjectChecksums
from backhaul.transfer.descriptors import (
    Column,
    Objects,
    Pairs,
    RegionTable,
    batches,
    coalesced,
)
from backhaul.transfer.nixl_agent import Ended, NixlAgent, Operation, Outcome, Post

POST_BYTES = 4 << 20
"""Bytes per post. Small enough that a checksum finds the bytes still in the cache and that a
deadline is kept within milliseconds; large enough that the cost of a post does not show."""
CHECKSUM_THREADS = 1
"""Hashing is several times faster than moving, so one thread keeps up with all transfers."""


class Moved(NamedTuple):
    """What became of a transfer.

    Attributes:
        checksums: of each object, in order, where the transfer was done.
        verified: of a fetch: each object had a checksum, and it was compared.
        corrupt: first object whose checksum differs, or None.
    """

    ended: Ended
    checksums: list[int]
    verified: bool = False
    corrupt: int | None = None


class Payload:
    """Attached memory and the agent that moves it. Thread-safe.

    Checksums of long transfers are computed on a thread of their own, while the next bytes travel:
    neither NIXL nor xxhash holds the GIL meanwhile.
    """

    def __init__(
        self,
        name: str,
        regions: Sequence[MemoryRegion],
        device_checksum: ChecksumFunction | None = None,
    ) -> None:
        """Registers the memory. Raises ``ConfigError`` where NIXL cannot."""
        self.table = RegionTable(regions)
        self.agent = NixlAgent(name)
        self.agent.register(self.table.regions)
        self._checksum = ObjectChecksums(self.table.regions, device_checksum)
        self._hashing = ThreadPoolExecutor(CHECKSUM_THREADS, thread_name_prefix="backhaul-checksum")

    def send(
        self, peer: str, segments: Sequence[Segments], addresses: Column, deadline: float
    ) -> Moved:
        """Write objects to their ``addresses`` in the store."""
        plan = self._plan(segments, addresses)
        sums = _Checksums(self._checksum, self._hashing if len(plan.posts) > 1 else None)

        def before(index: int) -> None:
            sums.ask(segments, plan.whole(index))

        ended = self.agent.transfer(Operation.WRITE, peer, plan.posts, deadline, before=before)
        return Moved(ended, sums.result(segments, ended))

    def fetch(
        self,
        peer: str,
        segments: Sequence[Segments],
        addresses: Column,
        deadline: float,
        expected: Sequence[int] | None,
    ) -> Moved:
        """Read objects from the store; ``expected``: their checksums, compared as they arrive."""
        plan = self._plan(segments, addresses)
        sums = _Checksums(self._checksum, self._hashing if len(plan.posts) > 1 else None)

        def after(index: int) -> None:
            sums.ask(segments, plan.whole(index))

        hook = after if expected is not None else None
        ended = self.agent.transfer(Operation.READ, peer, plan.posts, deadline, after=hook)
        if ended.outcome is not Outcome.DONE or expected is None:
            return Moved(ended, sums.result((), ended))
        found = sums.result(segments, ended)
        known = [NO_CHECKSUM not in pair for pair in zip(found, expected, strict=True)]
        corrupt = (i for i, sure in enumerate(known) if sure and found[i] != expected[i])
        return Moved(ended, found, all(known), next(corrupt, None))

    def close(self) -> None:
        """Deregister the memory."""
        self.agent.close()
        self._hashing.shutdown(wait=True)

    def _plan(self, segments: Sequence[Segments], addresses: Column) -> _Plan:
        objects = Objects(segments)
        runs = batches(coalesced(objects.pairs(addresses, self.table)), self.table, POST_BYTES)
        reach = np.cumsum([int(run.nbytes.sum()) for run in runs], dtype=np.uint64)
        return _Plan([self.post(run) for run in runs], reach, objects.ends)

    def post(self, run: Pairs) -> Post:
        """NIXL's view of rows of one memory kind."""
        local = np.empty((len(run.local), 3), dtype=np.uint64)
        local[:, 0], local[:, 1] = run.local, run.nbytes
        local[:, 2] = self.table.devices[run.region]
        remote = np.zeros_like(local)
        remote[:, 0], remote[:, 1] = run.remote, run.nbytes
        on_device = bool(self.table.is_device[run.region[0]])
        return Post(local, remote, MemoryKind.VRAM if on_device else MemoryKind.DRAM)


class _Plan(NamedTuple):
    """Posts; the bytes that have travelled once each is done; the byte where each object ends."""

    posts: list[Post]
    reach: Column
    ends: Column

    def whole(self, index: int) -> int:
        """How many objects have travelled whole once post ``index`` is done."""
        return int(np.searchsorted(self.ends, self.reach[index], side="right"))


class _Checksums:
    """Checksums of a run of objects, asked for piece by piece."""

    def __init__(self, function: ChecksumFunction, threads: ThreadPoolExecutor | None) -> None:
        """Without ``threads`` they are computed at once: not worth a change of threads."""
        self._function = function
        self._threads = threads
        self._jobs: list[Future[list[int]]] = []
        self._done: list[int] = []
        self._asked = 0

    def ask(self, segments: Sequence[Segments], until: int) -> None:
        """Go on to the object ``until``, not included."""
        if until <= self._asked:
            return
        some, self._asked = segments[self._asked : until], until
        if self._threads is not None:
            self._jobs.append(self._threads.submit(self._compute, some))
        else:
            self._done += self._compute(some)

    def result(self, segments: Sequence[Segments], ended: Ended) -> list[int]:
        """All of them. None of a transfer that failed: then this only waits until nobody looks at
        the memory any more, which is the caller's again."""
        if ended.outcome is not Outcome.DONE:
            for job in self._jobs:
                if not job.cancel():
                    job.exception()
            return []
        found = [*self._done, *(one for job in self._jobs for one in job.result())]
        return found + self._compute(segments[self._asked :])  # objects without a byte

    def _compute(self, some: Sequence[Segments]) -> list[int]:
        return [self._function(one) for one in some]
