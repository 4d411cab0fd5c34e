"""`backhaul simulate`: policies and budgets on a trace or a workload, in virtual time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from backhaul.benchmarks.reuse.deployment import Deployment
from backhaul.benchmarks.reuse.record import NO_POLICY
from backhaul.benchmarks.reuse.workloads import WORKLOADS, Sizes
from backhaul.deploy.arguments import (
    each,
    file_or_folder,
    file_to_write,
    shown,
    some_bytes,
    store_budget,
    writing,
)
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.policy import Policy
from backhaul.transfer.strategies import Eviction

if TYPE_CHECKING:
    from backhaul.benchmarks.reuse.arms import Limits
    from backhaul.benchmarks.reuse.record import Arm
    from backhaul.benchmarks.reuse.simulator import Experiment
    from backhaul.benchmarks.reuse.trace import Turn

_PIPE_WIDTH = 200  # a file has no edge, unless COLUMNS says so
LINE_EVERY_S = 10.0
"""Where standard error is no terminal: how often a long arm says how far it is."""


class LineProgress:
    """Says in lines how far the arms are: one as an arm ends, and now and then within a long one.
    For logs and pipes, which a progress bar leaves empty."""

    def __init__(
        self,
        arms: int,
        say: Callable[[str], None],
        *,
        every_s: float = LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arms = arms
        self._say = say
        self._every_s = every_s
        self._clock = clock
        self._number = 0
        self._name = ""
        self._began = self._said = 0.0

    def begin(self, arm: Arm) -> None:
        """The next arm begins."""
        self._number += 1
        self._name = f"{arm.policy}, {arm.limit}, {arm.eviction}, P_end {arm.prompt_end}"
        self._began = self._said = self._clock()

    def done(self, requests: int, total: int) -> None:
        """So many of the arm's requests have ended."""
        now = self._clock()
        if now - self._said >= self._every_s:
            self._said = now
            self._line(f"{requests:,} of {total:,} requests")

    def end(self) -> None:
        """The arm has ended."""
        self._line(f"done in {self._clock() - self._began:.1f} s")

    def _line(self, text: str) -> None:
        self._say(f"arm {self._number} of {self._arms} ({self._name}): {text}")


def _defaults(base: msgspec.Struct) -> str:
    given = msgspec.structs.asdict(base)
    # Apart, so that a narrow terminal breaks lines between them and cuts nothing.
    return ", ".join(f"{name} {value:g}" for name, value in given.items() if name != "routing")


def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TRACE]", help="A trace; see docs/traces.md.", callback=each(file_or_folder)
        ),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"Instead of a trace: {', '.join(WORKLOADS)}."),
    ] = "",
    trace_format: Annotated[
        str,
        typer.Option(
            "--format", metavar="NAME", help="The trace's format; auto: told from its start."
        ),
    ] = "auto",
    requests: Annotated[
        int, typer.Option(min=0, help="Use the first so many requests; 0: all.")
    ] = 0,
    generation_prefix: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Assume this many generation-only tokens at the end of prompts whose trace does "
            "not give U_end; 0: no U_end there.",
        ),
    ] = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"May be repeated. Of {NO_POLICY}, {', '.join(Policy)}. Default: none and both.",
        ),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="Of the store, e.g. 64GiB; may be repeated; 0: no limit. Default: 0.",
            callback=each(store_budget),
        ),
    ] = None,
    admit_per_token: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="Admitted bytes per prompt token, e.g. 2KiB (shown per 1,000 tokens); may be "
            "repeated. Default: no limit.",
            callback=each(some_bytes),
        ),
    ] = None,
    eviction: Annotated[
        list[Eviction] | None,
        typer.Option(help=f"Of the store; may be repeated. Default: {Eviction.LRU}."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Shape of the model.")
    ] = "qwen3.5-35b-a3b",
    routing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="sticky (P_end present) or forget (absent); may be repeated. Default: both.",
        ),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help=f"A figure of the cluster; may be repeated. Defaults: {_defaults(Deployment())}.",
        ),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help=f"A size of the workload; may be repeated. Defaults: {_defaults(Sizes())}.",
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="Of a workload, with other seeds; the table shows medians over them."
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append results as JSON lines, e.g. to results.jsonl; a file that has one of "
            "these arms already is refused. Default: none are written.",
            callback=each(file_to_write),
        ),
    ] = None,
) -> None:
    """Simulate a P/D cluster; `backhaul report` reads what --output writes.

    Example: backhaul simulate trace.jsonl --policy both --policy none --capacity 64GiB

    Exit code 0: simulated; 2: wrong usage, or the trace cannot be read.
    """
    if bool(trace) == bool(workload):
        raise ConfigError("give a TRACE, or --workload NAME")

    import os
    from contextlib import ExitStack
    from functools import partial

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

    from backhaul.benchmarks.reuse.arms import (
        EXPENDABLE,
        Finished,
        arm_rows,
        arms_table,
        plan,
        policy_named,
        run_arms,
        with_settings,
    )
    from backhaul.benchmarks.reuse.deployment import Routing
    from backhaul.benchmarks.reuse.lines import appending
    from backhaul.benchmarks.reuse.model_shape import preset
    from backhaul.benchmarks.reuse.record import write_results
    from backhaul.deploy.console import Console, narrowed

    name = workload or (trace.stem if trace else "")
    shape = preset(model)
    for text in routing or ():
        if text not in list(Routing):
            raise ConfigError(f"unknown routing {text!r}; known: {', '.join(Routing)}")
    deployment = with_settings(Deployment(), cluster or (), "--cluster")
    policies = [policy_named(text) for text in policy or ("none", "both")]
    routings = [Routing(text) for text in routing or (Routing.STICKY, Routing.FORGET)]
    evictions = eviction or [Eviction.LRU]
    arms = []
    workloads: dict[int, list[Turn]] = {}
    for repeat in range(repeats if workload else 1):
        workloads[repeat] = _turns(trace, workload, trace_format, size or (), seed + repeat)
        if requests:
            workloads[repeat] = workloads[repeat][:requests]
        if generation_prefix:
            workloads[repeat] = [_with_u_end(t, generation_prefix) for t in workloads[repeat]]
        arms += plan(
            name,
            shape,
            deployment,
            policies=policies,
            budgets=_budgets(capacity or (), admit_per_token or ()),
            evictions=evictions,
            routings=routings,
            repeat=repeat,
        )
    arms = list({experiment.arm: experiment for experiment in arms}.values())
    if output:
        _check_new([experiment.arm for experiment in arms], output)

    console = Console(stderr=True)
    finished: list[Finished] = []
    lines = None if console.is_terminal else LineProgress(len(arms), _say)
    with ExitStack() as stack:
        if output:
            stack.enter_context(writing("--output", output))
        file = stack.enter_context(appending(output)) if output else None
        progress = stack.enter_context(
            Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                console=console,
                transient=True,
                disable=not console.is_terminal,
            )
        )
        every = progress.add_task("arms", total=len(arms))
        for repeat, turns in workloads.items():
            task, step, total = TaskID(0), max(len(turns) // 200, 1), len(turns)

            def told(
                experiment: Experiment, done: int, step: int = step, total: int = total
            ) -> None:
                nonlocal task
                if done == 0:
                    task = progress.add_task(experiment.arm.policy, total=total)
                    if lines is not None:
                        lines.begin(experiment.arm)
                elif done % step == 0:
                    progress.update(task, completed=done)
                    if lines is not None:
                        lines.done(done, total)

            for one in run_arms([arm for arm in arms if arm.repeat == repeat], turns, told):
                if file is not None:
                    write_results([*one.results, one.arm], file)
                finished.append(one)
                if lines is not None:
                    lines.end()
                progress.remove_task(task)
                progress.advance(every)
    edge = sys.stdout.isatty() or os.environ.get("COLUMNS")
    paper = Console(width=None if edge else _PIPE_WIDTH)
    title = f"{name}, requests: {len(workloads[0]):,}, {model}"
    if len(workloads) > 1:
        title += f"; medians of {len(workloads)} repeats"
    table, left_out = narrowed(paper, partial(arms_table, arm_rows(finished), title), EXPENDABLE)
    paper.print(table)
    if left_out:
        paper.print(f"Not shown for lack of width: {', '.join(left_out)}")


def _check_new(arms: Sequence[Arm], output: Path) -> None:
    """Raises ``ConfigError`` where a file has one of these arms: `report` could not tell them
    apart."""
    from backhaul.benchmarks.reuse.record import ArmResult, read_results

    if not output.is_file():
        return
    earlier = read_results(output, say_torn=False)  # said when it is cut off
    held = {result.arm for result in earlier if isinstance(result, ArmResult)}
    twice = [arm for arm in arms if arm in held]
    if twice:
        raise ConfigError(
            f"--output {shown(str(output))} has {len(twice)} of these {len(arms)} arms already, "
            f"e.g. {twice[0].title}: remove the file, or name another one"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _turns(
    trace: Path | None,
    workload_name: str,
    trace_format: str,
    size: list[str] | tuple[()],
    seed: int,
) -> list[Turn]:
    from backhaul.benchmarks.reuse.arms import with_settings
    from backhaul.benchmarks.reuse.workloads import workload
    from backhaul.benchmarks.traces import open_trace

    if trace is not None:
        return sorted(open_trace(trace, trace_format), key=lambda turn: turn.arrival_s)
    return workload(workload_name, with_settings(Sizes(), size, "--size"), seed=seed)


def _with_u_end(turn: Turn, generation_prefix: int) -> Turn:
    import msgspec

    if turn.u_end is not None or turn.prompt_tokens <= generation_prefix:
        return turn
    return msgspec.structs.replace(turn, u_end=turn.prompt_tokens - generation_prefix)


def _budgets(capacities: list[str] | tuple[()], admitted: list[str] | tuple[()]) -> list[Limits]:
    from backhaul.benchmarks.reuse.arms import Limits
    from backhaul.transfer.daemon.settings import parse_byte_rate, parse_bytes

    budgets = [Limits(capacity=0 if text == "0" else parse_bytes(text)) for text in capacities]
    budgets += [Limits(admit_per_token=parse_byte_rate(text)) for text in admitted]
    return budgets or [Limits()]
