"""A small layout and short calls for tests of the block index."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Iterable, Sequence

import msgspec

from backhaul.protocols.checkpoint import (
    UNKNOWN_WORK,
    CheckpointKind,
    CheckpointManifest,
    DomainId,
    ObjectKey,
    PrefillWork,
    PublicationId,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout, checkpoint_objects
from backhaul.protocols.sharding import Part, Rows, page_bytes
from backhaul.transfer.admission import AdmissionStrategy
from backhaul.transfer.base import CommitResult, Grant, GrantStatus, Written
from backhaul.transfer.entries import Checkpoint
from backhaul.transfer.eviction import EvictionStrategy
from backhaul.transfer.index import BlockIndex, LookupAnswer

GRID = 4
"""Boundary grid and hash unit of the layouts here, in tokens."""
ATTENTION_BYTES = 256
STATE_BYTES = 1024


def make_layout(ranks: int = 1, window_tokens: int = 0, *, pages: bool = False) -> CacheLayout:
    """Full attention and a recurrent group, with a sliding window where one is asked for;
    ``pages``: it is known how they are cut over tensor-parallel ranks."""
    groups = [
        GroupLayout(index=0, kind=GroupKind.FULL, block_tokens=GRID),
        GroupLayout(index=1, kind=GroupKind.RECURRENT, block_tokens=GRID),
    ]
    if pages:
        page = (Rows(1, (Part(4, 8),)),)
        groups = [
            msgspec.structs.replace(group, page=page, page_bytes=page_bytes(page, ranks))
            for group in groups
        ]
    if window_tokens:
        groups.append(
            GroupLayout(
                index=2, kind=GroupKind.WINDOW, block_tokens=GRID, window_tokens=window_tokens
            )
        )
    return CacheLayout(groups=tuple(groups), hash_tokens=GRID, ranks=ranks)


def make_record(model: str = "m", layout: CacheLayout | None = None) -> DomainRecord:
    """A domain record that differs by ``model``."""
    return DomainRecord(
        model=model,
        weights="w",
        layout=layout or make_layout(),
        hash_function="sha256",
        hash_probe="00",
        kv_dtype="bfloat16",
        platform="cpu",
        vllm="0.32",
    )


def chain(tokens: str) -> list[bytes]:
    """Chained hashes of a prefix: one letter stands for one block of ``GRID`` tokens."""
    hashes: list[bytes] = []
    digest = b""
    for letter in tokens:
        digest = hashlib.sha256(digest + letter.encode()).digest()
        hashes.append(digest)
    return hashes


def keys_of(layout: CacheLayout, tokens: str, rank: int = 0) -> list[ObjectKey]:
    """The objects of one rank of the checkpoint at the end of ``tokens``."""
    pairs = checkpoint_objects(layout, len(tokens) * GRID, chain(tokens))
    return [ObjectKey(rank, group, block_hash) for group, block_hash in pairs]


def manifest_of(
    tokens: str,
    *kinds: CheckpointKind,
    producer: str = "engine-1",
    user_turn: bool = False,
    work: PrefillWork = UNKNOWN_WORK,
) -> CheckpointManifest:
    """The manifest of the checkpoint at the end of ``tokens``."""
    return CheckpointManifest(
        boundary=len(tokens) * GRID,
        hashes=tuple(chain(tokens)),
        kinds=kinds or (CheckpointKind.DECODE_END,),
        producer=producer,
        user_turn=user_turn,
        work=work,
    )


def size_of(layout: CacheLayout, key: ObjectKey) -> int:
    """Bytes of an object: states are larger."""
    kind = next(group.kind for group in layout.groups if group.index == key.group)
    return STATE_BYTES if kind is GroupKind.RECURRENT else ATTENTION_BYTES


class SortedQueue:
    """A strategy's own rule, applied to everything anew for each candidate."""

    def __init__(self, strategy: EvictionStrategy) -> None:
        self.strategy = strategy
        self.members: dict[Checkpoint, None] = {}

    def add(self, checkpoint: Checkpoint) -> None:
        self.members[checkpoint] = None

    def remove(self, checkpoint: Checkpoint) -> None:
        del self.members[checkpoint]

    def changed(self, checkpoint: Checkpoint) -> None:
        pass

    def candidates(
        self, now: float, leased: Collection[Checkpoint]
    ) -> Generator[Checkpoint, None, None]:
        given: set[Checkpoint] = set()
        while True:
            unleased = [one for one in self.members if one not in leased]
            ordered = [one for one in self.strategy.order(unleased, now) if one not in given]
            if not ordered:
                return
            given.add(ordered[0])
            yield ordered[0]


class Driver:
    """An index with one layout, one domain opened, and a clock that only tests move."""

    def __init__(
        self,
        capacity_bytes: int = 1 << 20,
        *,
        ranks: int = 1,
        window_tokens: int = 0,
        quarantine_s: float = 0.0,
        layout: CacheLayout | None = None,
        strategy: EvictionStrategy | None = None,
        admission: AdmissionStrategy | None = None,
    ) -> None:
        self.index = BlockIndex(
            capacity_bytes,
            publication_ttl_s=60.0,
            lease_max_s=100.0,
            quarantine_s=quarantine_s,
            strategy=strategy,
            admission=admission,
        )
        self.layout = layout or make_layout(ranks, window_tokens)
        self.now = 0.0
        self.domain = self.open("m")

    def open(self, model: str) -> DomainId:
        """Open a domain that differs by ``model``."""
        return self.index.open_domain(make_record(model, self.layout), self.now)

    def reserve(
        self, name: str, keys: Iterable[ObjectKey], domain: DomainId | None = None
    ) -> list[Grant]:
        """Reserve keys with the sizes of the layout."""
        wants = [(key, size_of(self.layout, key)) for key in keys]
        return self.index.reserve(domain or self.domain, PublicationId(name), wants, self.now)

    def commit(
        self,
        name: str,
        grants: Sequence[Grant],
        manifest: CheckpointManifest | None = None,
        *,
        rank: int = 0,
        domain: DomainId | None = None,
    ) -> CommitResult:
        """Commit what was granted."""
        written = [
            Written(grant.key, grant.token, checksum=grant.token + 1000)
            for grant in grants
            if grant.status is GrantStatus.GRANTED
        ]
        return self.index.commit(
            domain or self.domain, PublicationId(name), rank, written, manifest, self.now
        )

    def publish(
        self,
        tokens: str,
        *kinds: CheckpointKind,
        name: str | None = None,
        domain: DomainId | None = None,
        end: bool = True,
        user_turn: bool = False,
        work: PrefillWork = UNKNOWN_WORK,
    ) -> CommitResult:
        """Reserve, commit and (if ``end``) abandon a whole checkpoint of all ranks."""
        name = name or f"publication of {tokens}"
        result = CommitResult(False)
        for rank in range(self.layout.ranks):
            grants = self.reserve(name, keys_of(self.layout, tokens, rank), domain)
            manifest = manifest_of(tokens, *kinds, user_turn=user_turn, work=work)
            result = self.commit(name, grants, manifest, rank=rank, domain=domain)
        if end:
            self.abandon(name)
        return result

    def abandon(self, name: str) -> None:
        """End a publication."""
        self.index.abandon(PublicationId(name), self.now)

    def lookup(
        self,
        tokens: str,
        *,
        above: int = 0,
        lease_s: float = 10.0,
        domain: DomainId | None = None,
    ) -> LookupAnswer:
        """Look up a prefix."""
        return self.index.lookup(domain or self.domain, chain(tokens), above, lease_s, self.now)

    def consumable(self, tokens: str) -> list[int]:
        """Boundaries, in blocks, of the consumable matches; takes no lease."""
        matches = self.lookup(tokens, lease_s=0).matches
        return [match.boundary // GRID for match in matches if match.consumable]

    def visible(self) -> set[int]:
        """Boundaries, in blocks, of all visible checkpoints of the first domain."""
        infos = self.index.list_checkpoints(self.domain, 0, self.now)
        return {info.boundary // GRID for info in infos}

    @property
    def used_bytes(self) -> int:
        """Allocated bytes."""
        return self.index.stats().used_bytes
