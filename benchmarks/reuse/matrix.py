"""The real matrix: policy x budget x workload x P_end present or absent, on one pair of engines.

The engines run throughout; a policy is a hint of each request. Every arm gets a store of its own,
empty, with that arm's budget, and engines that have forgotten their caches. Arms of one setting
and repeat replay the same turns, in an order that is drawn anew, so that drift of the machine hits
all of them alike.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence

import msgspec

from backhaul.benchmarks.reuse.record import (
    Arm,
    ArmResult,
    Budget,
    PromptEndAt,
    Result,
    Source,
)
from backhaul.benchmarks.reuse.trace import Turn


class StoreBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What an arm's store may hold or admit; see ``record.Arm`` for ``bytes``."""

    budget: Budget
    bytes: int = 0
    eviction: str = "lru"


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run.

    ``policies``: values of ``Policy``, or ``NO_POLICY``. ``seed`` draws the order of the arms and,
    with the number of the repeat, its turns.
    """

    policies: tuple[str, ...]
    budgets: tuple[StoreBudget, ...]
    workloads: tuple[str, ...]
    prompt_ends: tuple[PromptEndAt, ...] = (PromptEndAt.ABSENT, PromptEndAt.PRESENT)
    repeats: int = 3
    model: str = ""
    seed: int = 0


def planned(matrix: Matrix) -> list[Arm]:
    """Every arm in the order to run it: repeat by repeat, so that what was cut off early still
    compares all arms; within a repeat setting by setting, its policies shuffled."""
    rng = random.Random(matrix.seed)
    arms: list[Arm] = []
    for repeat in range(matrix.repeats):
        settings = list(itertools.product(matrix.workloads, matrix.prompt_ends, matrix.budgets))
        rng.shuffle(settings)
        for workload, prompt_end, budget in settings:
            for policy in rng.sample(matrix.policies, len(matrix.policies)):
                arms.append(
                    Arm(
                        source=Source.REAL,
                        workload=workload,
                        policy=policy,
                        budget=budget.budget,
                        budget_bytes=budget.bytes,
                        eviction=budget.eviction,
                        prompt_end=prompt_end,
                        model=matrix.model,
                        repeat=repeat,
                    )
                )
    return list(dict.fromkeys(arms))


def left_to_do(arms: Iterable[Arm], results: Iterable[Result]) -> list[Arm]:
    """The arms without a line that says that they were finished."""
    done = {result.arm for result in results if isinstance(result, ArmResult)}
    return [arm for arm in arms if arm not in done]


RunArm = Callable[[Arm, Sequence[Turn]], list[Result]]
"""Runs one arm and returns its lines, the ``ArmResult`` last."""
