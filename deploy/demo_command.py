"""`backhaul demo`: the multi-turn conversation on a real prefill/decode pair."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from backhaul.deploy.arguments import each, file_to_write, folder_to_write
from backhaul.deploy.requirements import ENGINE, TINY_MODEL, need


def default_cache_dir() -> Path:
    """Where the locally built model lies: ``$XDG_CACHE_HOME/backhaul`` or ``~/.cache/backhaul``."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "backhaul"


def demo(
    output: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Also write the figures as JSON.", callback=each(file_to_write)
        ),
    ] = None,
    cache_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Where to build the tiny model.", callback=each(folder_to_write)
        ),
    ] = None,
    keep_logs: Annotated[
        bool,
        typer.Option(
            help="Keep the logs of store and engines; of a failed run they are kept anyhow."
        ),
    ] = False,
) -> None:
    """Run a conversation with and without Backhaul and compare what each turn recomputed.

    Example: backhaul demo --output demo.json --keep-logs

    Exit code 0: both ran; 1: a service failed; 2: wrong usage; 130: interrupted; 143:
    SIGTERM.
    """
    need("`backhaul demo`", *ENGINE, *TINY_MODEL)
    from backhaul.deploy.console import Console
    from backhaul.deploy.demo import run_demo
    from backhaul.deploy.processes import ServiceError, exit_on_sigterm

    exit_on_sigterm()
    try:
        run_demo(
            Console(),
            cache_dir=Path(cache_dir) if cache_dir else default_cache_dir(),
            output=Path(output) if output else None,
            keep_logs=keep_logs,
        )
    except ServiceError as error:
        print(f"backhaul: error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("backhaul: interrupted; every engine was stopped", file=sys.stderr)
        raise typer.Exit(130) from None
