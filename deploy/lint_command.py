"""`backhaul lint-template`: what chat templates mean for U_end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from backhaul.deploy.arguments import each, file_or_folder
from backhaul.deploy.console import Console
from backhaul.render import lint

_HEADINGS = (
    ("guards", "generation-only", "green"),
    ("refusals", "refused", "red"),
    ("moving", "moving control text", "yellow"),
    ("maybe_moving", "may be moving", "yellow"),
    ("clocks", "clock", "yellow"),
    ("trailing", "outside guards", "yellow"),
)

_VERDICTS = {
    None: "U_end will be found",
    "unguarded": "U_end stays unknown: no branch depends on add_generation_prompt",
    "refused": "U_end stays unknown: the effect of add_generation_prompt cannot be known",
}


def lint_template(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Jinja file, tokenizer_config.json, or a tokenizer's directory.",
            callback=each(file_or_folder),
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Say where a chat template's input ends, and what of it cannot be known.

    Example: backhaul lint-template /models/Qwen3-Next

    Exit code 0: U_end will be found; 1: for some template it will not; 2: nothing to examine.
    """
    reports = [
        lint.lint(name, source) for path in paths for name, source in lint.load(Path(path)).items()
    ]
    if as_json:
        sys.stdout.write(
            msgspec.json.format(msgspec.json.encode(reports), indent=2).decode() + "\n"
        )
    else:
        console = Console()
        for report in reports:
            _show(console, report)
    if not all(report.found for report in reports):
        raise typer.Exit(1)


def _show(console: Console, report: lint.Report) -> None:
    console.print(Text(report.name, style="bold"), soft_wrap=True)
    verdict = _VERDICTS[None if report.reason is None else str(report.reason)]
    console.print(Text(f"  {verdict}", style="green" if report.found else "red"))
    for field, heading, style in _HEADINGS:
        for remark in getattr(report, field):
            line = Text(f"  line {remark.line:>4}  ")
            line.append(f"{heading}: ", style=style)
            console.print(line.append(remark.message), soft_wrap=True)
