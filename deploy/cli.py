"""The `backhaul` command. One module per sub-command; each imports what is heavy only when run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import backhaul
from backhaul.deploy import demo_command, lint_command, store_command
from backhaul.protocols.errors import ConfigError

app = typer.Typer(
    name="backhaul",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("store")(store_command.store)
app.command("demo")(demo_command.demo)
app.command("lint-template")(lint_command.lint_template)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"backhaul {backhaul.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Carries finalized decode checkpoints back to prefill workers of a vLLM P/D cluster."""


def main() -> None:
    """Entry point: what the user got wrong is one line and exit code 2."""
    try:
        app()
    except ConfigError as error:
        print(f"backhaul: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
