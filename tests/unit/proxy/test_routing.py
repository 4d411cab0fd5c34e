"""Choice of workers: rules that hold for every set of workers and every request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.proxy.routing import Candidate, preference, sticky_key
from backhaul.proxy.settings import Policy

NAMES = st.lists(st.sampled_from([f"http://w{i}" for i in range(12)]), min_size=1, unique=True)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    return [Candidate(name, draw(st.integers(0, 20)), draw(st.booleans())) for name in draw(NAMES)]


TEXT = st.text("ab\u00e9\ud800", max_size=4)  # a lone surrogate: JSON can carry it
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.sampled_from(Policy), candidates(), st.binary(), st.integers(0, 10**9))
def test_all_workers_are_ranked_the_healthy_ones_first(
    policy: Policy, workers: list[Candidate], key: bytes, turn: int
) -> None:
    order = preference(policy, workers, key=key, turn=turn)
    assert sorted(order) == sorted(w.name for w in workers)
    healthy = {w.name: w.healthy for w in workers}
    flags = [healthy[name] for name in order]
    assert flags == sorted(flags, reverse=True)


@given(candidates(), st.integers(0, 1000), st.integers(1, 4))
def test_round_robin_is_even_over_the_healthy(
    workers: list[Candidate], start: int, rounds: int
) -> None:
    group = [w for w in workers if w.healthy] or workers
    firsts = Counter(
        preference(Policy.ROUND_ROBIN, workers, key=b"", turn=start + i)[0]
        for i in range(rounds * len(group))
    )
    assert firsts == {w.name: rounds for w in group}


@given(candidates(), st.integers(0, 1000))
def test_least_loaded_takes_the_least_loaded(workers: list[Candidate], turn: int) -> None:
    first = preference(Policy.LEAST_LOADED, workers, key=b"", turn=turn)[0]
    group = [w for w in workers if w.healthy] or workers
    load = {w.name: w.in_flight for w in group}
    assert load[first] == min(load.values())


def test_least_loaded_breaks_ties_in_turn() -> None:
    workers = [Candidate("a"), Candidate("b"), Candidate("c", 1)]
    firsts = [preference(Policy.LEAST_LOADED, workers, key=b"", turn=i)[0] for i in range(4)]
    assert firsts == ["a", "b", "a", "b"]


def _first(names: list[str], key: bytes) -> str:
    workers = [Candidate(name) for name in names]
    return preference(Policy.PREFIX_STICKY, workers, key=key, turn=0)[0]


@given(NAMES, st.binary(), st.randoms(use_true_random=False))
def test_sticky_does_not_depend_on_the_order_of_workers(
    names: list[str], key: bytes, random: Any
) -> None:
    shuffled = list(names)
    random.shuffle(shuffled)
    assert _first(names, key) == _first(shuffled, key)


@given(NAMES, st.binary())
def test_a_new_worker_only_takes_and_a_lost_one_only_gives(names: list[str], key: bytes) -> None:
    before = _first(names, key)
    assert _first([*names, "http://new"], key) in (before, "http://new")
    for lost in names:
        left = [name for name in names if name != lost]
        if left and lost != before:
            assert _first(left, key) == before


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_a_new_worker_takes_about_its_share(count: int) -> None:
    names = [f"http://w{i}" for i in range(count)]
    keys = [str(i).encode() for i in range(4000)]
    moved = sum(_first(names, key) != _first([*names, "http://new"], key) for key in keys)
    share = len(keys) / (count + 1)
    assert 0.8 * share < moved < 1.2 * share


@given(candidates(), st.binary())
def test_sticky_passes_over_a_worker_that_is_far_above_the_mean(
    workers: list[Candidate], key: bytes
) -> None:
    healthy = [w for w in workers if w.healthy]
    first = preference(Policy.PREFIX_STICKY, workers, key=key, turn=0)[0]
    if healthy:
        load = {w.name: w.in_flight for w in healthy}
        mean = (sum(load.values()) + 1) / len(load)
        assert load[first] <= 1.25 * mean


@given(st.dictionaries(st.sampled_from(
    ["model", "messages", "input", "instructions", "prompt", "session_id"]), JSON))  # fmt: skip
def test_a_key_is_made_of_anything(body: dict[str, Any]) -> None:
    assert sticky_key(body) == sticky_key(dict(body))


MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "second"},
]


@pytest.mark.parametrize("field", ["messages", "input"])
def test_the_turns_of_a_conversation_share_a_key(field: str) -> None:
    assert sticky_key({field: MESSAGES[:2]}) == sticky_key({field: MESSAGES})
    other = [*MESSAGES[:1], {"role": "user", "content": "another"}]
    assert sticky_key({field: MESSAGES}) != sticky_key({field: other})
    assert sticky_key({field: MESSAGES}) != sticky_key({field: MESSAGES, "model": "m"})


@pytest.mark.parametrize("prompt", ["x" * 5000, list(range(900)), [list(range(900))]])
def test_a_prompt_that_grows_keeps_its_key(prompt: Any) -> None:
    longer = [[*prompt[0], 1]] if isinstance(prompt[0], list) else prompt + prompt[:1]
    assert sticky_key({"prompt": prompt}) == sticky_key({"prompt": longer})


def test_a_session_is_the_key_where_there_is_one() -> None:
    assert sticky_key({"messages": MESSAGES}, "s") == sticky_key({"prompt": "p"}, "s")
    assert sticky_key({"session_id": "s"}) == sticky_key({}, "s")
