"""The Catalog service: messages in, calls of the block index, messages out.

Everything runs on one event loop and every index call returns at once, so there are no locks.
Only ``Lookup`` may wait, and it holds nothing while it does.

A caller may be gone when its call is handled, because the daemon was stopped or busy meanwhile.
gRPC cancels the handlers of calls that it knows to be over, but takes an answer for sent that
nobody receives. So a call that grants a lease or opens a publication is looked at again once it is
over: what was granted after the call's deadline is taken back, as its caller never will. Where load
delays that look itself, this may meet a caller that got the answer in time; it costs a miss. Of an
answer that was sent in time but not read in time, only the caller knows: it takes back what it
named itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import grpc

from backhaul.protocols import store_pb2, store_pb2_grpc
from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointManifest,
    DomainId,
    LeaseId,
    ObjectKey,
    PrefillWork,
    PublicationId,
)
from backhaul.protocols.domain import parse_domain
from backhaul.protocols.errors import BackhaulError, StoreFull, StoreRejected
from backhaul.transfer.backends.wire import checkpoint_message, domain_message
from backhaul.transfer.base import GrantStatus, Member, Visibility, Written
from backhaul.transfer.daemon.pool import Pool
from backhaul.transfer.entries import NotKnown
from backhaul.transfer.index import BlockIndex, LookupAnswer
from backhaul.transfer.listing import LISTING_MAX, ListQuery

PROTOCOL_VERSION = 1
"""Version of store.proto's meaning. 1: first version."""
LOOKUP_WAIT_MAX_S = 30.0
"""Longest wait that a lookup may ask for; a request stalled longer is better recomputed."""

SETTLE_S = 0.02
"""A wait that overran by more than this did so because the process stood still. As long again is
given to gRPC to read what arrived, and to cancel the handler if its caller hung up."""

DETAILS_MAX = 500
"""Characters of an error."""

logger = logging.getLogger(__name__)


class ProtocolMismatch(StoreRejected):
    """The client speaks another version of the protocol."""


STATUS_CODES: tuple[tuple[type[BackhaulError], grpc.StatusCode], ...] = (
    (ProtocolMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (NotKnown, grpc.StatusCode.NOT_FOUND),
    (StoreRejected, grpc.StatusCode.INVALID_ARGUMENT),
    (StoreFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (BackhaulError, grpc.StatusCode.INTERNAL),
)
"""What the index raises -> what the client sees; the first match counts."""

GRANT_STATUS = {
    GrantStatus.GRANTED: store_pb2.Grant.GRANTED,
    GrantStatus.PRESENT: store_pb2.Grant.PRESENT,
    GrantStatus.BUSY: store_pb2.Grant.BUSY,
    GrantStatus.FULL: store_pb2.Grant.FULL,
    GrantStatus.OVER_BUDGET: store_pb2.Grant.OVER_BUDGET,
}

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")
_Member = TypeVar("_Member", bound=enum.StrEnum)
_Method = Callable[[Any, _Request, Any], Awaitable[_Reply]]


def status_code(error: BackhaulError) -> grpc.StatusCode:
    """The code for an error of ours."""
    return next(code for kind, code in STATUS_CODES if isinstance(error, kind))


def _answering(method: _Method[_Request, _Reply]) -> _Method[_Request, _Reply]:
    """Turn what the method raises into a status; a bug is logged and hidden from the client."""

    @functools.wraps(method)
    async def call(self: Any, request: _Request, context: Any) -> _Reply:
        try:
            return await method(self, request, context)
        except BackhaulError as error:
            await context.abort(status_code(error), _one_line(str(error)))
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            await context.abort(
                grpc.StatusCode.INTERNAL, f"{method.__name__} failed: {type(error).__name__}"
            )
        raise AssertionError("abort always raises")

    return call


class Catalog(store_pb2_grpc.CatalogServicer):
    """One daemon's catalog over one index and one pool."""

    def __init__(
        self,
        index: BlockIndex,
        pool: Pool,
        clock: Callable[[], float] = time.monotonic,
        *,
        http_address: str = "",
    ) -> None:
        """``http_address``: told to clients; see store.proto."""
        self._index = index
        self._pool = pool
        self._clock = clock
        self._http_address = http_address
        self._changed = asyncio.Event()

    def expire(self) -> None:
        """End what ran out, and let waiting lookups see whether they still wait for something."""
        self._index.expire(self._clock())
        self._wake()

    @_answering
    async def Hello(self, request: store_pb2.HelloRequest, context: Any) -> store_pb2.HelloReply:
        """See store.proto."""
        if request.protocol_version != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"client {request.client_name[:80]!r} speaks protocol {request.protocol_version}, "
                f"this daemon {PROTOCOL_VERSION}: run the same Backhaul on both sides"
            )
        logger.info("client %r connected", request.client_name[:80])
        return store_pb2.HelloReply(
            instance_id=self._index.instance_id,
            agent_name=self._pool.agent_name,
            agent_metadata=self._pool.agent_metadata,
            pool_address=self._pool.address,
            capacity_bytes=self._pool.capacity_bytes,
            publication_ttl_s=self._index.publication_ttl_s,
            lease_ttl_max_s=self._index.lease_max_s,
            http_address=self._http_address,
        )

    @_answering
    async def OpenDomain(
        self, request: store_pb2.OpenDomainRequest, context: Any
    ) -> store_pb2.OpenDomainReply:
        """See store.proto."""
        record = parse_domain(request.record)
        if not request.member:
            domain_id = self._index.open_domain(record, self._clock(), request.client_name)
            return store_pb2.OpenDomainReply(domain_id=domain_id)
        member = Member(
            request.member,
            request.loads,
            request.publishes,
            request.decodes_only,
            request.converts,
        )
        peers = self._index.join(record, member, self._clock(), request.client_name)
        return store_pb2.OpenDomainReply(
            domain_id=record.domain_id,
            loaders=peers.loaders,
            decode_loaders=peers.decode_loaders,
            publishers=peers.publishers,
            elsewhere=[
                store_pb2.OtherDomain(
                    domain_id=one.domain,
                    field=one.field,
                    ours=one.ours,
                    theirs=one.theirs,
                    loaders=one.loaders,
                    publishers=one.publishers,
                    converters=one.converters,
                )
                for one in peers.elsewhere
            ],
        )

    # -- loads --------------------------------------------------------------------------------

    @_answering
    async def Lookup(self, request: store_pb2.LookupRequest, context: Any) -> store_pb2.LookupReply:
        """See store.proto. The lease is taken after the wait, so a caller that hangs up while
        waiting leaves nothing behind."""
        domain_id = DomainId(request.domain_id)
        hashes = list(request.boundary_hashes)
        if request.peek:
            seen = self._index.peek(domain_id, hashes, request.above_tokens, self._clock())
            return _lookup_reply(seen, waited_s=0.0)
        waited_s = await self._wait(domain_id, hashes, request.above_tokens, request.wait_s)
        answer = self._index.lookup(
            domain_id,
            hashes,
            request.above_tokens,
            request.lease_s,
            self._clock(),
            follow_up=request.follow_up,
            repeat=request.repeat,
            lease_name=request.lease_name,
        )
        if (lease := answer.lease) is None:
            return _lookup_reply(answer, waited_s)
        with _undone_without_answer(context, lambda: self._index.release([lease], self._clock())):
            return _lookup_reply(answer, waited_s)

    async def _wait(
        self, domain_id: DomainId, hashes: Sequence[bytes], above_tokens: int, wait_s: float
    ) -> float:
        """Wait while something deeper is about to come, at most ``wait_s``; seconds waited."""
        started = now = self._clock()
        deadline = started + min(wait_s, LOOKUP_WAIT_MAX_S)
        while now < deadline:
            awaited = self._index.awaited(domain_id, hashes, above_tokens, now)
            if awaited is None:
                break
            due = min(deadline, awaited.until)
            try:
                async with asyncio.timeout(due - now):
                    await self._changed.wait()
            except TimeoutError:
                pass
            if self._clock() > due + SETTLE_S:
                await asyncio.sleep(SETTLE_S)
            now = self._clock()
        return now - started

    @_answering
    async def Locate(self, request: store_pb2.LocateRequest, context: Any) -> store_pb2.LocateReply:
        """See store.proto."""
        keys = [_key(key) for key in request.keys]
        places = self._index.locate(LeaseId(request.lease_id), keys, self._clock())
        return store_pb2.LocateReply(
            locations=[
                store_pb2.Location(
                    offset=place.offset, nbytes=place.nbytes, checksum=place.checksum
                )
                for place in places
            ]
        )

    @_answering
    async def RenewLease(
        self, request: store_pb2.RenewLeaseRequest, context: Any
    ) -> store_pb2.RenewLeaseReply:
        """See store.proto."""
        self._index.renew(LeaseId(request.lease_id), request.lease_s, self._clock())
        return store_pb2.RenewLeaseReply()

    @_answering
    async def ReleaseLease(
        self, request: store_pb2.ReleaseLeaseRequest, context: Any
    ) -> store_pb2.ReleaseLeaseReply:
        """See store.proto."""
        self._index.release([LeaseId(name) for name in request.lease_ids], self._clock())
        return store_pb2.ReleaseLeaseReply()

    # -- publications -------------------------------------------------------------------------

    @_answering
    async def Announce(
        self, request: store_pb2.AnnounceRequest, context: Any
    ) -> store_pb2.AnnounceReply:
        """See store.proto."""
        self._index.announce(
            DomainId(request.domain_id),
            request.boundary,
            request.block_hash,
            request.ttl_s,
            self._clock(),
        )
        return store_pb2.AnnounceReply()

    @_answering
    async def Reserve(
        self, request: store_pb2.ReserveRequest, context: Any
    ) -> store_pb2.ReserveReply:
        """See store.proto."""
        publication = PublicationId(request.publication_id)
        with self._disowned_without_answer(publication, context):
            grants = self._index.reserve(
                DomainId(request.domain_id),
                publication,
                [(_key(want.key), want.nbytes) for want in request.wants],
                self._clock(),
            )
            return store_pb2.ReserveReply(
                instance_id=self._index.instance_id,
                grants=[
                    store_pb2.Grant(
                        status=GRANT_STATUS[grant.status], offset=grant.offset, token=grant.token
                    )
                    for grant in grants
                ],
            )

    @_answering
    async def Commit(self, request: store_pb2.CommitRequest, context: Any) -> store_pb2.CommitReply:
        """See store.proto."""
        manifest = _manifest(request.manifest) if request.HasField("manifest") else None
        publication = PublicationId(request.publication_id)
        with self._disowned_without_answer(publication, context):
            result = self._index.commit(
                DomainId(request.domain_id),
                publication,
                request.rank,
                [Written(_key(item.key), item.token, item.checksum) for item in request.written],
                manifest,
                self._clock(),
            )
            if result.visible:
                self._wake()
            missing = [
                store_pb2.Key(rank=key.rank, group=key.group, block_hash=key.block_hash)
                for key in result.missing
            ]
            return store_pb2.CommitReply(visible=result.visible, missing=missing)

    @_answering
    async def Abandon(
        self, request: store_pb2.AbandonRequest, context: Any
    ) -> store_pb2.AbandonReply:
        """See store.proto."""
        self._index.abandon(
            PublicationId(request.publication_id),
            self._clock(),
            still_written=request.still_written,
        )
        self._wake()
        return store_pb2.AbandonReply()

    @_answering
    async def KeepAlive(
        self, request: store_pb2.KeepAliveRequest, context: Any
    ) -> store_pb2.KeepAliveReply:
        """See store.proto."""
        names = [PublicationId(name) for name in request.publication_ids]
        return store_pb2.KeepAliveReply(unknown=self._index.keep_alive(names, self._clock()))

    def _disowned_without_answer(
        self, publication: PublicationId, context: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Around the call that may open it: one that is open already has an owner who knows of
        it."""
        if self._index.is_open(publication):
            return contextlib.nullcontext()
        return _undone_without_answer(
            context, lambda: self._index.disown(publication, self._clock())
        )

    # -- people -------------------------------------------------------------------------------

    @_answering
    async def Stats(self, request: store_pb2.StatsRequest, context: Any) -> store_pb2.StatsReply:
        """See store.proto."""
        stats = self._index.stats()
        return store_pb2.StatsReply(
            instance_id=stats.instance_id,
            capacity_bytes=stats.capacity_bytes,
            used_bytes=stats.used_bytes,
            objects=stats.objects,
            checkpoints=stats.checkpoints,
            leases=stats.leases,
            publications=stats.publications,
            domains=stats.domains,
            counters=stats.counters,
            gauges=stats.gauges,
        )

    @_answering
    async def ListCheckpoints(
        self, request: store_pb2.ListCheckpointsRequest, context: Any
    ) -> store_pb2.ListCheckpointsReply:
        """See store.proto."""
        page = self._index.query_checkpoints(_query(request), self._clock())
        return store_pb2.ListCheckpointsReply(
            checkpoints=[checkpoint_message(info) for info in page.checkpoints],
            next_cursor=page.next_cursor,
        )

    @_answering
    async def ListDomains(
        self, request: store_pb2.ListDomainsRequest, context: Any
    ) -> store_pb2.ListDomainsReply:
        """See store.proto."""
        domains = self._index.list_domains(self._clock())
        return store_pb2.ListDomainsReply(domains=[domain_message(domain) for domain in domains])

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@contextlib.contextmanager
def _undone_without_answer(context: Any, undo: Callable[[], None]) -> Iterator[None]:
    """Around the making of a reply: call ``undo`` where that fails, and when the call is over, if
    its deadline has passed by then."""

    def over(context: Any) -> None:
        left_s = context.time_remaining()
        if left_s is not None and left_s <= 0:
            undo()

    try:
        yield
    except BaseException:
        undo()
        raise
    context.add_done_callback(over)


def _lookup_reply(answer: LookupAnswer, waited_s: float) -> store_pb2.LookupReply:
    matches = [
        store_pb2.Match(
            boundary=match.boundary,
            kinds=[kind.value for kind in match.kinds],
            consumable=match.consumable,
            reason=match.reason.value if match.reason else "",
            age_s=match.age_s,
            producer=match.producer,
            field=match.field,
            domain_id=match.domain,
            also_in=match.also_in,
            retained=match.retained,
            hash_matched=match.hash_matched,
            hits=match.hits,
        )
        for match in answer.matches
    ]
    return store_pb2.LookupReply(
        matches=matches,
        lease_id=answer.lease or "",
        waited_s=waited_s,
        attention_tokens=answer.extent.attention,
        recurrent_tokens=answer.extent.recurrent,
    )


def _one_line(text: str) -> str:
    """What a refusal quotes may be of any content, and gRPC drops details of some kilobytes."""
    return " ".join(text.split())[:DETAILS_MAX]


def _key(key: store_pb2.Key) -> ObjectKey:
    return ObjectKey(key.rank, key.group, key.block_hash)


def _members(kind: type[_Member], what: str, values: Iterable[str]) -> tuple[_Member, ...]:
    members = {member.value: member for member in kind}
    named = tuple(values)
    for value in named:
        if value not in members:
            raise StoreRejected(f"{what} {value[:80]!r} is none of {', '.join(members)}")
    return tuple(members[value] for value in named)


def _query(request: store_pb2.ListCheckpointsRequest) -> ListQuery:
    visibilities = _members(Visibility, "visibility", request.visibilities)
    return ListQuery(
        domain=DomainId(request.domain_id) if request.domain_id else None,
        domain_prefix=request.domain_prefix,
        kinds=frozenset(_members(CheckpointKind, "checkpoint kind", request.kinds)),
        age_min_s=request.age_min_s,
        age_max_s=request.age_max_s or math.inf,
        visibilities=frozenset(visibilities or (Visibility.VISIBLE,)),
        prefix_hashes=tuple(request.prefix_hashes),
        hits_min=request.hits_min,
        limit=min(request.limit or LISTING_MAX, LISTING_MAX),
        cursor=request.cursor,
    )


def _manifest(manifest: store_pb2.Manifest) -> CheckpointManifest:
    return CheckpointManifest(
        boundary=manifest.boundary,
        hashes=tuple(manifest.hashes),
        kinds=_members(CheckpointKind, "checkpoint kind", manifest.kinds),
        producer=manifest.producer,
        user_turn=manifest.user_turn,
        work=PrefillWork(manifest.flops_per_token, manifest.flops_per_pair),
    )
