"""The simulator's cost by the number of requests: `python -m backhaul.benchmarks.scale`.

The same traffic for longer: conversations arrive at one rate and the store has one capacity, so
that from some point on every request meets the same pressure.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.progress import track
from rich.table import Table

from backhaul.benchmarks.reuse.deployment import Deployment, Routing
from backhaul.benchmarks.reuse.model_shape import preset
from backhaul.benchmarks.reuse.simulator import Experiment, Simulator
from backhaul.benchmarks.reuse.trace import Span, Turn
from backhaul.benchmarks.reuse.workloads import Sizes, workload
from backhaul.benchmarks.traces import open_trace
from backhaul.deploy.console import Console
from backhaul.protocols.options import Policy
from backhaul.transfer.daemon.settings import parse_bytes

SIZES = Sizes(turns=6, system=2000, user=800, reasoning=600, reply=300, arrival_s=2.0)


class Row(NamedTuple):
    """One run. ``cpu_s``: processor time of the simulation alone."""

    requests: int
    prompt_tokens: int
    evicted: int
    seconds: float
    cpu_s: float


def measure(turns: list[Turn], capacity: int, model: str) -> Row:
    """Simulate once, sticky routing, policy `both`."""
    experiment = Experiment(
        workload="scale",
        shape=preset(model),
        deployment=Deployment(prefill_workers=8, decode_workers=8, routing=Routing.STICKY),
        policy=Policy.BOTH,
        capacity_bytes=capacity,
    )
    simulator = Simulator(experiment)
    started, cpu = time.monotonic(), time.process_time()
    results, arm = simulator.run(turns)
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    simulator.check()
    return Row(
        len(results),
        sum(result.prompt_tokens for result in results),
        sum(kind.evicted for kind in arm.kinds.values()),
        seconds,
        cpu,
    )


def repeated(turns: list[Turn], requests: int) -> list[Turn]:
    """The first ``requests`` of a trace that is played again and again, each time with other
    content, after the last arrival."""
    found: list[Turn] = []
    length = max(turn.arrival_s for turn in turns) + 1.0
    for again in range(-(-requests // len(turns))):
        found += (_moved(turn, again, again * length) for turn in turns)
    return found[:requests]


def _moved(turn: Turn, again: int, by_s: float) -> Turn:
    if not again:
        return turn

    def renamed(spans: Iterable[Span]) -> tuple[Span, ...]:
        return tuple(Span(f"{span.source}#{again}", span.start, span.stop) for span in spans)

    return msgspec.structs.replace(
        turn,
        request=f"{turn.request}#{again}",
        conversation=turn.conversation and f"{turn.conversation}#{again}",
        after=turn.after and f"{turn.after}#{again}",
        arrival_s=turn.arrival_s + by_s,
        prompt=renamed(turn.prompt),
        output=renamed(turn.output),
    )


def table(rows: Iterable[Row]) -> Table:
    """Rows with the cost per request."""
    found = Table(title="Simulation, policy both", title_justify="left")
    names = ("requests", "prompt tokens", "evicted", "seconds", "CPU seconds", "ms per request")
    for name in names:
        found.add_column(name, justify="right")
    for row in rows:
        found.add_row(
            f"{row.requests:,}",
            f"{row.prompt_tokens:,}",
            f"{row.evicted:,}",
            f"{row.seconds:.1f}",
            f"{row.cpu_s:.1f}",
            f"{row.cpu_s / row.requests * 1000:.2f}",
        )
    return found


def run(
    trace: Annotated[
        Path | None, typer.Argument(metavar="[TRACE]", help="Instead of generated traffic.")
    ] = None,
    requests: Annotated[
        list[int] | None, typer.Option(min=1, help="Numbers of requests; may be repeated.")
    ] = None,
    capacity: Annotated[str, typer.Option(metavar="SIZE", help="Of the store.")] = "100GiB",
    model: Annotated[str, typer.Option(metavar="NAME", help="Shape.")] = "qwen3.5-35b-a3b",
) -> None:
    """Measure the simulator at several numbers of requests."""
    console = Console(stderr=True)
    rows = []
    turns = sorted(open_trace(trace), key=lambda turn: turn.arrival_s) if trace else []
    for count in track(requests or [3000, 6000, 12_000, 24_000], "simulating", console=console):
        if trace:
            wanted = repeated(turns, count)
        else:
            sizes = msgspec.structs.replace(SIZES, conversations=-(-count // SIZES.turns))
            wanted = workload("full_replay", sizes)[:count]
        rows.append(measure(wanted, parse_bytes(capacity), model))
    Console().print(table(rows))


if __name__ == "__main__":
    typer.run(run)
