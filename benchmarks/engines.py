"""What Backhaul costs decode and saves prefill, on a real prefill/decode pair.

``python -m backhaul.benchmarks.engines`` measures, interleaved on one pair of engines:

1. decode tokens per second with publication on against off (per request, same engine);
2. time from a request's end to its D_end being consumable;
3. prefill time of turn 2 after a history of 2k, 4k and 8k tokens, with Backhaul and without, where
   the prefill worker still holds the prompt's end (sticky routing) and where it does not;
4. what the load itself takes: the same boundary once loaded and once held locally, the same number
   of tokens computed after it.

Prints tables and, with ``--output``, writes JSON with every single measurement.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from backhaul.deploy.console import Console
from backhaul.deploy.demo_command import default_cache_dir
from backhaul.deploy.logs import log_folder
from backhaul.deploy.pair import EngineClient, Pair
from backhaul.deploy.tiny_model import TOKEN_IDS, build_tiny_model

END = TOKEN_IDS["<|im_end|>"]
REPLY_TOKENS = 300
QUEUE_S = 60.0


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    """Random letters, so that no two prompts share a prefix."""
    return [rng.randrange(97, 123) for _ in range(tokens)]


def ends_after(tokens: int) -> dict[str, Any]:
    """Sampling parameters under which a reply ends by itself after ``tokens`` tokens."""
    return {
        "max_tokens": tokens + 4,
        "min_tokens": tokens - 1,
        "logit_bias": {str(END): 100.0},
    }


def decode_rates(pair: Pair, rng: random.Random, repeats: int) -> dict[str, list[float]]:
    """Tokens per second after the first token, by arm, interleaved in changing order."""
    rates: dict[str, list[float]] = {"on": [], "off": []}
    for _ in track(range(repeats), "decode with publication on and off"):
        for arm in rng.sample(("on", "off"), 2):
            leg = pair.decode.complete(
                prompt_of(rng, 200),
                transfer={"backhaul": {"publish": arm == "on"}},
                stream=True,
                **ends_after(REPLY_TOKENS),
            )
            rates[arm].append((len(leg.tokens) - 1) / (leg.seconds - leg.first_token_s))
            wait_idle(pair.decode)
    return rates


def consumable_times(pair: Pair, rng: random.Random, repeats: int) -> list[float]:
    """Seconds from the end of a request to the moment lookups find its D_end."""
    name = "backhaul:finish_to_consumable_seconds"
    times = []
    for _ in track(range(repeats), "finish to consumable"):
        before = pair.decode.metrics()
        pair.run(prompt_of(rng, 500), **ends_after(60))
        wait_idle(pair.decode)
        after = pair.decode.metrics()
        count = after[f"{name}_count"] - before[f"{name}_count"]
        times.append((after[f"{name}_sum"] - before[f"{name}_sum"]) / count)
    return times


def turn_two_times(
    pair: Pair, rng: random.Random, history: int, *, load: bool, sticky: bool
) -> dict[str, float]:
    """Prefill seconds and computed tokens of turn 2, after a first turn of ``history`` tokens;
    after a load also the seconds of another turn 2 that finds the loaded state held locally."""
    reply = 100
    first = prompt_of(rng, history - reply)
    turn = pair.run(first, **ends_after(reply))
    wait_idle(pair.decode)
    wait_idle(pair.prefill)
    if not sticky:
        pair.prefill.reset_prefix_cache()
    second = [*first, *turn.decode.tokens, *prompt_of(rng, 50)]
    # Not marked for a decode leg: NIXL would keep its blocks until one comes.
    hints = {"load": load, "publish": False}
    leg = pair.prefill.complete(second, max_tokens=1, transfer={"backhaul": hints})
    measured = {"seconds": leg.seconds, "computed": leg.prompt_tokens - leg.cached_tokens}
    if load and not sticky:
        wait_idle(pair.prefill)
        other = [*second[:-50], *prompt_of(rng, 50)]
        held = pair.prefill.complete(other, max_tokens=1, transfer={"backhaul": hints})
        if held.cached_tokens != leg.cached_tokens:
            raise RuntimeError(f"held {held.cached_tokens} tokens, loaded {leg.cached_tokens}")
        measured["held_seconds"] = held.seconds
    return measured


def wait_idle(client: EngineClient) -> None:
    """Wait until the engine has no job under way. Raises ``TimeoutError`` after a minute."""
    deadline = time.monotonic() + QUEUE_S
    time.sleep(0.1)  # the front end enters a step's gauges just after it answered
    while client.metrics().get("backhaul:open_jobs", 0):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{client.engine.name} still has jobs after {QUEUE_S:.0f} s")
        time.sleep(0.02)


def turn_two_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Medians by history and situation, and how many times faster with Backhaul."""
    table = Table(title="Prefill of turn 2 (median)", title_justify="left")
    for name in ("history", "prompt end on prefill", "with s", "computed", "without s", "computed"):
        table.add_column(name, justify="right")
    table.add_column("without / with", justify="right")
    for history in sorted({row["history"] for row in rows}):
        for sticky in (True, False):
            cells = [
                [r for r in rows if (r["history"], r["sticky"], r["load"]) == (history, sticky, x)]
                for x in (True, False)
            ]
            seconds = [statistics.median(r["seconds"] for r in cell) for cell in cells]
            computed = [statistics.median(r["computed"] for r in cell) for cell in cells]
            table.add_row(
                f"{history:,}",
                "present" if sticky else "absent",
                f"{seconds[0]:.3f}",
                f"{computed[0]:,.0f}",
                f"{seconds[1]:.3f}",
                f"{computed[1]:,.0f}",
                f"{seconds[1] / seconds[0]:.2f}x",
            )
    return table


def load_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Prefill after a load against prefill from the same state held locally."""
    table = Table(title="The load itself (median)", title_justify="left")
    for name in ("history", "loaded s", "held s", "loaded - held, paired"):
        table.add_column(name, justify="right")
    for history in sorted({row["history"] for row in rows}):
        pairs = [
            (row["seconds"], row["held_seconds"])
            for row in rows
            if row["history"] == history and "held_seconds" in row
        ]
        loaded, held = (statistics.median(column) for column in zip(*pairs, strict=True))
        paired = statistics.median(a - b for a, b in pairs)
        table.add_row(f"{history:,}", f"{loaded:.3f}", f"{held:.3f}", f"{paired * 1000:.1f} ms")
    return table


def decode_table(rates: dict[str, list[float]], consumable: Sequence[float]) -> Table:
    """Decode rates and the time to consumable."""
    table = Table(title="Decode", title_justify="left")
    for name in ("figure", "median", "min", "max"):
        table.add_column(name, justify="left" if name == "figure" else "right")

    def row(name: str, values: Sequence[float], form: Callable[[float], str]) -> None:
        table.add_row(name, *(form(f(values)) for f in (statistics.median, min, max)))

    row("tokens/s, publication on", rates["on"], lambda x: f"{x:.2f}")
    row("tokens/s, publication off", rates["off"], lambda x: f"{x:.2f}")
    ratios = [a / b for a, b in zip(rates["on"], rates["off"], strict=True)]
    row("on / off, paired", ratios, lambda x: f"{x:.3f}")
    row("finish to consumable, ms", [s * 1000 for s in consumable], lambda x: f"{x:.1f}")
    return table


def run(
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of every figure.")] = 7,
    history: Annotated[
        list[int] | None, typer.Option(help="History lengths in tokens; may be repeated.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JSON.")] = None,
) -> None:
    """Measure decode impact, time to consumable, and turn-2 prefill."""
    console = Console()
    rng = random.Random(1)
    model = build_tiny_model(default_cache_dir() / "tiny-hybrid")
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(log_folder("backhaul-bench-"))
        console.print(f"starting a pair (about a minute), logs in {logs}", soft_wrap=True)
        pair = Pair(model, logs, capacity="1GiB", engine_env={"VLLM_SERVER_DEV_MODE": "1"})
        stack.enter_context(pair)
        for _ in range(2):  # connections and first kernels
            pair.run(prompt_of(rng, 300), **ends_after(40))
        rates = decode_rates(pair, rng, repeats)
        consumable = consumable_times(pair, rng, repeats)
        rows: list[dict[str, Any]] = []
        plan = [
            (size, sticky, load)
            for _ in range(max(repeats // 2, 1))
            for size in history or (2048, 4096, 8192)
            for sticky in (True, False)
            for load in rng.sample((True, False), 2)
        ]
        for size, sticky, load in track(plan, "turn 2"):
            measured = turn_two_times(pair, rng, size, load=load, sticky=sticky)
            rows.append({"history": size, "sticky": sticky, "load": load, **measured})
    console.print(decode_table(rates, consumable))
    console.print(turn_two_table(rows))
    console.print(load_table(rows))
    if output is not None:
        result = {"decode_tokens_per_s": rates, "consumable_s": consumable, "turn_two": rows}
        output.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"wrote {output}")


if __name__ == "__main__":
    typer.run(run)
