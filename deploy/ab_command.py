"""`backhaul ab`: one dialogue with one or two servers, and what each reused."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backhaul.deploy.arguments import (
    each,
    file_to_read,
    file_to_write,
    http_url,
    pause_of_seconds,
    seconds,
    writing,
)
from backhaul.protocols.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from backhaul.benchmarks.ab import Arm, ArmReport, RequestReport
    from backhaul.deploy.console import Console

TURNS_MAX = 1000
_EXPENDABLE = ("digest", "calls", "reasoning", "content", "output")
"""Columns that a narrow terminal does without, the first ones first."""
CUT = "length"
"""How a reply ends that reached its limit."""
ADVICE = (
    'Backhaul publishes their D_end only where publish_on has "length". Raise --max-tokens, or '
    "make a model that does not stop by itself end its replies: see docs/ab.md"
)


def ab(
    a: Annotated[
        str,
        typer.Option(
            "--a",
            metavar="URL",
            help="An OpenAI-compatible server or proxy.",
            callback=each(http_url),
        ),
    ],
    b: Annotated[
        str,
        typer.Option(
            "--b",
            metavar="URL",
            help="The one to compare with; default: none.",
            callback=each(http_url),
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Default: the first that each server lists.")
    ] = "",
    turns: Annotated[
        int, typer.Option(metavar="N", min=1, max=TURNS_MAX, help="Turns of the dialogue.")
    ] = 5,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most tokens of a reply.")
    ] = 4096,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON array of what the user says, in turn.",
            callback=each(file_to_read),
        ),
    ] = None,
    tools: Annotated[
        bool, typer.Option(help="Offer a tool; a call is answered at the next turn.")
    ] = False,
    salt: Annotated[
        bool,
        typer.Option(help="Send a random cache_salt per arm (vLLM): find nothing from before."),
    ] = False,
    reset_a: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Engine behind A that forgets its prefix cache before each turn, as if the turn "
            "met another worker (VLLM_SERVER_DEV_MODE=1); repeat.",
            callback=each(http_url),
        ),
    ] = None,
    reset_b: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="The same behind B.", callback=each(http_url)),
    ] = None,
    extra: Annotated[
        str, typer.Option(metavar="JSON", help="Object with further members of each request.")
    ] = "{}",
    pause: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Between reply and next request.",
            callback=each(pause_of_seconds),
        ),
    ] = 1.0,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Longest wait for the next byte.", callback=each(seconds)
        ),
    ] = 600.0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write the figures as JSON.", callback=each(file_to_write)
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Hold a dialogue that replays its whole history, and say what each server had cached.

    Example: backhaul ab --a http://127.0.0.1:8000 --b http://127.0.0.1:9000 --turns 5

    Exit code 0: measured; 1: a server could not be asked or failed; 2: wrong usage.
    """
    from backhaul.benchmarks.ab import QUESTIONS, AbError, AbPlan, Arm, run_arm
    from backhaul.deploy.console import Console
    from backhaul.deploy.terminal import print_json

    if reset_b and not b:
        raise ConfigError("--reset-b without --b: there is no second server")
    plan = AbPlan(
        model=model,
        turns=turns,
        max_tokens=max_tokens,
        questions=_questions(questions) if questions else QUESTIONS,
        tools=tools,
        salt=salt,
        extra=_extra(extra),
        pause_s=pause,
        timeout_s=timeout,
    )
    arms = [Arm(name="A", url=a, reset=reset_a or ())]
    if b:
        arms.append(Arm(name="B", url=b, reset=reset_b or ()))
    console = Console(stderr=as_json)
    reports: list[ArmReport] = []
    seen: list[RequestReport] = []

    def on_request(arm: Arm, r: RequestReport) -> None:
        seen.append(r)
        console.print(_progress(arm, r))

    try:
        for arm in arms:
            reports.append(run_arm(arm, plan, on_request))
    except AbError as error:
        print(f"backhaul: error: {error}", file=sys.stderr)
        if cut := _cut(seen):  # histories of whole limits outgrow a model's context
            print(f"{cut} replies were cut at --max-tokens. {ADVICE}", file=sys.stderr)
        raise typer.Exit(1) from None
    result = {"turns": turns, "arms": [_as_dict(report) for report in reports]}
    if out is not None:
        with writing("--out", out):
            out.write_text(json.dumps(result, indent=2) + "\n")
    if as_json:
        print_json(result)
        return
    for report in reports:
        print_arm(console, report)
    if len(reports) == 2:
        console.print(comparison_table(*reports))
    for line in _remarks(reports, salt=salt):
        console.print(line, style="yellow", soft_wrap=True)


def _questions(path: Path) -> list[str]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--questions {str(path)!r} cannot be read: {error}") from None
    if not (isinstance(value, list) and value and all(isinstance(q, str) for q in value)):
        raise ConfigError(f"--questions {str(path)!r} is no JSON array of strings")
    return value


def _extra(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--extra {text[:60]!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--extra {text[:60]!r} is no JSON object")
    return value


def _as_dict(report: ArmReport) -> dict[str, Any]:
    return asdict(report) | {
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "cached_share": report.cached_share,
        "later_cached_share": report.later_cached_share,
    }


def _progress(arm: Arm, r: RequestReport) -> str:
    cached = _count(r.cached_tokens)
    return (
        f"{arm.name} {r.turn}: {r.prompt_tokens:,} prompt tokens, {cached} cached, "
        f"{r.completion_tokens:,} generated{' and cut' if r.finish_reason == CUT else ''}, "
        f"first after {r.ttft_s:.2f} s"
    )


def _count(tokens: int | None) -> str:
    return "?" if tokens is None else f"{tokens:,}"


def print_arm(console: Console, report: ArmReport) -> None:
    """One arm's requests, with the columns that the console has a place for."""
    from backhaul.deploy.console import narrowed

    table, left_out = narrowed(console, partial(_arm_table, report), _EXPENDABLE)
    console.print(table)
    if left_out:
        console.print(f"Not shown for lack of width: {', '.join(left_out)}. --json has all.")


def _arm_table(report: ArmReport, without: Collection[str] = ()) -> Table:
    from backhaul.deploy.console import plain_table

    requests = report.requests
    cells = {
        "turn": [*(str(r.turn) for r in requests), "all", "2 on"],
        "prompt": [*(f"{r.prompt_tokens:,}" for r in requests), f"{report.prompt_tokens:,}"],
        "cached": [*(_count(r.cached_tokens) for r in requests), f"{report.cached_tokens:,}"],
        "share": [
            *(f"{(r.cached_tokens or 0) / max(r.prompt_tokens, 1):.1%}" for r in requests),
            f"{report.cached_share:.1%}",
            f"{report.later_cached_share:.1%}",
        ],
        "output": [
            *(f"{r.completion_tokens:,}" for r in requests),
            f"{sum(r.completion_tokens for r in requests):,}",
        ],
        "reasoning": [f"{r.reasoning_characters:,}" for r in requests],
        "content": [f"{r.content_characters:,}" for r in requests],
        "calls": [str(r.tool_calls) for r in requests],
        "TTFT s": [f"{r.ttft_s:.2f}" for r in requests],
        "ended": [r.finish_reason for r in requests],
        "digest": [r.digest for r in requests],
    }
    table = plain_table(f"{report.name}: {report.url} ({report.model})")
    shown = [name for name in cells if name not in without]
    for name in shown:
        left = name in ("ended", "digest")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    rows = list(zip_longest(*(cells[name] for name in shown), fillvalue=""))
    for number, row in enumerate(rows, 1):
        table.add_row(*row, end_section=number == len(requests))
    return table


def comparison_table(one: ArmReport, two: ArmReport) -> Table:
    """Two arms' requests beside each other."""
    from backhaul.deploy.console import plain_table

    table = plain_table("A against B")
    table.add_column("turn", justify="right")
    for name in ("recomputed A", "recomputed B", "TTFT A", "TTFT B", "B / A"):
        table.add_column(name, justify="right")
    table.add_column("output")
    for x, y in zip(one.requests, two.requests, strict=True):
        table.add_row(
            str(x.turn),
            *(f"{r.prompt_tokens - (r.cached_tokens or 0):,}" for r in (x, y)),
            f"{x.ttft_s:.2f}",
            f"{y.ttft_s:.2f}",
            f"{y.ttft_s / max(x.ttft_s, 1e-9):.2f}x",
            "same" if x.digest == y.digest else "differs",
        )
    table.add_section()
    table.add_row("all", *(f"{r.prompt_tokens - r.cached_tokens:,}" for r in (one, two)))
    return table


def _remarks(reports: list[ArmReport], *, salt: bool) -> list[str]:
    """What makes the figures mean something else than they seem to."""
    lines = []
    for report in reports:
        requests = report.requests
        if any(r.cached_tokens is None for r in requests):
            lines.append(
                f"{report.name} does not say what was cached: start vLLM with "
                "--enable-prompt-tokens-details"
            )
        if requests[0].cached_tokens and not salt:
            lines.append(
                f"{report.name} had {requests[0].cached_tokens:,} tokens of the first prompt "
                "cached: it has met this dialogue before; --salt keeps it apart (vLLM)"
            )
        if cut := _cut(requests):
            lines.append(f"{report.name} cut {cut} replies at --max-tokens. {ADVICE}")
    return lines


def _cut(requests: Iterable[RequestReport]) -> int:
    return sum(r.finish_reason == CUT for r in requests)
