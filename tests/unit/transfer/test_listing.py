"""What people ask of the index: filters, pages, common prefixes, domains, recent events."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_kit import GRID, STATE_BYTES, Driver, chain, keys_of, make_record, manifest_of

from backhaul.protocols.checkpoint import CheckpointKind, PublicationId
from backhaul.protocols.errors import StoreRejected
from backhaul.transfer.base import Visibility
from backhaul.transfer.entries import CLIENTS_MAX
from backhaul.transfer.listing import ListQuery
from backhaul.transfer.recent import EVENTS_MAX

LETTERS = st.text("ab", min_size=1, max_size=6)


def boundaries(driver: Driver, **fields: object) -> list[int]:
    """Boundaries in blocks, in the order of the listing."""
    page = driver.index.query_checkpoints(ListQuery(**fields), driver.now)  # type: ignore[arg-type]
    return [info.boundary // GRID for info in page.checkpoints]


@given(st.lists(LETTERS, max_size=12, unique=True), st.integers(1, 5))
def test_pages_together_are_the_whole_listing(prefixes: list[str], limit: int) -> None:
    driver = Driver()
    for number, prefix in enumerate(prefixes):
        driver.now = number // 3  # some appear at the same moment
        driver.publish(prefix)
    whole = driver.index.query_checkpoints(ListQuery(), driver.now).checkpoints
    paged, cursor = [], ""
    while True:
        page = driver.index.query_checkpoints(ListQuery(limit=limit, cursor=cursor), driver.now)
        paged += page.checkpoints
        cursor = page.next_cursor
        if not cursor:
            break
    assert tuple(paged) == whole and len(whole) == len(prefixes)
    assert [info.age_s for info in whole] == sorted(info.age_s for info in whole)


def test_a_page_goes_on_where_it_ended_whatever_came_and_went() -> None:
    driver = Driver(capacity_bytes=4 * STATE_BYTES + 4096)
    for prefix in ("a", "b", "c"):
        driver.now += 1
        driver.publish(prefix)
    first = driver.index.query_checkpoints(ListQuery(limit=2), driver.now)
    driver.now += 1
    driver.publish("dd")
    rest = driver.index.query_checkpoints(ListQuery(limit=2, cursor=first.next_cursor), driver.now)
    assert [info.block_hash for info in rest.checkpoints] == [chain("a")[-1]]
    assert rest.next_cursor == ""


def test_filters() -> None:
    driver = Driver()
    driver.publish("a", CheckpointKind.INPUT_END)
    driver.now = 10
    driver.publish("bb", CheckpointKind.DECODE_END, CheckpointKind.PROMPT_END)
    other = driver.open("other")
    driver.publish("ccc", domain=other, name="c")
    driver.now = 15
    assert boundaries(driver) == [3, 2, 1]
    assert boundaries(driver, kinds=frozenset({CheckpointKind.PROMPT_END})) == [2]
    assert boundaries(driver, domain_prefix=other[:8]) == [3]
    assert boundaries(driver, domain_prefix="no") == []
    assert boundaries(driver, age_min_s=5) == [3, 2, 1]
    assert boundaries(driver, age_min_s=5.5) == [1]
    assert boundaries(driver, age_max_s=5) == [3, 2]
    assert boundaries(driver, age_min_s=15, age_max_s=15) == [1]


def test_pending_and_evicted_are_listed_when_asked_for() -> None:
    driver = Driver(ranks=2)
    name = PublicationId("p")
    grants = driver.reserve(name, keys_of(driver.layout, "ab"))
    driver.commit(name, grants, manifest_of("ab"))
    pending = frozenset({Visibility.PENDING})
    assert boundaries(driver) == [] and boundaries(driver, visibilities=pending) == [2]

    small = Driver(capacity_bytes=2 * STATE_BYTES)
    small.publish("a")
    small.lookup("a", lease_s=0)
    small.now = 7
    small.publish("b")
    (gone,) = small.index.query_checkpoints(
        ListQuery(visibilities=frozenset({Visibility.EVICTED})), 9.0
    ).checkpoints
    assert gone.block_hash == chain("a")[-1] and gone.age_s == 2 and gone.hits == 1
    assert gone.visibility is Visibility.EVICTED


@given(LETTERS, st.lists(LETTERS, min_size=1, max_size=6, unique=True))
def test_common_tokens_is_the_longest_common_prefix(prompt: str, prefixes: list[str]) -> None:
    driver = Driver()
    for prefix in prefixes:
        driver.publish(prefix)
    query = ListQuery(prefix_hashes=tuple(chain(prompt)))
    infos = driver.index.query_checkpoints(query, driver.now).checkpoints
    expected = {}
    for prefix in prefixes:
        same = [a == b for a, b in zip(prefix, prompt, strict=False)]
        shared = same.index(False) if False in same else len(same)
        expected[chain(prefix)[-1]] = shared * GRID
    assert {info.block_hash: info.common_tokens for info in infos} == expected
    common = [info.common_tokens for info in infos]
    assert common == sorted(common, reverse=True)


@given(LETTERS, st.lists(LETTERS, min_size=1, max_size=6, unique=True), st.data())
def test_common_tokens_ends_at_the_last_hash_that_is_known(
    prompt: str, prefixes: list[str], data: st.DataObject
) -> None:
    driver = Driver()
    for prefix in prefixes:
        driver.publish(prefix)
    known = data.draw(st.sets(st.integers(0, len(prompt) - 1))) if prompt else set()
    hashes = [one if i in known else b"" for i, one in enumerate(chain(prompt))]
    query = ListQuery(prefix_hashes=tuple(hashes) or (b"",))
    for info in driver.index.query_checkpoints(query, driver.now).checkpoints:
        (prefix,) = [one for one in prefixes if chain(one)[-1] == info.block_hash]
        same = [a == b for a, b in zip(prefix, prompt, strict=False)]
        shared = same.index(False) if False in same else len(same)
        expected = max((block + 1 for block in known if block < shared), default=0)
        assert info.common_tokens == expected * GRID


def test_only_what_was_hit_often_enough() -> None:
    driver = Driver()
    for tokens, hits in (("a", 0), ("ab", 1), ("abc", 2)):
        driver.publish(tokens)
        for _ in range(hits):
            driver.lookup(tokens)
    for hits_min, boundaries in ((0, [3, 2, 1]), (1, [3, 2]), (2, [3]), (3, [])):
        page = driver.index.query_checkpoints(ListQuery(hits_min=hits_min), driver.now)
        assert [info.boundary // GRID for info in page.checkpoints] == boundaries


def test_listing_counts_as_no_use() -> None:
    driver = Driver()
    driver.publish("ab")
    before = driver.index.stats()
    driver.now = 50
    (info,) = driver.index.query_checkpoints(
        ListQuery(prefix_hashes=tuple(chain("ab"))), 50
    ).checkpoints
    assert info.idle_s == 50 and driver.index.stats() == before


@pytest.mark.parametrize(
    "fields",
    [
        {"cursor": "x"},
        {"cursor": "0x1p0/y"},
        {"age_min_s": 2.0, "age_max_s": 1.0},
        {"age_min_s": math.nan},
        {"age_min_s": -1.0},
        {"cursor": "0x1p0/1", "prefix_hashes": (b"h",)},
    ],
)
def test_impossible_queries_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(StoreRejected):
        ListQuery(**fields)  # type: ignore[arg-type]


def test_domains_come_with_their_clients_and_content() -> None:
    driver = Driver()
    record = make_record("m2", driver.layout)
    driver.now = 1
    domain = driver.index.open_domain(record, driver.now, "decode-0:worker")
    driver.now = 2
    driver.index.open_domain(record, driver.now, "prefill-0:scheduler")
    driver.index.open_domain(record, driver.now)
    driver.publish("ab", CheckpointKind.DECODE_END, CheckpointKind.INPUT_END, domain=domain)
    driver.publish("a", CheckpointKind.INPUT_END, domain=domain)
    driver.now = 5
    mine, empty = driver.index.list_domains(driver.now)
    assert mine.id == domain and mine.record == record and mine.idle_s == 3
    assert mine.clients == (("prefill-0:scheduler", 3.0), ("decode-0:worker", 4.0))
    assert mine.checkpoints == 2 and mine.objects == 4
    assert mine.kinds == {CheckpointKind.DECODE_END: 1, CheckpointKind.INPUT_END: 2}
    assert mine.object_bytes == 2 * 256 + 2 * STATE_BYTES
    assert empty.clients == () and empty.checkpoints == empty.object_bytes == 0


@given(st.lists(st.text(max_size=300), max_size=CLIENTS_MAX + 20))
def test_client_names_are_bounded(names: list[str]) -> None:
    driver = Driver()
    record = make_record("m", driver.layout)
    for name in names:
        driver.index.open_domain(record, 0.0, name)
    driver.index.check()
    (info,) = driver.index.list_domains(0.0)
    assert all(len(client.name.encode()) <= 256 for client in info.clients)


def test_recent_events_are_bounded_and_repeats_only_count() -> None:
    driver = Driver(capacity_bytes=2 * STATE_BYTES)
    driver.publish("a")
    driver.publish("b")
    for _ in range(3):
        driver.lookup("a", lease_s=0)
    newest, evicted = driver.index.checkpoints.recent.newest_first()
    assert (newest.what, newest.reason, newest.times) == ("not consumable", "evicted", 3)
    assert (evicted.what, evicted.reason, evicted.boundary) == ("evicted", "capacity", GRID)
    for number in range(EVENTS_MAX * 2):
        driver.publish("ab"[number % 2])
        driver.lookup("ba"[number % 2], lease_s=0)
    assert len(driver.index.checkpoints.recent.newest_first()) == EVENTS_MAX


def test_lookups_that_matched_and_leases_that_were_read_are_counted() -> None:
    driver = Driver()
    driver.publish("ab")
    lease = driver.lookup("ab").lease
    driver.lookup("zz")
    assert lease is not None
    for _ in range(2):
        driver.index.locate(lease, keys_of(driver.layout, "ab"), driver.now)
    counters = driver.index.stats().counters
    assert (counters["lookups"], counters["lookups_matched"], counters["hits"]) == (2, 1, 1)
    assert counters["leases_read"] == 1
