"""A store inside one process: the daemon's own index over local memory, and plain copies.

The reference for what a backend does, and a real one where prefill and decode share a process.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
import uuid
from collections.abc import Sequence

import numpy as np

from backhaul.protocols.checkpoint import (
    CheckpointManifest,
    DomainId,
    LeaseId,
    ObjectKey,
    PublicationId,
    Reason,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import ConfigError, StoreError, StoreUnavailable
from backhaul.transfer.base import (
    CheckpointInfo,
    CommitResult,
    Grant,
    LoadItem,
    LookupResult,
    Member,
    MemoryKind,
    MemoryRegion,
    Peers,
    Segments,
    Store,
    StoreStats,
    TransferResult,
    WriteItem,
    Written,
)
from backhaul.transfer.checksum import HostChecksum
from backhaul.transfer.index import BlockIndex
from backhaul.transfer.strategies import DEFAULT, Strategies

QUARANTINE_S = 10.0
"""As in the daemon: longer than a write that was under way when its publication ran out."""


class InProcessPool:
    """What all clients of one store share: memory, index, and the lock around the index."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        publication_ttl_s: float = 60.0,
        lease_max_s: float = 300.0,
        quarantine_s: float = QUARANTINE_S,
        strategies: Strategies = DEFAULT,
    ) -> None:
        self.memory = np.zeros(capacity_bytes, dtype=np.uint8)
        self.index = BlockIndex(
            capacity_bytes,
            publication_ttl_s=publication_ttl_s,
            lease_max_s=lease_max_s,
            instance_id=uuid.uuid4().hex[:16],
            first_token=secrets.randbits(48) + 1,
            quarantine_s=quarantine_s,
            strategy=strategies.make_eviction(),
            admission=strategies.make_admission(),
        )
        self.changed = threading.Condition()
        """Guards ``index``; notified when a waiting lookup may have got its answer."""


class InProcessStore(Store):
    """One client of a pool. Copies run outside the lock. Thread-safe."""

    def __init__(self, pool: InProcessPool) -> None:
        self._pool = pool
        self._index = pool.index
        self._lock = pool.changed
        self._base = int(pool.memory.ctypes.data)
        self._checksum: HostChecksum | None = None
        self._closed = False

    # -- bytes --------------------------------------------------------------------------------

    def attach(self, regions: Sequence[MemoryRegion]) -> None:
        """See ``Store``. Raises ``ConfigError`` for device memory."""
        if any(region.kind is not MemoryKind.DRAM for region in regions):
            raise ConfigError("the in-process store takes host memory only: use backhaul://")
        if self._checksum is not None:
            raise ValueError("memory is attached already")
        self._checksum = HostChecksum(regions)

    def read(
        self, lease: LeaseId, items: Sequence[LoadItem], *, verify: bool, timeout_s: float
    ) -> TransferResult:
        """See ``Store``."""
        deadline = time.monotonic() + timeout_s
        checksum = self._attached()
        keys = [item.key for item in items]
        if not items:
            return TransferResult(ok=True)
        try:
            with self._open():
                places = self._index.locate(lease, keys, time.monotonic())
        except StoreError as error:
            return _failed(error)
        if any(
            _bytes(item.segments) != place.nbytes for item, place in zip(items, places, strict=True)
        ):
            return TransferResult(ok=False, reason=Reason.CORRUPT)
        for item, place in zip(items, places, strict=True):
            if time.monotonic() > deadline:
                return TransferResult(ok=False, reason=Reason.TIMEOUT)
            self._copy(item.segments, place.offset, into_pool=False)
            if verify and place.checksum not in (0, checksum(item.segments)):
                return TransferResult(ok=False, reason=Reason.CORRUPT)
        try:  # a lease that ran out under the copy: the bytes may be another object's
            with self._open():
                self._index.locate(lease, keys[:1], time.monotonic())
        except StoreError as error:
            return _failed(error)
        return TransferResult(ok=True, nbytes=sum(place.nbytes for place in places))

    def write(self, items: Sequence[WriteItem], *, timeout_s: float) -> TransferResult:
        """See ``Store``."""
        deadline = time.monotonic() + timeout_s
        checksum = self._attached()
        written = []
        for item in items:
            grant = item.grant
            if _bytes(item.segments) != grant.nbytes:
                raise ValueError(f"{grant} is not the size of its pages")
            if self._closed or time.monotonic() > deadline:
                reason = Reason.UNREACHABLE if self._closed else Reason.TIMEOUT
                return TransferResult(ok=False, reason=reason)
            digest = checksum(item.segments)
            self._copy(item.segments, grant.offset, into_pool=True)
            written.append(Written(grant.key, grant.token, digest))
        nbytes = sum(item.grant.nbytes for item in items)
        return TransferResult(ok=True, nbytes=nbytes, written=tuple(written))

    # -- catalog: publications ----------------------------------------------------------------

    def open_domain(self, record: DomainRecord, *, timeout_s: float) -> DomainId:
        """See ``Store``."""
        with self._open():
            return self._index.open_domain(record, time.monotonic())

    def join(self, record: DomainRecord, member: Member, *, timeout_s: float) -> Peers:
        """See ``Store``."""
        with self._open():
            return self._index.join(record, member, time.monotonic())

    def domain_record(self, domain: DomainId, *, timeout_s: float) -> DomainRecord:
        """See ``Store``."""
        with self._open():
            return self._index.domain_record(domain)

    def announce(
        self, domain: DomainId, boundary: int, block_hash: bytes, *, ttl_s: float, timeout_s: float
    ) -> None:
        """See ``Store``."""
        with self._open():
            self._index.announce(domain, boundary, block_hash, ttl_s, time.monotonic())

    def reserve(
        self,
        domain: DomainId,
        publication: PublicationId,
        wants: Sequence[tuple[ObjectKey, int]],
        *,
        timeout_s: float,
    ) -> list[Grant]:
        """See ``Store``."""
        with self._open():
            return self._index.reserve(domain, publication, wants, time.monotonic())

    def commit(
        self,
        domain: DomainId,
        publication: PublicationId,
        rank: int,
        written: Sequence[Written],
        manifest: CheckpointManifest | None = None,
        *,
        timeout_s: float,
    ) -> CommitResult:
        """See ``Store``."""
        with self._open():
            result = self._index.commit(
                domain, publication, rank, written, manifest, time.monotonic()
            )
            self._lock.notify_all()
            return result

    def abandon(
        self, publication: PublicationId, *, still_written: bool = False, timeout_s: float
    ) -> None:
        """See ``Store``."""
        with self._open():
            self._index.abandon(publication, time.monotonic(), still_written=still_written)
            self._lock.notify_all()

    def keep_alive(self, publications: Sequence[PublicationId], *, timeout_s: float) -> None:
        """See ``Store``."""
        with self._open():
            self._index.keep_alive(publications, time.monotonic())

    # -- catalog: loads -----------------------------------------------------------------------

    def lookup(
        self,
        domain: DomainId,
        boundary_hashes: Sequence[bytes],
        *,
        above_tokens: int = 0,
        lease_s: float = 0.0,
        wait_s: float = 0.0,
        follow_up: bool = False,
        repeat: bool = False,
        timeout_s: float,
    ) -> LookupResult:
        """See ``Store``."""
        started = now = time.monotonic()
        deadline = started + min(wait_s, timeout_s)
        with self._open():
            while now < deadline:
                awaited = self._index.awaited(domain, boundary_hashes, above_tokens, now)
                if awaited is None:
                    break
                self._lock.wait(min(deadline, awaited.until) - now)
                now = time.monotonic()
            answer = self._index.lookup(
                domain,
                boundary_hashes,
                above_tokens,
                lease_s,
                now,
                follow_up=follow_up,
                repeat=repeat,
            )
        return LookupResult(
            matches=answer.matches,
            lease=answer.lease,
            waited_s=now - started,
            attention_tokens=answer.extent.attention,
            recurrent_tokens=answer.extent.recurrent,
        )

    def renew(self, lease: LeaseId, lease_s: float, *, timeout_s: float) -> None:
        """See ``Store``."""
        with self._open():
            self._index.renew(lease, lease_s, time.monotonic())

    def release(self, leases: Sequence[LeaseId], *, timeout_s: float) -> None:
        """See ``Store``."""
        with self._open():
            self._index.release(leases, time.monotonic())

    # -- people -------------------------------------------------------------------------------

    def stats(self, *, timeout_s: float) -> StoreStats:
        """See ``Store``."""
        with self._open():
            self._index.expire(time.monotonic())
            return self._index.stats()

    def list_checkpoints(
        self, domain: DomainId | None = None, *, limit: int = 0, timeout_s: float
    ) -> list[CheckpointInfo]:
        """See ``Store``."""
        with self._open():
            return self._index.list_checkpoints(domain, limit, time.monotonic())

    def close(self) -> None:
        """See ``Store``. The pool lives on for its other clients."""
        self._closed = True

    # -- helpers ------------------------------------------------------------------------------

    def _open(self) -> threading.Condition:
        if self._closed:
            raise StoreUnavailable("this store was closed")
        return self._lock

    def _attached(self) -> HostChecksum:
        if self._checksum is None:
            raise ValueError("no memory is attached: call attach() before read or write")
        return self._checksum

    def _copy(self, segments: Segments, offset: int, *, into_pool: bool) -> None:
        place = self._base + offset
        for address, nbytes in segments.tolist():
            target, source = (place, address) if into_pool else (address, place)
            ctypes.memmove(target, source, nbytes)
            place += nbytes


def _bytes(segments: Segments) -> int:
    return int(segments[:, 1].sum())


def _failed(error: StoreError) -> TransferResult:
    closed = isinstance(error, StoreUnavailable)
    return TransferResult(ok=False, reason=Reason.UNREACHABLE if closed else Reason.LEASE_EXPIRED)
