"""The `backhaul` command. One module per sub-command; each imports what is heavy only when run."""

from __future__ import annotations

import errno
import re
import sys
from typing import Annotated

import typer

import backhaul
from backhaul.deploy import (
    ab_command,
    bench_command,
    checkpoints_command,
    demo_command,
    doctor_command,
    explain_command,
    lint_command,
    proxy_command,
    report_command,
    simulate_command,
    store_command,
    trace_command,
    up_command,
)
from backhaul.deploy.arguments import UsageError
from backhaul.deploy.service import silence_stdout
from backhaul.protocols.errors import ConfigError, StoreError

app = typer.Typer(
    name="backhaul",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("store")(store_command.store)
app.command("demo")(demo_command.demo)
app.command("proxy")(proxy_command.proxy)
app.command("up")(up_command.up)
app.command("checkpoints")(checkpoints_command.checkpoints)
app.command("doctor")(doctor_command.doctor)
app.command("explain")(explain_command.explain)
app.command("report")(report_command.report)
app.command("simulate")(simulate_command.simulate)
app.command("lint-template")(lint_command.lint_template)
app.command("trace")(trace_command.trace)
app.command("ab")(ab_command.ab)
app.command("bench")(bench_command.bench)


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
    """Entry point: what the user got wrong is one line and exit code 2, a store that could not do
    what was asked, or a file that cannot be used, one line and exit code 1."""
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        if not sys.argv[1:]:
            error.show()  # the help
        else:
            _complain(f"{_usage_words(error.format_message())}; see --help")
        sys.exit(2)
    except ConfigError as error:
        _complain(str(error))
        sys.exit(2)
    except StoreError as error:
        _complain(str(error))
        sys.exit(1)
    except OSError as error:
        if error.errno in _NO_SPACE:
            silence_stdout()
            _complain(f"cannot write {error.filename or 'the output'}: {error.strerror}")
        elif error.filename is not None:  # not a connection's
            _complain(f"{error.filename}: {error.strerror}")
        else:
            raise
        sys.exit(1)
    except UnicodeEncodeError as error:
        if error.encoding == "utf-8":  # an argument that is not, which Python marks byte by byte
            _complain(f"{error.object!r} is no UTF-8 text")
        else:
            silence_stdout()
            _complain(
                f"the output cannot be written as {error.encoding}: set PYTHONIOENCODING=utf-8"
            )
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""A disk that takes no more is not the command's fault, wherever it shows."""


def _usage_words(message: str) -> str:
    """A usage error of the library's as part of a line: without its full stop and the name of the
    exception that it was made of."""
    return " ".join(message.split()).replace(": Value error, ", ": ").rstrip(".")


_LONG_WORD = re.compile(r"\S{201,}")


def _complain(message: str) -> None:
    """One line, whatever the values in it that come from outside."""
    line = " ".join(message.splitlines())
    line = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)
    line = _LONG_WORD.sub(lambda word: f"{word[0][:200]}...", line)
    print(f"backhaul: error: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
