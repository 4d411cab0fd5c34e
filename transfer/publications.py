"""Open publications: what each has reserved, holds and works on."""

from __future__ import annotations

from collections import Counter

from backhaul.protocols.checkpoint import ObjectKey, PublicationId
from backhaul.protocols.errors import StoreFull, StoreRejected
from backhaul.transfer.admission import AdmissionStrategy
from backhaul.transfer.base import Grant, GrantStatus, Written
from backhaul.transfer.checkpoints import CheckpointTable
from backhaul.transfer.entries import (
    PUBLICATIONS_MAX,
    REFUSED_MAX,
    Checkpoint,
    Domain,
    Entry,
    Publication,
)
from backhaul.transfer.index_input import check_name
from backhaul.transfer.objects import ObjectTable


class PublicationTable:
    """Not thread-safe."""

    def __init__(
        self,
        objects: ObjectTable,
        checkpoints: CheckpointTable,
        counters: Counter[str],
        admission: AdmissionStrategy,
    ) -> None:
        self.open: dict[PublicationId, Publication] = {}
        self._refused: dict[PublicationId, None] = {}
        self._objects = objects
        self._checkpoints = checkpoints
        self._counters = counters
        self._admission = admission

    def check(self, name: PublicationId, domain: Domain) -> None:
        """Raise unless ``join`` would succeed."""
        check_name("publication id", name)
        if name in self._refused:
            raise StoreRejected(f"publication {name} was ended for good by its engine")
        known = self.open.get(name)
        if known is None:
            if len(self.open) >= PUBLICATIONS_MAX:
                raise StoreFull(f"{PUBLICATIONS_MAX} publications are open at once: end some")
        elif known.domain is not domain:
            raise StoreRejected(
                f"publication {name} belongs to domain {known.domain.id}, not {domain.id}"
            )

    def refuse(self, name: PublicationId) -> None:
        """From now on nothing more is taken under that name."""
        check_name("publication id", name)
        self._refused[name] = None
        if len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def join(
        self, name: PublicationId, domain: Domain, expires_at: float
    ) -> tuple[Publication, bool]:
        """The publication of that name, created on first use (True), living until then."""
        self.check(name, domain)
        publication = self.open.get(name)
        if publication is not None:
            publication.expires_at = expires_at
            return publication, False
        publication = self.open[name] = Publication(name, domain, expires_at)
        domain.publications += 1
        return publication, True

    def grant_known(self, publication: Publication, entry: Entry) -> Grant:
        """Answer for an object that is reserved or committed."""
        key, nbytes = entry.key, entry.nbytes
        if entry.committed:
            self._hold(publication, entry)
            self._counters["present_objects"] += 1
            return Grant(key, GrantStatus.PRESENT, nbytes)
        if entry.writer == publication.id:
            return Grant(key, GrantStatus.GRANTED, nbytes, entry.offset, entry.token)
        self._counters["busy_objects"] += 1
        return Grant(key, GrantStatus.BUSY, nbytes)

    def admits(self, publication: Publication, nbytes: int) -> bool:
        """Whether the budget lets the publication have so many new bytes."""
        if not publication.admitted:
            publication.admitted = self._admission.admits(nbytes)
        return publication.admitted

    def grant_over_budget(self, key: ObjectKey, nbytes: int) -> Grant:
        """Answer for an absent object that is not admitted."""
        self._counters["over_budget_objects"] += 1
        return Grant(key, GrantStatus.OVER_BUDGET, nbytes)

    def grant_new(self, publication: Publication, key: ObjectKey, nbytes: int) -> Grant:
        """Reserve space for an absent object, if there is any."""
        entry = self._objects.place(publication.domain, key, nbytes, publication.id)
        if entry is None:
            self._counters["full_objects"] += 1
            return Grant(key, GrantStatus.FULL, nbytes)
        publication.reserved[key] = entry
        self._admission.charge(nbytes)
        self._counters["granted_objects"] += 1
        self._counters["granted_bytes"] += nbytes
        return Grant(key, GrantStatus.GRANTED, nbytes, entry.offset, entry.token)

    def complete(self, publication: Publication, item: Written) -> None:
        """Commit one object if its token is that of the publication's reservation; repeating it
        is harmless, and any other token changes nothing."""
        entry = publication.domain.objects.get(item.key)
        if entry is None or entry.token != item.token:
            self._counters["stale_commits"] += 1
        elif entry.writer == publication.id:
            del publication.reserved[item.key]
            entry.writer = None
            entry.checksum = item.checksum
            self._hold(publication, entry)
            self._counters["committed_objects"] += 1
        elif not entry.committed:
            self._counters["stale_commits"] += 1

    def work_on(self, publication: Publication, checkpoint: Checkpoint) -> None:
        """A pending checkpoint lives as long as any publication that works on it."""
        checkpoint.publications.add(publication.id)
        publication.pending[checkpoint.block_hash] = checkpoint

    def finish(self, checkpoint: Checkpoint) -> None:
        """A pending checkpoint became visible: nobody works on it any more."""
        for name in checkpoint.publications:
            del self.open[name].pending[checkpoint.block_hash]
        checkpoint.publications.clear()

    def end(self, publication: Publication, reuse_at: float | None = None) -> None:
        """Close a publication. Its reserved space is free at once, or from ``reuse_at`` on."""
        publication.ended = True
        del self.open[publication.id]
        publication.domain.publications -= 1
        for entry in publication.reserved.values():
            self._admission.refund(entry.nbytes)
            if reuse_at is None:
                self._objects.drop(entry)
            else:
                self._objects.drop_later(entry, reuse_at)
        for checkpoint in publication.pending.values():
            checkpoint.publications.remove(publication.id)
            if not checkpoint.publications:
                self._checkpoints.discard(checkpoint)
        for entry in publication.held.values():
            self._objects.unhold(entry)

    def _hold(self, publication: Publication, entry: Entry) -> None:
        if entry.key not in publication.held:
            publication.held[entry.key] = entry
            self._objects.hold(entry)
