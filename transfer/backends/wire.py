"""Messages of store.proto <-> the types of the Store interface."""

from __future__ import annotations

from collections.abc import Iterable

from backhaul.protocols import store_pb2
from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointManifest,
    CheckpointMatch,
    DomainId,
    LeaseId,
    ObjectKey,
    Reason,
)
from backhaul.protocols.domain import parse_domain
from backhaul.transfer.base import (
    CheckpointInfo,
    DomainClient,
    DomainInfo,
    Elsewhere,
    GrantStatus,
    LookupResult,
    Peers,
    StoreStats,
    Visibility,
    Written,
)

GRANT_STATUS = {
    store_pb2.Grant.GRANTED: GrantStatus.GRANTED,
    store_pb2.Grant.PRESENT: GrantStatus.PRESENT,
    store_pb2.Grant.BUSY: GrantStatus.BUSY,
    store_pb2.Grant.FULL: GrantStatus.FULL,
    store_pb2.Grant.OVER_BUDGET: GrantStatus.OVER_BUDGET,
}


def key_message(key: ObjectKey) -> store_pb2.Key:
    """An object's key."""
    return store_pb2.Key(rank=key.rank, group=key.group, block_hash=key.block_hash)


def key_of(message: store_pb2.Key) -> ObjectKey:
    """The reverse of ``key_message``."""
    return ObjectKey(message.rank, message.group, message.block_hash)


def written_message(written: Written) -> store_pb2.Written:
    """One object to commit."""
    return store_pb2.Written(
        key=key_message(written.key), token=written.token, checksum=written.checksum
    )


def manifest_message(manifest: CheckpointManifest) -> store_pb2.Manifest:
    """What a rank commits last."""
    return store_pb2.Manifest(
        boundary=manifest.boundary,
        hashes=manifest.hashes,
        kinds=[kind.value for kind in manifest.kinds],
        producer=manifest.producer,
        user_turn=manifest.user_turn,
        flops_per_token=manifest.work.per_token,
        flops_per_pair=manifest.work.per_pair,
    )


def lookup_result(reply: store_pb2.LookupReply) -> LookupResult:
    """The answer of a lookup."""
    matches = tuple(
        CheckpointMatch(
            boundary=match.boundary,
            kinds=_kinds(match.kinds),
            consumable=match.consumable,
            reason=_reason(match.reason) if not match.consumable else None,
            age_s=match.age_s,
            producer=match.producer,
            field=match.field,
            domain=DomainId(match.domain_id),
            also_in=tuple(map(DomainId, match.also_in)),
            # A daemon that does not know a tag has said the ones that imply it.
            retained=match.retained or match.hash_matched or match.consumable,
            hash_matched=match.hash_matched or match.consumable,
            hits=match.hits,
        )
        for match in reply.matches
    )
    lease = LeaseId(reply.lease_id) if reply.lease_id else None
    return LookupResult(
        matches=matches,
        lease=lease,
        waited_s=reply.waited_s,
        attention_tokens=reply.attention_tokens,
        recurrent_tokens=reply.recurrent_tokens,
    )


def lease_id(instance_id: str, name: str) -> LeaseId:
    """What the lease of a lookup is called that chose its name."""
    return LeaseId(f"{instance_id}.{name}")


def instance_of(lease: LeaseId) -> str:
    """The life of the daemon that granted a lease."""
    return lease.partition(".")[0]


def checkpoint_message(info: CheckpointInfo) -> store_pb2.CheckpointInfo:
    """One line of a listing."""
    return store_pb2.CheckpointInfo(
        domain_id=info.domain,
        boundary=info.boundary,
        block_hash=info.block_hash,
        kinds=[kind.value for kind in info.kinds],
        state_bytes=info.state_bytes,
        attention_bytes=info.attention_bytes,
        age_s=info.age_s,
        idle_s=info.idle_s,
        leases=info.leases,
        producer=info.producer,
        visibility=info.visibility.value,
        hits=info.hits,
        common_tokens=info.common_tokens,
    )


def checkpoint_info(message: store_pb2.CheckpointInfo) -> CheckpointInfo:
    """The reverse of ``checkpoint_message``."""
    return CheckpointInfo(
        domain=DomainId(message.domain_id),
        boundary=message.boundary,
        block_hash=message.block_hash,
        kinds=_kinds(message.kinds),
        state_bytes=message.state_bytes,
        attention_bytes=message.attention_bytes,
        age_s=message.age_s,
        idle_s=message.idle_s,
        leases=message.leases,
        producer=message.producer,
        visibility=Visibility(message.visibility or Visibility.VISIBLE),
        hits=message.hits,
        common_tokens=message.common_tokens,
    )


def domain_message(info: DomainInfo) -> store_pb2.DomainInfo:
    """One known domain."""
    return store_pb2.DomainInfo(
        domain_id=info.id,
        record=info.record.canonical(),
        clients=[
            store_pb2.DomainClient(name=client.name, opened_s=client.opened_s)
            for client in info.clients
        ],
        idle_s=info.idle_s,
        checkpoints=info.checkpoints,
        kinds={kind.value: count for kind, count in info.kinds.items()},
        objects=info.objects,
        object_bytes=info.object_bytes,
    )


def domain_info(message: store_pb2.DomainInfo) -> DomainInfo:
    """The reverse of ``domain_message``. Raises ``StoreRejected`` for another version's record."""
    known = set(CheckpointKind)
    return DomainInfo(
        id=DomainId(message.domain_id),
        record=parse_domain(message.record),
        clients=tuple(DomainClient(client.name, client.opened_s) for client in message.clients),
        idle_s=message.idle_s,
        checkpoints=message.checkpoints,
        kinds={CheckpointKind(name): n for name, n in message.kinds.items() if name in known},
        objects=message.objects,
        object_bytes=message.object_bytes,
    )


def peers(reply: store_pb2.OpenDomainReply) -> Peers:
    """Who else uses a domain."""
    return Peers(
        loaders=reply.loaders,
        decode_loaders=reply.decode_loaders,
        publishers=reply.publishers,
        elsewhere=tuple(
            Elsewhere(
                DomainId(one.domain_id),
                one.field,
                one.ours,
                one.theirs,
                one.loaders,
                one.publishers,
                one.converters,
            )
            for one in reply.elsewhere
        ),
    )


def store_stats(reply: store_pb2.StatsReply) -> StoreStats:
    """Occupancy and counters."""
    return StoreStats(
        instance_id=reply.instance_id,
        capacity_bytes=reply.capacity_bytes,
        used_bytes=reply.used_bytes,
        objects=reply.objects,
        checkpoints=reply.checkpoints,
        leases=reply.leases,
        publications=reply.publications,
        domains=reply.domains,
        counters=dict(reply.counters),
        gauges=dict(reply.gauges),
    )


def _kinds(names: Iterable[str]) -> tuple[CheckpointKind, ...]:
    """Kinds that a newer daemon invented are left out: they are hints."""
    known = set(CheckpointKind)
    return tuple(CheckpointKind(name) for name in names if name in known)


def _reason(name: str) -> Reason:
    return Reason(name) if name in set(Reason) else Reason.INTERNAL
