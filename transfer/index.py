"""The block index of the embedded store: names, places, leases. Sans-I/O.

No clock (methods take ``now``, seconds on any monotone clock; an earlier ``now`` counts as the
latest one seen), no bytes, no network, no threads. The daemon runs it, and so may a simulator.

An object's life::

    absent -> reserved -> committed -> (loose) -> absent
              one publication writes it          evicted, or never committed

A checkpoint's life::

    first rank commits -> pending -> all ranks committed -> visible -> evicted (tombstone)

Rules, recomputed by ``check``: what an open publication, a lease or a checkpoint uses is never
freed; a visible checkpoint has every object of every rank; allocated space is the sum of objects.
Refusals raise ``StoreRejected`` (``NotKnown`` for names), limits ``StoreFull``, and change nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from backhaul.protocols.checkpoint import (
    CheckpointManifest,
    CheckpointMatch,
    DomainId,
    LeaseId,
    ObjectKey,
    PublicationId,
    Reason,
    Tag,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreFull, StoreRejected
from backhaul.protocols.metrics import store_counters
from backhaul.transfer.admission import AdmissionStrategy, AdmitAll
from backhaul.transfer.base import (
    CheckpointInfo,
    CommitResult,
    DomainInfo,
    Grant,
    GrantStatus,
    Member,
    Peers,
    StoreStats,
    Written,
)
from backhaul.transfer.checkpoints import (
    CheckpointTable,
    consumable,
    deepest_first,
    with_diverged,
    with_incomplete,
)
from backhaul.transfer.deadlines import Deadlines
from backhaul.transfer.differences import DomainDifferences
from backhaul.transfer.entries import (
    ANNOUNCEMENTS_MAX,
    DOMAINS_MAX,
    MATCHES_MAX,
    Announcement,
    Checkpoint,
    Domain,
    Entry,
    Lease,
    NotKnown,
    Publication,
)
from backhaul.transfer.eviction import (
    EvictionStrategy,
    LeastRecentlyUsed,
    Reclaimer,
    pinned_entries,
)
from backhaul.transfer.extent import Extent, incomplete_ends, matched_extent
from backhaul.transfer.index_check import Books, check_books
from backhaul.transfer.index_input import (
    check_boundary,
    check_commit,
    check_hash,
    check_hashes,
    check_name,
    check_wants,
    required_keys,
    seconds,
)
from backhaul.transfer.leases import LeaseTable, Location, locate
from backhaul.transfer.listing import (
    ListPage,
    ListQuery,
    describe_domains,
    remember_client,
    select,
)
from backhaul.transfer.members import MemberTable
from backhaul.transfer.objects import ObjectTable
from backhaul.transfer.publications import PublicationTable

COUNTERS = (*store_counters(), "evicted_lifetime_ms")
"""Every counter there is; all start at 0. The lifetimes' sum is for the simulator: the daemon
exposes a histogram."""


class Awaited(NamedTuple):
    """A checkpoint worth waiting for: its boundary, and until when (seconds, ``inf`` if open)."""

    boundary: int
    until: float


class LookupAnswer(NamedTuple):
    """Candidates deepest first; the lease on all consumable ones; what is about to come; how far
    objects of either kind reach."""

    matches: tuple[CheckpointMatch, ...]
    lease: LeaseId | None
    awaited: Awaited | None
    extent: Extent = Extent()


class _Found(NamedTuple):
    """What a prefix meets: ``usable`` may be leased, ``used`` are those and what they extend."""

    matches: tuple[CheckpointMatch, ...]
    usable: list[Checkpoint]
    used: list[Checkpoint]
    extent: Extent


class BlockIndex:
    """See the module's docstring. Not thread-safe; every call returns at once."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        publication_ttl_s: float,
        lease_max_s: float,
        instance_id: str = "index",
        first_token: int = 1,
        quarantine_s: float = 0.0,
        strategy: EvictionStrategy | None = None,
        admission: AdmissionStrategy | None = None,
    ) -> None:
        """
        Args:
            publication_ttl_s: life of a publication without reserve, commit or keep_alive.
            lease_max_s: longer leases are cut to this.
            instance_id: prefix of lease ids; unique per start, so that a lease of an earlier one
                is not mistaken for one of this.
            first_token: where reservation tokens start; for the same reason.
            quarantine_s: how long the uncommitted space of an expired publication stays unused.
            strategy: order of eviction; least recently used first by default.
            admission: which publications are let in; all by default.
        """
        self.instance_id = instance_id
        self.publication_ttl_s = publication_ttl_s
        self.lease_max_s = lease_max_s
        self.quarantine_s = quarantine_s
        self.strategy: EvictionStrategy = strategy or LeastRecentlyUsed()
        self.admission: AdmissionStrategy = admission or AdmitAll()
        self.objects = ObjectTable(capacity_bytes, first_token)
        self.domains: dict[DomainId, Domain] = {}
        self.leases = LeaseTable(instance_id)
        self.announcements: dict[Announcement, None] = {}  # oldest first
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        differences = DomainDifferences()
        self.members = MemberTable(differences)
        self.checkpoints = CheckpointTable(
            self.objects, self.counters, self.strategy.queue(), differences
        )
        self.publications = PublicationTable(
            self.objects, self.checkpoints, self.counters, self.admission
        )
        self._deadlines: Deadlines[Publication | Lease | Announcement] = Deadlines()
        self._now = -math.inf

    # -- domains ------------------------------------------------------------------------------

    def open_domain(self, record: DomainRecord, now: float, client: str = "") -> DomainId:
        """Make a domain known. Repeating it is harmless. ``client``: who asks, for people."""
        now = self.expire(now)
        domain_id = record.domain_id
        if domain_id not in self.domains:
            if len(self.domains) >= DOMAINS_MAX:
                self._forget_a_domain()
            self.domains[domain_id] = Domain(
                domain_id,
                record,
                now,
                record.layout.boundary_tokens,
                {group.index: group.kind for group in record.layout.groups},
            )
        self.domains[domain_id].used_at = now
        if client:
            remember_client(self.domains[domain_id], client, now)
        return domain_id

    def domain_record(self, domain_id: DomainId) -> DomainRecord:
        """The record of a known domain."""
        return self._domain(domain_id, self._now).record

    def join(self, record: DomainRecord, member: Member, now: float, client: str = "") -> Peers:
        """Make a domain known, note who uses it, and answer who else does."""
        domain_id = self.open_domain(record, now, client)
        check_name("member", member.name)
        now = self._now
        self.members.join(domain_id, member, now)
        return self.members.peers(domain_id, member.name, self.domains, now)

    # -- publications -------------------------------------------------------------------------

    def reserve(
        self,
        domain_id: DomainId,
        publication_id: PublicationId,
        wants: Sequence[tuple[ObjectKey, int]],
        now: float,
    ) -> list[Grant]:
        """Answer (key, bytes) pairs in their order; see ``GrantStatus``. What is granted or
        present stays until the publication ends."""
        now = self.expire(now)
        domain = self._domain(domain_id, now)
        check_wants(domain, wants)
        publication = self._join(publication_id, domain, now)
        self.counters["reservations"] += 1
        grants: list[Grant | None] = []
        for key, _ in wants:
            # What is there is held before anything is evicted for what is not.
            entry = domain.objects.get(key)
            grants.append(self.publications.grant_known(publication, entry) if entry else None)
        absent = [index for index, grant in enumerate(grants) if grant is None]
        new_bytes = sum(dict(wants[index] for index in absent).values())
        if absent and not self.publications.admits(publication, new_bytes):
            for index in absent:
                grants[index] = self.publications.grant_over_budget(*wants[index])
            absent = []
        reclaimer: Reclaimer | None = None
        for position, index in enumerate(absent):
            key, nbytes = wants[index]
            if (entry := domain.objects.get(key)) is not None:  # wanted twice in this call
                grants[index] = self.publications.grant_known(publication, entry)
                continue
            if not self.objects.arena.fits(nbytes):
                if reclaimer is None:
                    sizes = dict(wants[i] for i in absent[position:])
                    reclaimer = self._reclaimer(list(sizes.values()), now)
                reclaimer.make_room(nbytes)
            grants[index] = self.publications.grant_new(publication, key, nbytes)
        if reclaimer is not None:
            reclaimer.close()
        answered = [grant for grant in grants if grant is not None]
        if any(grant.status is GrantStatus.FULL for grant in answered):
            self.checkpoints.recent.note(now, "refused", Reason.STORE_FULL, domain_id)
        if any(grant.status is GrantStatus.OVER_BUDGET for grant in answered):
            self.checkpoints.recent.note(now, "refused", Reason.OVER_BUDGET, domain_id)
        return answered

    def commit(
        self,
        domain_id: DomainId,
        publication_id: PublicationId,
        rank: int,
        written: Sequence[Written],
        manifest: CheckpointManifest | None,
        now: float,
    ) -> CommitResult:
        """Complete written objects and, with a manifest, this rank's part of the checkpoint.

        An object whose token is stale is not accepted, and missing unless somebody else committed
        it. The rank's part is registered only when nothing is missing."""
        now = self.expire(now)
        domain = self._domain(domain_id, now)
        check_commit(domain, rank, written)
        required = required_keys(domain, rank, manifest) if manifest else []
        publication = self._join(publication_id, domain, now)
        if manifest is not None and any(manifest.work) and manifest.work != domain.work:
            domain.work = manifest.work
            self.checkpoints.works_anew(domain)
        self.counters["commits"] += 1
        for item in written:
            self.publications.complete(publication, item)
        wanted = dict.fromkeys([item.key for item in written] + required)
        entries = {key: domain.objects.get(key) for key in wanted}
        missing = tuple(key for key, entry in entries.items() if not (entry and entry.committed))
        if manifest is None:
            return CommitResult(False, missing)
        known = domain.checkpoints.get(manifest.hashes[-1])
        if known is not None and known.visible:
            self.checkpoints.merge(known, manifest, now)
            return CommitResult(True)
        if missing:
            return CommitResult(False, missing)
        part = tuple(domain.objects[key] for key in required)
        checkpoint = known or self.checkpoints.begin(domain, manifest, now)
        self.checkpoints.add_part(checkpoint, rank, part, manifest)
        self.publications.work_on(publication, checkpoint)
        if len(checkpoint.parts) < domain.record.layout.ranks:
            return CommitResult(False)
        self.checkpoints.publish(checkpoint, manifest, now)
        self.publications.finish(checkpoint)
        if (announcement := domain.announcements.get(checkpoint.block_hash)) is not None:
            self._drop_announcement(announcement)
        return CommitResult(True)

    def is_open(self, publication_id: PublicationId) -> bool:
        """Whether a publication of that name was opened and has not ended."""
        return publication_id in self.publications.open

    def disown(self, publication_id: PublicationId, now: float) -> None:
        """End a publication whose writer is gone as if it had run out; unknown ones are ignored."""
        now = self.expire(now)
        publication = self.publications.open.get(publication_id)
        if publication is not None:
            self._run_out(publication, now)

    def abandon(
        self, publication_id: PublicationId, now: float, *, still_written: bool = False
    ) -> None:
        """End a publication on every rank; unknown ones are ignored. Its reserved space may be
        given away at once, so no transfer into it may be in flight, unless it is ``still_written``:
        the space then rests for a while, and the name is refused from now on."""
        now = self.expire(now)
        if still_written:
            self.publications.refuse(publication_id)
        publication = self.publications.open.get(publication_id)
        if publication is not None:
            reuse_at = now + self.quarantine_s if still_written else None
            self.publications.end(publication, reuse_at=reuse_at)

    def keep_alive(
        self, publication_ids: Sequence[PublicationId], now: float
    ) -> list[PublicationId]:
        """Give publications their full life again. Answers those that are unknown by now."""
        now = self.expire(now)
        unknown = []
        for publication_id in publication_ids:
            publication = self.publications.open.get(publication_id)
            if publication is None:
                unknown.append(publication_id)
            else:
                publication.expires_at = now + self.publication_ttl_s
        return unknown

    def announce(
        self, domain_id: DomainId, boundary: int, block_hash: bytes, ttl_s: float, now: float
    ) -> None:
        """Say that a checkpoint is about to be published; pointless where it is visible."""
        now = self.expire(now)
        domain = self._domain(domain_id, now)
        check_hash(block_hash)
        check_boundary(domain, boundary)
        ttl_s = min(seconds("ttl_s", ttl_s), self.publication_ttl_s)
        known = domain.checkpoints.get(block_hash)
        if ttl_s == 0 or (known is not None and known.visible):
            return
        earlier = domain.announcements.get(block_hash)
        if earlier is not None and earlier.boundary == boundary:
            self._move_deadline(earlier, now + ttl_s)
            return
        if earlier is not None:
            self._drop_announcement(earlier)
        elif len(self.announcements) >= ANNOUNCEMENTS_MAX:
            self._drop_announcement(next(iter(self.announcements)))
        announcement = Announcement(domain, block_hash, boundary, now + ttl_s)
        self.announcements[announcement] = None
        domain.announcements[block_hash] = announcement
        self._deadlines.push(announcement)

    # -- loads --------------------------------------------------------------------------------

    def awaited(
        self,
        domain_id: DomainId,
        boundary_hashes: Sequence[bytes],
        above_tokens: int,
        now: float,
    ) -> Awaited | None:
        """The deepest checkpoint of the prefix that is announced or pending and deeper than any
        visible one; None where nothing is worth waiting for."""
        now = self.expire(now)
        check_hashes(boundary_hashes)
        return self._awaited(self._domain(domain_id, now), boundary_hashes, above_tokens)

    @staticmethod
    def _awaited(
        domain: Domain, boundary_hashes: Sequence[bytes], above_tokens: int
    ) -> Awaited | None:
        for boundary, block_hash in deepest_first(domain, boundary_hashes):
            if boundary <= above_tokens:
                break
            checkpoint = domain.checkpoints.get(block_hash)
            if checkpoint is not None and checkpoint.boundary == boundary:
                return None if checkpoint.visible else Awaited(boundary, math.inf)
            announcement = domain.announcements.get(block_hash)
            if announcement is not None and announcement.boundary == boundary:
                return Awaited(boundary, announcement.expires_at)
        return None

    def lookup(
        self,
        domain_id: DomainId,
        boundary_hashes: Sequence[bytes],
        above_tokens: int,
        lease_s: float,
        now: float,
        *,
        follow_up: bool = False,
        repeat: bool = False,
        lease_name: str = "",
    ) -> LookupAnswer:
        """Checkpoints of the prefix above ``above_tokens``: up to ``MATCHES_MAX`` consumable ones,
        under one lease, as many of which something is known that makes them unusable, a few that
        extend the deepest one by other tokens, and where objects of one class end. At most one per
        boundary.

        ``follow_up``: another domain was asked first and counted the lookup, of which only the hit
        counts here, where ``above_tokens`` 0 says that there was none. ``repeat``: the same request
        asked before, so that it is a lookup and no further traffic. ``lease_name``: what follows
        the instance id in the lease's id, unlike any other's; numbered where it is empty."""
        now = self.expire(now)
        check_hashes(boundary_hashes)
        lease_s = min(seconds("lease_s", lease_s), self.lease_max_s)
        if lease_s:
            self.leases.check_room(lease_name)
        domain = self._domain(domain_id, now)
        if not follow_up:
            self.counters["lookups"] += 1
            if not repeat:
                self.admission.credit(len(boundary_hashes) * domain.boundary_tokens)
        found = self._find(domain, boundary_hashes, above_tokens, now)
        usable = found.usable
        self.checkpoints.use(found.used, now)
        self._count_hit(usable, counted=follow_up and above_tokens > 0)
        if not follow_up:
            self._count_candidates(found.matches)
            self._note_unusable(found.matches, domain_id, now)
        awaited = self._awaited(domain, boundary_hashes, above_tokens)
        lease_id = None
        if usable and lease_s:  # at the very end: what raises leaves no lease
            lease = self.leases.grant(domain, tuple(usable), now + lease_s, lease_name)
            self._deadlines.push(lease)
            lease_id = lease.id
        return LookupAnswer(found.matches, lease_id, awaited, found.extent)

    def peek(
        self, domain_id: DomainId, boundary_hashes: Sequence[bytes], above_tokens: int, now: float
    ) -> LookupAnswer:
        """What ``lookup`` would answer, for people: nothing is leased, counted or touched."""
        now = self.expire(now)
        if (domain := self.domains.get(domain_id)) is None:
            raise _unknown(domain_id)
        check_hashes(boundary_hashes)
        found = self._find(domain, boundary_hashes, above_tokens, now)
        return LookupAnswer(found.matches, None, None, found.extent)

    def locate(self, lease_id: LeaseId, keys: Sequence[ObjectKey], now: float) -> list[Location]:
        """Where objects of the leased checkpoints lie, in the order of the keys."""
        now = self.expire(now)
        lease = self.leases.get(lease_id)
        self.counters["leases_read"] += not lease.readable
        locations = locate(lease, keys)
        for checkpoint in lease.checkpoints:
            self.checkpoints.touch(checkpoint, now)
        return locations

    def renew(self, lease_id: LeaseId, lease_s: float, now: float) -> None:
        """Make a lease last ``lease_s`` from now, whether that is longer or shorter."""
        now = self.expire(now)
        lease_s = min(seconds("lease_s", lease_s), self.lease_max_s)
        lease = self.leases.get(lease_id)
        if lease_s == 0:
            raise StoreRejected("lease_s is 0: to give a lease back, release it")
        self._move_deadline(lease, now + lease_s)

    def release(self, lease_ids: Sequence[LeaseId], now: float) -> None:
        """Give leases back; unknown ones are ignored."""
        self.expire(now)
        for lease_id in lease_ids:
            lease = self.leases.valid.get(lease_id)
            if lease is not None:
                self.leases.end(lease)

    # -- time and people ----------------------------------------------------------------------

    def expire(self, now: float) -> float:
        """End what ran out. Every other method does so first, so this is only needed to free
        space while nobody calls. Answers ``now``, or the latest time seen if that is later."""
        self._now = now = max(now, self._now)
        for owner in self._deadlines.due(now):
            if isinstance(owner, Lease):
                self.leases.end(owner)
                self.counters["expired_leases"] += 1
            elif isinstance(owner, Publication):
                self._run_out(owner, now)
            else:
                self._drop_announcement(owner)
                self.counters["expired_announcements"] += 1
        self.objects.release_quarantine(now)
        return now

    def stats(self) -> StoreStats:
        """Occupancy and counters. ``used_bytes`` includes rounding and quarantine."""
        return StoreStats(
            instance_id=self.instance_id,
            capacity_bytes=self.objects.arena.capacity_bytes,
            used_bytes=self.objects.arena.used_bytes,
            objects=self.objects.count,
            checkpoints=len(self.checkpoints.visible),
            leases=len(self.leases.valid),
            publications=len(self.publications.open),
            domains=len(self.domains),
            counters=dict(self.counters),
            gauges=self._gauges(),
        )

    def list_checkpoints(
        self, domain_id: DomainId | None, limit: int, now: float
    ) -> list[CheckpointInfo]:
        """Visible checkpoints, newest first; of one domain, or of all; ``limit`` 0 means all."""
        query = ListQuery(domain=domain_id, limit=limit)
        return list(self.query_checkpoints(query, now).checkpoints)

    def query_checkpoints(self, query: ListQuery, now: float) -> ListPage:
        """What ``query`` selects. Counts as no use: nothing is leased, counted or touched, but
        for a domain that is named in full."""
        now = self.expire(now)
        if query.domain is not None:
            self._domain(query.domain, now)
        return select(self.checkpoints, query, now, self.domains)

    def list_domains(self, now: float) -> list[DomainInfo]:
        """Every known domain, the one used last first. Walks over the visible checkpoints."""
        now = self.expire(now)
        return describe_domains(self.domains.values(), self.checkpoints, now)

    def check(self) -> None:
        """Recompute all books; ``AssertionError`` where two disagree. Walks over everything."""
        check_books(
            Books(
                self.domains,
                self.objects,
                self.checkpoints,
                self.publications,
                self.leases,
                self.announcements,
            )
        )

    # -- inside -------------------------------------------------------------------------------

    def _join(self, name: PublicationId, domain: Domain, now: float) -> Publication:
        expires_at = now + self.publication_ttl_s
        publication, is_new = self.publications.join(name, domain, expires_at)
        if is_new:
            self._deadlines.push(publication)
        return publication

    def _run_out(self, publication: Publication, now: float) -> None:
        self.publications.end(publication, reuse_at=now + self.quarantine_s)
        self.counters["expired_publications"] += 1

    def _reclaimer(self, sizes: Sequence[int], now: float) -> Reclaimer:
        def drop_loose(entry: Entry) -> None:
            self.objects.drop(entry)
            self.counters["evicted_loose_objects"] += 1

        held = [publication.held.values() for publication in self.publications.open.values()]
        held += [publication.reserved.values() for publication in self.publications.open.values()]
        leased = {
            checkpoint for lease in self.leases.valid.values() for checkpoint in lease.checkpoints
        }
        return Reclaimer(
            self.objects,
            pinned_entries(held, [*leased, *self.checkpoints.pending]),
            self.checkpoints.queue.candidates(now, leased),
            lambda checkpoint: self.checkpoints.evict(checkpoint, now),
            drop_loose,
            sizes,
        )

    def _move_deadline(self, owner: Lease | Announcement, expires_at: float) -> None:
        shortened = expires_at < owner.expires_at
        owner.expires_at = expires_at
        if shortened:  # otherwise the deadline that is queued already comes first
            self._deadlines.push(owner)

    def _find(
        self, domain: Domain, boundary_hashes: Sequence[bytes], above_tokens: int, now: float
    ) -> _Found:
        """What is known along a prefix. Changes nothing."""
        usable: list[Checkpoint] = []
        used: list[Checkpoint] = []
        matches: list[CheckpointMatch] = []
        unusable = 0
        for boundary, block_hash in self.checkpoints.known(domain, boundary_hashes):
            checkpoint = domain.checkpoints.get(block_hash)
            if checkpoint is not None and checkpoint.visible and checkpoint.boundary == boundary:
                if boundary > above_tokens and len(usable) < MATCHES_MAX:
                    usable.append(checkpoint)
                    matches.append(consumable(checkpoint, now))
                if usable:  # this one, or one that extends it, was hit
                    used.append(checkpoint)
            elif boundary > above_tokens and unusable < MATCHES_MAX:
                match = self.checkpoints.unusable(domain, boundary, block_hash, now)
                if match is not None:
                    unusable += 1
                    matches.append(match)
        if usable:
            reach = len(boundary_hashes) * domain.boundary_tokens
            matches = with_diverged(matches, usable[0], above_tokens, reach, now)
        deepest = usable[0].boundary if usable else 0
        extent = matched_extent(domain, boundary_hashes, deepest)
        incomplete = incomplete_ends(domain, boundary_hashes, extent, deepest)
        matches = with_incomplete(matches, incomplete, above_tokens)
        return _Found(tuple(matches), usable, used, extent)

    def _note_unusable(
        self, matches: Sequence[CheckpointMatch], domain_id: DomainId, now: float
    ) -> None:
        for match in matches:
            if match.reason is not None and not match.convertible:
                self.checkpoints.recent.note(
                    now, "not consumable", match.reason, domain_id, match.boundary, match.kinds
                )

    def _count_hit(self, usable: Sequence[Checkpoint], *, counted: bool) -> None:
        """``counted``: the lookup's hit, that is; a checkpoint's own hits always count."""
        if usable:
            self.counters["hits"] += not counted
            self.counters["checkpoints_hit"] += usable[0].hits == 0
            usable[0].hits += 1

    def _count_candidates(self, matches: Sequence[CheckpointMatch]) -> None:
        self.counters["lookups_matched"] += any(match.hash_matched for match in matches)
        self.counters["candidates_known"] += len(matches)
        for match in matches:
            self.counters[f"candidates_{Tag.RETAINED}"] += match.retained
            self.counters[f"candidates_{Tag.HASH_MATCHED}"] += match.hash_matched
            usable = match.consumable or match.convertible
            self.counters[f"candidates_{Tag.CONSUMABLE}"] += usable
            if match.reason is not None and not usable:
                self.counters[f"unconsumable_{match.reason}"] += 1

    def _gauges(self) -> dict[str, int]:
        table = self.checkpoints
        gauges = {f"retained_checkpoints|{kind}": n for kind, n in table.retained.items()}
        gauges |= {f"retained_state_bytes|{kind}": n for kind, n in table.state_bytes.items()}
        gauges |= {f"domain_checkpoints|{d.id}": len(d.checkpoints) for d in self.domains.values()}
        return gauges

    def _drop_announcement(self, announcement: Announcement) -> None:
        announcement.ended = True
        del self.announcements[announcement]
        del announcement.domain.announcements[announcement.block_hash]

    def _domain(self, domain_id: DomainId, now: float) -> Domain:
        domain = self.domains.get(domain_id)
        if domain is None:
            raise _unknown(domain_id)
        domain.used_at = now
        return domain

    def _forget_a_domain(self) -> None:
        empty = [domain for domain in self.domains.values() if domain.empty]
        if not empty:
            raise StoreFull(f"{DOMAINS_MAX} domains have content: no other can be opened")
        del self.domains[min(empty, key=lambda domain: domain.used_at).id]


def _unknown(domain_id: DomainId) -> NotKnown:
    return NotKnown(f"domain {domain_id[:80]!r} is unknown: open it first")
