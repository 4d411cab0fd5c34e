"""What the block index keeps: domains, objects, checkpoints, publications, leases; their limits.

Plain records without behaviour of their own; ``index.py`` and ``objects.py`` change them, and
``index_check.py`` says which numbers must agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backhaul.protocols.checkpoint import (
    UNKNOWN_WORK,
    CheckpointKind,
    DomainId,
    LeaseId,
    ObjectKey,
    PrefillWork,
    PublicationId,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreRejected
from backhaul.protocols.layout import GroupKind

DOMAINS_MAX = 256
"""A cluster runs a handful; a client that opens one per start must not fill the memory. Beyond
this, domains without any content are forgotten."""
PUBLICATIONS_MAX = 65_536
"""Open at once; each is one decoding request, so this is above any cluster's concurrency."""
REFUSED_MAX = 65_536
"""Names of publications that were ended while somebody wrote; the oldest gives way, whose writer's
time was up long ago."""
LEASES_MAX = 65_536
"""Valid at once; each is one request between lookup and the end of its load."""
ANNOUNCEMENTS_MAX = 65_536
"""The oldest gives way: its waiters only fall back earlier."""
TOMBSTONES_MAX = 65_536
"""Remembered evictions; they only serve to tell `evicted` from `never seen`."""
MATCHES_MAX = 16
"""Consumable candidates per lookup, and as many that are not. A caller that finds the deepest
ones denied gains nothing from a seventeenth."""
DIVERGED_MAX = 8
"""Answered checkpoints of the same history that went on differently; they only serve to say so."""
NAME_BYTES_MAX = 256
"""Publication ids and producers."""
CLIENTS_MAX = 64
"""Names remembered per domain; whoever opened it longest ago gives way."""
HASH_BYTES_MAX = 64
"""SHA-512, the longest hash in use."""
HASHES_MAX = 1 << 17
"""Hashes of one prefix: two million tokens in blocks of 16. The daemon answers one call at a time,
and goes through so many in a tenth of a second."""
CHECKPOINT_OBJECTS_MAX = 1 << 17
"""Objects of one rank's part of a checkpoint; for the same reason."""
CALL_OBJECTS_MAX = 1 << 14
"""Objects, leases or publications named in one call; clients send fewer at a time."""
CALL_CHOICES_MAX = 16
"""Values of a closed set named in one call, of which none has as many."""


class NotKnown(StoreRejected):
    """A domain, lease or object of that name is not (or no longer) known."""


@dataclass(slots=True, eq=False)
class Entry:
    """One object, reserved or committed.

    Attributes:
        writer: the publication that is writing it; None once committed.
        refs: checkpoints that consist of it, pending ones included.
        holds: open publications that were told it is there, or that committed it.
    """

    domain: Domain
    key: ObjectKey
    nbytes: int
    offset: int
    token: int
    writer: PublicationId | None
    checksum: int = 0
    refs: int = 0
    holds: int = 0

    @property
    def committed(self) -> bool:
        """Whether its bytes are complete."""
        return self.writer is None


@dataclass(slots=True, eq=False)
class Checkpoint:
    """One boundary of one prefix, pending until ``parts`` has every rank, then visible.

    Attributes:
        parts: rank -> its objects. Each of them counts this checkpoint in ``Entry.refs``.
        publications: of a pending one: the open publications that still work on it.
        created_at: when it became visible (pending: when its first part came), seconds.
        used_at: last lookup, locate or commit that met it or an extension of it, seconds.
        hits: lookups that found it consumable.
        leases: valid leases on it; while there are any it is not evicted.
        state_bytes, attention_bytes: of all parts so far.
        parent: the deepest visible checkpoint that this one was seen to extend. One that came later
            is noticed at the next use of this one.
        children: visible checkpoints whose parent this is, in the order in which that was noticed.
        user_turn: the U_end of a user's message.
    """

    domain: Domain
    boundary: int
    block_hash: bytes
    producer: str
    created_at: float
    used_at: float
    serial: int
    visible: bool = False
    kinds: list[CheckpointKind] = field(default_factory=list)
    parts: dict[int, tuple[Entry, ...]] = field(default_factory=dict)
    publications: set[PublicationId] = field(default_factory=set)
    hits: int = 0
    leases: int = 0
    state_bytes: int = 0
    attention_bytes: int = 0
    parent: Checkpoint | None = None
    children: dict[Checkpoint, None] = field(default_factory=dict)
    user_turn: bool = False

    @property
    def pinned(self) -> bool:
        """Whether it may not be evicted now."""
        return self.leases > 0 or not self.visible

    def entries(self) -> list[Entry]:
        """The objects of all parts."""
        return [entry for part in self.parts.values() for entry in part]


@dataclass(slots=True, eq=False)
class Announcement:
    """A checkpoint that somebody is about to publish."""

    domain: Domain
    block_hash: bytes
    boundary: int
    expires_at: float
    ended: bool = False


@dataclass(slots=True, eq=False)
class Domain:
    """One cache domain and everything that lies in it.

    Attributes:
        object_bytes: sum over ``objects``, reserved ones included.
        clients: name -> when it opened the domain last, the latest at the end.
        work: prefill work of its model, as the latest manifest that knew it said.
    """

    id: DomainId
    record: DomainRecord
    used_at: float
    boundary_tokens: int
    group_kinds: dict[int, GroupKind]
    objects: dict[ObjectKey, Entry] = field(default_factory=dict)
    checkpoints: dict[bytes, Checkpoint] = field(default_factory=dict)
    announcements: dict[bytes, Announcement] = field(default_factory=dict)
    publications: int = 0
    object_bytes: int = 0
    clients: dict[str, float] = field(default_factory=dict)
    work: PrefillWork = UNKNOWN_WORK

    @property
    def empty(self) -> bool:
        """Whether forgetting it loses nothing but its name."""
        return not (self.objects or self.checkpoints or self.announcements or self.publications)


@dataclass(slots=True, eq=False)
class Publication:
    """One request's way into the store, of all ranks together.

    Attributes:
        reserved: its objects that are not committed yet.
        held: committed objects that it keeps from eviction; each counts it in ``Entry.holds``.
        pending: checkpoints that became neither visible nor void yet.
        admitted: it was given new bytes once, and may finish.
    """

    id: PublicationId
    domain: Domain
    expires_at: float
    ended: bool = False
    reserved: dict[ObjectKey, Entry] = field(default_factory=dict)
    held: dict[ObjectKey, Entry] = field(default_factory=dict)
    pending: dict[bytes, Checkpoint] = field(default_factory=dict)
    admitted: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """A reader's claim on checkpoints of one prefix. ``readable``: rank -> objects under the
    lease, filled at the rank's first ``locate``."""

    id: LeaseId
    domain: Domain
    expires_at: float
    checkpoints: tuple[Checkpoint, ...]
    ended: bool = False
    readable: dict[int, set[Entry]] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Tombstone:
    """What is remembered of an evicted checkpoint."""

    boundary: int
    kinds: tuple[CheckpointKind, ...]
    producer: str
    evicted_at: float
    serial: int = 0
    hits: int = 0
