"""Leases: readers' claims on visible checkpoints, and what they may read under them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backhaul.protocols.checkpoint import LeaseId, ObjectKey
from backhaul.protocols.errors import StoreFull, StoreRejected
from backhaul.transfer.entries import LEASES_MAX, Checkpoint, Domain, Entry, Lease, NotKnown
from backhaul.transfer.index_input import check_name, key_name


class Location(NamedTuple):
    """Where one object's bytes lie in the pool."""

    offset: int
    nbytes: int
    checksum: int


class LeaseTable:
    """Not thread-safe."""

    def __init__(self, instance_id: str) -> None:
        self.valid: dict[LeaseId, Lease] = {}
        self._instance_id = instance_id
        self._granted = 0

    def check_room(self, name: str = "") -> None:
        """Raise where no other lease can be granted, or none of that name."""
        if len(self.valid) >= LEASES_MAX:
            raise StoreFull(f"{LEASES_MAX} leases are valid at once: release some")
        if name:
            check_name("lease name", name)
            if self._id(name) in self.valid:
                raise StoreRejected(f"a lease named {name[:80]!r} is valid: choose unique names")

    def grant(
        self,
        domain: Domain,
        checkpoints: tuple[Checkpoint, ...],
        expires_at: float,
        name: str = "",
    ) -> Lease:
        """A new lease on visible checkpoints of one domain; without a ``name`` it is numbered."""
        self.check_room(name)
        lease_id = self._id(name) if name else self._numbered()
        lease = self.valid[lease_id] = Lease(lease_id, domain, expires_at, checkpoints)
        for checkpoint in checkpoints:
            checkpoint.leases += 1
        return lease

    def get(self, lease_id: LeaseId) -> Lease:
        """The valid lease of that name. Raises ``NotKnown``."""
        lease = self.valid.get(lease_id)
        if lease is None:
            raise NotKnown(f"lease {lease_id[:80]!r} is unknown: it ran out or was released")
        return lease

    def end(self, lease: Lease) -> None:
        """The checkpoints may be evicted as far as this lease is concerned."""
        lease.ended = True
        del self.valid[lease.id]
        for checkpoint in lease.checkpoints:
            checkpoint.leases -= 1

    def _id(self, name: str) -> LeaseId:
        return LeaseId(f"{self._instance_id}.{name}")

    def _numbered(self) -> LeaseId:
        while True:
            self._granted += 1
            lease_id = self._id(str(self._granted))
            if lease_id not in self.valid:  # somebody may have named one so
                return lease_id


def locate(lease: Lease, keys: Sequence[ObjectKey]) -> list[Location]:
    """Where objects under the lease lie, in the order of the keys. Raises ``NotKnown``."""
    locations = []
    for key in keys:
        readable = lease.readable.get(key.rank)
        if readable is None:
            readable = lease.readable[key.rank] = _readable(lease, key.rank)
        entry = lease.domain.objects.get(key)
        if entry is None or entry not in readable:
            raise NotKnown(f"{key_name(key)} is in no checkpoint under lease {lease.id}")
        locations.append(Location(entry.offset, entry.nbytes, entry.checksum))
    return locations


def _readable(lease: Lease, rank: int) -> set[Entry]:
    return {entry for checkpoint in lease.checkpoints for entry in checkpoint.parts.get(rank, ())}
