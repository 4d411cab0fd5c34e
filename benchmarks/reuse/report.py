"""The report: thirteen questions with numbers, as Markdown and as one self-contained HTML file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from backhaul.benchmarks.reuse.accounting import Verdict, missing_counterparts, verdicts
from backhaul.benchmarks.reuse.charts import reuse_chart, ttft_chart
from backhaul.benchmarks.reuse.figures import (
    QUESTIONS,
    Context,
    Figure,
    Question,
    Unit,
    contexts,
    gather,
)
from backhaul.benchmarks.reuse.record import Arm, Result
from backhaul.benchmarks.reuse.report_html import render_html
from backhaul.benchmarks.reuse.report_parts import Answer, Chart, Report, Table
from backhaul.benchmarks.reuse.statistics import CONFIDENCE, RESAMPLES
from backhaul.deploy.terminal import format_age
from backhaul.transfer.daemon.settings import format_bytes


def build_report(results: Iterable[Result]) -> Report:
    """Compute the report. Raises ``ConfigError`` where there is no finished arm."""
    book = gather(results)
    every = contexts(book)
    account = verdicts(book)
    arms = [arm for context in every for arm in context.cell.arms]
    served = [context for context in every if context.cell.is_served]
    requests = sum(len(context.cell.requests) for context in every)
    sources = sorted({str(arm.arm.source) for arm in arms})
    repeats = sorted({len(context.cell.arms) for context in every})
    summary = (
        f"Arms: {len(arms)}; requests in all: {requests:,}; results: {', '.join(sources)}; "
        f"repeats per arm: {', '.join(map(str, repeats))}.",
        f"A figure in brackets is its {CONFIDENCE:.0%} interval: a bootstrap over conversations "
        f"and repeats ({RESAMPLES} resamples). Without brackets there was one conversation "
        "(of throughput and residents: one repeat), or it is a count.",
        "Simulated rows model time and vLLM's own prefix cache and run the product's own "
        "decisions; real rows were measured; served rows are what engines logged of their clients' "
        "requests, without times and without the store's books.",
    )
    return Report(
        title="Which ends are worth keeping",
        summary=summary,
        runs=_runs(every),
        accounting=_accounting(account),
        remarks=_remarks(account, only_served=len(served) == len(every)),
        answers=tuple(Answer(q, _answer(q, every)) for q in QUESTIONS),
        charts=tuple(_charts(every)),
    )


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write ``report.html`` (all in one file), and ``report.md`` with its plots in ``plots/``.
    Answers both paths."""
    plots = folder / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    for chart in report.charts:
        (plots / f"{chart.name}.svg").write_text(chart.svg + "\n")
    html, markdown = folder / "report.html", folder / "report.md"
    html.write_text(render_html(report))
    markdown.write_text(render_markdown(report))
    return html, markdown


def render_markdown(report: Report) -> str:
    """The report as Markdown; plots are ``plots/NAME.svg``."""
    parts = [f"# {report.title}", *report.summary, _markdown_table(report.runs)]
    parts += ["## What it brings, honestly", *(f"- {r}" for r in report.remarks)]
    parts += [_markdown_table(report.accounting)]
    parts += [f"![{chart.title}](plots/{chart.name}.svg)" for chart in report.charts]
    for answer in report.answers:
        parts.append(f"## {answer.question.number}. {answer.question.text}")
        if answer.question.note:
            parts.append(answer.question.note)
        parts.append(_markdown_table(answer.table))
    return "\n\n".join(parts) + "\n"


# -- tables ---------------------------------------------------------------------------------------

_NAMED_MAX = 3
"""Comparisons that a remark names; of more it says how many."""
_ARM_HEADER = ("workload", "source", "P_end", "budget", "policy")


def _arm_cells(arm: Arm) -> tuple[str, ...]:
    source = f"{arm.source} {arm.model}".strip()
    return (arm.workload, source, str(arm.prompt_end), budget_text(arm), arm.policy)


def budget_text(arm: Arm) -> str:
    """The budget and, where there is one, its size and the order of eviction."""
    return f"{arm.limit}, {arm.eviction}" if arm.budget_bytes else arm.limit


def _runs(every: Sequence[Context]) -> Table:
    header = (*_ARM_HEADER, "repeats", "requests", "published", "loaded", "peak", "lifetime")
    rows = []
    for context in every:
        arms = context.cell.arms
        counts = (str(len(arms)), f"{len(context.cell.requests):,}")
        if context.cell.is_served:
            rows.append((*_arm_cells(context.cell.arm), *counts, "-", "-", "-", "-"))
            continue
        rows.append(
            (
                *_arm_cells(context.cell.arm),
                *counts,
                format_bytes(sum(arm.published_bytes for arm in arms)),
                format_bytes(sum(arm.loaded_bytes for arm in arms)),
                format_bytes(max(arm.peak_used_bytes for arm in arms)),
                _lifetime(max(arm.lifetime_s for arm in arms)),
            )
        )
    return Table(header, tuple(rows))


def _lifetime(seconds: float) -> str:
    return format_age(seconds) if seconds else "-"  # nothing was evicted


def _answer(question: Question, every: Sequence[Context]) -> Table:
    names: list[str] = []
    rows: list[tuple[Context, dict[str, Figure]]] = []
    for context in every:
        figures = question.figures(context)
        names += [f.name for f in figures if f.name not in names]
        rows.append((context, {f.name: f for f in figures}))
    return Table(
        (*_ARM_HEADER, *names),
        tuple(
            (
                *_arm_cells(context.cell.arm),
                *(format_figure(figures[n]) if n in figures else "" for n in names),
            )
            for context, figures in rows
        ),
    )


def _accounting(account: Sequence[Verdict]) -> Table:
    return Table(
        (*_ARM_HEADER, "against", "verdict"),
        tuple((*_arm_cells(v.arm), v.against, v.text) for v in account),
    )


def _remarks(account: Sequence[Verdict], *, only_served: bool) -> tuple[str, ...]:
    remarks = []
    if only_served:
        remarks.append("Requests of real clients: what they would have been without is not known.")
    elif not account:
        remarks.append("Nothing to compare with: run `none` or `main_sparse` as well.")
    alone = defaultdict(list)
    for arm in missing_counterparts(account):
        alone[arm.prompt_end].append(f"{arm.workload}, {arm.policy}, {budget_text(arm)}")
    for prompt_end, names in alone.items():
        some = "; ".join(names) if len(names) <= _NAMED_MAX else f"{len(names)} of {len(account)}"
        remarks.append(
            f"Only with P_end {prompt_end}, so the other half of the account is missing: {some}."
        )
    judged = [v for v in account if not v.idle]
    slower = sum(1 for v in judged if v.ttft_s.is_clear and (v.ttft_s.value or 0) > 0)
    if account:
        remarks.append(
            f"Comparisons: {len(judged)}; with a later first token: {slower}; in which the policy "
            f"adds little: {_little(judged)}."
        )
    if idle := len(account) - len(judged):
        remarks.append(f"Not compared, as the policy had none of its ends to keep: {idle}.")
    return tuple(remarks)


def _little(account: Sequence[Verdict]) -> int:
    return sum("adds little" in verdict.text for verdict in account)


def _charts(every: Sequence[Context]) -> Iterable[Chart]:
    groups: dict[tuple[object, ...], list[Context]] = {}
    for context in every:
        groups.setdefault(context.cell.arm.setting[:-1], []).append(context)
    for number, group in enumerate(groups.values()):
        arm = group[0].cell.arm
        where = f"{arm.workload} ({arm.source}, {budget_text(arm)})"
        title = f"Prompt tokens reused: {where}"
        yield Chart(f"reuse-{number}", title, reuse_chart(title, group))
        if group[0].cell.is_served:
            continue
        title = f"Time to first token: {where}"
        yield Chart(f"ttft-{number}", title, ttft_chart(title, group))


def _markdown_table(table: Table) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "---|" * len(table.header)
    return "\n".join([line(table.header), rule, *map(line, table.rows)])


# -- numbers --------------------------------------------------------------------------------------


def format_figure(figure: Figure) -> str:
    """A figure with its interval; "-" where there was nothing to count."""
    estimate = figure.estimate
    if estimate.value is None:
        return "-"
    text = format_value(estimate.value, figure.unit)
    if estimate.low is not None and estimate.high is not None:
        low, high = (format_value(x, figure.unit) for x in (estimate.low, estimate.high))
        text += f" ({low} … {high})"
    return text


def format_value(value: float, unit: str) -> str:
    """A number as people read it."""
    if unit == Unit.SHARE:
        return f"{value:.1%}"
    if unit == Unit.BYTES:
        return format_bytes(round(value))
    if unit == Unit.SECONDS:
        return f"{value * 1000:,.0f} ms" if abs(value) < 10 else f"{value:,.1f} s"
    if unit == Unit.COUNT:
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    if unit in (Unit.WORK, Unit.WORK_PER_BYTE, Unit.REQUEST_RATE):
        return f"{value:.3g} {unit}"
    return f"{value:,.1f} {unit}" if abs(value) < 100 else f"{value:,.0f} {unit}"
