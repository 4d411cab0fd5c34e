"""The embedded store's client: a gRPC catalog, and NIXL between attached memory and the pool.

Nothing here needs the daemon before the first call that does. The client says Hello then, and again
after anything that smells of a restart (a name that is not known, a lost connection, a failed
transfer). Domains are remembered and made known to the new daemon; leases and publications of the
old one are lost, which callers see as ``StoreRejected`` or ``LEASE_EXPIRED``.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from backhaul.protocols import store_pb2
from backhaul.protocols.checkpoint import (
    CheckpointManifest,
    DomainId,
    LeaseId,
    ObjectKey,
    PublicationId,
    Reason,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import (
    BackhaulError,
    LookupUnanswered,
    StoreError,
    StoreFull,
    StoreRejected,
    StoreUnavailable,
)
from backhaul.transfer.backends import wire
from backhaul.transfer.backends.payload import Moved, Payload
from backhaul.transfer.backends.rpc import CatalogChannel, StoreTimeout, StoreUnanswered
from backhaul.transfer.backends.session import SessionKeeper
from backhaul.transfer.base import (
    CheckpointInfo,
    CommitResult,
    Grant,
    LoadItem,
    LookupResult,
    Member,
    MemoryRegion,
    Peers,
    Store,
    StoreStats,
    TransferResult,
    WriteItem,
    Written,
)
from backhaul.transfer.checksum import ChecksumFunction
from backhaul.transfer.entries import NotKnown
from backhaul.transfer.nixl_agent import Outcome

WAIT_SHARE_MAX = 0.8
"""Part of a lookup's time that the daemon may wait for a publication: the answer has to travel."""

RECORDS_MAX = 256
"""Records of domains kept: as many as a store has."""

OBJECTS_PER_CALL = 512
"""The daemon answers one call at a time: a long checkpoint must not hold up everyone's lookups."""

_Item = TypeVar("_Item")

REASONS: tuple[tuple[type[BackhaulError], Reason], ...] = (
    (StoreTimeout, Reason.TIMEOUT),
    (StoreUnavailable, Reason.UNREACHABLE),
    (NotKnown, Reason.LEASE_EXPIRED),
    (StoreFull, Reason.STORE_FULL),
    (StoreRejected, Reason.DENIED),
    (BackhaulError, Reason.INTERNAL),
)
"""What a read or write ran into -> what its result says; the first match counts."""

logger = logging.getLogger(__name__)


class InstanceGrant(Grant):
    """A grant that remembers which life of the daemon gave it: its offset means nothing, and
    would damage another object, in the pool of the next one."""

    instance_id: str = ""


class EmbeddedStore(Store):
    """See the module's docstring. All methods are thread-safe."""

    def __init__(
        self,
        target: str,
        *,
        client_name: str = "",
        device_checksum: ChecksumFunction | None = None,
    ) -> None:
        """
        Args:
            target: ``host:port`` of the daemon's catalog.
            client_name: shown in the daemon's log.
            device_checksum: checksum of an object in device memory; without it such objects are
                stored and loaded without one.
        """
        self._name = client_name or f"pid-{os.getpid()}"
        self._device_checksum = device_checksum
        self._channel = CatalogChannel(target)
        self._keeper = SessionKeeper(self._channel, self._name)
        self._payload: Payload | None = None
        self._records: dict[DomainId, DomainRecord] = {}

    # -- bytes --------------------------------------------------------------------------------

    def attach(self, regions: Sequence[MemoryRegion]) -> None:
        """See ``Store``. Raises ``ConfigError`` where NIXL cannot take the memory."""
        if self._payload is not None:
            raise ValueError("memory is attached already")
        # Agents of one name would be one peer to the daemon.
        # The part that differs comes first: UCX keeps the beginning only.
        name = f"backhaul-{uuid.uuid4().hex[:12]}-{self._name}"
        self._payload = Payload(name, regions, self._device_checksum)
        self._keeper.attach(self._payload.agent)

    def read(
        self, lease: LeaseId, items: Sequence[LoadItem], *, verify: bool, timeout_s: float
    ) -> TransferResult:
        """See ``Store``. Without a checksum to compare, the lease is checked once more after the
        transfer: bytes read after it ran out may be another object's."""
        deadline = time.monotonic() + timeout_s
        payload = self._attached()
        if not items:
            return TransferResult(ok=True)
        requests = [
            store_pb2.LocateRequest(
                lease_id=lease, keys=[wire.key_message(item.key) for item in batch]
            )
            for batch in _batches(items)
        ]
        try:
            session = self._keeper.current(deadline)
            if wire.instance_of(lease) != session.instance_id:
                # Granted to somebody else by a daemon that was started since: its pool is another.
                self._keeper.doubt()
                session = self._keeper.current(deadline)
            places = [
                place
                for request in requests
                for place in self._keeper.call("Locate", request, deadline).locations
            ]
            peer = self._keeper.peer(session, deadline)
        except StoreError as error:
            return _failed(error)
        segments = [item.segments for item in items]
        nbytes = [int(one[:, 1].sum()) for one in segments]
        if nbytes != [place.nbytes for place in places]:
            logger.warning("backhaul: objects differ in size from the pages that await them")
            return TransferResult(ok=False, reason=Reason.CORRUPT)
        addresses = np.array([place.offset for place in places], dtype=np.uint64)
        addresses += np.uint64(session.pool_address)
        expected = [place.checksum for place in places] if verify else None
        moved = payload.fetch(peer, segments, addresses, deadline, expected)
        if moved.ended.outcome is not Outcome.DONE:
            return self._not_moved(moved)
        if moved.corrupt is not None:
            logger.warning("backhaul: checksum mismatch of %s", items[moved.corrupt].key)
            return TransferResult(ok=False, reason=Reason.CORRUPT, nbytes=sum(nbytes))
        if not moved.verified:
            del requests[0].keys[1:]
            try:
                self._keeper.call("Locate", requests[0], deadline)
            except StoreError as error:
                return _failed(error)
        return TransferResult(ok=True, nbytes=sum(nbytes))

    def write(self, items: Sequence[WriteItem], *, timeout_s: float) -> TransferResult:
        """See ``Store``."""
        deadline = time.monotonic() + timeout_s
        payload = self._attached()
        if not items:
            return TransferResult(ok=True)
        grants = [item.grant for item in items]
        for item in items:
            if int(item.segments[:, 1].sum()) != item.grant.nbytes:
                raise ValueError(f"{item.grant} is not the size of its pages")
        try:
            session = self._keeper.current(deadline)
            if any(_instance(grant) != session.instance_id for grant in grants):
                raise StoreUnavailable("the store was restarted after it granted the space")
            peer = self._keeper.peer(session, deadline)
        except StoreError as error:
            return _failed(error)
        addresses = np.array([grant.offset for grant in grants], dtype=np.uint64)
        addresses += np.uint64(session.pool_address)
        moved = payload.send(peer, [item.segments for item in items], addresses, deadline)
        if moved.ended.outcome is not Outcome.DONE:
            return self._not_moved(moved)
        written = tuple(
            Written(grant.key, grant.token, checksum)
            for grant, checksum in zip(grants, moved.checksums, strict=True)
        )
        return TransferResult(
            ok=True, nbytes=sum(grant.nbytes for grant in grants), written=written
        )

    def transports(self) -> tuple[str, ...]:
        """See ``Store``."""
        peer = self._keeper.connected
        if self._payload is None or peer is None:
            return ()
        return self._payload.agent.lanes(peer)

    # -- catalog: publications ----------------------------------------------------------------

    def open_domain(self, record: DomainRecord, *, timeout_s: float) -> DomainId:
        """See ``Store``. The domain is remembered even where this raises. With memory attached the
        pool is connected to as well: UCX's wire-up would delay the first transfer."""
        deadline = time.monotonic() + timeout_s
        domain = self._keeper.open_domain(record, deadline)
        if self._payload is not None:
            self._keeper.peer(self._keeper.current(deadline), deadline)
        return domain

    def join(self, record: DomainRecord, member: Member, *, timeout_s: float) -> Peers:
        """See ``Store``. The domain is remembered even where this raises."""
        return wire.peers(self._keeper.join(record, member, time.monotonic() + timeout_s))

    def domain_record(self, domain: DomainId, *, timeout_s: float) -> DomainRecord:
        """See ``Store``. The store answers with all domains, which is slow where they hold much;
        that says nothing of its health, and every record is kept."""
        if domain not in self._records:
            deadline = time.monotonic() + timeout_s
            request = store_pb2.ListDomainsRequest()
            reply = self._keeper.call("ListDomains", request, deadline, trips=False)
            self._remember(reply.domains, domain)
        if (record := self._records.get(domain)) is None:
            raise NotKnown(f"domain {domain} is not known here")
        return record

    def _remember(self, messages: Iterable[store_pb2.DomainInfo], wanted: DomainId) -> None:
        """Keep the records of domains, the ``wanted`` one also where there is no room."""
        for message in messages:
            name = DomainId(message.domain_id)
            if name in self._records or (len(self._records) >= RECORDS_MAX and name != wanted):
                continue
            try:
                self._records[name] = wire.domain_info(message).record
            except StoreRejected as error:
                if name == wanted:
                    raise
                logger.debug("backhaul: domain %s: %s", name, error)

    def announce(
        self, domain: DomainId, boundary: int, block_hash: bytes, *, ttl_s: float, timeout_s: float
    ) -> None:
        """See ``Store``."""
        request = store_pb2.AnnounceRequest(
            domain_id=domain, boundary=boundary, block_hash=block_hash, ttl_s=ttl_s
        )
        self._keeper.call("Announce", request, time.monotonic() + timeout_s, domain)

    def reserve(
        self,
        domain: DomainId,
        publication: PublicationId,
        wants: Sequence[tuple[ObjectKey, int]],
        *,
        timeout_s: float,
    ) -> list[Grant]:
        """See ``Store``."""
        deadline = time.monotonic() + timeout_s
        grants: list[Grant] = []
        for batch in _batches(wants):
            request = store_pb2.ReserveRequest(
                domain_id=domain,
                publication_id=publication,
                wants=[store_pb2.Want(key=wire.key_message(k), nbytes=size) for k, size in batch],
            )
            reply = self._keeper.call("Reserve", request, deadline, domain)
            instance_id = self._keeper.current(deadline).instance_id
            if reply.instance_id not in ("", instance_id):
                # By another daemon, which knew the domain: so far nothing told that it is another.
                self._keeper.doubt()
                instance_id = reply.instance_id
            for (key, size), answer in zip(batch, reply.grants, strict=True):
                status = wire.GRANT_STATUS[answer.status]
                grant = InstanceGrant(key, status, size, answer.offset, answer.token)
                grant.instance_id = instance_id
                grants.append(grant)
        return grants

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
        deadline = time.monotonic() + timeout_s
        missing: dict[ObjectKey, None] = {}
        batches = _batches(written) or [()]
        for number, batch in enumerate(batches, start=1):
            last = manifest if number == len(batches) else None
            request = store_pb2.CommitRequest(
                domain_id=domain,
                publication_id=publication,
                rank=rank,
                written=[wire.written_message(one) for one in batch],
                manifest=wire.manifest_message(last) if last else None,
            )
            reply = self._keeper.call("Commit", request, deadline, domain)
            missing.update((wire.key_of(key), None) for key in reply.missing)
        return CommitResult(reply.visible, () if reply.visible else tuple(missing))

    def abandon(
        self, publication: PublicationId, *, still_written: bool = False, timeout_s: float
    ) -> None:
        """See ``Store``."""
        request = store_pb2.AbandonRequest(publication_id=publication, still_written=still_written)
        self._keeper.call("Abandon", request, time.monotonic() + timeout_s)

    def keep_alive(self, publications: Sequence[PublicationId], *, timeout_s: float) -> None:
        """See ``Store``."""
        deadline = time.monotonic() + timeout_s
        for batch in _batches(publications):
            request = store_pb2.KeepAliveRequest(publication_ids=batch)
            self._keeper.call("KeepAlive", request, deadline)

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
        name = uuid.uuid4().hex if lease_s else ""
        request = store_pb2.LookupRequest(
            domain_id=domain,
            boundary_hashes=boundary_hashes,
            above_tokens=above_tokens,
            lease_s=lease_s,
            wait_s=min(wait_s, timeout_s * WAIT_SHARE_MAX),
            follow_up=follow_up,
            repeat=repeat,
            lease_name=name,
        )
        try:
            reply = self._keeper.call("Lookup", request, time.monotonic() + timeout_s, domain)
        except StoreUnanswered as error:
            if not name:
                raise
            lease = wire.lease_id(self._keeper.instance_id, name)
            raise LookupUnanswered(str(error), lease) from None
        return wire.lookup_result(reply)

    def renew(self, lease: LeaseId, lease_s: float, *, timeout_s: float) -> None:
        """See ``Store``."""
        request = store_pb2.RenewLeaseRequest(lease_id=lease, lease_s=lease_s)
        self._keeper.call("RenewLease", request, time.monotonic() + timeout_s)

    def release(self, leases: Sequence[LeaseId], *, timeout_s: float) -> None:
        """See ``Store``."""
        deadline = time.monotonic() + timeout_s
        for batch in _batches(leases):
            request = store_pb2.ReleaseLeaseRequest(lease_ids=batch)
            self._keeper.call("ReleaseLease", request, deadline)

    # -- people -------------------------------------------------------------------------------

    def stats(self, *, timeout_s: float) -> StoreStats:
        """See ``Store``."""
        deadline = time.monotonic() + timeout_s
        return wire.store_stats(self._keeper.call("Stats", store_pb2.StatsRequest(), deadline))

    def list_checkpoints(
        self, domain: DomainId | None = None, *, limit: int = 0, timeout_s: float
    ) -> list[CheckpointInfo]:
        """See ``Store``."""
        deadline = time.monotonic() + timeout_s
        infos: list[CheckpointInfo] = []
        cursor = ""
        while True:
            request = store_pb2.ListCheckpointsRequest(
                domain_id=domain or "", limit=max(limit - len(infos), 0), cursor=cursor
            )
            reply = self._keeper.call("ListCheckpoints", request, deadline, domain)
            infos += [wire.checkpoint_info(one) for one in reply.checkpoints]
            cursor = reply.next_cursor
            if not cursor or (limit and len(infos) >= limit):
                return infos

    def close(self) -> None:
        """See ``Store``. Running transfers are given up first."""
        self._channel.close()
        if self._payload is not None:
            self._payload.close()

    # -- helpers ------------------------------------------------------------------------------

    def _attached(self) -> Payload:
        if self._payload is None:
            raise ValueError("no memory is attached: call attach() before read or write")
        return self._payload

    def _not_moved(self, moved: Moved) -> TransferResult:
        ended = moved.ended
        if ended.outcome is Outcome.TIMEOUT:
            self._keeper.doubt()
            return TransferResult(ok=False, reason=Reason.TIMEOUT, unsettled=ended.unsettled)
        logger.warning("backhaul: transfer failed: %s", ended.detail or "the store is gone")
        self._keeper.doubt(peer=True)
        return TransferResult(ok=False, reason=Reason.UNREACHABLE, unsettled=ended.unsettled)


def _batches(items: Sequence[_Item]) -> list[Sequence[_Item]]:
    return [items[i : i + OBJECTS_PER_CALL] for i in range(0, len(items), OBJECTS_PER_CALL)]


def _instance(grant: Grant) -> str:
    return grant.instance_id if isinstance(grant, InstanceGrant) else ""


def _failed(error: StoreError) -> TransferResult:
    logger.debug("backhaul: %s", error)
    return TransferResult(
        ok=False, reason=next(r for kind, r in REASONS if isinstance(error, kind))
    )
