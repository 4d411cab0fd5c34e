"""An admission budget: so many bytes per token of traffic, whatever the pool would hold."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_kit import ATTENTION_BYTES, GRID, STATE_BYTES, Driver, chain, keys_of

from backhaul.protocols import store_pb2
from backhaul.protocols.checkpoint import Reason
from backhaul.protocols.errors import ConfigError
from backhaul.transfer.admission import AdmitAll, AdmittedBytesBudget
from backhaul.transfer.backends import wire
from backhaul.transfer.base import Grant, GrantStatus
from backhaul.transfer.daemon import catalog
from backhaul.transfer.strategies import Admission, Eviction, Strategies

ONE = ATTENTION_BYTES + STATE_BYTES


def statuses(grants: list[Grant]) -> list[GrantStatus]:
    return [grant.status for grant in grants]


@given(
    st.floats(0.1, 1000),
    st.integers(1, 10_000),
    st.lists(st.tuples(st.sampled_from(["credit", "publish"]), st.integers(1, 5000))),
)
def test_what_is_admitted_was_earned(
    rate: float, burst: int, events: list[tuple[str, int]]
) -> None:
    """One publication at a time, in one piece: debt is left only by one above the bucket's size."""
    budget = AdmittedBytesBudget(rate, burst)
    tokens = admitted = 0
    for event, amount in events:
        if event == "credit":
            budget.credit(amount)
            tokens += amount
        elif budget.admits(amount):
            budget.charge(amount)
            admitted += amount
            assert amount <= burst or budget.balance + amount == burst
        assert budget.balance <= burst
        assert admitted <= (burst + rate * tokens + max(-budget.balance, 0)) * (1 + 1e-9)


def test_traffic_that_nobody_used_is_kept_up_to_the_burst() -> None:
    budget = AdmittedBytesBudget(10.0, 100)
    budget.charge(100)
    budget.credit(5)
    assert budget.admits(50) and not budget.admits(51)
    budget.credit(1000)
    assert budget.balance == 100


def test_a_request_that_asks_again_is_no_further_traffic() -> None:
    budget = AdmittedBytesBudget(1.0, 1000)
    budget.charge(1000)
    driver = Driver(admission=budget)
    daemon = catalog.Catalog(driver.index, cast(Any, None), lambda: driver.now)
    for repeat in (False, True, True):
        request = store_pb2.LookupRequest(
            domain_id=driver.domain, boundary_hashes=chain("abc"), repeat=repeat
        )
        asyncio.run(daemon.Lookup(request, None))
    assert budget.balance == 3 * GRID
    assert driver.index.counters["lookups"] == 3


def test_lookups_earn_and_publications_spend() -> None:
    driver = Driver(admission=AdmittedBytesBudget(ONE / GRID, ONE))
    assert driver.publish("a").visible
    refused = driver.reserve("p", keys_of(driver.layout, "b"))
    assert set(statuses(refused)) == {GrantStatus.OVER_BUDGET}
    counters = driver.index.stats().counters
    assert counters["over_budget_objects"] == 2 and counters["full_objects"] == 0
    (event,) = driver.index.checkpoints.recent.newest_first()
    assert (event.what, event.reason) == ("refused", Reason.OVER_BUDGET)
    driver.lookup("x")  # a prompt of one block earns one checkpoint of one block
    assert driver.publish("b").visible


def test_every_answer_crosses_the_wire() -> None:
    sent = {status: catalog.GRANT_STATUS[status] for status in GrantStatus}
    received = [wire.GRANT_STATUS[value] for value in sent.values()]
    assert received == list(GrantStatus)


def test_nothing_is_evicted_for_what_is_not_admitted() -> None:
    driver = Driver(ONE, admission=AdmittedBytesBudget(1.0, ONE))
    driver.publish("a")
    driver.reserve("p", keys_of(driver.layout, "b"))
    assert driver.consumable("a") == [1]
    assert driver.index.stats().counters["evictions_capacity"] == 0


def test_what_is_there_costs_nothing() -> None:
    budget = AdmittedBytesBudget(1.0, ONE)
    driver = Driver(admission=budget)
    driver.publish("a")
    assert budget.balance == 0
    grants = driver.reserve("p", keys_of(driver.layout, "a"))
    assert set(statuses(grants)) == {GrantStatus.PRESENT}
    # A longer prefix shares what is there and is refused what is not.
    grants = driver.reserve("q", keys_of(driver.layout, "ab"))
    assert statuses(grants) == [
        GrantStatus.PRESENT, GrantStatus.OVER_BUDGET, GrantStatus.OVER_BUDGET,
    ]  # fmt: skip
    driver.index.check()


def test_a_publication_that_was_let_in_may_finish() -> None:
    """The second rank, and the state after streamed attention, are charged and not refused."""
    budget = AdmittedBytesBudget(1.0, ONE)
    driver = Driver(ranks=2, admission=budget)
    assert driver.publish("a").visible
    assert budget.balance == -ONE
    grants = driver.reserve("p", keys_of(driver.layout, "b"))
    assert set(statuses(grants)) == {GrantStatus.OVER_BUDGET}, "until the debt is earned back"


def test_what_was_never_committed_is_given_back() -> None:
    budget = AdmittedBytesBudget(1.0, 2 * ONE)
    driver = Driver(admission=budget)
    driver.reserve("p", keys_of(driver.layout, "a"))
    assert budget.balance == ONE
    driver.abandon("p")
    assert budget.balance == 2 * ONE
    driver.reserve("p", keys_of(driver.layout, "a"))
    driver.now = 1000.0
    driver.index.expire(driver.now)
    assert budget.balance == 2 * ONE


def test_an_object_wanted_twice_is_counted_once() -> None:
    driver = Driver(admission=AdmittedBytesBudget(1.0, ONE))
    keys = keys_of(driver.layout, "a")
    assert set(statuses(driver.reserve("p", [*keys, *keys]))) == {GrantStatus.GRANTED}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"marconi_alpha": -1.0}, ["--marconi-alpha", "-1"]),
        ({"marconi_alpha": float("nan")}, ["--marconi-alpha", "nan"]),
        ({"admit_bytes_per_token": float("inf")}, ["--admit-per-token", "inf"]),
        ({"admit_burst_bytes": 0}, ["--admit-burst", "0"]),
        ({"admission": Admission.BUDGET}, ["--admit-per-token", "0", "give"]),
    ],
)
def test_numbers_that_make_no_sense_are_refused(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Strategies(**values)
    assert all(part in str(error.value) for part in parts) and "\n" not in str(error.value)


def test_strategies_are_made_by_name() -> None:
    made = {eviction: Strategies(eviction=eviction).make_eviction() for eviction in Eviction}
    assert len({type(strategy) for strategy in made.values()}) == len(Eviction)
    assert isinstance(Strategies().make_admission(), AdmitAll)
    chosen = Strategies(admission=Admission.BUDGET, admit_bytes_per_token=2.0)
    assert chosen.make_admission() is not chosen.make_admission(), "balances are not shared"
