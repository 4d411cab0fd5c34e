"""One arm of each budget on the shared pair: real engines differ as their policies say, and the
budget reaches the daemon, which keeps it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from e2e_kit import Session

from backhaul.benchmarks.reuse.matrix import Matrix, StoreBudget, planned
from backhaul.benchmarks.reuse.model_shape import preset
from backhaul.benchmarks.reuse.real import RealArms
from backhaul.benchmarks.reuse.record import (
    NO_POLICY,
    RESULTS,
    Arm,
    ArmResult,
    Budget,
    EndFate,
    PromptEndAt,
    RequestResult,
    Result,
    read_results,
)
from backhaul.benchmarks.reuse.report import build_report, write_report
from backhaul.benchmarks.reuse.run import results_file, run_arms
from backhaul.benchmarks.reuse.trace import Turn
from backhaul.benchmarks.reuse.workloads import Sizes, workload
from backhaul.deploy.console import Console
from backhaul.deploy.pair import scrape
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.transfer.arena import ALIGNMENT

SIZES = Sizes(
    conversations=2, turns=2, system=100, user=60, reasoning=40, reply=40, generation_prefix=5
)
SHAPE = preset("tiny-hybrid")
ADMITTED = 1000
"""Bytes per 1,000 prompt tokens: less than any checkpoint. A full bucket lets one in, which leaves
debt that this traffic never earns back."""


def arms() -> dict[str, Arm]:
    """One of each budget, by policy; the one without Backhaul finds P_end where it was computed.
    The capacity holds all U_ends but half a state."""
    ends = [turn.u_end or 0 for turn in workload("full_replay", SIZES, seed=0)]
    deepest = ends[2:]  # both first turns come before both second ones
    blocks = sum(end // SHAPE.grid for end in deepest)
    needed = blocks * SHAPE.block_bytes + len(ends) * SHAPE.state_bytes
    budgets = {
        NO_POLICY: StoreBudget(budget=Budget.UNLIMITED),
        "input_end": StoreBudget(budget=Budget.CAPACITY, bytes=needed - SHAPE.state_bytes // 2),
        "decode_end": StoreBudget(budget=Budget.ADMITTED, bytes=ADMITTED),
    }
    planned_arms = {}
    for policy, budget in budgets.items():
        (planned_arms[policy],) = planned(
            Matrix(
                policies=(policy,),
                budgets=(budget,),
                workloads=("full_replay",),
                prompt_ends=(PromptEndAt.PRESENT if policy == NO_POLICY else PromptEndAt.ABSENT,),
                repeats=1,
                model=SHAPE.name,
            )
        )
    return planned_arms


@pytest.fixture
def own_store(pair: Session) -> Iterator[Session]:
    """The pair; its store gets its usual settings back."""
    store = pair.pair.store
    usual = store.settings
    yield pair
    store.stop()
    store.configure(*usual)
    pair.ensure_store()


def test_arms_on_real_engines(own_store: Session, tmp_path: Path) -> None:
    path = tmp_path / RESULTS
    real = RealArms(own_store.pair, SHAPE, concurrency=2)
    planned_arms = arms()
    books: dict[str, dict[str, float]] = {}

    def run(arm: Arm, turns: Sequence[Turn]) -> list[Result]:
        results = real.run(arm, turns)
        books[arm.policy] = scrape(own_store.pair.store.http_url, "backhaul:store_")
        return results

    with results_file(tmp_path) as file:
        run_arms(Console(file=io.StringIO()), list(planned_arms.values()), SIZES, file, run)
    results = list(read_results(path))
    requests = {
        policy: [r for r in results if isinstance(r, RequestResult) and r.arm.policy == policy]
        for policy in planned_arms
    }
    done = {r.arm.policy: r for r in results if isinstance(r, ArmResult)}
    assert {policy: len(lines) for policy, lines in requests.items()} == dict.fromkeys(
        planned_arms, 4
    )
    assert all(r.loaded_tokens == 0 and not r.selected for r in requests[NO_POLICY])
    assert done[NO_POLICY].kinds == {} and done[NO_POLICY].peak_used_bytes == 0
    for line in requests[NO_POLICY]:  # P_end present: prefill's own cache was left alone
        assert line.local_tokens == line.relation.prompt_end
        assert (line.local_tokens > 0) is bool(line.relation.continuation)
    prompts = {r.request: r.prompt_tokens for r in requests[NO_POLICY]}
    for lines in requests.values():
        assert {r.request: r.prompt_tokens for r in lines} == prompts

    kinds = {"input_end": CheckpointKind.INPUT_END, "decode_end": CheckpointKind.DECODE_END}
    for policy, kind in kinds.items():
        (other,) = set(kinds.values()) - {kind}
        later = [r for r in requests[policy] if r.relation.continuation]
        assert len(later) == 2
        for line in later:
            assert getattr(line, other.value) is EndFate.NOT_KEPT
            if getattr(line, kind.value) is not EndFate.SELECTED:
                continue
            reachable = getattr(line.relation, kind.value)
            assert line.selected == kind.value
            assert line.local_tokens == 0 and line.hit_tokens == reachable > 0
            assert line.saved_flops > 0
        arm = done[policy]
        assert set(arm.kinds) == {kind} and arm.loaded_bytes > 0

    # Equal capacity: every end is let in, and one has to go when the last one comes.
    capacity = planned_arms["input_end"].budget_bytes
    arm = done["input_end"]
    assert books["input_end"]["backhaul:store_capacity_bytes"] == capacity // ALIGNMENT * ALIGNMENT
    assert capacity - SHAPE.state_bytes < arm.peak_used_bytes <= capacity
    input_ends = arm.kinds[CheckpointKind.INPUT_END]
    assert (input_ends.created, arm.refused) == (4, 0) and input_ends.evicted >= 1
    assert sum(r.input_end is EndFate.SELECTED for r in requests["input_end"]) == 2

    # Equal admitted bytes: of the four one is let in, and nothing is evicted for it.
    arm = done["decode_end"]
    decode_ends = arm.kinds[CheckpointKind.DECODE_END]
    assert (decode_ends.created, decode_ends.evicted) == (1, 0) and arm.refused >= 3
    assert books["decode_end"]["backhaul:store_over_budget_objects_total"] > 0
    assert sum(r.decode_end is EndFate.SELECTED for r in requests["decode_end"]) == 1

    html, markdown = write_report(build_report(results), tmp_path / "report")
    assert "full_replay" in html.read_text() and "full_replay" in markdown.read_text()
