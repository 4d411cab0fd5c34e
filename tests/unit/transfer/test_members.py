"""The table of a store's engines: expiry, bounds, other domains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_kit import make_record

from backhaul.protocols.checkpoint import DomainId
from backhaul.protocols.comparison import Comparison, compare
from backhaul.protocols.domain import DomainRecord
from backhaul.transfer import differences, members
from backhaul.transfer.base import Member
from backhaul.transfer.differences import DomainDifferences
from backhaul.transfer.entries import Domain
from backhaul.transfer.index import BlockIndex
from backhaul.transfer.members import ELSEWHERE_MAX, MEMBER_TTL_S, MemberTable


def make_domain(model: str) -> Domain:
    record = make_record(model)
    return Domain(record.domain_id, record, 0.0, 4, {})


A, B = make_record("a"), make_record("b")
DOMAINS = {one.id: one for one in map(make_domain, "ab")}
LOADER, PUBLISHER = Member("loader", True, False), Member("publisher", False, True)


def test_who_is_silent_is_forgotten_and_who_speaks_is_not() -> None:
    table = MemberTable(DomainDifferences())
    table.join(A.domain_id, LOADER, 0.0)
    assert table.peers(A.domain_id, "me", DOMAINS, MEMBER_TTL_S - 1).loaders == 1
    table.join(A.domain_id, LOADER, MEMBER_TTL_S - 1)
    assert table.peers(A.domain_id, "me", DOMAINS, 2 * MEMBER_TTL_S - 2).loaders == 1
    assert table.peers(A.domain_id, "me", DOMAINS, 2 * MEMBER_TTL_S - 1).loaders == 0


def test_an_engine_that_comes_back_with_another_domain_left_the_first() -> None:
    table = MemberTable(DomainDifferences())
    table.join(A.domain_id, LOADER, 0.0)
    table.join(B.domain_id, LOADER, 1.0)
    seen = table.peers(A.domain_id, "me", DOMAINS, 2.0)
    assert seen.loaders == 0
    assert [(one.domain, one.field, one.loaders) for one in seen.elsewhere] == [
        (B.domain_id, "model", 1)
    ]


def test_the_table_is_bounded_and_the_most_silent_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "MEMBERS_MAX", 3)
    table = MemberTable(DomainDifferences())
    for index in range(3):
        table.join(A.domain_id, Member(f"m{index}", True, False), float(index))
    table.join(A.domain_id, Member("m0", True, False), 3.0)
    table.join(A.domain_id, PUBLISHER, 4.0)
    assert table.peers(A.domain_id, "m1", DOMAINS, 5.0).loaders == 2  # m0 and m2


def test_a_forgotten_domain_is_left_out() -> None:
    table = MemberTable(DomainDifferences())
    table.join(DomainId("gone"), LOADER, 0.0)
    assert table.peers(A.domain_id, "me", DOMAINS, 1.0).elsewhere == ()


def test_only_domains_that_are_named_are_compared_and_each_pair_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []

    def counting(ours: DomainRecord, theirs: DomainRecord) -> Comparison:
        compared.append(theirs.model)
        return compare(ours, theirs)

    monkeypatch.setattr(differences, "compare", counting)
    index = BlockIndex(1 << 20, publication_ttl_s=60.0, lease_max_s=60.0)
    records = [make_record(f"other {number:02}") for number in range(3 * ELSEWHERE_MAX)]
    for place, record in enumerate(records):
        for engine in range(1 + (place < ELSEWHERE_MAX)):
            index.join(record, Member(f"{place}.{engine}", True, False), 0.0)
    compared.clear()
    for _ in range(3):
        peers = index.join(A, LOADER, 1.0)
    named = {record.domain_id for record in records[:ELSEWHERE_MAX]}
    assert {one.domain for one in peers.elsewhere} == named, "those with most engines"
    assert sorted(compared) == [record.model for record in records[:ELSEWHERE_MAX]]


def test_what_is_remembered_of_domains_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "PAIRS_MAX", 3)
    ours = make_domain("ours")
    others = [make_domain(f"{number}".ljust(250, "x")) for number in range(5)]
    known = DomainDifferences()
    compared: list[str] = []

    def counting(ours: DomainRecord, theirs: DomainRecord) -> Comparison:
        compared.append(theirs.model[0])
        return compare(ours, theirs)

    monkeypatch.setattr(differences, "compare", counting)
    for number in (0, 1, 2, 0, 3, 0, 1):
        first = known.first(ours, others[number])
        assert first.field == "model" and len(first.theirs) == differences.VALUE_MAX
    assert compared == ["0", "1", "2", "3", "1"], "the pair asked for longest ago gave way"


def test_a_loader_counts_as_converting_where_it_says_so_and_prefills() -> None:
    table = MemberTable(DomainDifferences())
    for name, decodes_only, converts in (
        ("0", False, True),
        ("1", False, False),
        ("2", True, True),
    ):
        table.join(B.domain_id, Member(name, True, False, decodes_only, converts), 0.0)
    (one,) = table.peers(A.domain_id, "me", DOMAINS, 1.0).elsewhere
    assert (one.loaders, one.converters, one.publishers) == (2, 1, 0)


_EVENTS = st.lists(
    st.tuples(
        st.integers(0, 3), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
        st.floats(0, MEMBER_TTL_S),
    ),
    max_size=30,
)  # fmt: skip


@given(_EVENTS)
def test_an_answer_counts_everybody_who_spoke_in_time_but_the_asker(
    events: list[tuple[int, bool, bool, bool, bool, float]],
) -> None:
    index = BlockIndex(1 << 20, publication_ttl_s=60.0, lease_max_s=60.0)
    last: dict[int, tuple[bool, Member, float]] = {}
    now = 0.0
    for who, first, loads, publishes, decodes_only, pause in events:
        now += pause
        member = Member(str(who), loads, publishes, decodes_only)
        peers = index.join(A if first else B, member, now)
        last[who] = (first, member, now)
        alive = [
            (where, one)
            for other, (where, one, spoke) in last.items()
            if other != who and spoke + MEMBER_TTL_S > now
        ]
        beside = [one for where, one in alive if where == first]
        assert peers.loaders == sum(one.loads and not one.decodes_only for one in beside)
        assert peers.decode_loaders == sum(one.loads and one.decodes_only for one in beside)
        assert peers.publishers == sum(one.publishes for one in beside)
        elsewhere = [one for where, one in alive if where != first]
        assert sum(one.loaders + one.publishers for one in peers.elsewhere) == sum(
            (one.loads and not one.decodes_only) + one.publishes for one in elsewhere
        )
    index.check()
