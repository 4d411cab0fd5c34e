"""What an engine owes a store that does not answer, and what a slow answer may cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from backhaul.connector import catalog as module
from backhaul.connector.catalog import Catalog
from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointMatch,
    DomainId,
    LeaseId,
    Reason,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import (
    LookupUnanswered,
    StoreError,
    StoreRejected,
    StoreUnavailable,
)
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout
from backhaul.protocols.options import Options
from backhaul.protocols.sharding import Part, Rows
from backhaul.transfer.backends.rpc import StoreTimeout
from backhaul.transfer.base import LookupResult, Store


class StandingStore:
    """Takes releases; the first ones fail with the errors given."""

    def __init__(self, errors: list[StoreError]) -> None:
        self.errors = errors
        self.calls = 0
        self.asked: list[LeaseId] = []
        self.released: list[LeaseId] = []

    def release(self, leases: list[LeaseId], *, timeout_s: float) -> None:
        self.calls += 1
        self.asked += leases
        if self.errors:
            raise self.errors.pop(0)
        self.released += leases


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPEAT_S", 0.01)


@pytest.fixture
def made() -> Iterator[list[Catalog]]:
    catalogs: list[Catalog] = []
    yield catalogs
    for catalog in catalogs:
        catalog.close()


def make(made: list[Catalog], errors: list[StoreError], clock: Clock) -> tuple[Catalog, Any]:
    store = StandingStore(errors)
    domain = cast(DomainRecord, type("Domain", (), {"domain_id": "d"}))
    made.append(Catalog(cast(Store, store), domain, Options(store="backhaul://x:1"), clock))
    return made[-1], store


def comes_to(store: StandingStore, calls: int) -> bool:
    """Whether there are that many, and no more in a while."""
    while store.calls < calls:
        time.sleep(0.001)
    time.sleep(0.1)
    return store.calls == calls


def test_a_release_is_repeated_until_the_store_answers(made: list[Catalog]) -> None:
    errors: list[StoreError] = [StoreTimeout("hung"), StoreUnavailable("gone"), StoreTimeout("x")]
    catalog, store = make(made, errors, Clock())
    for number in range(3):
        catalog.release(LeaseId(str(number)))
    assert comes_to(store, 6)
    assert sorted(store.released) == ["0", "1", "2"], "each arrives once"


def test_a_store_that_stands_still_is_tried_with_one_release_at_a_time(
    made: list[Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes its whole time limit, on the threads that lookups need."""
    monkeypatch.setattr(module, "_REPEAT_S", 3600)
    errors: list[StoreError] = [StoreTimeout("hung") for _ in range(13)]
    catalog, store = make(made, errors, Clock())
    for number in range(10):
        catalog.release(LeaseId(str(number)))
    for calls in (10, 11, 12, 13):
        while store.calls < calls or len(catalog._owed) < 10:
            time.sleep(0.001)
        catalog._give_back_owed()
    assert comes_to(store, 23)
    assert len(set(store.asked[:10])) == 10 and len(set(store.asked[10:14])) == 1
    assert sorted(store.released) == sorted(map(str, range(10)))


def test_a_release_is_given_up_when_the_lease_has_run_out(made: list[Catalog]) -> None:
    clock = Clock()

    class Hung(list[StoreError]):
        def __bool__(self) -> bool:
            return True

        def pop(self, index: Any = -1) -> StoreError:
            clock.now += 10.0
            return StoreTimeout("hung")

    catalog, store = make(made, Hung(), clock)
    catalog.release(LeaseId("a"))
    assert comes_to(store, 3), "lease_s is 30"
    assert not store.released


def test_a_refusal_is_final(made: list[Catalog]) -> None:
    catalog, store = make(made, [StoreRejected("no")], Clock())
    catalog.release(LeaseId("a"))
    assert comes_to(store, 1)


def test_nothing_is_repeated_after_the_end(made: list[Catalog]) -> None:
    catalog, store = make(made, [StoreTimeout("hung")] * 1000, Clock())
    catalog.release(LeaseId("a"))
    while not store.calls:
        time.sleep(0.001)
    catalog.close()
    calls = store.calls
    time.sleep(0.2)
    assert store.calls <= calls + 1, "one may have been under way"


class TwoDomains:
    """Answers for its own domain at once; about another one it takes as long as it is told to."""

    def __init__(self, own: LookupResult) -> None:
        self.own = own
        self.hang, self.asked = threading.Event(), threading.Event()
        self.timeouts: list[float] = []
        self.released: list[LeaseId] = []

    def open_domain(self, record: DomainRecord, *, timeout_s: float) -> DomainId:
        return record.domain_id

    def lookup(self, domain: DomainId, hashes: Any, **more: Any) -> LookupResult:
        if not more.get("follow_up"):
            return self.own
        self.timeouts.append(more["timeout_s"])
        self.asked.set()
        self.hang.wait(300)
        return LookupResult(matches=(match(3, consumable=True),), lease=LeaseId("theirs"))

    def domain_record(self, domain: DomainId, *, timeout_s: float) -> DomainRecord:
        self.timeouts.append(timeout_s)
        return make_record(2)

    def release(self, leases: list[LeaseId], *, timeout_s: float) -> None:
        self.released += leases


def make_record(ranks: int) -> DomainRecord:
    group = GroupLayout(
        index=0, kind=GroupKind.FULL, block_tokens=16, page=(Rows(1, (Part(2, 8),)),),
        page_bytes=16 // ranks,
    )  # fmt: skip
    return DomainRecord(
        model="m", weights="w", hash_function="sha256", hash_probe="00", kv_dtype="bfloat16",
        layout=CacheLayout(groups=(group,), hash_tokens=16, ranks=ranks), platform="cpu",
        tensor_parallel=ranks, vllm="0.32",
    )  # fmt: skip


def match(blocks: int, *, consumable: bool) -> CheckpointMatch:
    return CheckpointMatch(
        boundary=16 * blocks, kinds=(CheckpointKind.DECODE_END,), consumable=consumable,
        reason=None if consumable else Reason.DOMAIN_MISMATCH,
        domain=DomainId("") if consumable else make_record(2).domain_id,
    )  # fmt: skip


@pytest.mark.parametrize("own", [True, False])
def test_one_s_own_answer_survives_another_domain_that_is_slow(
    made: list[Catalog], own: bool
) -> None:
    matches = (match(3, consumable=False), *((match(1, consumable=True),) if own else ()))
    lease = LeaseId("ours") if own else None
    store, clock = TwoDomains(LookupResult(matches=matches, lease=lease)), Clock()
    options = Options(store="backhaul://x:1")
    catalog = Catalog(cast(Store, store), make_record(1), options, clock)
    made.append(catalog)
    catalog.start("r", [b"a", b"b", b"c"])
    assert store.asked.wait(300)
    assert catalog.poll("r") is None
    clock.now = options.lookup_timeout_s + options.publication_wait_s
    answer = catalog.poll("r")
    assert answer is not None and answer.foreign is None and answer.reason is None
    assert [m.boundary for m in answer.result.matches if m.consumable] == [16] * own
    assert catalog.poll("r") is answer
    store.hang.set()
    while catalog.open_leases != own or store.released != ["theirs"]:
        time.sleep(0.001)
    if own:
        assert catalog.take("r") == "ours"


def test_other_domains_get_what_is_left_of_a_lookup_s_time(made: list[Catalog]) -> None:
    store, clock = TwoDomains(LookupResult(matches=(match(3, consumable=False),))), Clock()
    store.hang.set()
    options = Options(store="backhaul://x:1", lookup_timeout_s=50, publication_wait_s=10)
    catalog = Catalog(cast(Store, store), make_record(1), options, clock)
    made.append(catalog)
    asked = store.lookup

    def slow(domain: DomainId, hashes: Any, **more: Any) -> LookupResult:
        clock.now += 0 if more.get("follow_up") else 59.0
        return asked(domain, hashes, **more)

    store.lookup = slow  # type: ignore[method-assign]
    catalog.start("r", [b"a"])
    while catalog.poll("r") is None:
        time.sleep(0.001)
    assert store.timeouts and all(left < 1.0 for left in store.timeouts)


def in_two_domains(made: list[Catalog]) -> tuple[Catalog, TwoDomains]:
    """One's own checkpoint and a deeper one elsewhere; the lookup of "r" has begun."""
    matches = (match(3, consumable=False), match(1, consumable=True))
    store = TwoDomains(LookupResult(matches=matches, lease=LeaseId("ours")))
    options = Options(store="backhaul://x:1", lookup_timeout_s=3600)
    made.append(Catalog(cast(Store, store), make_record(1), options, Clock()))
    made[-1].start("r", [b"a", b"b", b"c"])
    return made[-1], store


@pytest.mark.parametrize("foreign", [False, True])
def test_a_load_keeps_the_lease_of_the_domain_that_it_reads(
    made: list[Catalog], foreign: bool
) -> None:
    catalog, store = in_two_domains(made)
    store.hang.set()
    while (answer := catalog.poll("r")) is None:
        time.sleep(0.001)
    assert len(answer.leases) == catalog.open_leases == 2
    kept, other = ("theirs", "ours") if foreign else ("ours", "theirs")
    assert catalog.take("r", foreign=foreign) == kept
    while store.released != [other]:
        time.sleep(0.001)
    assert catalog.open_leases == 1


def test_a_lookup_that_nobody_waits_for_gives_back_whatever_it_is_granted(
    made: list[Catalog],
) -> None:
    catalog, store = in_two_domains(made)
    assert store.asked.wait(60)
    catalog.drop("r")
    store.hang.set()
    while sorted(store.released) != ["ours", "theirs"]:
        time.sleep(0.001)
    assert not catalog.open_leases and not catalog.started("r")


def test_an_answer_is_good_for_half_its_lease_from_when_it_was_asked_for(
    made: list[Catalog],
) -> None:
    """The other half is left for the load that follows."""
    found = LookupResult(matches=(match(3, consumable=True),), lease=LeaseId("ours"))
    store, clock = TwoDomains(found), Clock()
    options = Options(store="backhaul://x:1", lookup_timeout_s=50, lease_s=30)
    catalog = Catalog(cast(Store, store), make_record(2), options, clock)
    made.append(catalog)
    asked = store.lookup

    def slow(domain: DomainId, hashes: Any, **more: Any) -> LookupResult:
        clock.now += 3.0
        return asked(domain, hashes, **more)

    store.lookup = slow  # type: ignore[method-assign]
    clock.now = 100.0
    catalog.start("r", [b"a", b"b", b"c"])
    while (answer := catalog.poll("r")) is None:
        time.sleep(0.001)
    assert clock.now == 103.0 and answer.expires == 115.0


@pytest.mark.parametrize("foreign", [False, True])
def test_what_a_lookup_without_an_answer_may_have_been_granted_is_given_back(
    made: list[Catalog], foreign: bool
) -> None:
    """The store granted it in time, but the engine stood still and heard of it too late."""

    class Unheard(TwoDomains):
        def lookup(self, domain: DomainId, hashes: Any, **more: Any) -> LookupResult:
            if bool(more.get("follow_up")) is foreign:
                raise LookupUnanswered("too late", "i.unheard")
            return super().lookup(domain, hashes, **more)

        def release(self, leases: list[LeaseId], *, timeout_s: float) -> None:
            if not self.asked.is_set():
                self.asked.set()
                raise StoreTimeout("still hung")
            super().release(leases, timeout_s=timeout_s)

    store = Unheard(LookupResult(matches=(match(3, consumable=False),)))
    catalog = Catalog(cast(Store, store), make_record(1), Options(store="backhaul://x:1"), Clock())
    made.append(catalog)
    catalog.start("r", [b"a", b"b", b"c"])
    while (answer := catalog.poll("r")) is None or not store.released:
        time.sleep(0.001)
    assert answer.reason is (None if foreign else Reason.UNREACHABLE) and not answer.leases
    assert store.released == ["i.unheard"] and catalog.open_leases == 0
