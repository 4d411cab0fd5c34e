"""Cost of finding U_end while rendering, against the plain render of the same template.

Measures, per template and conversation length, in pairs whose order alternates, the thread's
processor time (so that other load on the machine counts less):

- ``plain``: the template as transformers renders it.
- ``cost``: the marked render less the plain one of the same pair; median and quartiles.
- ``examine``: once per template, what parsing, examining and compiling it with marks takes on top.

Tokenising the suffix is not in it: it is some ten tokens, and kept from the first request on.

    python -m backhaul.benchmarks.render chat_template.jinja --output render.json
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer
from rich.table import Table

from backhaul.deploy.console import Console
from backhaul.protocols.errors import ConfigError
from backhaul.render import lint
from backhaul.render.template import MarkedTemplate, environment

console = Console()


@dataclass(frozen=True)
class Result:
    """One template and length. Times in milliseconds; ``cost`` is marked less plain."""

    template: str
    turns: int
    chars: int
    plain_ms: float
    cost_ms: float
    cost_ms_quartiles: tuple[float, float]
    cost_percent: float
    examine_ms: float


def conversation(turns: int, chars: int) -> dict[str, Any]:
    """Template variables of ``turns`` turns with messages of ``chars`` characters each."""
    words = "the quick brown fox jumps over the lazy dog "
    text = (words * (chars // len(words) + 1))[:chars]
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are careful."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn}: {text}"})
        messages.append({"role": "assistant", "content": text, "reasoning_content": text})
    messages.append({"role": "user", "content": text})
    return {
        "messages": messages,
        "tools": None,
        "documents": None,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_generation_prompt": True,
    }


def measure(name: str, source: str, turns: int, chars: int, repeats: int) -> Result:
    """Time one template. Raises ``ConfigError`` where U_end is not found in it."""
    made = environment()
    made.globals["strftime_now"] = lambda form: form
    plain = made.from_string(source)
    started = time.perf_counter()
    marked = MarkedTemplate(source, made)
    examine_ms = (time.perf_counter() - started) * 1e3
    if marked.reason is not None:
        raise ConfigError(f"{name}: U_end is not found ({marked.reason}); nothing to measure")
    variables = conversation(turns, chars)
    try:
        text = plain.render(**variables)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{name} does not take the benchmark's messages: {error}") from None
    rendering = marked.render(**variables)
    assert rendering is not None and rendering.text == text

    plain_ms, cost_ms = [], []
    gc.disable()
    for repeat in range(-2, repeats):  # Two pairs to warm up.
        runs = [lambda: plain.render(**variables), lambda: marked.render(**variables)]
        order = (0, 1) if repeat % 2 else (1, 0)
        times = {which: _timed_ms(runs[which]) for which in order}
        gc.collect(0)
        if repeat >= 0:
            plain_ms.append(times[0])
            cost_ms.append(times[1] - times[0])
    gc.enable()
    low, cost, high = statistics.quantiles(cost_ms, n=4)
    base = statistics.median(plain_ms)
    return Result(
        template=name,
        turns=turns,
        chars=len(text),
        plain_ms=round(base, 4),
        cost_ms=round(cost, 4),
        cost_ms_quartiles=(round(low, 4), round(high, 4)),
        cost_percent=round(100 * cost / base, 2),
        examine_ms=round(examine_ms, 2),
    )


def _timed_ms(run: Callable[[], object]) -> float:
    started = time.thread_time()
    run()
    return (time.thread_time() - started) * 1e3


def _show(results: list[Result]) -> None:
    table = Table(title="Finding U_end while rendering (medians)")
    for column in (
        "template",
        "turns",
        "prompt chars",
        "plain ms",
        "cost ms",
        "cost %",
        "examine ms",
    ):
        table.add_column(column, justify="left" if column == "template" else "right")
    for r in results:
        low, high = r.cost_ms_quartiles
        table.add_row(
            Path(r.template).stem, str(r.turns), f"{r.chars:,}", f"{r.plain_ms:.3f}",
            f"{r.cost_ms:+.3f} ({low:+.3f} to {high:+.3f})", f"{r.cost_percent:+.2f}",
            f"{r.examine_ms:.1f}",
        )  # fmt: skip
    console.print(table)


def main(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="As for lint-template.")],
    turns: Annotated[str, typer.Option(help="Turns, separated by commas.")] = "1,10,100",
    chars: Annotated[int, typer.Option(help="Characters per message.")] = 1000,
    repeats: Annotated[int, typer.Option(min=4, help="Timed pairs.")] = 200,
    output: Annotated[Path | None, typer.Option(help="Where to write results as JSON.")] = None,
) -> None:
    """Cost of finding U_end while rendering a chat template."""
    try:
        results = [
            measure(name, source, int(count), chars, repeats)
            for path in paths
            for name, source in lint.load(path).items()
            for count in turns.split(",")
        ]
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    _show(results)
    if output is not None:
        settings = {
            "chars_per_message": chars,
            "repeats": repeats,
            "jinja2": jinja2.__version__,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "machine": platform.platform(),
            "load_average": os.getloadavg(),
        }
        rows = [asdict(result) for result in results]
        output.write_text(json.dumps({"settings": settings, "results": rows}, indent=2) + "\n")
        console.print(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
