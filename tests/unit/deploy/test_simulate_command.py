"""`backhaul simulate`: results as lines, a row per arm, and errors that say what to write."""

from __future__ import annotations

import io
import statistics
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from backhaul.benchmarks.reuse.arms import (
    Finished,
    Limits,
    arm_rows,
    plan,
    run_arms,
    with_settings,
)
from backhaul.benchmarks.reuse.deployment import Deployment, range_of
from backhaul.benchmarks.reuse.figures import gather
from backhaul.benchmarks.reuse.model_shape import preset
from backhaul.benchmarks.reuse.record import (
    RUN_WITH,
    Arm,
    ArmResult,
    PromptEndAt,
    RequestResult,
    Source,
    read_results,
    write_results,
)
from backhaul.benchmarks.reuse.simulator import Experiment
from backhaul.benchmarks.reuse.workloads import Sizes, workload
from backhaul.deploy.cli import app
from backhaul.deploy.simulate_command import LineProgress
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.policy import Policy

SMALL = ["--size", "conversations=2", "--size", "turns=2", "--model", "tiny-hybrid"]


@pytest.fixture(autouse=True)
def no_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have a narrow terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


def simulate(*args: str) -> str:
    """What the command prints; raises what it raises."""
    result = CliRunner().invoke(app, ["simulate", *args], catch_exceptions=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_arm_is_run_and_written(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    printed = simulate(
        *("--workload", "full_replay", *SMALL, "--repeats", "2", "--output", str(output)),
        *("--policy", "none", "--policy", "both", "--capacity", "0", "--capacity", "64MiB"),
    )
    results = list(read_results(output))
    arms = [r for r in results if isinstance(r, ArmResult)]
    assert len(arms) == 2 * 2 * 2 * 2 == len({arm.arm for arm in arms})
    assert sum(isinstance(r, RequestResult) for r in results) == 16 * 4
    assert printed.count("both") == 4, "a row per arm, whatever the repeats"
    assert "medians of 2 repeats" in printed
    for result in results:  # the default has both, and absent means that nothing is there
        if isinstance(result, RequestResult) and result.arm.prompt_end is PromptEndAt.ABSENT:
            assert not result.local_tokens
    assert {arm.arm.prompt_end for arm in arms} == set(RUN_WITH)


def test_engines_without_backhaul_are_run_once_and_stand_in_every_setting() -> None:
    turns = workload("full_replay", Sizes(conversations=2, turns=2))
    budgets = [Limits(), Limits(capacity=1 << 30), Limits(admit_per_token=8192)]
    begun: list[Arm] = []
    ran: set[Arm] = set()

    def told(experiment: Experiment, done: int) -> None:
        if done == 0:
            begun.append(experiment.arm)
        else:
            ran.add(experiment.arm)

    arms = plan(
        "w", preset("tiny-hybrid"), Deployment(), policies=[None, Policy.BOTH], budgets=budgets
    )
    finished = list(run_arms(arms, turns, told))
    policies = [arm.policy for arm in ran]
    assert (policies.count("none"), policies.count("both")) == (2, 6), "once per routing"
    assert begun == [arm.arm for arm in arms]
    assert [one.arm.arm for one in finished] == [arm.arm for arm in arms]
    for one in finished:
        assert {result.arm for result in one.results} == {one.arm.arm}
    assert [arm.policy for arm in arm_rows(finished)].count("none") == 2


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=7))
def test_a_row_is_the_median_over_repeats(seconds: list[float]) -> None:
    finished = []
    for repeat, one in enumerate(seconds):
        arm = Arm(source=Source.SIMULATED, workload="w", policy="both", repeat=repeat)
        result = RequestResult(arm=arm, request="r", prompt_tokens=100, ttft_s=one)
        finished.append(Finished([result], ArmResult(arm=arm, seconds=one, requests=1), 0.0))
    ((_, row),) = arm_rows(finished).items()
    assert row.ttft_s == statistics.median(seconds)
    assert row.input_rate == pytest.approx(statistics.median(100 / one for one in seconds))


def test_a_repeated_command_is_refused_before_it_writes(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    args = ["--workload", "full_replay", *SMALL, "--policy", "both", "--output", str(output)]
    simulate(*args)
    before = output.read_bytes()
    with pytest.raises(
        ConfigError, match=r"has 1 of these 3 arms already, e\.g\. full_replay, both"
    ):
        simulate(*args, "--capacity", "1GiB", "--capacity", "0", "--routing", "forget",
                 "--capacity", "2GiB")  # fmt: skip
    assert output.read_bytes() == before
    simulate(*args, "--capacity", "1GiB")
    simulate(*args, "--policy", "none", "--policy", "none", "--capacity", "2GiB")
    arms = [r.arm for r in read_results(output) if isinstance(r, ArmResult)]
    assert len(arms) == len(set(arms)) == 8


def test_what_a_killed_run_left_is_gone_on_with(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    args = ["--workload", "full_replay", *SMALL, "--routing", "sticky", "--output", str(output)]
    simulate(*args, "--policy", "none")
    whole = output.read_bytes()
    simulate(*args, "--policy", "both")
    output.write_bytes(output.read_bytes()[:-9])  # killed within the last line
    result = CliRunner().invoke(app, ["simulate", *args, "--policy", "both"])
    told = [line for line in result.stderr.splitlines() if str(output) in line]
    assert len(told) == 1 and "is cut off" in told[0]
    assert output.read_bytes().startswith(whole)
    arms = [r for r in read_results(output) if isinstance(r, ArmResult)]
    assert [one.arm.policy for one in arms] == ["none", "both"]
    cells = [cell for cells in gather(read_results(output)).values() for cell in cells.values()]
    assert [len(cell.requests) for cell in cells] == [one.requests for one in arms]


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_a_pipe_is_as_wide_as_it_is_told(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    args = ["--workload", "full_replay", *SMALL, "--policy", "both", "--admit-per-token", "8KiB"]
    lines = simulate(*args).splitlines()
    assert max(map(len, lines)) <= columns
    said = " ".join(" ".join(lines).split())
    assert ("Not shown for lack of width: CPU" in said) == (columns < 160)
    assert columns < 160 or "admitted 7.8 MiB per 1,000 tokens" in said


def test_a_trace_is_read_and_u_end_assumed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"request":"a","prompt":[["s",0,500]],"output":[["a",0,90]]}\n'
        '{"request":"b","after":"a","prompt":[["s",0,490],["t",0,60]],"output":[["b",0,9]]}\n'
    )
    output = tmp_path / "results.jsonl"
    simulate(
        *(str(trace), "--model", "tiny-hybrid", "--policy", "both", "--routing", "forget"),
        *("--generation-prefix", "10", "--output", str(output)),
    )
    second = [r for r in read_results(output) if isinstance(r, RequestResult)][1]
    assert (second.selected, second.loaded_tokens) == ("input_end", 480)


@pytest.mark.parametrize("base", [Deployment(), Sizes()], ids=["cluster", "size"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "-1e-9", "1e31", "9" * 400, "x"])
def test_no_figure_is_out_of_its_range(base: Any, value: str) -> None:
    for name in base.__struct_fields__:
        with pytest.raises(ConfigError) as raised:
            with_settings(base, [f"{name}={value}"], "--it")
        assert name in str(raised.value) and "\n" not in str(raised.value)


ENDS = {name: range_of(name) for name in Deployment.__struct_fields__ if name != "routing"}


@settings(max_examples=12)
@given(st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in ENDS.items()}))
def test_a_cluster_of_extremes_gives_results_that_can_be_read(ends: dict[str, float]) -> None:
    texts = [
        f"{name}={value:.0f}" if value >= 1 else f"{name}={value}" for name, value in ends.items()
    ]
    cluster = with_settings(Deployment(), texts, "--cluster")
    turns = workload("full_replay", Sizes(conversations=2, turns=2))
    file = io.BytesIO()
    for one in run_arms(plan("w", preset("tiny-hybrid"), cluster, policies=[Policy.BOTH]), turns):
        write_results([*one.results, one.arm], file)
    with tempfile.NamedTemporaryFile() as written:
        written.write(file.getvalue())
        written.flush()
        assert len(list(read_results(Path(written.name)))) == 2 * (4 + 1)


def test_sizes_are_in_binary_units() -> None:
    printed = simulate("--workload", "full_replay", *SMALL, "--policy", "both", "--capacity=3MiB")
    assert "capacity 3 MiB" in printed and printed.count("MiB") == 4 and "GB" not in printed


def test_progress_is_lines_where_standard_error_is_no_terminal() -> None:
    args = ["--workload", "full_replay", *SMALL, "--policy", "none", "--policy", "both"]
    result = CliRunner().invoke(app, ["simulate", *args], catch_exceptions=False)
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    assert len(lines) == 4, "a line per arm"
    assert lines[0].startswith("arm 1 of 4 (none, unlimited, lru, P_end present): done in ")
    assert lines[3].startswith("arm 4 of 4 (both, unlimited, lru, P_end absent): done in ")
    assert "arm 1 of 4" not in result.stdout


def test_a_long_arm_says_now_and_then_how_far_it_is() -> None:
    said: list[str] = []
    now = 0.0
    progress = LineProgress(1, said.append, every_s=10.0, clock=lambda: now)
    progress.begin(Arm(source=Source.SIMULATED, workload="w", policy="both"))
    for done in range(1, 26):
        now += 1.0
        progress.done(done, 1000)
    progress.end()
    assert [line.partition("): ")[2] for line in said] == [
        "10 of 1,000 requests",
        "20 of 1,000 requests",
        "done in 25.0 s",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "TRACE, or --workload"),
        (("--workload", "x"), "unknown workload 'x'"),
        (("--workload", "mixed", "--policy", "x"), "unknown policy 'x'"),
        (("--workload", "mixed", "--model", "x"), "unknown model 'x'"),
        (("--workload", "mixed", "--routing", "x"), "unknown routing 'x'"),
        (("--workload", "mixed", "--size", "turns"), "--size 'turns': write NAME=VALUE"),
        (
            ("--workload", "mixed", "--size", "turns=x"),
            "'turns=x': give a whole number, e.g. turns",
        ),
        (
            ("--workload", "mixed", "--size", "arrival_s=x"),
            "'arrival_s=x': give a number, e.g. arr",
        ),
        (("--workload", "mixed", "--cluster", "routing=x"), "'routing=x': invalid enum value 'x'"),
        (("--workload", "mixed", "--cluster", "decode_slots=0"), "decode_slots is 0"),
        (("--workload", "mixed", "--capacity", "1"), "--capacity is 1 bytes: at least 1 MiB"),
        (("--workload", "mixed", "--admit-per-token", "0"), "--admit-per-token is '0'"),
        (("--workload", "mixed", "--output", "/proc/x"), "--output '/proc/x': /proc cannot be"),
        (("--workload", "full_replay", *SMALL, "--output", "/dev/full"), "'/dev/full' cannot be"),
    ],
)
def test_what_is_wrong_is_named(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        simulate(*args)
    assert message in str(raised.value) and "\n" not in str(raised.value)
