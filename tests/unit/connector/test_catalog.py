"""What an engine owes a store that does not answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from backhaul.connector import catalog as module
from backhaul.connector.catalog import Catalog
from backhaul.protocols.checkpoint import LeaseId
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreError, StoreRejected, StoreUnavailable
from backhaul.protocols.options import Options
from backhaul.transfer.backends.rpc import StoreTimeout
from backhaul.transfer.base import Store


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


def settled(store: StandingStore) -> int:
    """Calls so far, once none has come for a while."""
    before = -1
    while before != store.calls:
        before = store.calls
        time.sleep(0.2)
    return before


def test_a_release_is_repeated_until_the_store_answers(made: list[Catalog]) -> None:
    errors: list[StoreError] = [StoreTimeout("hung"), StoreUnavailable("gone"), StoreTimeout("x")]
    catalog, store = make(made, errors, Clock())
    for number in range(3):
        catalog.release(LeaseId(str(number)))
    assert settled(store) == 6
    assert sorted(store.released) == ["0", "1", "2"], "each arrives once"


def test_a_store_that_stands_still_is_tried_with_one_release_at_a_time(
    made: list[Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes its whole time limit, on the threads that lookups need."""
    monkeypatch.setattr(module, "_REPEAT_S", 0.1)
    errors: list[StoreError] = [StoreTimeout("hung") for _ in range(13)]
    catalog, store = make(made, errors, Clock())
    for number in range(10):
        catalog.release(LeaseId(str(number)))
    assert settled(store) == 23
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
    assert settled(store) == 3, "lease_s is 30"
    assert not store.released


def test_a_refusal_is_final(made: list[Catalog]) -> None:
    catalog, store = make(made, [StoreRejected("no")], Clock())
    catalog.release(LeaseId("a"))
    assert settled(store) == 1


def test_nothing_is_repeated_after_the_end(made: list[Catalog]) -> None:
    catalog, store = make(made, [StoreTimeout("hung")], Clock())
    catalog.release(LeaseId("a"))
    while not store.calls:
        time.sleep(0.001)
    catalog.close()
    assert settled(store) <= 2
