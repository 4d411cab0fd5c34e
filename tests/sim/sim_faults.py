"""A store that misbehaves on demand."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backhaul.protocols.checkpoint import CheckpointManifest, DomainId, LeaseId, Reason
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreRejected, StoreUnavailable
from backhaul.transfer.base import (
    CheckpointInfo,
    CommitResult,
    Grant,
    GrantStatus,
    LoadItem,
    LookupResult,
    Member,
    MemoryRegion,
    Peers,
    Store,
    StoreStats,
    TransferResult,
    WriteItem,
)
from backhaul.transfer.registry import open_store

FAULTS = (
    "lookup_raises",
    "lookup_slow",
    "lookup_bug",
    "read_fails",
    "read_corrupt",
    "read_unsettled",
    "read_slow",
    "read_bug",
    "reserve_raises",
    "reserve_full",
    "write_fails",
    "write_unsettled",
    "commit_raises",
    "release_raises",
)
WRITE_SLOW = "write_slow"
"""For tests that need a publication under way at a certain moment; no fault, and none of those."""


@dataclass
class Faults:
    """How often each fault happens (0 ... 1), and how often it did. ``repeats``: of each lookup,
    whether its request had asked before."""

    rates: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    slow_s: float = 0.05
    happened: Counter[str] = field(default_factory=Counter)
    repeats: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert set(self.rates) <= set(FAULTS), self.rates
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        self._go_on = threading.Event()

    def slow_down(self) -> None:
        """Wait as a slow store makes one wait; ``go_on`` cuts it short."""
        self._go_on.wait(self.slow_s)

    def go_on(self) -> None:
        """End what is slow now."""
        self._go_on.set()

    @property
    def goes_on(self) -> bool:
        """Whether ``go_on`` was called."""
        return self._go_on.is_set()

    def strikes(self, name: str) -> bool:
        """Whether a fault happens now."""
        rate = self.rates.get(name, 0.0)
        with self._lock:
            struck = rate > 0 and self._random.random() < rate
            self.happened[name] += struck
        return struck


class Restartable:
    """A store's address over restarts: each one begins empty, under a name of its own."""

    def __init__(self, uri: str) -> None:
        self._base, _, self._query = uri.partition("?")
        self.generation = 0

    def at(self, generation: int) -> str:
        """The address of one generation."""
        return f"{self._base}-{generation}?{self._query}"

    @property
    def uri(self) -> str:
        """Where the store is now."""
        return self.at(self.generation)

    def restart(self) -> None:
        """Everything that was stored, leased or reserved is gone."""
        self.generation += 1


_SCRIBBLE_S = 0.2


class _StillWriting:
    """A read that was given up but goes on: it fills its memory with garbage for a while."""

    def __init__(self, items: Sequence[Any], seconds: float) -> None:
        self._over = threading.Event()
        segments = [s for item in items for s in item.segments.tolist()]
        threading.Thread(target=self._scribble, args=(segments, seconds), daemon=True).start()

    def _scribble(self, segments: list[tuple[int, int]], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for address, nbytes in segments:
                ctypes.memset(address, 0xA5, nbytes)
            time.sleep(0.001)
        self._over.set()

    def settled(self) -> bool:
        return self._over.is_set()


class _Settling:
    """A write that was given up; it only reads memory."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._end = time.monotonic() + faults.slow_s

    def settled(self) -> bool:
        return self._faults.goes_on or time.monotonic() > self._end


class FaultyStore(Store):
    """The store at ``where``, with ``faults``."""

    def __init__(self, where: Restartable, faults: Faults) -> None:
        self._where, self._faults = where, faults
        self._regions: Sequence[MemoryRegion] = ()
        self._records: dict[DomainId, DomainRecord] = {}
        self._lock = threading.Lock()
        self._stores: dict[int, Store] = {}

    def _open(self, generation: int) -> Store:
        with self._lock:
            store = self._stores.get(generation)
            if store is None:
                store = open_store(self._where.at(generation), client_name="faulty")
                if self._regions:
                    store.attach(self._regions)
                for record in self._records.values():
                    store.open_domain(record, timeout_s=300)
                self._stores[generation] = store
            return store

    def _inner(self) -> Store:
        return self._open(self._where.generation)

    # Tokens and leases carry their generation, since those of a store that is gone must never
    # pass for a later one's.

    def _check(self, generation: int) -> Store:
        if generation != self._where.generation:
            raise StoreUnavailable("the store was restarted")
        return self._open(generation)

    def attach(self, regions: Sequence[MemoryRegion]) -> None:
        self._regions = regions
        self._inner()

    def read(
        self, lease: LeaseId, items: Sequence[LoadItem], *, verify: bool, timeout_s: float
    ) -> TransferResult:
        if self._faults.strikes("read_bug"):
            raise RuntimeError("read")
        if self._faults.strikes("read_slow"):
            self._faults.slow_down()
        if self._faults.strikes("read_fails"):
            return TransferResult(ok=False, reason=Reason.LOAD_FAILED)
        if self._faults.strikes("read_unsettled"):
            still = _StillWriting(items, min(self._faults.slow_s, _SCRIBBLE_S))
            return TransferResult(ok=False, reason=Reason.TIMEOUT, unsettled=still)
        generation, own = _lease(lease)
        if generation != self._where.generation:
            return TransferResult(ok=False, reason=Reason.LEASE_EXPIRED)
        result = self._open(generation).read(own, items, verify=verify, timeout_s=timeout_s)
        if self._faults.strikes("read_corrupt"):
            for item in items:
                for address, nbytes in item.segments.tolist():
                    ctypes.memset(address, 0x5A, nbytes)
            return TransferResult(ok=False, reason=Reason.CORRUPT)
        return result

    def write(self, items: Sequence[WriteItem], *, timeout_s: float) -> TransferResult:
        if self._faults.strikes("write_fails"):
            return TransferResult(ok=False, reason=Reason.TIMEOUT)
        if self._faults.strikes(WRITE_SLOW):
            self._faults.slow_down()
        if self._faults.strikes("write_unsettled"):
            return TransferResult(
                ok=False, reason=Reason.TIMEOUT, unsettled=_Settling(self._faults)
            )
        generations = {item.grant.token & 1023 for item in items}
        if generations != {self._where.generation}:
            return TransferResult(ok=False, reason=Reason.UNREACHABLE)
        inner = self._open(*generations)
        own = [WriteItem(_unmarked(grant), segments) for grant, segments in items]
        result = inner.write(own, timeout_s=timeout_s)
        return replace(result, written=tuple(_marked(w, *generations) for w in result.written))

    def open_domain(self, record: DomainRecord, *, timeout_s: float) -> DomainId:
        self._records[record.domain_id] = record
        return self._inner().open_domain(record, timeout_s=timeout_s)

    def join(self, record: DomainRecord, member: Member, *, timeout_s: float) -> Peers:
        self._records[record.domain_id] = record
        return self._inner().join(record, member, timeout_s=timeout_s)

    def announce(
        self, domain: DomainId, boundary: int, block_hash: bytes, *, ttl_s: float, timeout_s: float
    ) -> None:
        self._inner().announce(domain, boundary, block_hash, ttl_s=ttl_s, timeout_s=timeout_s)

    def reserve(
        self, domain: Any, publication: Any, wants: Any, *, timeout_s: float
    ) -> list[Grant]:
        if self._faults.strikes("reserve_raises"):
            raise StoreUnavailable("reserve")
        if self._faults.strikes("reserve_full"):
            return [Grant(key, GrantStatus.FULL, nbytes) for key, nbytes in wants]
        generation = self._where.generation
        grants = self._open(generation).reserve(domain, publication, wants, timeout_s=timeout_s)
        return [_marked(grant, generation) for grant in grants]

    def commit(
        self,
        domain: Any,
        publication: Any,
        rank: int,
        written: Any,
        manifest: CheckpointManifest | None = None,
        *,
        timeout_s: float,
    ) -> CommitResult:
        if self._faults.strikes("commit_raises"):
            raise StoreRejected("commit")
        generations = {w.token & 1023 for w in written} or {self._where.generation}
        inner = self._check(*generations)
        own = [_unmarked(w) for w in written]
        return inner.commit(domain, publication, rank, own, manifest, timeout_s=timeout_s)

    def abandon(self, publication: Any, *, still_written: bool = False, timeout_s: float) -> None:
        self._inner().abandon(publication, still_written=still_written, timeout_s=timeout_s)

    def keep_alive(self, publications: Any, *, timeout_s: float) -> None:
        self._inner().keep_alive(publications, timeout_s=timeout_s)

    def lookup(
        self,
        domain: Any,
        boundary_hashes: Any,
        *,
        above_tokens: int = 0,
        lease_s: float = 0.0,
        wait_s: float = 0.0,
        follow_up: bool = False,
        repeat: bool = False,
        timeout_s: float,
    ) -> LookupResult:
        self._faults.repeats.append(repeat)
        if self._faults.strikes("lookup_bug"):
            raise RuntimeError("lookup")
        if self._faults.strikes("lookup_raises"):
            raise StoreUnavailable("lookup")
        if self._faults.strikes("lookup_slow"):
            self._faults.slow_down()
        generation = self._where.generation
        result = self._open(generation).lookup(
            domain,
            boundary_hashes,
            above_tokens=above_tokens,
            lease_s=lease_s,
            wait_s=wait_s,
            follow_up=follow_up,
            repeat=repeat,
            timeout_s=timeout_s,
        )
        if result.lease is not None:
            result = replace(result, lease=LeaseId(f"{generation}:{result.lease}"))
        return result

    def renew(self, lease: LeaseId, lease_s: float, *, timeout_s: float) -> None:
        generation, own = _lease(lease)
        self._check(generation).renew(own, lease_s, timeout_s=timeout_s)

    def release(self, leases: Sequence[LeaseId], *, timeout_s: float) -> None:
        # A release that gets lost leaves its lease to run out, so it goes through first.
        for generation, own in map(_lease, leases):
            if generation == self._where.generation:
                self._open(generation).release([own], timeout_s=timeout_s)
        if self._faults.strikes("release_raises"):
            raise StoreUnavailable("release")

    def stats(self, *, timeout_s: float) -> StoreStats:
        return self._inner().stats(timeout_s=timeout_s)

    def list_checkpoints(
        self, domain: DomainId | None = None, *, limit: int = 0, timeout_s: float
    ) -> list[CheckpointInfo]:
        return self._inner().list_checkpoints(domain, limit=limit, timeout_s=timeout_s)

    def close(self) -> None:
        with self._lock:
            for store in self._stores.values():
                store.close()


def _marked(item: Any, generation: int) -> Any:
    return item._replace(token=item.token << 10 | generation)


def _unmarked(item: Any) -> Any:
    return item._replace(token=item.token >> 10)


def _lease(lease: LeaseId) -> tuple[int, LeaseId]:
    generation, _, own = lease.partition(":")
    return int(generation), LeaseId(own)
