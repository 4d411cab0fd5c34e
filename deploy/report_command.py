"""`backhaul report`: answers the experiment's questions from result lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backhaul.deploy.arguments import each, file_or_folder, folder_to_write, writing


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="JSON lines of `backhaul simulate --output` or of `backhaul bench`; of a folder, "
            "its results.jsonl. Or request logs of engines, of both legs: what their clients' "
            "requests reused.",
            callback=each(file_or_folder),
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Where report.html and report.md are written.",
            callback=each(folder_to_write),
        ),
    ] = Path("report"),
) -> None:
    """Write a self-contained HTML report and a Markdown one with plots.

    Example: backhaul report results.jsonl --output report; of what was served: backhaul report
    prefill.jsonl decode.jsonl

    Exit code 0: written; 2: wrong usage, or there is nothing to read.
    """
    from itertools import chain

    from backhaul.benchmarks.reuse.record import RESULTS, read_files
    from backhaul.benchmarks.reuse.report import build_report, write_report
    from backhaul.benchmarks.reuse.served import is_request_log, read_logs, served_results

    files = [path / RESULTS if path.is_dir() else path for path in results]
    files = list(dict.fromkeys(files))
    logs = list(filter(is_request_log, files))
    lines = read_files(path for path in files if path not in logs)
    built = build_report(chain(lines, served_results(read_logs(logs))))
    with writing("--output", output):
        written = write_report(built, output)
    for path in written:
        print(f"wrote {path}")
