"""Checks of what clients send to the block index: ``StoreRejected``, and nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from backhaul.protocols.checkpoint import CheckpointManifest, ObjectKey
from backhaul.protocols.errors import StoreRejected
from backhaul.protocols.layout import checkpoint_objects, required_blocks
from backhaul.transfer.base import Written
from backhaul.transfer.entries import (
    CHECKPOINT_OBJECTS_MAX,
    HASH_BYTES_MAX,
    HASHES_MAX,
    NAME_BYTES_MAX,
    Domain,
)

WORK_MAX = 1e24
"""FLOPs of a token, or of a pair of tokens: far above any model, and sums stay finite."""


def check_name(what: str, name: str) -> None:
    """A publication id or the like."""
    if not name or len(name.encode()) > NAME_BYTES_MAX:
        raise StoreRejected(f"{what} {name[:40]!r} must have 1 to {NAME_BYTES_MAX} bytes")


def check_hash(block_hash: bytes) -> None:
    """A block hash of any hash function."""
    if not 0 < len(block_hash) <= HASH_BYTES_MAX:
        raise StoreRejected(
            f"block hash of {len(block_hash)} bytes: it must have 1 to {HASH_BYTES_MAX}"
        )


def check_hashes(block_hashes: Sequence[bytes]) -> None:
    """A prefix's block hashes."""
    if len(block_hashes) > HASHES_MAX:
        raise StoreRejected(f"{len(block_hashes)} hashes: a prefix may have {HASHES_MAX}")
    lengths = set(map(len, block_hashes))
    if lengths and not 0 < min(lengths) <= max(lengths) <= HASH_BYTES_MAX:
        check_hash(next(h for h in block_hashes if not 0 < len(h) <= HASH_BYTES_MAX))


def check_boundary(domain: Domain, boundary: int) -> None:
    """A token position on the domain's grid."""
    grid = domain.boundary_tokens
    if boundary <= 0 or boundary % grid:
        raise StoreRejected(f"boundary {boundary} is not a positive multiple of {grid} tokens")


def seconds(what: str, value: float) -> float:
    """A duration; answers it."""
    if not math.isfinite(value) or value < 0:
        raise StoreRejected(f"{what} is {value}: it must be a finite number of seconds, 0 or more")
    return value


def check_key(domain: Domain, key: ObjectKey) -> None:
    """A key of the domain's layout."""
    ranks = domain.record.layout.ranks
    if not 0 <= key.rank < ranks:
        raise StoreRejected(f"rank {key.rank} is not below the {ranks} of domain {domain.id}")
    if key.group not in domain.group_kinds:
        raise StoreRejected(
            f"group {key.group} is none of {sorted(domain.group_kinds)} of domain {domain.id}"
        )
    check_hash(key.block_hash)


def check_wants(domain: Domain, wants: Sequence[tuple[ObjectKey, int]]) -> None:
    """The arguments of ``reserve``, against what is known and each other."""
    sizes: dict[ObjectKey, int] = {}
    for key, nbytes in wants:
        check_key(domain, key)
        if nbytes < 1:
            raise StoreRejected(f"{key_name(key)} of {nbytes} bytes: nothing to store")
        entry = domain.objects.get(key)
        known = sizes.setdefault(key, entry.nbytes if entry else nbytes)
        if known != nbytes:
            raise StoreRejected(f"{key_name(key)} has {known} bytes here, {nbytes} were asked for")


def check_commit(domain: Domain, rank: int, written: Sequence[Written]) -> None:
    """The arguments of ``commit`` besides the manifest."""
    ranks = domain.record.layout.ranks
    if not 0 <= rank < ranks:
        raise StoreRejected(f"rank {rank} is not below the {ranks} of domain {domain.id}")
    for item in written:
        check_key(domain, item.key)
        if item.key.rank != rank:
            raise StoreRejected(f"rank {rank} cannot commit {key_name(item.key)}")


def required_keys(domain: Domain, rank: int, manifest: CheckpointManifest) -> list[ObjectKey]:
    """Check a manifest; answers the objects that it needs of ``rank``: of groups that lie on
    several ranks alike only the first of those stores them."""
    layout = domain.record.layout
    check_boundary(domain, manifest.boundary)
    if len(manifest.hashes) * layout.hash_tokens != manifest.boundary:
        raise StoreRejected(
            f"{len(manifest.hashes)} hashes of {layout.hash_tokens} tokens do not end at "
            f"boundary {manifest.boundary}"
        )
    check_hashes(manifest.hashes)
    if not manifest.kinds:
        raise StoreRejected(f"the checkpoint at {manifest.boundary} names no kind")
    if not all(0 <= flops <= WORK_MAX for flops in manifest.work):  # also refuses NaN
        raise StoreRejected(
            f"prefill work {tuple(manifest.work)}: it must be 0 ... {WORK_MAX:g} FLOPs"
        )
    if manifest.producer:
        check_name("producer", manifest.producer)
    known = domain.checkpoints.get(manifest.hashes[-1])
    if known is not None and known.boundary != manifest.boundary:
        raise StoreRejected(
            f"hash {manifest.hashes[-1].hex()[:16]} ends at {known.boundary} tokens, "
            f"not at {manifest.boundary}"
        )
    objects = sum(len(required_blocks(group, manifest.boundary)) for group in layout.groups)
    if objects > CHECKPOINT_OBJECTS_MAX:
        raise StoreRejected(
            f"the checkpoint at {manifest.boundary} has {objects} objects a rank: "
            f"at most {CHECKPOINT_OBJECTS_MAX} are taken"
        )
    pairs = checkpoint_objects(layout, manifest.boundary, manifest.hashes)
    if not pairs:
        raise StoreRejected(f"a checkpoint of domain {domain.id} consists of no object")
    own = {group.index for group in layout.groups if group.owner(rank) == rank}
    return [ObjectKey(rank, group, block_hash) for group, block_hash in pairs if group in own]


def key_name(key: ObjectKey) -> str:
    """A key as errors show it."""
    return f"object {key.rank}/{key.group}/{key.block_hash.hex()[:16]}"
