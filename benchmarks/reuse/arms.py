"""Many simulated arms of one workload: built from names and numbers, run, shown as a table."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from rich.table import Table

from backhaul.benchmarks.reuse.deployment import Deployment, Routing
from backhaul.benchmarks.reuse.model_shape import ModelShape
from backhaul.benchmarks.reuse.record import NO_POLICY, Arm, ArmResult, Budget, RequestResult
from backhaul.benchmarks.reuse.simulator import Experiment, simulate
from backhaul.benchmarks.reuse.trace import Turn
from backhaul.deploy.console import plain_table
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.options import Policy
from backhaul.transfer.daemon.settings import format_bytes
from backhaul.transfer.strategies import DEFAULT, Admission, Eviction, Strategies

T = TypeVar("T", bound=msgspec.Struct)


def with_settings(base: T, settings: Iterable[str], option: str) -> T:
    """``base`` with fields set from ``NAME=VALUE`` texts. Raises ``ConfigError`` in one line."""
    changed: dict[str, object] = {}
    names = base.__struct_fields__
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or name not in names:
            raise ConfigError(f"{option} {text!r}: write NAME=VALUE; names: {', '.join(names)}")
        changed[name] = value
    try:
        return msgspec.convert(
            msgspec.structs.asdict(base) | changed, type(base), strict=False, from_attributes=True
        )
    except msgspec.ValidationError as error:
        raise ConfigError(_wrong_setting(base, changed, option, str(error))) from error


_FIELD = re.compile(r" - at `\$\.(\w+)`$")


def _wrong_setting(
    base: msgspec.Struct, changed: Mapping[str, object], option: str, message: str
) -> str:
    found = _FIELD.search(message)
    if found is None:
        return f"{option}: {message}"
    name, default = found[1], getattr(base, found[1])
    given = f"{option} {f'{name}={changed[name]}'!r}"
    if isinstance(default, str):
        return f"{given}: {message[: found.start()].lower()}"
    kind = "whole number" if isinstance(default, int) else "number"
    return f"{given}: give a {kind}, e.g. {name}={default:g}"


def policy_named(name: str) -> Policy | None:
    """A policy, or None for engines without Backhaul."""
    known = [NO_POLICY, *Policy]
    if name not in known:
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(known)}")
    return None if name == NO_POLICY else Policy(name)


class Limits(NamedTuple):
    """One budget. Bytes; 0: no limit."""

    capacity: int = 0
    admit_per_token: float = 0.0


def plan(
    workload: str,
    shape: ModelShape,
    deployment: Deployment,
    *,
    policies: Sequence[Policy | None],
    budgets: Sequence[Limits] = (Limits(),),
    evictions: Sequence[Eviction] = (Eviction.LRU,),
    routings: Sequence[Routing] = (Routing.STICKY, Routing.FORGET),
    repeat: int = 0,
) -> list[Experiment]:
    """The product of all of them. Engines without Backhaul (None) stand in every setting: arms are
    compared within one."""
    arms: list[Experiment] = []
    for routing in routings:
        for policy in policies:
            for limits in budgets:
                for eviction in evictions:
                    strategies = Strategies(eviction=eviction)
                    if limits.admit_per_token:
                        strategies = Strategies(
                            eviction=eviction,
                            admission=Admission.BUDGET,
                            admit_bytes_per_token=limits.admit_per_token,
                            # A bucket smaller than a checkpoint lets one in only when full.
                            admit_burst_bytes=max(DEFAULT.admit_burst_bytes, 4 * shape.state_bytes),
                        )
                    arms.append(
                        Experiment(
                            workload=workload,
                            shape=shape,
                            deployment=msgspec.structs.replace(deployment, routing=routing),
                            policy=policy,
                            capacity_bytes=limits.capacity,
                            strategies=strategies,
                            repeat=repeat,
                        )
                    )
    return arms


class Finished(NamedTuple):
    """One arm's results and the processor time that it took."""

    results: list[RequestResult]
    arm: ArmResult
    cpu_s: float

    def labelled(self, arm: Arm) -> Finished:
        """The same under another arm's name; it took no time of its own."""
        return Finished(
            [msgspec.structs.replace(result, arm=arm) for result in self.results],
            msgspec.structs.replace(self.arm, arm=arm),
            0.0,
        )


Progress = Callable[[Experiment, int], None]
"""Told the arm and how many of its requests have ended: 0 as it begins."""


def run_arms(
    arms: Iterable[Experiment], turns: Sequence[Turn], on_progress: Progress | None = None
) -> Iterator[Finished]:
    """Simulate one arm after the other. Engines without Backhaul know nothing of a store's budget
    and eviction: they are run once and stand in every setting, as arms are compared within one."""
    alone: dict[Experiment, Finished] = {}
    for experiment in arms:
        if on_progress is not None:
            on_progress(experiment, 0)
        started = time.process_time()
        key = msgspec.structs.replace(experiment, capacity_bytes=0, strategies=DEFAULT)
        if experiment.policy is None and key in alone:
            yield alone[key].labelled(experiment.arm)
            continue

        def told(done: int, experiment: Experiment = experiment) -> None:
            if on_progress is not None:
                on_progress(experiment, done)

        results, arm = simulate(experiment, turns, on_progress=told)
        finished = Finished(results, arm, time.process_time() - started)
        if experiment.policy is None:
            alone[key] = finished
        yield finished


class Row(NamedTuple):
    """A line of the table: an arm's figures, each the median over its repeats.

    ``ttft_s`` is the mean over the requests, ``ttft_p95_s`` their 95th percentile; NaN for none.
    ``input_rate``: prompt tokens per second. ``residents``: requests in the system, mean over time.
    ``evicted``: checkpoints. ``peak_bytes``: the store's highest occupancy. ``cpu_s``: what the
    simulation itself took.
    """

    reused: float
    loaded: float
    ttft_s: float
    ttft_p95_s: float
    input_rate: float
    residents: float
    evicted: float
    peak_bytes: float
    cpu_s: float


def arm_rows(finished: Iterable[Finished]) -> dict[Arm, Row]:
    """One row per arm, repeats taken together (``repeat`` 0). Engines without Backhaul do the same
    under every budget and eviction: they have one row per kind of routing."""
    groups: dict[Arm, dict[int, Row]] = {}
    for one in finished:
        arm = msgspec.structs.replace(one.arm.arm, repeat=0)
        if arm.policy == NO_POLICY:
            arm = msgspec.structs.replace(arm, budget=Budget.UNLIMITED, budget_bytes=0, eviction="")
        groups.setdefault(arm, {}).setdefault(one.arm.arm.repeat, _row(one))
    return {
        arm: Row(*(statistics.median(column) for column in zip(*rows.values(), strict=True)))
        for arm, rows in groups.items()
    }


EXPENDABLE = ("CPU", "resident", "peak", "evicted", "input tok/s", "p95")
"""Columns that a narrow console goes without, the first ones first."""


def arms_table(rows: Mapping[Arm, Row], title: str, without: Collection[str] = ()) -> Table:
    """One line per arm; docs/reuse.md explains the columns."""
    cells: dict[str, list[str]] = {
        "policy": [arm.policy for arm in rows],
        "budget": ["-" if arm.policy == NO_POLICY else arm.limit for arm in rows],
        "eviction": [arm.eviction or "-" for arm in rows],
        "P_end": [str(arm.prompt_end) for arm in rows],
        "reused": [_share(row.reused) for row in rows.values()],
        "loaded": [_share(row.loaded) for row in rows.values()],
        "TTFT": [_seconds(row.ttft_s) for row in rows.values()],
        "p95": [_seconds(row.ttft_p95_s) for row in rows.values()],
        "input tok/s": [
            f"{row.input_rate:,.0f}" if row.input_rate else "-" for row in rows.values()
        ],
        "resident": [f"{row.residents:.1f}" for row in rows.values()],
        "evicted": [f"{row.evicted:,.0f}" for row in rows.values()],
        "peak": [format_bytes(round(row.peak_bytes)) for row in rows.values()],
        "CPU": [f"{row.cpu_s:.1f} s" for row in rows.values()],
    }
    table = plain_table(title)
    shown = [name for name in cells if name not in without]
    for name in shown:
        left = name in ("policy", "budget", "eviction", "P_end")
        table.add_column(name, justify="left" if left else "right")
    for line in zip(*(cells[name] for name in shown), strict=True):
        table.add_row(*line)
    return table


def _row(one: Finished) -> Row:
    results, arm = one.results, one.arm
    prompt = sum(result.prompt_tokens for result in results)
    times = sorted(result.ttft_s for result in results)
    return Row(
        reused=sum(result.hit_tokens for result in results) / prompt if prompt else math.nan,
        loaded=sum(result.loaded_tokens for result in results) / prompt if prompt else math.nan,
        ttft_s=sum(times) / len(times) if times else math.nan,
        ttft_p95_s=times[int(len(times) * 0.95)] if times else math.nan,
        input_rate=prompt / arm.seconds if arm.seconds else 0.0,
        residents=arm.residents,
        evicted=sum(kind.evicted for kind in arm.kinds.values()),
        peak_bytes=arm.peak_used_bytes,
        cpu_s=one.cpu_s,
    )


def _share(part: float) -> str:
    return "-" if math.isnan(part) else f"{part:.1%}"


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f} s"
