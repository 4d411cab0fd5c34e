"""Questions that people ask of the block index: which checkpoints, which domains. Sans-I/O.

Answers never count as a use: nothing here touches, leases or counts a checkpoint.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backhaul.protocols.checkpoint import CheckpointKind, DomainId
from backhaul.protocols.errors import StoreRejected
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout
from backhaul.transfer.base import CheckpointInfo, DomainClient, DomainInfo, Visibility
from backhaul.transfer.checkpoints import CheckpointTable, describe
from backhaul.transfer.entries import (
    CLIENTS_MAX,
    HASH_BYTES_MAX,
    NAME_BYTES_MAX,
    Checkpoint,
    Domain,
    Tombstone,
)

LISTING_MAX = 2_000
"""Checkpoints of one answer of a daemon: some hundred KiB, and its loop is soon free again. Whoever
wants more asks on with the cursor."""


@dataclass(frozen=True, kw_only=True)
class ListQuery:
    """Which checkpoints to list; what is left out does not restrict.

    Attributes:
        domain: one domain's whole id.
        domain_prefix: start of the ids of the domains meant.
        kinds: ends of which a checkpoint must stand for at least one.
        age_min_s, age_max_s: seconds since it became visible (pending: since its first part
            came; evicted: since the eviction), both ends included.
        visibilities: where in their life.
        hits_min: lookups that must have found it consumable, at least.
        prefix_hashes: a prompt's block hashes in units of the domain's ``hash_tokens``, empty where
            one is not known; asks for ``common_tokens`` and puts the longest first.
        limit: at most so many; 0: all.
        cursor: ``ListPage.next_cursor`` of the page before.
    """

    domain: DomainId | None = None
    domain_prefix: str = ""
    kinds: frozenset[CheckpointKind] = frozenset()
    age_min_s: float = 0.0
    age_max_s: float = math.inf
    visibilities: frozenset[Visibility] = frozenset({Visibility.VISIBLE})
    hits_min: int = 0
    prefix_hashes: tuple[bytes, ...] = ()
    limit: int = 0
    cursor: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.age_min_s <= self.age_max_s:  # also refuses NaN
            raise StoreRejected(
                f"ages from {self.age_min_s} to {self.age_max_s} seconds: give a range above 0"
            )
        if self.cursor:
            _Place.parse(self.cursor)
        if any(len(one) > HASH_BYTES_MAX for one in self.prefix_hashes):
            raise StoreRejected(f"a hash of the prefix has more than {HASH_BYTES_MAX} bytes")
        if self.cursor and self.prefix_hashes:
            raise StoreRejected("a listing along a prompt has no pages: leave out the cursor")


class ListPage(NamedTuple):
    """``next_cursor`` asks for the next page; empty on the last one."""

    checkpoints: tuple[CheckpointInfo, ...]
    next_cursor: str = ""


class _Place(NamedTuple):
    """A checkpoint's place in the order of a listing; stays the same while others come and go."""

    since: float
    serial: int

    @staticmethod
    def parse(cursor: str) -> _Place:
        since, _, serial = cursor.partition("/")
        try:
            return _Place(float.fromhex(since), int(serial))
        except (ValueError, OverflowError):
            raise StoreRejected(
                f"cursor {cursor[:80]!r} is unreadable: give the next_cursor of the page before"
            ) from None

    def __str__(self) -> str:
        return f"{float(self.since).hex()}/{self.serial}"


def select(
    table: CheckpointTable, query: ListQuery, now: float, domains: Mapping[DomainId, Domain]
) -> ListPage:
    """The page that ``query`` asks for. Raises ``StoreRejected`` for a malformed cursor."""
    before = _Place.parse(query.cursor) if query.cursor else None
    found = [
        (place, item)
        for place, domain, item in _all(table, query.visibilities)
        if (before is None or place < before) and _wanted(query, domain, item, now - place.since)
    ]
    found.sort(key=lambda pair: pair[0], reverse=True)
    common: dict[_Place, int] = {}
    if hashes := query.prefix_hashes:
        common = {place: _common_tokens(item, hashes, domains) for place, item in found}
        found.sort(key=lambda pair: common[pair[0]], reverse=True)  # stable: ties newest first
    page = found[: query.limit] if query.limit else found
    infos = tuple(_info(item, now, common.get(place, 0)) for place, item in page)
    more = len(page) < len(found) and not query.prefix_hashes
    return ListPage(infos, str(page[-1][0]) if more else "")


class _Evicted(NamedTuple):
    domain: DomainId
    block_hash: bytes
    tombstone: Tombstone


def _all(
    table: CheckpointTable, visibilities: Iterable[Visibility]
) -> Iterator[tuple[_Place, DomainId, Checkpoint | _Evicted]]:
    for visibility in visibilities:
        if visibility is Visibility.EVICTED:
            for (domain, block_hash), stone in table.tombstones.items():
                place = _Place(stone.evicted_at, stone.serial)
                yield place, domain, _Evicted(domain, block_hash, stone)
            continue
        living = table.visible if visibility is Visibility.VISIBLE else table.pending
        for checkpoint in living:
            place = _Place(checkpoint.created_at, checkpoint.serial)
            yield place, checkpoint.domain.id, checkpoint


def _wanted(query: ListQuery, domain: DomainId, item: Checkpoint | _Evicted, age_s: float) -> bool:
    told = item.tombstone if isinstance(item, _Evicted) else item
    return (
        (query.domain is None or domain == query.domain)
        and domain.startswith(query.domain_prefix)
        and (not query.kinds or not query.kinds.isdisjoint(told.kinds))
        and told.hits >= query.hits_min
        and query.age_min_s <= age_s <= query.age_max_s
    )


def _info(item: Checkpoint | _Evicted, now: float, common_tokens: int) -> CheckpointInfo:
    if isinstance(item, Checkpoint):
        return describe(item, now, common_tokens)
    stone = item.tombstone
    return CheckpointInfo(
        domain=item.domain,
        boundary=stone.boundary,
        block_hash=item.block_hash,
        kinds=stone.kinds,
        state_bytes=0,
        attention_bytes=0,
        age_s=now - stone.evicted_at,
        idle_s=now - stone.evicted_at,
        leases=0,
        producer=stone.producer,
        visibility=Visibility.EVICTED,
        hits=stone.hits,
        common_tokens=common_tokens,
    )


def compared_group(layout: CacheLayout) -> GroupLayout | None:
    """The group by whose blocks ``common_tokens`` is found out: of those that keep every block of
    a prefix the one with the shortest. None: only whole checkpoints are compared."""
    full = (group for group in layout.groups if group.kind is GroupKind.FULL)
    return min(full, key=lambda one: one.block_tokens, default=None)


def _common_tokens(
    item: Checkpoint | _Evicted, hashes: Sequence[bytes], domains: Mapping[DomainId, Domain]
) -> int:
    """Tokens that the checkpoint shares with a prompt, as far as hashes of whole blocks tell.

    Hashes are chained, so that they agree up to some block and nowhere behind it: bisection."""
    if isinstance(item, _Evicted):
        home, boundary = domains.get(item.domain), item.tombstone.boundary
    else:
        home, boundary = item.domain, item.boundary
    if home is None:
        return 0
    unit = home.record.layout.hash_tokens
    end = boundary // unit
    if end <= len(hashes) and hashes[end - 1] == item.block_hash:
        return boundary
    if isinstance(item, _Evicted):
        return 0
    group = compared_group(home.record.layout)
    if group is None or not item.parts:
        return 0
    part = next(iter(item.parts.values()))
    chain = [entry.key.block_hash for entry in part if entry.key.group == group.index]
    step = group.block_tokens // unit
    reach = min(len(chain), len(hashes) // step)
    known = [block for block in range(reach) if hashes[(block + 1) * step - 1]]
    differing = bisect_left(
        known, True, key=lambda block: chain[block] != hashes[(block + 1) * step - 1]
    )
    return (known[differing - 1] + 1) * group.block_tokens if differing else 0


def describe_domains(
    domains: Iterable[Domain], table: CheckpointTable, now: float
) -> list[DomainInfo]:
    """Every domain as people see it, the one used last first."""
    kinds: dict[DomainId, Counter[CheckpointKind]] = {}
    counts: Counter[DomainId] = Counter()
    for checkpoint in table.visible:
        counts[checkpoint.domain.id] += 1
        kinds.setdefault(checkpoint.domain.id, Counter()).update(checkpoint.kinds)
    return [
        DomainInfo(
            id=domain.id,
            record=domain.record,
            clients=tuple(
                DomainClient(name, now - opened_at)
                for name, opened_at in reversed(domain.clients.items())
            ),
            idle_s=now - domain.used_at,
            checkpoints=counts[domain.id],
            kinds=dict(kinds.get(domain.id, {})),
            objects=len(domain.objects),
            object_bytes=domain.object_bytes,
        )
        for domain in sorted(domains, key=lambda one: one.used_at, reverse=True)
    ]


def remember_client(domain: Domain, name: str, now: float) -> None:
    """Note who opened a domain; of too many, the one of longest ago is forgotten."""
    name = name.encode()[:NAME_BYTES_MAX].decode(errors="ignore")
    domain.clients.pop(name, None)
    domain.clients[name] = now
    if len(domain.clients) > CLIENTS_MAX:
        del domain.clients[next(iter(domain.clients))]
