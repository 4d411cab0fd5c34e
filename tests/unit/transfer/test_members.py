"""The table of a store's engines: expiry, bounds, other domains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_kit import make_record

from backhaul.protocols.checkpoint import DomainId
from backhaul.transfer import members
from backhaul.transfer.base import Member
from backhaul.transfer.index import BlockIndex
from backhaul.transfer.members import MEMBER_TTL_S, MemberTable

A, B = make_record("a"), make_record("b")
RECORDS = {A.domain_id: A, B.domain_id: B}
LOADER, PUBLISHER = Member("loader", True, False), Member("publisher", False, True)


def test_who_is_silent_is_forgotten_and_who_speaks_is_not() -> None:
    table = MemberTable()
    table.join(A.domain_id, LOADER, 0.0)
    assert table.peers(A.domain_id, "me", RECORDS, MEMBER_TTL_S - 1).loaders == 1
    table.join(A.domain_id, LOADER, MEMBER_TTL_S - 1)
    assert table.peers(A.domain_id, "me", RECORDS, 2 * MEMBER_TTL_S - 2).loaders == 1
    assert table.peers(A.domain_id, "me", RECORDS, 2 * MEMBER_TTL_S - 1).loaders == 0


def test_an_engine_that_comes_back_with_another_domain_left_the_first() -> None:
    table = MemberTable()
    table.join(A.domain_id, LOADER, 0.0)
    table.join(B.domain_id, LOADER, 1.0)
    seen = table.peers(A.domain_id, "me", RECORDS, 2.0)
    assert seen.loaders == 0
    assert [(one.domain, one.field, one.loaders) for one in seen.elsewhere] == [
        (B.domain_id, "model", 1)
    ]


def test_the_table_is_bounded_and_the_most_silent_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "MEMBERS_MAX", 3)
    table = MemberTable()
    for index in range(3):
        table.join(A.domain_id, Member(f"m{index}", True, False), float(index))
    table.join(A.domain_id, Member("m0", True, False), 3.0)
    table.join(A.domain_id, PUBLISHER, 4.0)
    assert table.peers(A.domain_id, "m1", RECORDS, 5.0).loaders == 2  # m0 and m2


def test_a_forgotten_domain_is_left_out() -> None:
    table = MemberTable()
    table.join(DomainId("gone"), LOADER, 0.0)
    assert table.peers(A.domain_id, "me", RECORDS, 1.0).elsewhere == ()


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
