"""Plots of a report: self-contained SVG, no script and nothing fetched."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from backhaul.benchmarks.reuse.figures import Cell, Context, hit_rate
from backhaul.benchmarks.reuse.record import PromptEndAt
from backhaul.benchmarks.reuse.statistics import Estimate, mean

_COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#6f4a8e", "#5c6b73")


def reuse_chart(title: str, contexts: Sequence[Context]) -> str:
    """Share of prompt tokens reused by policy, P_end present and absent."""
    return _bars(title, contexts, lambda cell: hit_rate(cell.requests), percent=True)


def ttft_chart(title: str, contexts: Sequence[Context]) -> str:
    """Mean time to first token by policy, P_end present and absent."""
    return _bars(title, contexts, lambda cell: mean(cell.requests, lambda r: r.ttft_s))


def _bars(
    title: str,
    contexts: Sequence[Context],
    figure: Callable[[Cell], Estimate],
    *,
    percent: bool = False,
) -> str:
    import pygal
    from pygal.style import Style

    scale = 100 if percent else 1
    policies = list(dict.fromkeys(context.cell.arm.policy for context in contexts))
    values: dict[tuple[str, str], Estimate] = {
        (c.cell.arm.prompt_end, c.cell.arm.policy): figure(c.cell) for c in contexts
    }
    top = max((e.high or e.value or 0.0 for e in values.values()), default=0.0) * scale
    chart = pygal.Bar(
        style=Style(
            background="white",
            plot_background="white",
            colors=_COLOURS,
            font_family="sans-serif",
            label_font_size=11,
            major_label_font_size=11,
            legend_font_size=12,
            title_font_size=14,
        ),
        js=(),
        disable_xml_declaration=True,
        title=title,
        width=760,
        height=320,
        legend_at_bottom=True,
        range=(0, top * 1.05 or 1),
        x_labels=policies,
        value_formatter=_percent if percent else _seconds,
        print_values=False,
    )
    for where in PromptEndAt:
        row = [values.get((where, policy)) for policy in policies]
        if any(row):
            chart.add(f"P_end {where}", [_bar(estimate, scale) for estimate in row])
    return _bare(chart.render(is_unicode=True))


def _bar(estimate: Estimate | None, scale: int) -> Any:
    if estimate is None or estimate.value is None:
        return None
    bar: dict[str, Any] = {"value": estimate.value * scale}
    if estimate.low is not None and estimate.high is not None:
        bar["ci"] = {"low": estimate.low * scale, "high": estimate.high * scale}
    return bar


def _bare(svg: str) -> str:
    """Without scripts, and without comments, which name addresses and the day: equal results give
    equal files."""
    svg = re.sub(r"<!--.*?-->|<script.*?</script>", "", svg, flags=re.DOTALL)
    # Identifiers are random; styles refer to them.
    found = re.search(r'id="chart-([0-9a-f-]+)"', svg)
    return svg.replace(found[1], "0") if found else svg


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _seconds(value: float) -> str:
    return f"{value:.2f} s"
