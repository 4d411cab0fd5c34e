"""``backhaul bench``: experiments on real engines."""

from __future__ import annotations

import enum
import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from backhaul.benchmarks.reuse.matrix import Matrix, StoreBudget
from backhaul.benchmarks.reuse.record import NO_POLICY, RUN_WITH, Budget, PromptEndAt
from backhaul.benchmarks.reuse.workloads import WORKLOADS, Sizes
from backhaul.deploy.arguments import each, folder_to_write
from backhaul.deploy.demo_command import default_cache_dir
from backhaul.deploy.requirements import ENGINE, TINY_MODEL, need
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.policy import Policy
from backhaul.transfer.daemon.settings import CAPACITY_MIN_BYTES, parse_bytes
from backhaul.transfer.strategies import Eviction


class Experiment(enum.StrEnum):
    """What can be run."""

    REUSE = "reuse"


POLICIES = (NO_POLICY, *(policy.value for policy in Policy))
"""Compared unless others are named."""
SMALL = Sizes(
    conversations=3, turns=4, system=400, user=120, reasoning=80, reply=60, tool_result=120,
    tool_rounds=2, branches=3,
)  # fmt: skip
"""Sizes for engines on processor cores."""


def bench(
    experiment: Annotated[
        Experiment, typer.Argument(metavar="EXPERIMENT", help="Which one: reuse.")
    ],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="DIRECTORY",
            help="Where results.jsonl, report.html and report.md go. Arms that results.jsonl "
            "already has are not run again.",
            callback=each(folder_to_write),
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"May be repeated. Of {', '.join(POLICIES)}; all."),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"May be repeated. Of {', '.join(WORKLOADS)}; all."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="unlimited|capacity=SIZE|admitted=SIZE",
            help="May be repeated: what is equal between policies. The store's capacity, or the "
            "checkpoint bytes admitted per 1,000 prompt tokens. Default: unlimited.",
        ),
    ] = None,
    eviction: Annotated[
        Eviction, typer.Option(help="The store's order of eviction.")
    ] = Eviction.LRU,
    prompt_end: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(RUN_WITH),
            help="May be repeated: whether prefill still holds P_end. Default: both.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of every arm.")] = 3,
    conversations: Annotated[
        int, typer.Option(min=1, help="Conversations of a workload.")
    ] = SMALL.conversations,
    turns: Annotated[int, typer.Option(min=1, help="User messages of each.")] = SMALL.turns,
    scale: Annotated[
        float, typer.Option(min=0.05, max=1000.0, help="Factor on all lengths.")
    ] = 1.0,
    concurrency: Annotated[
        int, typer.Option(min=1, max=256, help="Requests under way at once, at most.")
    ] = 2,
    seed: Annotated[int, typer.Option(help="Draws the turns and the order of the arms.")] = 0,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where to build the tiny model.", callback=each(folder_to_write)
        ),
    ] = None,
) -> None:
    """Run an experiment on real engines. reuse: policy x budget x workload on a prefill/decode
    pair, as JSON lines and a report.

    Arms are interleaved and repeated; an interrupted run continues where it stopped.

    Example: backhaul bench reuse results --workload tool_loop --budget capacity=4MiB

    Exit code 0: all arms are done; 1: an engine or the store failed; 2: an argument is wrong; 130:
    interrupted; 143: SIGTERM.
    """
    need("`backhaul bench`", *ENGINE, *TINY_MODEL)
    from backhaul.benchmarks.reuse.run import MODEL, run_matrix
    from backhaul.deploy.console import Console
    from backhaul.deploy.processes import ServiceError, exit_on_sigterm

    exit_on_sigterm()
    if not math.isfinite(scale):  # compares as in range
        raise ConfigError(f"--scale is {scale}: give a factor, e.g. 2")
    sizes = Sizes(
        **{
            **{name: getattr(SMALL, name) for name in SMALL.__struct_fields__},
            "conversations": conversations,
            "turns": turns,
        }
    ).scaled(scale)
    matrix = Matrix(
        policies=_known("policy", policy, POLICIES, POLICIES),
        workloads=_known("workload", workload, WORKLOADS, WORKLOADS),
        budgets=tuple(parse_budget(text, eviction) for text in budget or ["unlimited"]),
        prompt_ends=tuple(map(PromptEndAt, _known("prompt-end", prompt_end, RUN_WITH, RUN_WITH))),
        repeats=repeats,
        model=MODEL,
        seed=seed,
    )
    try:
        run_matrix(
            Console(),
            matrix,
            sizes,
            directory=output,
            cache_dir=cache_dir or default_cache_dir(),
            concurrency=concurrency,
        )
    except ServiceError as error:
        print(f"backhaul: error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print(
            "backhaul: interrupted; every engine was stopped. The same command goes on from here",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


def parse_budget(text: str, eviction: str) -> StoreBudget:
    """A budget as written on the command line. Raises ``ConfigError``."""
    name, equals, size = text.partition("=")
    if name not in tuple(Budget) or bool(equals) == (name == Budget.UNLIMITED):
        raise ConfigError(
            f"--budget {text!r} is unreadable: write unlimited, capacity=SIZE or admitted=SIZE, "
            "e.g. capacity=8MiB"
        )
    nbytes = parse_bytes(size) if equals else 0
    least = CAPACITY_MIN_BYTES if name == Budget.CAPACITY else 1000  # a byte per token
    if equals and nbytes < least:
        raise ConfigError(f"--budget {text!r} is too small: give at least {least} bytes")
    return StoreBudget(budget=Budget(name), bytes=nbytes, eviction=eviction)


def _known(
    option: str, given: list[str] | None, known: tuple[str, ...], default: tuple[str, ...]
) -> tuple[str, ...]:
    for value in given or ():
        if value not in known:
            raise ConfigError(f"--{option} {value!r} is unknown; known: {', '.join(known)}")
    return tuple(dict.fromkeys(given)) if given else default
