"""Many simulated arms of one workload: built from names and numbers, run, shown as a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from rich.table import Table

from backhaul.benchmarks.reuse.deployment import Deployment, Routing
from backhaul.benchmarks.reuse.model_shape import ModelShape
from backhaul.benchmarks.reuse.record import NO_POLICY, ArmResult, RequestResult
from backhaul.benchmarks.reuse.simulator import Experiment, simulate
from backhaul.benchmarks.reuse.trace import Turn
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
        raise ConfigError(f"{option}: {error}") from error


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


Progress = Callable[[Experiment, int], None]
"""Told the arm and how many of its requests have ended."""


def run_arms(
    arms: Iterable[Experiment], turns: Sequence[Turn], on_progress: Progress | None = None
) -> Iterator[Finished]:
    """Simulate one arm after the other."""
    for experiment in arms:
        started = time.process_time()

        def told(done: int, experiment: Experiment = experiment) -> None:
            if on_progress is not None:
                on_progress(experiment, done)

        results, arm = simulate(experiment, turns, on_progress=told)
        yield Finished(results, arm, time.process_time() - started)


def arms_table(finished: Iterable[Finished], title: str) -> Table:
    """One row per arm."""
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    table.add_column("budget")
    table.add_column("eviction")
    table.add_column("P_end")
    names = ("reused", "loaded", "TTFT", "p95", "input tok/s", "resident", "evicted", "peak")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("CPU", justify="right")
    for one in finished:
        table.add_row(*_row(one))
    return table


def _row(one: Finished) -> list[str]:
    results, arm = one.results, one.arm
    prompt = sum(result.prompt_tokens for result in results)
    times = sorted(result.ttft_s for result in results)
    budget = str(arm.arm.budget)
    if arm.arm.budget_bytes:
        budget += f" {format_bytes(arm.arm.budget_bytes)}"
    return [
        arm.arm.policy,
        budget,
        arm.arm.eviction,
        arm.arm.prompt_end,
        _share(sum(result.hit_tokens for result in results), prompt),
        _share(sum(result.loaded_tokens for result in results), prompt),
        f"{sum(times) / len(times):.3f} s" if times else "-",
        f"{times[int(len(times) * 0.95)]:.3f} s" if times else "-",
        f"{prompt / arm.seconds:,.0f}" if arm.seconds else "-",
        f"{arm.residents:.1f}",
        f"{sum(kind.evicted for kind in arm.kinds.values()):,}",
        format_bytes(arm.peak_used_bytes),
        f"{one.cpu_s:.1f} s",
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
