"""One small matrix on the shared pair: arms of real engines differ as their policies say."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_kit import Session

from backhaul.benchmarks.reuse.matrix import Matrix, StoreBudget, planned
from backhaul.benchmarks.reuse.model_shape import preset
from backhaul.benchmarks.reuse.real import RealArms
from backhaul.benchmarks.reuse.record import (
    NO_POLICY,
    ArmResult,
    Budget,
    EndFate,
    PromptEndAt,
    RequestResult,
    read_results,
)
from backhaul.benchmarks.reuse.report import build_report, write_report
from backhaul.benchmarks.reuse.run import results_file, run_arms
from backhaul.benchmarks.reuse.workloads import Sizes
from backhaul.deploy.console import Console
from backhaul.protocols.checkpoint import CheckpointKind

SIZES = Sizes(
    conversations=2, turns=2, system=100, user=60, reasoning=40, reply=40, generation_prefix=5
)
MATRIX = Matrix(
    policies=(NO_POLICY, "input_end", "decode_end"),
    budgets=(StoreBudget(budget=Budget.UNLIMITED),),
    workloads=("full_replay",),
    prompt_ends=(PromptEndAt.ABSENT,),
    repeats=1,
    model="tiny-hybrid",
)


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
    path = results_file(tmp_path)
    real = RealArms(own_store.pair, preset("tiny-hybrid"), concurrency=2)
    run_arms(Console(file=io.StringIO()), planned(MATRIX), SIZES, path, real.run)
    results = list(read_results(path))
    requests = {
        policy: [r for r in results if isinstance(r, RequestResult) and r.arm.policy == policy]
        for policy in MATRIX.policies
    }
    assert {policy: len(lines) for policy, lines in requests.items()} == dict.fromkeys(
        MATRIX.policies, 4
    )
    for policy, kind, other in (
        ("input_end", CheckpointKind.INPUT_END, CheckpointKind.DECODE_END),
        ("decode_end", CheckpointKind.DECODE_END, CheckpointKind.INPUT_END),
    ):
        later = [r for r in requests[policy] if r.relation.continuation]
        assert len(later) == 2
        for line in later:
            reachable = getattr(line.relation, kind.value)
            assert line.selected == kind.value
            assert line.local_tokens == 0 and line.hit_tokens == reachable > 0
            assert getattr(line, kind.value) is EndFate.SELECTED
            assert getattr(line, other.value) is EndFate.NOT_KEPT
            assert line.saved_flops > 0
        (arm,) = [r for r in results if isinstance(r, ArmResult) and r.arm.policy == policy]
        assert set(arm.kinds) == {kind} and arm.kinds[kind].created == 4
        assert arm.loaded_bytes > 0 and arm.evicted_unused == 0
    assert all(r.hit_tokens == 0 and not r.selected for r in requests[NO_POLICY])
    prompts = {r.request: r.prompt_tokens for r in requests[NO_POLICY]}
    for lines in requests.values():
        assert {r.request: r.prompt_tokens for r in lines} == prompts
    html, markdown = write_report(build_report(results), tmp_path / "report")
    assert "full_replay" in html.read_text() and "full_replay" in markdown.read_text()
