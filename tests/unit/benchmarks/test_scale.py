"""The simulator's cost: what one request takes must not grow with their number."""

from __future__ import annotations

import cProfile

import msgspec

from backhaul.benchmarks import scale
from backhaul.benchmarks.reuse.workloads import workload

CAPACITY = 1 << 20
"""Some dozens of the tiny model's checkpoints: full long before 500 requests have ended."""


def calls(requests: int) -> tuple[float, scale.Row]:
    """Function calls per request: the same number in every run."""
    sizes = msgspec.structs.replace(
        scale.SIZES, conversations=-(-requests // 2), turns=2, system=40, user=40, reasoning=20,
        reply=10,
    )  # fmt: skip
    turns = workload("full_replay", sizes)[:requests]
    profile = cProfile.Profile(builtins=False)
    row = profile.runcall(scale.measure, turns, CAPACITY, "tiny-hybrid")
    return sum(entry.callcount for entry in profile.getstats()) / requests, row


def test_a_request_costs_the_same_among_many() -> None:
    few, short = calls(500)
    many, long = calls(2000)
    assert (short.requests, long.requests) == (500, 2000)
    assert short.evicted > 100 and long.evicted / 2000 > 0.8 * short.evicted / 500, "no pressure"
    assert many < 1.3 * few, f"{few:.0f} calls a request among 500, {many:.0f} among 2,000"
