"""`backhaul trace`: what a request trace holds, and its conversion to our JSON lines."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from backhaul.deploy.arguments import each, file_or_folder, file_to_write
from backhaul.protocols.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from backhaul.benchmarks.traces import Reason
    from backhaul.benchmarks.traces.dialogue import TextRules
    from backhaul.benchmarks.traces.summary import Spread, Summary


def trace(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The trace.", callback=each(file_or_folder))
    ],
    format: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="backhaul, mooncake, lmcache, messages, swe-agent, or auto: told from its start.",
        ),
    ] = "auto",
    skip_malformed: Annotated[
        bool, typer.Option(help="Skip and count malformed lines instead of stopping at the first.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the trace as Backhaul's JSON lines.",
            callback=each(file_to_write),
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Count the tokens of text with this tokenizer.json (or a model's folder). "
            "Default: four characters a token.",
            callback=each(file_or_folder),
        ),
    ] = None,
    drop_reasoning: Annotated[
        bool,
        typer.Option(help="Prompts lose a reply's reasoning once the next user message comes."),
    ] = False,
    observations: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="SWE-agent: prompts show the last N observations. Default: as recorded.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Summarise a request trace and convert it.

    Example: backhaul trace conversations.jsonl --format mooncake --out trace.jsonl

    Exit code 0: read; 2: the trace cannot be read.
    """
    from dataclasses import asdict

    from backhaul.benchmarks.traces import open_trace
    from backhaul.benchmarks.traces.native import encode_turn
    from backhaul.benchmarks.traces.summary import Summarizer
    from backhaul.deploy.console import Console
    from backhaul.deploy.terminal import print_json

    rules = _rules(tokenizer, drop_reasoning=drop_reasoning, observations=observations)
    turns = open_trace(path, format, strict=not skip_malformed, rules=rules)
    summarizer = Summarizer()
    with _replacing(out) as file:
        for turn in turns:
            summarizer.add(turn)
            if file is not None:
                file.write(encode_turn(turn))
    summary = summarizer.summary()
    if as_json:
        shares = {"reusable_share": summary.reusable_share, "skipped": dict(turns.skipped)}
        print_json({"format": turns.format} | asdict(summary) | shares)
        return
    console = Console()
    console.print(_table(path, turns.format, summary))
    if turns.skipped:
        console.print(_skipped(turns.skipped), style="yellow")
    if out is not None:
        console.print(f"Wrote {out}", soft_wrap=True)


def _rules(tokenizer: Path | None, *, drop_reasoning: bool, observations: int | None) -> TextRules:
    from backhaul.benchmarks.traces.dialogue import TextRules
    from backhaul.benchmarks.traces.text import CharacterEstimate, TokenizerCount
    from backhaul.deploy.prompts import load_tokenizer

    return TextRules(
        tokens=TokenizerCount(load_tokenizer(tokenizer)) if tokenizer else CharacterEstimate(),
        reasoning_kept=not drop_reasoning,
        observations=observations,
    )


@contextmanager
def _replacing(out: Path | None) -> Iterator[IO[bytes] | None]:
    """A file that becomes ``out`` only when all was written; None for no file. The trace may be
    the very file that is written. Raises ``ConfigError`` where it cannot be written."""
    if out is None:
        yield None
        return
    try:
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r} cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, out)
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r} cannot be written: {error.strerror}") from None
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _table(path: Path, format: str, summary: Summary) -> Table:
    from rich.table import Table

    table = Table(title=f"{path.name} ({format})", title_justify="left", show_header=True)
    table.add_column("")
    for name in ("total", "min", "median", "max"):
        table.add_column(name, justify="right")
    table.add_row("turns", f"{summary.turns:,}")
    table.add_row("conversations", f"{summary.conversations:,}")
    table.add_row("prompt tokens", f"{summary.prompt_tokens:,}", *_cells(summary.prompt))
    table.add_row("output tokens", f"{summary.output_tokens:,}", *_cells(summary.output))
    share = f"{summary.reusable_tokens:,} ({summary.reusable_share:.1%})"
    table.add_row("prompt tokens had before", share)
    return table


def _cells(spread: Spread) -> tuple[str, str, str]:
    return f"{spread.min:,}", f"{spread.median:,.0f}", f"{spread.max:,}"


def _skipped(counts: Counter[Reason]) -> str:
    reasons = ", ".join(f"{reason.value} {n:,}" for reason, n in counts.most_common())
    return f"Skipped {counts.total():,} malformed: {reasons}"
