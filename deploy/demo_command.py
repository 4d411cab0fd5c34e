"""`backhaul demo`: the multi-turn conversation on a real prefill/decode pair."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def default_cache_dir() -> Path:
    """Where the locally built model lies: ``$XDG_CACHE_HOME/backhaul`` or ``~/.cache/backhaul``."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "backhaul"


def demo(
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the figures as JSON.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to build the tiny model.")
    ] = None,
    keep_logs: Annotated[bool, typer.Option(help="Keep the engines' logs.")] = False,
) -> None:
    """Run a conversation with and without Backhaul and compare what each turn recomputed."""
    from rich.console import Console

    from backhaul.deploy.demo import run_demo
    from backhaul.deploy.processes import ServiceError

    try:
        run_demo(
            Console(),
            cache_dir=cache_dir or default_cache_dir(),
            output=output,
            keep_logs=keep_logs,
        )
    except ServiceError as error:
        print(f"backhaul: error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("backhaul: interrupted; every engine was stopped", file=sys.stderr)
        raise typer.Exit(130) from None
