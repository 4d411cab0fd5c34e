"""Domains: kept apart with the field that differs, and who uses them."""

from __future__ import annotations

import os
from itertools import count

import msgspec
import pytest
from store_contract import (
    BOUNDARY,
    TIMEOUT_S,
    ClientMaker,
    WorkerMaker,
    at_boundaries,
    hash_chain,
    make_domain,
)

from backhaul.protocols.checkpoint import DomainId, Reason
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreRejected
from backhaul.transfer.base import Elsewhere, Member, Peers, Store

_names = count()


def member(*, loads: bool = False, publishes: bool = False) -> Member:
    """An engine that no other test knows."""
    return Member(f"member-{os.getpid()}-{next(_names)}", loads, publishes)


def join(store: Store, record: DomainRecord, who: Member) -> Peers:
    return store.join(record, who, timeout_s=TIMEOUT_S)


def of(peers: Peers, domain: DomainId) -> Elsewhere | None:
    return next((one for one in peers.elsewhere if one.domain == domain), None)


def test_an_engine_alone_knows_of_no_other(new_client: ClientMaker) -> None:
    store, record = new_client(), make_domain()
    who = member(loads=True, publishes=True)
    for _ in range(2):
        peers = join(store, record, who)
        assert (peers.known, peers.loaders, peers.publishers) == (True, 0, 0)


def test_engines_of_one_domain_see_each_other_s_roles(new_client: ClientMaker) -> None:
    record = make_domain()
    decode, prefill = member(publishes=True), member(loads=True, publishes=True)
    one, two = new_client(), new_client()
    assert join(one, record, decode).loaders == 0
    seen = join(two, record, prefill)
    assert (seen.loaders, seen.publishers) == (0, 1)
    seen = join(one, record, decode)
    assert (seen.loaders, seen.publishers) == (1, 1)


def test_loaders_that_only_decode_are_counted_apart(new_client: ClientMaker) -> None:
    record, store = make_domain(), new_client()
    decode = member(publishes=True)
    other = member(loads=True, publishes=True)
    join(store, record, other._replace(decodes_only=True))
    peers = join(store, record, decode)
    assert (peers.loaders, peers.decode_loaders, peers.publishers) == (0, 1, 1)
    join(store, record, other)
    peers = join(store, record, decode)
    assert (peers.loaders, peers.decode_loaders) == (1, 0)


def test_an_engine_that_leaves_is_forgotten_at_once(new_client: ClientMaker) -> None:
    store, record = new_client(), make_domain()
    decode, prefill = member(publishes=True), member(loads=True)
    join(store, record, prefill)
    assert join(store, record, decode).loaders == 1
    join(store, record, prefill._replace(loads=False))
    assert join(store, record, decode).loaders == 0


def test_loaders_of_another_domain_come_with_the_field_that_differs(
    new_client: ClientMaker,
) -> None:
    ours, store = make_domain(), new_client()
    theirs = msgspec.structs.replace(ours, kv_dtype="uint8:fp8_e4m3")
    decode = member(publishes=True)
    for _ in range(30):  # the answer is short, and names the most used domains first
        join(store, theirs, member(loads=True))
    peers = join(store, ours, decode)
    assert (peers.loaders, peers.publishers) == (0, 0)
    other = of(peers, theirs.domain_id)
    assert other == Elsewhere(theirs.domain_id, "kv_dtype", "bfloat16", "uint8:fp8_e4m3", 30, 0)


def test_a_checkpoint_of_another_domain_comes_with_the_field_that_differs(
    new_worker: WorkerMaker,
) -> None:
    ours = make_domain()
    theirs = msgspec.structs.replace(ours, state_dtypes=("bfloat16", "bfloat16"))
    writer, reader = new_worker(theirs), new_worker(ours)
    chain = hash_chain("only one other domain has it", 2 * BOUNDARY)
    assert writer.publish(chain, 2 * BOUNDARY).visible
    answer = reader.store.lookup(
        reader.domain_id, at_boundaries(chain), lease_s=10.0, timeout_s=TIMEOUT_S
    )
    assert answer.lease is None
    (match,) = answer.matches
    assert (match.boundary, match.consumable) == (2 * BOUNDARY, False)
    assert match.reason is Reason.DOMAIN_MISMATCH
    assert (match.field, match.domain) == ("state_dtypes", writer.domain_id)
    assert writer.lookup(chain)[0] == [2 * BOUNDARY]


def test_the_record_of_a_domain_that_somebody_opened(new_client: ClientMaker) -> None:
    record = make_domain()
    new_client().open_domain(record, timeout_s=TIMEOUT_S)
    assert new_client().domain_record(record.domain_id, timeout_s=TIMEOUT_S) == record
    with pytest.raises(StoreRejected, match=r"not known|unknown"):
        new_client().domain_record(DomainId("nobody's"), timeout_s=TIMEOUT_S)


def test_joining_opens_the_domain(new_client: ClientMaker) -> None:
    store, record = new_client(), make_domain()
    join(store, record, member(loads=True))
    assert store.lookup(record.domain_id, [b"h"], timeout_s=TIMEOUT_S).matches == ()


def test_a_tool_that_opens_a_domain_is_no_engine(new_client: ClientMaker) -> None:
    store, record = new_client(), make_domain()
    store.open_domain(record, timeout_s=TIMEOUT_S)
    assert join(new_client(), record, member(publishes=True)).publishers == 0


@pytest.mark.parametrize("name", ["n" * 257, "ü" * 200])
def test_an_overlong_name_is_refused(new_client: ClientMaker, name: str) -> None:
    with pytest.raises(StoreRejected, match="member"):
        join(new_client(), make_domain(), Member(name, True, True))
