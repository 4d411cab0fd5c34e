"""What is run in which order, and how a trace's content becomes what an engine said."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.benchmarks.reuse import run as real_run
from backhaul.benchmarks.reuse.contents import Contents
from backhaul.benchmarks.reuse.matrix import (
    Matrix,
    StoreBudget,
    left_to_do,
    planned,
)
from backhaul.benchmarks.reuse.real import arm_result, store_settings
from backhaul.benchmarks.reuse.record import (
    NO_POLICY,
    RESULTS,
    Arm,
    ArmResult,
    Budget,
    KindResult,
    RequestResult,
    Result,
    read_results,
)
from backhaul.benchmarks.reuse.run import Settings, keep_to_settings, results_file, run_arms
from backhaul.benchmarks.reuse.trace import Span, Turn
from backhaul.benchmarks.reuse.waves import waves
from backhaul.benchmarks.reuse.workloads import Sizes, workload
from backhaul.deploy.bench_command import POLICIES, parse_budget
from backhaul.deploy.console import Console
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.options import Options, Policy
from backhaul.transfer.daemon.settings import parse_byte_rate, parse_bytes

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


def _lines(arm: Arm, turns: Sequence[Turn]) -> list[Result]:
    requests = [
        RequestResult(arm=arm, request=one.request, prompt_tokens=one.prompt_tokens)
        for one in turns
    ]
    return [*requests, ArmResult(arm=arm, seconds=1.0, requests=len(requests))]


def test_a_run_that_was_cut_off_goes_on_and_ends_with_every_arm_once(tmp_path: Path) -> None:
    sizes = Sizes(conversations=1, turns=2)
    arms = planned(MATRIX)[:5]
    ran: list[Arm] = []

    def run(arm: Arm, turns: Sequence[Turn]) -> list[Result]:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(arm)
        return _lines(arm, turns)

    console = Console(file=io.StringIO())
    folder = tmp_path / "new" / "folder"
    path = folder / RESULTS
    with results_file(folder) as file, pytest.raises(KeyboardInterrupt):
        run_arms(console, arms, sizes, file, run)
    with path.open("ab") as file:
        file.write(b'{"type":"arm","ve')  # as a killed process leaves it
    with results_file(folder) as file:
        left = left_to_do(arms, read_results(path))
        assert left == arms[2:]
        run_arms(console, left, sizes, file, _lines)
    results = list(read_results(path))
    assert [one.arm for one in results if isinstance(one, ArmResult)] == arms
    assert {one.arm for one in results} == set(arms)
    for arm in arms:
        turns = workload(arm.workload, sizes, seed=arm.repeat)
        asked = [r.request for r in results if isinstance(r, RequestResult) and r.arm == arm]
        assert asked == [one.request for one in turns], "arms of one repeat replay the same turns"


def test_repeats_and_seeds_draw_other_turns(tmp_path: Path) -> None:
    arms = [arm for arm in planned(MATRIX) if arm.workload == "branching"][::6]
    assert [arm.repeat for arm in arms] == [0, 0, 1, 1, 2, 2]
    asked: dict[int, list[list[Turn]]] = {}
    for seed in (0, 10):
        seen = asked.setdefault(seed, [])

        def run(arm: Arm, turns: Sequence[Turn], seen: list[list[Turn]] = seen) -> list[Result]:
            seen.append(list(turns))
            return _lines(arm, turns)

        console = Console(file=io.StringIO())
        with results_file(tmp_path / str(seed)) as file:
            run_arms(console, arms, Sizes(conversations=1, turns=1), file, run, seed=seed)
    drawn = [turns for seen in asked.values() for turns in seen]
    assert drawn[0::2] == drawn[1::2], "arms of one repeat replay the same turns"
    assert all(a != b for i, a in enumerate(drawn[::2]) for b in drawn[::2][:i])


def test_publications_of_real_arms_come_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an admission budget would weigh the first streamed block and let in the rest unasked."""
    given: list[Options] = []

    def pair(*_: object, options: dict[str, object], **__: object) -> None:
        given.append(msgspec.convert({"store": "x", **options}, Options))
        raise KeyboardInterrupt

    monkeypatch.setattr(real_run, "Pair", pair)
    monkeypatch.setattr(real_run, "build_tiny_model", lambda path: path)
    with pytest.raises(KeyboardInterrupt):
        real_run.run_matrix(
            Console(file=io.StringIO()),
            MATRIX,
            Sizes(),
            directory=tmp_path / "results",
            cache_dir=tmp_path,
            concurrency=2,
        )
    assert [options.stream_ahead for options in given] == [False]


def test_every_policy_is_compared_unless_some_are_named() -> None:
    assert set(POLICIES) == {NO_POLICY, *Policy}


def test_a_directory_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with (
        pytest.raises(ConfigError, match=r"results\.jsonl cannot be written"),
        results_file(taken),
    ):
        pass


def test_results_of_other_sizes_are_not_mixed(tmp_path: Path) -> None:
    settings = Settings(sizes=Sizes(), concurrency=2)
    keep_to_settings(tmp_path, settings)
    keep_to_settings(tmp_path, settings)
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]
    for other, name in (
        (Settings(sizes=Sizes(user=7), concurrency=2), "user 200, this run has 7"),
        (Settings(sizes=Sizes(), concurrency=3), "concurrency 2, this run has 3"),
        (Settings(sizes=Sizes(), concurrency=2, seed=9), "seed 0, this run has 9"),
    ):
        with pytest.raises(ConfigError, match=name):
            keep_to_settings(tmp_path, other)
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match=r"settings\.json cannot be read"):
        keep_to_settings(tmp_path, settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unlimited", StoreBudget(budget=Budget.UNLIMITED)),
        ("capacity=8MiB", StoreBudget(budget=Budget.CAPACITY, bytes=8 << 20)),
        ("admitted=64KiB", StoreBudget(budget=Budget.ADMITTED, bytes=64 << 10)),
    ],
)
def test_budgets_are_read(text: str, expected: StoreBudget) -> None:
    assert parse_budget(text, "lru") == expected


@pytest.mark.parametrize(
    "text", ["", "capacity", "unlimited=1", "capacity=", "capacity=-1", "capacity=1KiB", "x=1MiB"]
)
def test_unreadable_budgets_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_budget(text, "lru")
    assert "\n" not in str(error.value)
    assert "give" in str(error.value) or "write" in str(error.value)


def test_a_store_gets_what_its_arm_allows() -> None:
    arm = planned(MATRIX)[0]
    arm = msgspec.structs.replace(arm, eviction="marconi", budget_bytes=1 << 20)
    settings = {
        budget: store_settings(msgspec.structs.replace(arm, budget=budget)) for budget in Budget
    }
    evicts = "--eviction=marconi"
    assert settings == {
        Budget.UNLIMITED: {"capacity": "1GiB", "args": [evicts]},
        Budget.CAPACITY: {"capacity": "1048576", "args": [evicts]},
        Budget.ADMITTED: {
            "capacity": "1GiB",
            # What 1,000 tokens earn, per token; what 2,000 earn at once.
            "args": [
                *(evicts, "--admission=budget"),
                *("--admit-per-token=1048.576", "--admit-burst=2097152"),
            ],
        },
    }


@given(st.integers(1000, 1 << 50))
def test_a_budget_is_admitted_to_the_byte(nbytes: int) -> None:
    arm = msgspec.structs.replace(planned(MATRIX)[0], budget=Budget.ADMITTED, budget_bytes=nbytes)
    args = dict(arg.removeprefix("--").split("=") for arg in store_settings(arm)["args"])
    assert round(parse_byte_rate(args["admit-per-token"]) * 1000) == nbytes
    assert parse_bytes(args["admit-burst"]) == 2 * nbytes


def test_an_arm_s_line_is_the_books_of_store_and_engines() -> None:
    arm = planned(MATRIX)[0]
    books = {
        "backhaul:store_logical_ends_total{kind=decode_end}": 5.0,
        "backhaul:store_duplicate_ends_total{kind=decode_end}": 2.0,
        # Engines published a checkpoint for both of its ends, and another one twice.
        "backhaul:checkpoints_published_total{kind=decode_end}": 4.0,
        "backhaul:checkpoints_published_total{kind=input_end}": 1.0,
        "backhaul:published_state_bytes_total{kind=decode_end}": 400.0,
        "backhaul:published_state_bytes_total{kind=input_end}": 100.0,
        "backhaul:store_retained_checkpoints{kind=decode_end}": 2.0,
        "backhaul:store_retained_state_bytes{kind=decode_end}": 200.0,
        "backhaul:store_evicted_checkpoints_total{kind=decode_end}": 1.0,
        "backhaul:store_evicted_state_bytes_total{kind=decode_end}": 100.0,
        "backhaul:store_evictions_total{reason=capacity}": 2.0,
        "backhaul:store_evicted_age_seconds_sum{kind=decode_end}": 3.0,
        "backhaul:store_evicted_age_seconds_sum{kind=input_end}": 5.0,
        "backhaul:store_checkpoints_hit_total": 4.0,
        "backhaul:publication_failures_total{reason=store_full}": 1.0,
        "backhaul:publication_failures_total{reason=over_budget}": 2.0,
        "backhaul:publication_failures_total{reason=timeout}": 7.0,
        "backhaul:publish_bytes_total": 1000.0,
        "backhaul:load_bytes_total": 2000.0,
    }
    result = arm_result(
        arm, requests=9, seconds=2.0, residents=1.5, peak_used_bytes=77, books=books
    )
    assert result == ArmResult(
        arm=arm,
        seconds=2.0,
        requests=9,
        kinds={
            CheckpointKind.DECODE_END: KindResult(
                logical=5, duplicates=2, created=3, state_bytes=300, evicted=1,
                evicted_state_bytes=100,
            )
        },
        checkpoints_hit=4,
        refused=3,
        published_bytes=1000,
        loaded_bytes=2000,
        peak_used_bytes=77,
        lifetime_s=4.0,
        residents=1.5,
    )  # fmt: skip
