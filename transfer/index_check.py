"""Recomputes every number that the block index keeps."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from backhaul.protocols.checkpoint import DomainId, ObjectKey, primary_kind
from backhaul.protocols.layout import GroupKind
from backhaul.transfer.checkpoints import CheckpointTable
from backhaul.transfer.entries import (
    ANNOUNCEMENTS_MAX,
    CLIENTS_MAX,
    DOMAINS_MAX,
    LEASES_MAX,
    PUBLICATIONS_MAX,
    TOMBSTONES_MAX,
    Announcement,
    Checkpoint,
    Domain,
    Entry,
)
from backhaul.transfer.leases import LeaseTable
from backhaul.transfer.objects import ObjectTable
from backhaul.transfer.publications import PublicationTable


class Books(NamedTuple):
    """The tables of one index."""

    domains: dict[DomainId, Domain]
    objects: ObjectTable
    checkpoints: CheckpointTable
    publications: PublicationTable
    leases: LeaseTable
    announcements: dict[Announcement, None]


def check_books(index: Books) -> None:
    """Raise ``AssertionError`` with the evidence where two books disagree. Costs a walk over
    everything: for tests, simulators and a suspicious operator."""
    index.objects.arena.check()
    _check_limits(index)
    for domain in index.domains.values():
        _check_domain(index, domain)
    _check_checkpoints(index)
    _check_publications(index)
    _check_objects(index)
    _check_announcements(index)


def _entries(index: Books) -> list[Entry]:
    return [entry for domain in index.domains.values() for entry in domain.objects.values()]


def _check_limits(index: Books) -> None:
    for what, count, limit in (
        ("domains", len(index.domains), DOMAINS_MAX),
        ("publications", len(index.publications.open), PUBLICATIONS_MAX),
        ("leases", len(index.leases.valid), LEASES_MAX),
        ("announcements", len(index.announcements), ANNOUNCEMENTS_MAX),
        ("tombstones", len(index.checkpoints.tombstones), TOMBSTONES_MAX),
    ):
        assert count <= limit, f"{count} {what}, the limit is {limit}"


def _check_domain(index: Books, domain: Domain) -> None:
    for key, entry in domain.objects.items():
        assert entry.key == key and entry.domain is domain, f"{key} is filed as {entry.key}"
    for block_hash, checkpoint in domain.checkpoints.items():
        assert checkpoint.block_hash == block_hash and checkpoint.domain is domain, block_hash
        table = index.checkpoints.visible if checkpoint.visible else index.checkpoints.pending
        assert checkpoint in table, f"checkpoint {block_hash!r} is in no table"
    nbytes = sum(entry.nbytes for entry in domain.objects.values())
    assert domain.object_bytes == nbytes, f"{domain.object_bytes} bytes counted, {nbytes} exist"
    assert len(domain.clients) <= CLIENTS_MAX
    open_here = sum(one.domain is domain for one in index.publications.open.values())
    assert domain.publications == open_here, f"{domain.publications} publications, {open_here}"


def _check_checkpoints(index: Books) -> None:
    visible, pending = index.checkpoints.visible, index.checkpoints.pending
    filed = sum(len(domain.checkpoints) for domain in index.domains.values())
    assert filed == len(visible) + len(pending), f"{filed} filed, {len(visible)}+{len(pending)}"
    homes: dict[bytes, set[Domain]] = {}
    for checkpoint in visible:
        assert checkpoint.visible and not checkpoint.publications
        assert set(checkpoint.parts) == set(range(checkpoint.domain.record.layout.ranks)), (
            f"visible checkpoint {checkpoint.block_hash!r} has ranks {sorted(checkpoint.parts)}"
        )
        homes.setdefault(checkpoint.block_hash, set()).add(checkpoint.domain)
        assert (checkpoint.domain.id, checkpoint.block_hash) not in index.checkpoints.tombstones
    assert homes == index.checkpoints.domains_of, "domains by hash differ"
    for checkpoint in pending:
        assert not checkpoint.visible and checkpoint.publications and not checkpoint.leases
    for checkpoint in (*visible, *pending):
        _check_parts(checkpoint)
    _check_filing(index)
    leases: Counter[Checkpoint] = Counter()
    for lease in index.leases.valid.values():
        assert not lease.ended
        leases.update(lease.checkpoints)
    for checkpoint in leases:
        assert checkpoint in visible, f"leased checkpoint {checkpoint.block_hash!r} is gone"
    for checkpoint in visible:
        assert checkpoint.leases == leases[checkpoint], (
            f"{checkpoint.leases} leases on {checkpoint.block_hash!r}, {leases[checkpoint]} exist"
        )


def _check_filing(index: Books) -> None:
    """Sums by kind, and who extends whom."""
    table = index.checkpoints
    retained: Counter[str] = Counter()
    state_bytes: Counter[str] = Counter()
    for checkpoint in table.visible:
        retained[primary_kind(checkpoint.kinds)] += 1
        state_bytes[primary_kind(checkpoint.kinds)] += checkpoint.state_bytes
        parent = checkpoint.parent
        assert parent is None or (parent in table.visible and checkpoint in parent.children)
        for child in checkpoint.children:
            assert child.parent is checkpoint and child.domain is checkpoint.domain
            assert child.boundary > checkpoint.boundary
    assert table.retained == retained, f"{table.retained} retained, {retained} exist"
    assert table.state_bytes == state_bytes, f"{table.state_bytes} state bytes, {state_bytes}"


def _check_parts(checkpoint: Checkpoint) -> None:
    domain = checkpoint.domain
    nbytes = {True: 0, False: 0}
    for rank, part in checkpoint.parts.items():
        for entry in part:
            assert entry.key.rank == rank
            assert domain.objects.get(entry.key) is entry, (
                f"checkpoint {checkpoint.block_hash!r} lacks {entry.key}"
            )
            assert entry.committed, f"checkpoint {checkpoint.block_hash!r}: {entry.key} unwritten"
            nbytes[domain.group_kinds[entry.key.group] is GroupKind.RECURRENT] += entry.nbytes
    assert (checkpoint.state_bytes, checkpoint.attention_bytes) == (nbytes[True], nbytes[False])


def _check_publications(index: Books) -> None:
    for name, publication in index.publications.open.items():
        assert publication.id == name and not publication.ended
        for entry in publication.reserved.values():
            assert entry.writer == name, f"{entry.key} is reserved by {name}, not {entry.writer}"
        for entry in publication.held.values():
            assert entry.committed, f"{entry.key} is held by {name} but not committed"
        for checkpoint in publication.pending.values():
            assert checkpoint in index.checkpoints.pending and name in checkpoint.publications
    for checkpoint in index.checkpoints.pending:
        for name in checkpoint.publications:
            known = index.publications.open[name].pending.get(checkpoint.block_hash)
            assert known is checkpoint, f"{name} does not know its checkpoint"


def _check_objects(index: Books) -> None:
    objects, arena = index.objects, index.objects.arena
    entries = _entries(index)
    refs: Counter[Entry] = Counter()
    for checkpoint in (*index.checkpoints.visible, *index.checkpoints.pending):
        refs.update(checkpoint.entries())
    holds: Counter[Entry] = Counter()
    reserved: set[ObjectKey] = set()
    for publication in index.publications.open.values():
        holds.update(publication.held.values())
        reserved.update(publication.reserved)
    for entry in entries:
        assert entry.refs == refs[entry], f"{entry.key}: {entry.refs} refs, {refs[entry]} exist"
        assert entry.holds == holds[entry], f"{entry.key}: {entry.holds} holds, {holds[entry]}"
        loose = entry.committed and entry.refs == 0 and entry.holds == 0
        assert loose == (entry in objects.loose), f"{entry.key}: loose {loose}, filed otherwise"
        assert entry.committed or entry.key in reserved, f"{entry.key} is reserved by nobody"
        assert arena.extent_bytes(entry.offset) == arena.rounded(entry.nbytes), entry.key
    extents = [entry.offset for entry in entries] + [offset for _, offset in objects.quarantine]
    assert len(set(extents)) == len(extents) == len(arena), "an extent has no or several owners"
    assert objects.count == len(entries), f"{objects.count} objects counted, {len(entries)} exist"
    used = sum(arena.extent_bytes(offset) for offset in extents)
    assert used == arena.used_bytes <= arena.capacity_bytes, f"{used} of {arena.used_bytes} owned"
    assert set(refs) | set(holds) | set(objects.loose) <= set(entries), "a freed object is in use"


def _check_announcements(index: Books) -> None:
    filed = [one for domain in index.domains.values() for one in domain.announcements.values()]
    assert set(filed) == set(index.announcements), "announcements differ"
    for announcement in filed:
        known = announcement.domain.checkpoints.get(announcement.block_hash)
        assert known is None or not known.visible, "a visible checkpoint is still announced"
