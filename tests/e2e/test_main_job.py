"""The conversation that ``backhaul demo`` shows: each turn loads from the end that it should."""

import io
from pathlib import Path

import psutil
from e2e_kit import Session

from backhaul.deploy.console import Console
from backhaul.deploy.demo import PLAN, play

GRID = 32


def test_every_turn_loads_its_end(pair: Session, model: Path) -> None:
    _, reports = play(Console(file=io.StringIO()), pair.pair, model)
    assert [r.loaded_from for r in reports] == ["", "D_end", "D_end", "D_end", "U_end"]
    computed = 0  # tokens whose state existed when the turn before ended
    prompt_end = 0  # what the turn before left on prefill; the hand-over takes its last token
    for plan, report in zip(PLAN, reports, strict=True):
        reused = report.prompt_tokens - report.recomputed
        assert report.found_locally == (0 if plan.other_worker else prompt_end)
        if report.loaded_from == "D_end":
            assert reused == computed // GRID * GRID
        computed = report.prompt_tokens + report.reply_tokens - 1
        prompt_end = (report.prompt_tokens - 2) // GRID * GRID


def test_each_worker_keeps_the_core_it_was_bound_to(pair: Session) -> None:
    """NixlConnector moves the model threads of all CPU workers to the machine's last core."""
    for engine in pair.pair.engines.values():
        workers = [p for p in engine.processes() if "VLLM::Worker" in " ".join(p.cmdline())]
        assert workers
        for worker in workers:
            assert {c for t in worker.threads() for c in psutil.Process(t.id).cpu_affinity()} == {
                int(engine.spec.cores)
            }
