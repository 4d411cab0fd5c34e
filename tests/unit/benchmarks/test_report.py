"""The report is whole by itself and the same for the same results."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from backhaul.benchmarks.reuse.arms import plan, run_arms
from backhaul.benchmarks.reuse.deployment import Deployment, Routing
from backhaul.benchmarks.reuse.figures import QUESTIONS, Figure, Unit
from backhaul.benchmarks.reuse.model_shape import preset
from backhaul.benchmarks.reuse.record import Result
from backhaul.benchmarks.reuse.report import build_report, format_figure, write_report
from backhaul.benchmarks.reuse.statistics import Estimate
from backhaul.benchmarks.reuse.workloads import Sizes, workload
from backhaul.protocols.options import Policy

NASTY = 'full_replay<script>alert("&")</script>|x'


@pytest.fixture(scope="module")
def results() -> list[Result]:
    turns = workload("full_replay", Sizes(conversations=3, turns=2, system=200))
    arms = plan(NASTY, preset("tiny-hybrid"), Deployment(), policies=[None, Policy.BOTH])
    return [r for one in run_arms(arms, turns) for r in (*one.results, one.arm)]


class _Fetches(HTMLParser):
    """Collects what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "iframe", "object", "embed", "img", "image", "use"):
            self.found.append(tag)
        for name, value in attrs:
            loads = name in ("src", "href", "xlink:href", "data", "srcset", "action", "poster")
            if (loads and not (value or "").startswith("#")) or name.startswith("on"):
                self.found.append(f"{tag} {name}={value}")


def test_the_page_fetches_and_runs_nothing(results: list[Result], tmp_path: Path) -> None:
    html, markdown = write_report(build_report(results), tmp_path)
    page = html.read_text()
    parser = _Fetches()
    parser.feed(page)
    assert parser.found == []
    assert not re.search(r"@import|url\((?!#)|expression\(", page)
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"'\s<>)]+", page)) <= namespaces
    assert "<script" not in page and "&lt;script&gt;" in page
    assert page.count("<svg") == 2
    assert "\\|x" in markdown.read_text()


def test_every_question_is_answered_in_both_forms(results: list[Result], tmp_path: Path) -> None:
    for path in write_report(build_report(results), tmp_path):
        text = path.read_text().replace("&#39;", "'")
        positions = [text.index(f"{q.number}. {q.text}") for q in QUESTIONS]
        assert positions == sorted(positions)
        for name in (
            "decode_end_hit_rate",
            "input_end_fallback_rate",
            "first_continuation_effective_hit_rate",
            "saved_prompt_tokens_per_retained_state_byte",
            "saved_prefill_work_per_retained_state_byte",
            "incremental_hit_rate_of_second_checkpoint",
            "incremental_saved_work_of_second_checkpoint",
        ):
            assert name in text
    plots = sorted((tmp_path / "plots").iterdir())
    named = re.findall(r"\]\((plots/[^)]+)\)", (tmp_path / "report.md").read_text())
    assert sorted(named) == [f"plots/{path.name}" for path in plots]
    for path in plots:
        ElementTree.fromstring(path.read_text())


def test_equal_results_give_equal_files(results: list[Result], tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_report(build_report(results), tmp_path / name)
    for path in (p for p in (tmp_path / "one").rglob("*") if p.is_file()):
        other = tmp_path / "other" / path.relative_to(tmp_path / "one")
        assert path.read_bytes() == other.read_bytes(), path.name


@pytest.mark.parametrize("count", [2, 5])
def test_half_an_account_is_said_once(count: int, tmp_path: Path) -> None:
    policies = [p for p in Policy if p is not Policy.BOUNDARIES][:count]
    routings = [Routing.FORGET]
    shape = preset("tiny-hybrid")
    arms = plan("w", shape, Deployment(), policies=[None, *policies], routings=routings)
    turns = workload("full_replay", Sizes(conversations=2, turns=2, system=200))
    results = [r for one in run_arms(arms, turns) for r in (*one.results, one.arm)]
    _, markdown = write_report(build_report(results), tmp_path)
    (line,) = [text for text in markdown.read_text().splitlines() if "half of the account" in text]
    assert ("5 of 5" in line) == (count == 5)
    assert all((policy in line) == (count == 2) for policy in policies)


def test_a_policy_without_its_ends_is_no_comparison() -> None:
    turns = [
        msgspec.structs.replace(turn, boundaries=(), suffix_start=None, verbatim_tokens=None)
        for turn in workload("full_replay", Sizes(conversations=2, turns=2, system=200))
    ]
    policies = [None, Policy.BOTH, Policy.BOUNDARIES]
    arms = plan("w", preset("tiny-hybrid"), Deployment(), policies=policies)
    report = build_report([r for one in run_arms(arms, turns) for r in (*one.results, one.arm)])
    said = {row[4]: row[-1] for row in report.accounting.rows}  # P_end present and absent
    assert "boundaries had none of its ends to keep: nothing can be said" in said["boundaries"]
    assert "% of the prompt's tokens" in said["both"]
    remarks = "\n".join(report.remarks)
    assert "Comparisons: 2; with a later first token: " in remarks
    assert "Not compared, as the policy had none of its ends to keep: 2." in remarks
    assert {row[-1] for row in report.runs.rows} == {"-"}, "nothing was evicted: no lifetime"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.6364, Unit.SHARE, "63.6%"),
        (64_400_000.0, Unit.BYTES, "61.4 MiB"),
        (511.6, Unit.BYTES, "512 bytes"),
        (0.0123, Unit.SECONDS, "12 ms"),
        (75.0, Unit.SECONDS, "75.0 s"),
        (3.0, Unit.COUNT, "3"),
        (1234.5, Unit.TOKENS, "1,234 tokens"),
        (0.0512, Unit.REQUEST_RATE, "0.0512 requests/s"),
        (2.5e12, Unit.WORK, "2.5e+12 FLOPs"),
    ],
)
def test_numbers_are_readable(value: float, unit: str, text: str) -> None:
    assert format_figure(Figure("x", Estimate(value), unit)) == text


def test_an_interval_is_shown() -> None:
    shown = format_figure(Figure("x", Estimate(0.5, 0.4, 0.6, 10, 5), Unit.SHARE))
    assert shown == "50.0% (40.0% … 60.0%)"
    assert format_figure(Figure("x", Estimate(), Unit.SHARE)) == "-"
