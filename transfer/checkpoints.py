"""The checkpoints of all domains: pending, visible, and a memory of the evicted ones."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from backhaul.protocols.checkpoint import (
    NOT_RETAINED,
    CheckpointKind,
    CheckpointManifest,
    CheckpointMatch,
    DomainId,
    Reason,
    primary_kind,
)
from backhaul.protocols.layout import GroupKind
from backhaul.protocols.metrics import PRIMARY_KIND
from backhaul.transfer.base import CheckpointInfo, Visibility
from backhaul.transfer.differences import DomainDifferences
from backhaul.transfer.entries import (
    DIVERGED_MAX,
    TOMBSTONES_MAX,
    Checkpoint,
    Domain,
    Entry,
    Tombstone,
)
from backhaul.transfer.eviction_queue import EvictionQueue
from backhaul.transfer.objects import ObjectTable
from backhaul.transfer.recent import RecentEvents

_ALSO_IN_MAX = 7
"""Named beside a foreign checkpoint's first domain."""
_CHILDREN_MAX = 64
"""Looked at per lookup: a system prompt's checkpoint is extended by every conversation."""


class CheckpointTable:
    """Not thread-safe. Knows nothing of publications and leases; its caller counts those."""

    def __init__(
        self,
        objects: ObjectTable,
        counters: Counter[str],
        queue: EvictionQueue,
        differences: DomainDifferences,
    ) -> None:
        """``queue``: empty; it is told of every visible checkpoint."""
        self.visible: dict[Checkpoint, None] = {}  # in the order in which they became visible
        self.pending: dict[Checkpoint, None] = {}
        self.domains_of: dict[bytes, set[Domain]] = {}  # where a boundary's hash is visible
        self.tombstones: OrderedDict[tuple[DomainId, bytes], Tombstone] = OrderedDict()
        self.recent = RecentEvents()
        self.queue = queue
        self._objects = objects
        self._counters = counters
        self._differences = differences
        self._serial = 0
        self.retained: Counter[str] = Counter(dict.fromkeys(PRIMARY_KIND.values, 0))
        self.state_bytes: Counter[str] = Counter(dict.fromkeys(PRIMARY_KIND.values, 0))
        self.on_evicted: Callable[[str, float], None] | None = None
        """Told the primary kind and the age in seconds of every checkpoint that is evicted."""

    def begin(self, domain: Domain, manifest: CheckpointManifest, now: float) -> Checkpoint:
        """A pending checkpoint without parts."""
        block_hash = manifest.hashes[-1]
        self._serial += 1
        checkpoint = Checkpoint(
            domain, manifest.boundary, block_hash, manifest.producer, now, now, self._serial
        )
        domain.checkpoints[block_hash] = checkpoint
        self.pending[checkpoint] = None
        return checkpoint

    def add_part(
        self,
        checkpoint: Checkpoint,
        rank: int,
        part: tuple[Entry, ...],
        manifest: CheckpointManifest,
    ) -> None:
        """Register a rank's committed objects; nothing changes if that rank is in already."""
        _add_kinds(checkpoint, manifest)
        if rank in checkpoint.parts:
            return
        checkpoint.parts[rank] = part
        kinds = checkpoint.domain.group_kinds
        for entry in part:
            self._objects.ref(entry)
            if kinds[entry.key.group] is GroupKind.RECURRENT:
                checkpoint.state_bytes += entry.nbytes
            else:
                checkpoint.attention_bytes += entry.nbytes

    def publish(self, checkpoint: Checkpoint, manifest: CheckpointManifest, now: float) -> None:
        """Make a pending checkpoint visible: every rank's part is in."""
        del self.pending[checkpoint]
        checkpoint.visible = True
        checkpoint.created_at = now
        self.visible[checkpoint] = None
        domain, block_hash = checkpoint.domain, checkpoint.block_hash
        self.domains_of.setdefault(block_hash, set()).add(domain)
        self.tombstones.pop((domain.id, block_hash), None)
        self._counters["checkpoints_created"] += 1
        primary = primary_kind(checkpoint.kinds)
        for kind in checkpoint.kinds:
            self._count_end(kind, duplicate=kind != primary)
        self._file(checkpoint, 1)
        self.queue.add(checkpoint)
        self._touch_chain(checkpoint, manifest, now)

    def merge(self, checkpoint: Checkpoint, manifest: CheckpointManifest, now: float) -> None:
        """A visible checkpoint was published again, perhaps for another logical end."""
        before = len(checkpoint.kinds)
        self._file(checkpoint, -1)
        _add_kinds(checkpoint, manifest)
        self._file(checkpoint, 1)
        for kind in checkpoint.kinds[before:]:
            self._count_end(kind, duplicate=True)
        self._counters["checkpoints_merged"] += 1
        self._touch_chain(checkpoint, manifest, now)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Forget a pending checkpoint that nobody works on any more."""
        del self.pending[checkpoint]
        del checkpoint.domain.checkpoints[checkpoint.block_hash]
        for entry in checkpoint.entries():
            self._objects.unref(entry)

    def evict(self, checkpoint: Checkpoint, now: float) -> None:
        """Remove a visible, unleased checkpoint and free what nothing else uses."""
        assert not checkpoint.pinned, f"evicting a pinned checkpoint at {checkpoint.boundary}"
        domain, block_hash = checkpoint.domain, checkpoint.block_hash
        del self.visible[checkpoint]
        del domain.checkpoints[block_hash]
        self._file(checkpoint, -1)
        self._orphan(checkpoint)
        self.queue.remove(checkpoint)
        homes = self.domains_of[block_hash]
        homes.remove(domain)
        if not homes:
            del self.domains_of[block_hash]
        used_before = self._objects.arena.used_bytes
        for entry in checkpoint.entries():
            self._objects.unref(entry)
            if entry.refs == 0 and entry.holds == 0:
                self._objects.drop(entry)
        self.tombstones[domain.id, block_hash] = Tombstone(
            checkpoint.boundary,
            tuple(checkpoint.kinds),
            checkpoint.producer,
            now,
            checkpoint.serial,
            checkpoint.hits,
        )
        self.recent.note(
            now, "evicted", "capacity", domain.id, checkpoint.boundary, checkpoint.kinds
        )
        if len(self.tombstones) > TOMBSTONES_MAX:
            self.tombstones.popitem(last=False)
        self._counters["evictions_capacity"] += 1
        self._counters["evicted_bytes"] += used_before - self._objects.arena.used_bytes
        self._counters["evicted_lifetime_ms"] += int((now - checkpoint.created_at) * 1000)
        self._counters["evicted_unused_checkpoints"] += checkpoint.hits == 0
        self._counters["evicted_user_turns"] += checkpoint.user_turn
        kind = primary_kind(checkpoint.kinds)
        self._counters[f"evicted_checkpoints_{kind}"] += 1
        self._counters[f"evicted_state_bytes_{kind}"] += checkpoint.state_bytes
        if self.on_evicted is not None:
            self.on_evicted(kind, now - checkpoint.created_at)

    def known(self, domain: Domain, boundary_hashes: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """Those of a prefix's (boundary, hash) pairs of which anything is known, deepest first."""
        here, coming, elsewhere = domain.checkpoints, domain.announcements, self.domains_of
        gone, name = self.tombstones, domain.id
        return [
            pair
            for pair in deepest_first(domain, boundary_hashes)
            if (block_hash := pair[1]) in here
            or block_hash in elsewhere
            or block_hash in coming
            or (name, block_hash) in gone
        ]

    def unusable(
        self, domain: Domain, boundary: int, block_hash: bytes, now: float
    ) -> CheckpointMatch | None:
        """What is known of a checkpoint that is not visible in ``domain``; None: never seen. What
        another domain holds is retained, whatever became of it here."""
        known = domain.checkpoints.get(block_hash)
        if known is not None and (known.visible or known.boundary != boundary):
            return None  # a hash of the caller's that belongs to another position
        homes = [
            (self._differences.first(domain, home).field, home)
            for home in self.domains_of.get(block_hash, ())
            if home.checkpoints[block_hash].boundary == boundary
        ]
        if homes:
            homes.sort(key=lambda pair: (bool(pair[0]), pair[1].id))  # convertible ones first
            field, home = homes[0]
            foreign = home.checkpoints[block_hash]
            match = _unusable(foreign, Reason.DOMAIN_MISMATCH, now - foreign.created_at)
            others = [other.id for differing, other in homes[1:] if not differing]
            return msgspec.structs.replace(
                match, field=field, domain=home.id, also_in=tuple(others[:_ALSO_IN_MAX])
            )
        if known is not None:
            return _unusable(known, Reason.UNCOMMITTED, now - known.created_at)
        announcement = domain.announcements.get(block_hash)
        if announcement is not None and announcement.boundary == boundary:
            return CheckpointMatch(
                boundary=boundary,
                kinds=(),
                consumable=False,
                reason=Reason.UNCOMMITTED,
                retained=False,
                hash_matched=False,
            )
        tombstone = self.tombstones.get((domain.id, block_hash))
        if tombstone is not None and tombstone.boundary == boundary:
            return _unusable(tombstone, Reason.EVICTED, now - tombstone.evicted_at)
        return None

    def touch(self, checkpoint: Checkpoint, now: float) -> None:
        """Count a use."""
        checkpoint.used_at = now
        self.queue.changed(checkpoint)

    def use(self, used: Sequence[Checkpoint], now: float) -> None:
        """Count a use of visible checkpoints of one prefix, the deepest first, none between them
        left out."""
        for checkpoint in used:
            self.touch(checkpoint, now)
        for checkpoint, parent in itertools.pairwise(used):
            self._extends(checkpoint, parent)

    def works_anew(self, domain: Domain) -> None:
        """The domain's work is another one now."""
        for checkpoint in domain.checkpoints.values():
            self.queue.changed(checkpoint)

    def _touch_chain(
        self, checkpoint: Checkpoint, manifest: CheckpointManifest, now: float
    ) -> None:
        """Count a use of the checkpoint and of those that it extends, and note who extends whom."""
        parent = None
        domain = checkpoint.domain
        grid, unit = domain.boundary_tokens, domain.record.layout.hash_tokens
        for boundary in range(grid, manifest.boundary + 1, grid):
            met = domain.checkpoints.get(manifest.hashes[boundary // unit - 1])
            if met is not None and met.boundary == boundary:
                self.touch(met, now)
                if met.visible:
                    if parent is not None:
                        self._extends(met, parent)
                    parent = met

    def _extends(self, checkpoint: Checkpoint, parent: Checkpoint) -> None:
        """``parent`` is the next shallower one. It may have come after what extends it, as the end
        of a user's message does whose publication took longer than the loop behind it."""
        before = checkpoint.parent
        if before is parent:
            return
        if before is not None:
            del before.children[checkpoint]
            self.queue.changed(before)
        self._adopt(parent, checkpoint)
        # What extends it belongs to the same user's turn as it does.
        below = [] if checkpoint.user_turn else list(checkpoint.children)
        while below:
            one = below.pop()
            self.queue.changed(one)
            if not one.user_turn:
                below += one.children

    def _adopt(self, parent: Checkpoint | None, checkpoint: Checkpoint) -> None:
        """Note that a visible checkpoint extends another one."""
        checkpoint.parent = parent
        self.queue.changed(checkpoint)
        if parent is not None:
            parent.children[checkpoint] = None
            self.queue.changed(parent)

    def _orphan(self, checkpoint: Checkpoint) -> None:
        """A checkpoint goes: those that extend it extend its parent, too."""
        parent = checkpoint.parent
        if parent is not None:
            del parent.children[checkpoint]
            self.queue.changed(parent)
        for child in checkpoint.children:
            self._adopt(parent, child)
        checkpoint.parent = None
        checkpoint.children.clear()

    def _file(self, checkpoint: Checkpoint, sign: int) -> None:
        """Count a visible checkpoint in or out."""
        kind = primary_kind(checkpoint.kinds)
        self.retained[kind] += sign
        self.state_bytes[kind] += sign * checkpoint.state_bytes

    def _count_end(self, kind: CheckpointKind, *, duplicate: bool) -> None:
        self._counters[f"logical_ends_{kind}"] += 1
        self._counters[f"duplicate_ends_{kind}"] += duplicate


def with_diverged(
    matches: Sequence[CheckpointMatch], deepest: Checkpoint, above: int, reach: int, now: float
) -> list[CheckpointMatch]:
    """Add checkpoints that extend the deepest matching one by other tokens than the request's, up
    to its ``reach`` in tokens: what a rewritten history leaves behind. The newest first, at most
    ``DIVERGED_MAX``, and none where the boundary has a candidate already. Nor past a shared
    prefix: what goes on from there belongs to other conversations."""
    if CheckpointKind.SHARED_PREFIX in deepest.kinds:
        return list(matches)
    by_boundary = {match.boundary: match for match in matches}
    room = len(by_boundary) + DIVERGED_MAX
    for child in itertools.islice(reversed(deepest.children), _CHILDREN_MAX):
        if len(by_boundary) < room and above < child.boundary <= reach:
            by_boundary.setdefault(
                child.boundary, _unusable(child, Reason.HASH_MISMATCH, now - child.created_at)
            )
    return [by_boundary[boundary] for boundary in sorted(by_boundary, reverse=True)]


def with_incomplete(
    matches: Sequence[CheckpointMatch], incomplete: Sequence[tuple[int, Reason]], above: int
) -> list[CheckpointMatch]:
    """Add what the prefix's objects reach without a checkpoint: nobody can say for which end they
    were sent. Not at or below ``above``, and none where the boundary has a candidate already."""
    by_boundary = {match.boundary: match for match in matches}
    for boundary, reason in incomplete:
        if boundary > above:
            match = CheckpointMatch(
                boundary=boundary,
                kinds=(),
                consumable=False,
                reason=reason,
                retained=False,
                hash_matched=False,
            )
            by_boundary.setdefault(boundary, match)
    return [by_boundary[boundary] for boundary in sorted(by_boundary, reverse=True)]


def consumable(checkpoint: Checkpoint, now: float) -> CheckpointMatch:
    """A visible checkpoint as lookups answer it."""
    return CheckpointMatch(
        boundary=checkpoint.boundary,
        kinds=tuple(checkpoint.kinds),
        consumable=True,
        age_s=now - checkpoint.created_at,
        producer=checkpoint.producer,
        hits=checkpoint.hits,
    )


def describe(checkpoint: Checkpoint, now: float, common_tokens: int = 0) -> CheckpointInfo:
    """A visible or pending checkpoint as people see it."""
    return CheckpointInfo(
        domain=checkpoint.domain.id,
        boundary=checkpoint.boundary,
        block_hash=checkpoint.block_hash,
        kinds=tuple(checkpoint.kinds),
        state_bytes=checkpoint.state_bytes,
        attention_bytes=checkpoint.attention_bytes,
        age_s=now - checkpoint.created_at,
        idle_s=now - checkpoint.used_at,
        leases=checkpoint.leases,
        producer=checkpoint.producer,
        visibility=Visibility.VISIBLE if checkpoint.visible else Visibility.PENDING,
        hits=checkpoint.hits,
        common_tokens=common_tokens,
    )


def deepest_first(domain: Domain, boundary_hashes: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """(boundary, hash) pairs of a prefix whose entry i ends at boundary (i + 1) * B."""
    grid = domain.boundary_tokens
    boundaries = range(len(boundary_hashes) * grid, 0, -grid)
    return zip(boundaries, reversed(boundary_hashes), strict=True)


def _unusable(known: Checkpoint | Tombstone, reason: Reason, age_s: float) -> CheckpointMatch:
    return CheckpointMatch(
        boundary=known.boundary,
        kinds=tuple(known.kinds),
        consumable=False,
        reason=reason,
        retained=reason not in NOT_RETAINED,
        hash_matched=reason not in NOT_RETAINED and reason is not Reason.HASH_MISMATCH,
        age_s=age_s,
        producer=known.producer,
        hits=known.hits,
    )


def _add_kinds(checkpoint: Checkpoint, manifest: CheckpointManifest) -> None:
    checkpoint.user_turn |= manifest.user_turn
    for kind in manifest.kinds:
        if kind not in checkpoint.kinds:
            checkpoint.kinds.append(kind)
