"""What is run in which order, and how a trace's content becomes what an engine said."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.benchmarks.reuse.contents import Contents
from backhaul.benchmarks.reuse.matrix import (
    Matrix,
    StoreBudget,
    finished_only,
    left_to_do,
    planned,
)
from backhaul.benchmarks.reuse.record import (
    Arm,
    ArmResult,
    Budget,
    PromptEndAt,
    RequestResult,
    Result,
)
from backhaul.benchmarks.reuse.trace import Span, Turn
from backhaul.benchmarks.reuse.waves import waves

MATRIX = Matrix(
    policies=("none", "main_sparse", "both"),
    budgets=(
        StoreBudget(budget=Budget.UNLIMITED),
        StoreBudget(budget=Budget.CAPACITY, bytes=1 << 20),
    ),
    workloads=("full_replay", "branching"),
    repeats=3,
)


def turn(request: str, after: str = "", arrival_s: float = 0.0) -> Turn:
    return Turn(
        request=request,
        after=after,
        arrival_s=arrival_s,
        prompt=(Span(request, 0, 5),),
        output=(Span(f"{request} says", 0, 3),),
    )


def test_every_cell_is_planned_once_in_each_repeat() -> None:
    arms = planned(MATRIX)
    assert len(set(arms)) == len(arms) == 3 * 2 * 2 * 2 * 3
    assert [arm.repeat for arm in arms] == sorted(arm.repeat for arm in arms)
    assert planned(MATRIX) == arms, "the same plan when it is continued"
    orders = {
        tuple(arm.policy for arm in arms[start : start + 3]) for start in range(0, len(arms), 3)
    }
    assert len(orders) > 2, "policies of one setting take turns in going first"
    for start in range(0, len(arms), 3):
        group = arms[start : start + 3]
        assert {arm.policy for arm in group} == set(MATRIX.policies)
        assert len({(arm.setting, arm.repeat) for arm in group}) == 1


def test_what_is_finished_is_not_run_again_and_what_was_cut_off_is() -> None:
    arms = planned(MATRIX)
    results: list[Result] = [ArmResult(arm=arm, seconds=1.0, requests=1) for arm in arms[:4]]
    results.append(RequestResult(arm=arms[0], request="r", prompt_tokens=5))
    results.append(RequestResult(arm=arms[4], request="r", prompt_tokens=5))
    assert left_to_do(arms, results) == arms[4:]
    assert {result.arm for result in finished_only(results)} == set(arms[:4])


@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_waves_hold_every_turn_after_the_one_it_follows(rng: random.Random, count: int) -> None:
    turns = [
        turn(str(n), after=str(rng.randrange(n)) if n and rng.random() < 0.7 else "", arrival_s=n)
        for n in range(count)
    ]
    rng.shuffle(turns)
    sent = waves(turns)
    depth = {one.request: number for number, wave in enumerate(sent) for one in wave}
    assert sorted(depth) == sorted(one.request for one in turns)
    for one in turns:
        assert depth[one.request] == (depth[one.after] + 1 if one.after else 0)
    for wave in sent:
        assert [one.arrival_s for one in wave] == sorted(one.arrival_s for one in wave)


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([turn("a", after="gone")], "request 'a' follows 'gone', which is not there"),
        ([turn("a", after="b"), turn("b", after="a")], "request 'a' follows itself"),
    ],
)
def test_turns_that_follow_nothing_are_refused(turns: list[Turn], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        waves(turns)


def test_what_was_generated_takes_the_place_of_the_trace_s_output() -> None:
    contents = Contents(range(97, 123))
    spoken = Turn(
        request="a",
        prompt=(Span("p", 0, 4),),
        output=(Span("thoughts", 0, 3), Span("reply", 0, 2)),
    )
    drawn = contents.ids((*spoken.prompt, *spoken.output))
    assert len(drawn) == 9 and set(drawn) <= set(range(97, 123))
    contents.generated(spoken, [1, 2, 3, 4, 5])
    assert contents.ids(spoken.prompt) == drawn[:4]
    assert contents.ids((Span("p", 2, 4), Span("reply", 0, 2), Span("thoughts", 1, 3))) == [
        *drawn[2:4], 4, 5, 2, 3,
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"generated 1 tokens, its trace has 5"):
        contents.generated(spoken, [1])


def test_arms_keep_their_prompt_end() -> None:
    assert {arm.prompt_end for arm in planned(MATRIX)} == set(PromptEndAt)
    assert all(isinstance(arm, Arm) for arm in planned(MATRIX))
