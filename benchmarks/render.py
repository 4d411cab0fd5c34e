"""Cost of finding U_end, against the same without.

Two measurements, of processor time, so that other load on the machine counts less; what is compared
alternates:

*The whole hook* (``--whole``): all that an unmodified server pays per request, in vLLM's own front
end without an engine. *Render time* is what the server does with a request's messages, without
hooks: it renders them, tokenises the text in its threads, and makes sampling parameters. *Cost* is
the same with the hooks less without, where templates are rendered in the measuring thread and only
that thread's time counts: what hooks do is in it, tokenising, which they leave alone, is not.
Other load only ever adds time, so both are 10th percentiles.

*The marks alone* (default): one template's render with marks and without; and once per
template, what parsing, examining and compiling it takes on top.

    python -m backhaul.benchmarks.render chat_template.jinja --whole --tokenizer tokenizer.json
"""

from __future__ import annotations

import functools
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jinja2
import typer
from rich.table import Table

from backhaul.deploy.console import Console
from backhaul.deploy.tiny_model import build_tiny_model
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.policy import Policy
from backhaul.render import lint
from backhaul.render.template import MarkedTemplate, environment

if TYPE_CHECKING:
    from backhaul.connector.front_end import HookedAndPlain

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


@dataclass(frozen=True)
class Served:
    """One template and length in vLLM's front end. Times in milliseconds. ``median_cost_ms``: cost
    by medians instead of 10th percentiles."""

    template: str
    turns: int
    tokens: int
    render_ms: float
    cost_ms: float
    cost_percent: float
    median_cost_ms: float


def measure_served(
    name: str, source: str, tokenizer: Path | None, policy: str, lengths: list[tuple[int, int, int]]
) -> list[Served]:
    """Time the whole hook. ``lengths``: turns, characters per message and pairs to time."""
    from backhaul.connector.front_end import HookedAndPlain

    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model(Path(folder) / "model")
        (model / "chat_template.jinja").write_text(source)
        if tokenizer is not None:
            shutil.copy(tokenizer, model / "tokenizer.json")
            config = json.loads((model / "config.json").read_text())
            config |= {"vocab_size": 1 << 20, "max_position_embeddings": 1 << 20}
            (model / "config.json").write_text(json.dumps(config))
        pair = HookedAndPlain(model, policy)
        try:
            return [_served(pair, name, *length) for length in lengths]
        finally:
            pair.close()


_COUNTED, _WARMING = 40, 10
"""Requests of a block that count, and those before them: what a switch changes in classes makes the
interpreter's caches of them void, which in a server happens once."""


def _served(pair: HookedAndPlain, name: str, turns: int, chars: int, repeats: int) -> Served:
    messages = conversation(turns, chars)["messages"]
    times: dict[bool, list[float]] = {True: [], False: []}
    whole: list[float] = []
    tokens = 0
    gc.disable()
    for block in range(max(2 * repeats // _COUNTED, 4)):
        on = block % 2 == 0
        pair.switch(on, inline=True)
        for number in range(_WARMING + _COUNTED):
            request = pair.request({"messages": messages})
            took = _timed_ms(functools.partial(pair.render, request))
            if number >= _WARMING:
                times[on].append(took)
        hints = (request.kv_transfer_params or {}).get("backhaul", {})
        if on is not ("u_end" in hints):
            raise ConfigError(f"{name}: U_end is not found; nothing to measure")
        tokens = hints.get("u_end", tokens)
        if not on:
            pair.switch(False, inline=False)
            for number in range(_WARMING):
                request = pair.request({"messages": messages})
                started = time.process_time()
                pair.render(request)
                if number:
                    whole.append((time.process_time() - started) * 1e3)
        gc.collect(0)
    gc.enable()
    hooked, plain, base = (_tenth(some) for some in (times[True], times[False], whole))
    return Served(
        template=name,
        turns=turns,
        tokens=tokens,
        render_ms=round(base, 4),
        cost_ms=round(hooked - plain, 4),
        cost_percent=round(100 * (hooked - plain) / base, 2),
        median_cost_ms=round(statistics.median(times[True]) - statistics.median(times[False]), 4),
    )


def _tenth(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[0]


def _show_served(results: list[Served]) -> None:
    table = Table(title="The whole hook, per request")
    for column in ("template", "turns", "tokens", "render ms", "cost ms", "cost %", "by medians"):
        table.add_column(column, justify="left" if column == "template" else "right")
    for r in results:
        table.add_row(
            Path(r.template).stem, str(r.turns), f"{r.tokens:,}", f"{r.render_ms:.3f}",
            f"{r.cost_ms:+.4f}", f"{r.cost_percent:+.2f}", f"{r.median_cost_ms:+.4f}",
        )  # fmt: skip
    console.print(table)


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
    turns: Annotated[str, typer.Option(help="Turns, separated by commas.")] = "0,1,10,50",
    chars: Annotated[int, typer.Option(help="Characters per message.")] = 1000,
    repeats: Annotated[int, typer.Option(min=4, help="Timed pairs of the shortest.")] = 2000,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json; default: bytes, which is no real cost.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Of the connector.")] = Policy.BOTH,
    whole: Annotated[bool, typer.Option(help="Time the whole hook, in vLLM's front end.")] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write results as JSON.")] = None,
) -> None:
    """Cost of finding U_end while rendering a chat template."""
    counts = [int(count) for count in turns.split(",")]
    # Longer prompts take longer and are steadier.
    lengths = [(count, chars, max(repeats // (1 + count), 40)) for count in counts]
    results: list[Any] = []
    try:
        for path in paths:
            for name, source in lint.load(path).items():
                if whole:
                    results += measure_served(name, source, tokenizer, policy, lengths)
                else:
                    results += [measure(name, source, *length) for length in lengths]
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    (_show_served if whole else _show)(results)
    if output is not None:
        settings = {
            "chars_per_message": chars,
            "repeats": repeats,
            "measured": "whole hook" if whole else "marks",
            "policy": policy,
            "tokenizer": str(tokenizer),
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
