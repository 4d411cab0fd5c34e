"""`backhaul ab`: tables for one arm and two, JSON, remarks, and one line for what is wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_kit import backhaul

from backhaul.benchmarks.ab import ArmReport, RequestReport
from backhaul.deploy.ab_command import comparison_table, print_arm
from backhaul.deploy.console import Console
from backhaul.proxy.fake_engine import Behaviour, FakeEngine


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    return backhaul("ab", *map(str, arguments))


@pytest.fixture
def engines() -> Iterator[tuple[FakeEngine, FakeEngine]]:
    with FakeEngine("a") as one, FakeEngine("b") as two:
        yield one, two


QUICK = ("--turns", "2", "--max-tokens", "3", "--pause", "0")


def test_one_arm(engines: Any) -> None:
    code, out, err = run("--a", engines[0].url, *QUICK)
    assert (code, err) == (0, "")
    assert f"A: {engines[0].url}/v1 (fake)" in out
    assert "A against B" not in out
    assert "it has met this dialogue before" in out


def test_two_arms_are_compared_and_written(engines: Any, tmp_path: Path) -> None:
    one, two = engines
    one.cached_tokens, two.cached_tokens = 50, 0
    questions = tmp_path / "questions.json"
    questions.write_text('["first", "second"]')
    target = tmp_path / "out.json"
    arguments = ("--a", one.url, "--b", two.url, "--questions", questions, "--out", target)
    code, out, _ = run(*arguments, *QUICK, "--extra", '{"seed": 5}')
    assert code == 0
    assert "A against B" in out and "same" in out
    a, b = json.loads(target.read_text())["arms"]
    assert (a["cached_tokens"], b["cached_tokens"]) == (100, 0)
    assert a["cached_share"] == 100 / a["prompt_tokens"]
    assert [r["digest"] for r in a["requests"]] == [r["digest"] for r in b["requests"]]
    assert [seen.body["seed"] for seen in two.seen] == [5, 5]
    assert one.seen[1].body["messages"][-1]["content"] == "second"
    code, printed, _ = run(*arguments, *QUICK, "--json")
    assert json.loads(printed)["arms"][0]["cached_tokens"] == 100


LENGTHS = st.integers(0, 999_999)


@given(st.lists(st.tuples(LENGTHS, LENGTHS, LENGTHS), min_size=1, max_size=4))
def test_tables_can_be_read_on_a_narrow_terminal(lengths: list[tuple[int, int, int]]) -> None:
    """80 columns: no number is cut or broken, and what has no place is named."""
    requests = [
        RequestReport(
            turn=turn, prompt_tokens=max(a, b), cached_tokens=min(a, b), completion_tokens=c,
            ttft_s=a / 9_000, seconds=1.0, reasoning_characters=c * 4, content_characters=b * 4,
            tool_calls=1, finish_reason="tool_calls", digest="0123456789ab",
        )
        for turn, (a, b, c) in enumerate(lengths, 1)
    ]  # fmt: skip
    report = ArmReport(name="A", url="http://127.0.0.1:8000/v1", model="m", requests=requests)
    text = io.StringIO()
    console = Console(file=text, width=80)
    print_arm(console, report)
    console.print(comparison_table(report, report))
    out = text.getvalue()
    assert all(len(line) <= 80 for line in out.splitlines()) and "\u2026" not in out
    for name in ("turn", "prompt", "cached", "share", "TTFT s", "ended"):
        assert name in out
    for r in requests:
        for figure in (f"{r.prompt_tokens:,}", f"{r.cached_tokens:,}", f"{r.ttft_s:.2f}"):
            assert figure in out
    wide = io.StringIO()
    print_arm(Console(file=wide, width=200), report)
    assert "digest" in wide.getvalue() and "lack of width" not in wide.getvalue()


def test_figures_that_mean_something_else_are_remarked_on(engines: Any) -> None:
    """The stand-in ends replies at their limit."""
    engines[0].cached_tokens = None
    _, out, _ = run("--a", engines[0].url, *QUICK)
    assert "--enable-prompt-tokens-details" in out
    assert "A cut 2 replies at --max-tokens" in out and "publish_on" in out
    assert "generated and cut, first after" in out


def test_a_history_that_outgrows_the_model_says_why(engines: Any) -> None:
    engine = engines[0]
    engine.behave = lambda seen: Behaviour(status=400 if len(engine.seen) > 1 else None)
    code, _, err = run("--a", engine.url, *QUICK)
    assert code == 1 and "1 replies were cut at --max-tokens" in err and err.count("\n") == 2


def test_a_server_that_is_not_there_is_one_line() -> None:
    code, out, err = run("--a", "http://127.0.0.1:1", "--model", "m")
    assert (code, out) == (1, "")
    assert err.startswith("backhaul: error: http://127.0.0.1:1/v1/chat/completions cannot be asked")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--extra", "[]"), "--extra '[]' is no JSON object"),
        (("--extra", "{"), "--extra '{' is no JSON: "),
        (("--timeout", "inf"), "--timeout is inf: give seconds"),
        (("--reset-b", "http://x"), "--reset-b without --b: there is no second server"),
        (("--questions", "/dev/null"), "--questions '/dev/null' is a device or a pipe"),
    ],
)
def test_wrong_options_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run("--a", "http://127.0.0.1:1", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"backhaul: error: {message}")
    assert err.count("\n") == 1
