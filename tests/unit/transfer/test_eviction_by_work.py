"""Eviction by saved work: what goes first, by numbers that can be checked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_kit import ATTENTION_BYTES, GRID, STATE_BYTES, Driver, chain

from backhaul.protocols.checkpoint import CheckpointKind, PrefillWork
from backhaul.protocols.errors import StoreRejected
from backhaul.transfer.entries import Checkpoint
from backhaul.transfer.eviction import EvictionStrategy, LeastRecentlyUsed, recency
from backhaul.transfer.eviction_by_work import (
    Marconi,
    SavedWorkPerByte,
    efficiency,
    freed_bytes,
    with_user_turns,
)
from backhaul.transfer.eviction_columns import ColumnQueue
from backhaul.transfer.eviction_queue import EvictionQueue, HeapQueue

DECODE, INPUT = CheckpointKind.DECODE_END, CheckpointKind.INPUT_END
BY_WORK = [SavedWorkPerByte(), Marconi(), Marconi(alpha=10.0)]
HISTORIES = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=5), st.booleans(), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)


def history(publications: list[tuple[str, bool, int]], work: PrefillWork) -> Driver:
    """A roomy index after publications of (tokens, user_turn, seconds until then)."""
    driver = Driver()
    for tokens, user_turn, seconds in publications:
        driver.now += seconds
        driver.publish(tokens, user_turn=user_turn, work=work)
    driver.now += 1
    return driver


def order(driver: Driver, strategy: EvictionStrategy) -> list[str]:
    """The prefixes of an index of ``a`` to ``e`` in the order of their eviction."""
    names = {chain(tokens)[-1]: tokens for tokens in driver_prefixes(driver)}
    visible = list(driver.index.checkpoints.visible)
    return [names[one.block_hash] for one in strategy.order(visible, driver.now)]


def driver_prefixes(driver: Driver) -> list[str]:
    """Every prefix that these tests publish."""
    return ["a", "ab", "abc", "abcd", "z", "zy", "zyx", "x", "w"]


def test_saved_work_counts_from_the_next_shallower_checkpoint() -> None:
    driver = Driver()
    work = PrefillWork(per_token=10.0, per_pair=1.0)
    driver.publish("a", work=work)
    driver.publish("abc", work=work)
    a, abc = driver.index.checkpoints.visible
    # 4 tokens of 10, and 1 + 2 + 3 + 4 pairs; then 8 tokens and 5 + ... + 12 pairs.
    assert a.domain.work.saved_work(0, GRID) == 40 + 10
    assert a.domain.work.saved_work(GRID, 3 * GRID) == 80 + 68
    assert freed_bytes(a) == STATE_BYTES, "its attention stays, for the other one"
    assert freed_bytes(abc) == STATE_BYTES + 2 * ATTENTION_BYTES
    assert efficiency(a) == 50 / STATE_BYTES
    assert efficiency(abc) == 148 / (STATE_BYTES + 2 * ATTENTION_BYTES)


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.builds(PrefillWork, st.floats(0, 1e12), st.floats(0, 1e9)),
)
def test_work_adds_up(first: int, second: int, third: int, work: PrefillWork) -> None:
    low, middle, high = sorted((first, second, third))
    whole = work.saved_work(low, high)
    parts = work.saved_work(low, middle) + work.saved_work(middle, high)
    assert math.isclose(parts, whole, rel_tol=1e-9)
    assert work.saved_work(low, low) == 0


def test_unknown_work_counts_tokens() -> None:
    assert PrefillWork().saved_work(100, 350) == 250


@pytest.mark.parametrize("strategy", BY_WORK)
def test_of_equally_recent_ones_the_least_efficient_goes_first(
    strategy: EvictionStrategy,
) -> None:
    driver = Driver()
    for tokens in ("abcd", "z", "ab"):
        driver.publish(tokens, work=PrefillWork(1.0, 1.0))
    driver.now = 1.0
    assert order(driver, strategy)[0] == "z"
    assert order(driver, strategy)[-1] == "abcd"


def test_saved_work_weighs_against_idleness() -> None:
    """Twice the work per byte makes up for twice the idle time, and no more."""
    driver = Driver()
    driver.publish("abc")
    driver.now = 10.0
    driver.publish("z")
    deep, short = (efficiency(one) for one in driver.index.checkpoints.visible)
    ratio = deep / short
    assert ratio > 1
    driver.now = 10.0 + 10.0 / (ratio - 1) * 1.1  # (now - 0) / (now - 10) < ratio
    assert order(driver, SavedWorkPerByte()) == ["z", "abc"]
    driver.now = 10.0 + 10.0 / (ratio - 1) * 0.9
    assert order(driver, SavedWorkPerByte()) == ["abc", "z"]


def test_marconis_alpha_weighs_work_against_recency() -> None:
    driver = Driver()
    driver.publish("abcd")  # the oldest, and the most efficient
    driver.now = 10.0
    driver.publish("z")
    driver.now = 11.0
    assert order(driver, Marconi(alpha=0.5)) == ["abcd", "z"]
    assert order(driver, Marconi(alpha=2.0)) == ["z", "abcd"]


def test_marconi_parts_last_with_what_several_extend() -> None:
    driver = Driver()
    driver.publish("a")
    driver.publish("ab")
    driver.publish("az")
    driver.now = 5.0
    driver.publish("abcd")
    last = Marconi().order(list(driver.index.checkpoints.visible), 6.0)[-1]
    assert last.block_hash == chain("a")[-1]


@given(HISTORIES, st.sampled_from([PrefillWork(), PrefillWork(1e9, 1e3)]))
def test_marconi_without_alpha_is_lru_but_for_shared_ones(
    publications: list[tuple[str, bool, int]], work: PrefillWork
) -> None:
    driver = history([(t, False, s) for t, _, s in publications], work)
    visible = list(driver.index.checkpoints.visible)
    lru = list(LeastRecentlyUsed().order(visible, driver.now))
    expected = sorted(lru, key=lambda one: len(one.children) > 1)
    assert Marconi(alpha=0.0).order(visible, driver.now) == expected


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 3)), max_size=8))
def test_where_all_are_equally_efficient_saved_work_is_lru(uses: list[tuple[str, int]]) -> None:
    driver = Driver()
    for tokens, seconds in uses:
        driver.publish(tokens)
        driver.now += seconds
    visible = list(driver.index.checkpoints.visible)
    lru = list(LeastRecentlyUsed().order(visible, driver.now))
    assert SavedWorkPerByte().order(visible, driver.now) == lru


@given(HISTORIES, st.sampled_from([*BY_WORK, LeastRecentlyUsed()]))
def test_an_order_is_a_permutation_and_changes_nothing(
    publications: list[tuple[str, bool, int]], strategy: EvictionStrategy
) -> None:
    driver = history(publications, PrefillWork(1e9, 1e3))
    visible = list(driver.index.checkpoints.visible)
    ordered = list(strategy.order(visible, driver.now))
    assert sorted(map(id, ordered)) == sorted(map(id, visible))
    assert list(strategy.order(list(reversed(visible)), driver.now)) == ordered, "ties are broken"
    assert list(strategy.order([], driver.now)) == []
    driver.index.check()


@given(HISTORIES)
def test_a_users_turn_is_worth_what_its_loop_left_behind(
    publications: list[tuple[str, bool, int]],
) -> None:
    driver = history(publications, PrefillWork(1.0, 1.0))
    worth = {one: efficiency(one) for one in driver.index.checkpoints.visible}
    raised = with_user_turns(worth)
    for one in worth:
        loop = [raised[below] for below in worth if turn_of(below) is one]
        expected = max([worth[one], *loop]) if one.user_turn else worth[one]
        assert raised[one] == expected


def turn_of(checkpoint: Checkpoint) -> Checkpoint | None:
    """The users' turn that a checkpoint which is none belongs to."""
    one = None if checkpoint.user_turn else checkpoint.parent
    while one is not None and not one.user_turn:
        one = one.parent
    return one


@given(HISTORIES, st.text("ab", min_size=1, max_size=5), st.booleans())
def test_a_use_shows_who_extends_whom(
    publications: list[tuple[str, bool, int]], tokens: str, published: bool
) -> None:
    """Whatever the order in which they came: work is saved from the next shallower one."""
    driver = history(publications, PrefillWork(1.0, 1.0))
    if published:
        driver.publish(tokens)
    else:
        driver.lookup(tokens, lease_s=0)
    known = driver.index.domains[driver.domain].checkpoints
    met = [known[name] for name in chain(tokens) if name in known]
    for parent, one in pairwise(met):
        assert one.parent is parent and one in parent.children
    if met:
        assert met[0].parent is None
    driver.index.check()


@pytest.mark.parametrize("strategy", BY_WORK)
@given(HISTORIES, st.lists(st.text("ab", min_size=1, max_size=5), max_size=6))
def test_columns_follow_who_extends_whom(
    strategy: EvictionStrategy, publications: list[tuple[str, bool, int]], uses: list[str]
) -> None:
    """The end of a user's message that came late takes over what extends it, and all of that."""
    driver = Driver(strategy=strategy)
    for tokens, user_turn, seconds in publications:
        driver.now += seconds
        driver.publish(tokens, user_turn=user_turn, work=PrefillWork(1.0, 1.0))
    for tokens in uses:
        table = driver.index.checkpoints
        waiting = table.queue.candidates(driver.now, ())
        ordered = list(waiting)
        waiting.close()
        visible = list(table.visible)
        assert len(ordered) == len(visible)
        if ordered:
            assert ordered[0] is strategy.order(visible, driver.now)[0]
        driver.now += 1
        driver.lookup(tokens, lease_s=0)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("strategy", [SavedWorkPerByte(), Marconi(), LeastRecentlyUsed()])
def test_the_end_of_the_last_users_message_outlives_the_tool_loop_after_it(
    strategy: EvictionStrategy, late: bool
) -> None:
    driver = Driver(strategy=strategy)
    if not late:
        driver.publish("a", INPUT, user_turn=True)
    for tokens in ("ab", "abc", "abcd"):
        driver.now += 1
        driver.publish(tokens, DECODE)
    driver.now += 1
    if late:
        driver.publish("a", INPUT, user_turn=True)
        driver.now += 1
        driver.lookup("abcd", lease_s=0)
        driver.now += 100
    ordered = list(strategy.order(list(driver.index.checkpoints.visible), driver.now))
    assert ordered[-1].user_turn


class Counting:
    """A strategy whose queue counts how often it looks at a checkpoint."""

    def __init__(self, inner: EvictionStrategy) -> None:
        self.inner = inner
        self.looks = 0

    def order(self, checkpoints: Sequence[Checkpoint], now: float) -> Iterable[Checkpoint]:
        return self.inner.order(checkpoints, now)

    def queue(self) -> EvictionQueue:
        def counted(rule: Callable[[Checkpoint], Any]) -> Callable[[Checkpoint], Any]:
            def look(checkpoint: Checkpoint) -> Any:
                self.looks += 1
                return rule(checkpoint)

            return look

        if isinstance(self.inner, SavedWorkPerByte | Marconi):
            return ColumnQueue(self.inner.worth, counted(efficiency), counted(recency))
        return HeapQueue(counted(recency))


@pytest.mark.parametrize("strategy", [SavedWorkPerByte(), Marconi(), LeastRecentlyUsed()])
def test_an_eviction_looks_at_few_of_many(strategy: EvictionStrategy) -> None:
    counting = Counting(strategy)
    many = 300
    driver = Driver(many * (STATE_BYTES + ATTENTION_BYTES), strategy=counting)
    names = [chr(0x4E00 + n) for n in range(2 * many)]
    for tokens in names[:many]:
        driver.publish(tokens)
        driver.now += 1
    driver.publish(names[many])  # what was added so far is looked at once
    counting.looks = 0
    for tokens in names[many + 1 :]:
        driver.lookup(tokens, lease_s=0)
        driver.publish(tokens)
        driver.now += 1
    assert driver.index.counters["evictions_capacity"] == many
    assert counting.looks < 10 * many, "of 300 each it would be 90,000"


@pytest.mark.parametrize("flops", [-1.0, 1e300, math.inf, math.nan])
def test_work_that_makes_no_sense_is_refused(flops: float) -> None:
    driver = Driver()
    for work in (PrefillWork(flops, 0.0), PrefillWork(1.0, flops)):
        with pytest.raises(StoreRejected, match="prefill work"):
            driver.publish("a", work=work)
    driver.index.check()
    assert driver.index.domains[driver.domain].work == PrefillWork()
