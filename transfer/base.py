"""The Store interface: what every backend does, and what callers may rely on.

A store keeps *objects* (one block of one group of one rank, keyed inside a cache domain) and makes
*checkpoints* of them. The life of a publication, the same on each rank::

    reserve  ->  write  ->  commit            attention blocks, streamed ahead, as often as needed
    reserve  ->  write  ->  commit(manifest)  the rest and the state; visible once all ranks did

and of a load::

    lookup (scheduler side)  ->  read (each rank)  ->  release (scheduler side)

Guarantees every backend gives, checked by tests/contract:

- A checkpoint is visible to ``lookup`` only when every rank has committed it and each of its
  objects is there; eviction removes a checkpoint whole and never an object that another visible
  checkpoint needs.
- While a lease is valid nothing under it is evicted. A lease that ran out makes ``read`` fail.
- ``read`` either leaves exactly the committed bytes in the caller's memory or reports a failure.
- Objects already present are not written again.

Threads and blocking: every method may be called from any thread and may block up to its
``timeout_s`` (seconds), so never call one from vLLM's scheduler or model thread. Failures raise
``StoreError``; nothing else escapes for operational faults.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointManifest,
    CheckpointMatch,
    DomainId,
    LeaseId,
    ObjectKey,
    PublicationId,
    Reason,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreRejected

Segments = npt.NDArray[np.uint64]
"""Memory of one object on a worker: shape [n, 2], columns (address, bytes), in object order."""


class MemoryKind(enum.StrEnum):
    """Where memory lies, in NIXL's terms."""

    DRAM = "DRAM"
    VRAM = "VRAM"


class MemoryRegion(NamedTuple):
    """Memory that objects are read into and written from; registered once, before any transfer."""

    address: int
    nbytes: int
    kind: MemoryKind = MemoryKind.DRAM
    device: int = 0


class GrantStatus(enum.Enum):
    """Answer to one wanted object."""

    GRANTED = "granted"
    """Write it, then commit it."""
    PRESENT = "present"
    """Already there, and held for this publication until it ends."""
    BUSY = "busy"
    """Another publication is writing it: ask again later."""
    FULL = "full"
    """No space could be freed."""
    OVER_BUDGET = "over_budget"
    """The admission budget is used up for now."""


class Grant(NamedTuple):
    """Space for one object. ``offset`` and ``token`` are the backend's own."""

    key: ObjectKey
    status: GrantStatus
    nbytes: int
    offset: int = 0
    token: int = 0


class Written(NamedTuple):
    """One object whose bytes have arrived, with the checksum of what was sent."""

    key: ObjectKey
    token: int
    checksum: int


class CommitResult(NamedTuple):
    """``visible``: lookups find the checkpoint. ``missing``: this rank's objects still lacking;
    while there are any, the rank's part is not registered and may be committed again."""

    visible: bool
    missing: tuple[ObjectKey, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LookupResult:
    """Candidates deepest first, and the lease (None: nothing consumable) that keeps them.

    ``attention_tokens``, ``recurrent_tokens``: how far the prefix's attention objects reach without
    a gap, and the deepest boundary with every recurrent state, whether or not both are there; 0
    where a backend does not know.
    """

    matches: tuple[CheckpointMatch, ...] = ()
    lease: LeaseId | None = None
    waited_s: float = 0.0
    attention_tokens: int = 0
    recurrent_tokens: int = 0


class Unsettled(Protocol):
    """A transfer that was given up but may still touch the caller's memory."""

    def settled(self) -> bool:
        """True once it can no longer touch memory. Non-blocking; call it again until it is."""
        ...


@dataclass(frozen=True, kw_only=True)
class TransferResult:
    """Outcome of ``read`` or ``write``.

    Attributes:
        ok: every object arrived whole (and matched its checksum, if that was asked for).
        reason: set exactly when not ok.
        nbytes: bytes that travelled.
        written: of ``write``: what may be committed. Empty when not ok.
        unsettled: memory must not be reused before this says so; None when it already may.
    """

    ok: bool
    reason: Reason | None = None
    nbytes: int = 0
    written: tuple[Written, ...] = ()
    unsettled: Unsettled | None = None


class LoadItem(NamedTuple):
    """One object to read and where its bytes go."""

    key: ObjectKey
    segments: Segments


class WriteItem(NamedTuple):
    """One granted object and where its bytes are."""

    grant: Grant
    segments: Segments


class Visibility(enum.StrEnum):
    """Where a checkpoint is in its life, as listings answer it."""

    VISIBLE = "visible"
    """Lookups find it."""
    PENDING = "pending"
    """Some rank has not committed yet."""
    EVICTED = "evicted"
    """Gone; its boundary's hash is remembered for a while. Its age counts from the eviction."""


class CheckpointInfo(NamedTuple):
    """One checkpoint, for people. Times in seconds, sizes in bytes.

    ``common_tokens``: of a listing along a prompt, the tokens that both share, in whole blocks."""

    domain: DomainId
    boundary: int
    block_hash: bytes
    kinds: tuple[CheckpointKind, ...]
    state_bytes: int
    attention_bytes: int
    age_s: float
    idle_s: float
    leases: int
    producer: str
    visibility: Visibility = Visibility.VISIBLE
    hits: int = 0
    common_tokens: int = 0


class DomainClient(NamedTuple):
    """Who opened a domain, and how many seconds ago the last time was."""

    name: str
    opened_s: float


class DomainInfo(NamedTuple):
    """One cache domain of a store, for people.

    ``kinds``: end -> visible checkpoints that stand for it; one can stand for several."""

    id: DomainId
    record: DomainRecord
    clients: tuple[DomainClient, ...]
    idle_s: float
    checkpoints: int
    kinds: dict[CheckpointKind, int]
    objects: int
    object_bytes: int


class Member(NamedTuple):
    """An engine that uses a domain. ``name`` is unique; without any role it leaves.
    ``decodes_only``: prompts reach it computed, so what it could load brings no conversation on.
    ``converts``: it can load what engines of a convertible domain published."""

    name: str
    loads: bool
    publishes: bool
    decodes_only: bool = False
    converts: bool = False


class Elsewhere(NamedTuple):
    """Engines of another domain, and the first field in which it differs, with both values; the
    field is "" where bytes of either can be converted. ``loaders`` as in ``Peers``, ``converters``
    those of them that convert."""

    domain: DomainId
    field: str
    ours: str
    theirs: str
    loaders: int
    publishers: int
    converters: int = 0


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The other engines of a store, as it saw them lately.

    Attributes:
        known: False where the backend keeps no such table; the rest means nothing then.
        loaders: engines of the same domain that load and may prefill, without the one that asks.
        decode_loaders: those that load and only decode.
        publishers: those that publish.
        elsewhere: other domains that somebody uses.
    """

    known: bool = True
    loaders: int = 0
    decode_loaders: int = 0
    publishers: int = 0
    elsewhere: tuple[Elsewhere, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Occupancy now, and monotone counters since the store started. ``gauges`` are further
    numbers of now, ``name|label value``; see ``backhaul.protocols.metrics``."""

    instance_id: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    objects: int = 0
    checkpoints: int = 0
    leases: int = 0
    publications: int = 0
    domains: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    gauges: dict[str, int] = field(default_factory=dict)


class Store(abc.ABC):
    """See the module's docstring for the guarantees; implementations add how they keep them."""

    # -- bytes: worker side -------------------------------------------------------------------

    @abc.abstractmethod
    def attach(self, regions: Sequence[MemoryRegion]) -> None:
        """Register memory for transfers. Called once, before ``read`` and ``write``; a process
        that only uses the catalog never calls it. Must not need the store to be up."""

    @abc.abstractmethod
    def read(
        self, lease: LeaseId, items: Sequence[LoadItem], *, verify: bool, timeout_s: float
    ) -> TransferResult:
        """Fill memory with objects under ``lease``. Never raises for an operational fault."""

    @abc.abstractmethod
    def write(self, items: Sequence[WriteItem], *, timeout_s: float) -> TransferResult:
        """Send granted objects. All or nothing. Never raises for an operational fault."""

    def transports(self) -> tuple[str, ...]:
        """What ``read`` and ``write`` may travel over, by the transport layer's own names; returns
        at once. Empty before the first of them, and where the backend cannot tell."""
        return ()

    # -- catalog: publications ----------------------------------------------------------------

    @abc.abstractmethod
    def open_domain(self, record: DomainRecord, *, timeout_s: float) -> DomainId:
        """Make the domain known. Other methods do this by themselves after a restart."""

    def join(self, record: DomainRecord, member: Member, *, timeout_s: float) -> Peers:
        """Make the domain known, say that ``member`` uses it, and learn who else does. To be
        repeated every few seconds: whoever is silent for a minute is forgotten.

        A backend that keeps no table of its clients says so."""
        self.open_domain(record, timeout_s=timeout_s)
        return Peers(known=False)

    def domain_record(self, domain: DomainId, *, timeout_s: float) -> DomainRecord:
        """The record of a domain that a lookup named. Raises ``StoreRejected`` where it is not
        known; a backend that keeps no records knows none."""
        raise StoreRejected(f"the record of domain {domain} is not known here")

    @abc.abstractmethod
    def announce(
        self, domain: DomainId, boundary: int, block_hash: bytes, *, ttl_s: float, timeout_s: float
    ) -> None:
        """Say that a checkpoint is about to be published, so that a lookup may wait for it."""

    @abc.abstractmethod
    def reserve(
        self,
        domain: DomainId,
        publication: PublicationId,
        wants: Sequence[tuple[ObjectKey, int]],
        *,
        timeout_s: float,
    ) -> list[Grant]:
        """Ask for space for (key, bytes) pairs; answers in their order."""

    @abc.abstractmethod
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
        """Complete written objects and, with a manifest, this rank's part of the checkpoint."""

    @abc.abstractmethod
    def abandon(
        self, publication: PublicationId, *, still_written: bool = False, timeout_s: float
    ) -> None:
        """End a publication. Its uncommitted space is freed; what no checkpoint uses may be
        evicted. Also called after a successful commit, and harmless when repeated.

        ``still_written``: a rank may be at it. Whatever it sends from now on is refused, so that
        nothing more becomes visible, and its space is given away only when that is safe."""

    @abc.abstractmethod
    def keep_alive(self, publications: Sequence[PublicationId], *, timeout_s: float) -> None:
        """Keep publications of long decodes from running out."""

    # -- catalog: loads -----------------------------------------------------------------------

    @abc.abstractmethod
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
        """Checkpoints of the prefix. Entry i of ``boundary_hashes`` ends at boundary (i + 1) * B.

        ``wait_s`` bounds how long the store may hold the answer back for an announced checkpoint
        deeper than what is visible. ``follow_up``: the same was asked of one's own domain, which
        counted the lookup and had nothing consumable above ``above_tokens``. ``repeat``: the same
        request asked before and was counted as traffic. Raises ``LookupUnanswered``, with the lease
        to release, where the store may have granted one without the caller hearing of it."""

    @abc.abstractmethod
    def renew(self, lease: LeaseId, lease_s: float, *, timeout_s: float) -> None:
        """Make a lease last ``lease_s`` from now. Raises ``StoreRejected`` if it ran out."""

    @abc.abstractmethod
    def release(self, leases: Sequence[LeaseId], *, timeout_s: float) -> None:
        """Give leases back; unknown ones are ignored."""

    # -- people -------------------------------------------------------------------------------

    @abc.abstractmethod
    def stats(self, *, timeout_s: float) -> StoreStats:
        """Occupancy and counters."""

    @abc.abstractmethod
    def list_checkpoints(
        self, domain: DomainId | None = None, *, limit: int = 0, timeout_s: float
    ) -> list[CheckpointInfo]:
        """Visible checkpoints, newest first; ``limit`` 0 means all."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free connections and registered memory. Safe to call twice."""
