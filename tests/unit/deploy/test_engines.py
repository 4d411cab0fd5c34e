"""Workers run on the cores that they were given."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from backhaul.deploy.engines import Engine, EngineSpec, core_ids

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "ids"),
    [("0", {0}), ("0,2", {0, 2}), ("1-3", {1, 2, 3}), ("0-1,5", {0, 1, 5})],
)
def test_core_lists(text: str, ids: set[int]) -> None:
    assert core_ids(text) == ids


class _Ranks(Engine):
    """Processes titled as vLLM's workers are, in the order of their ranks."""

    def command(self) -> list[str]:
        start = "bash -c 'exec -a VLLM::Worker_TP{} sleep 60' & sleep 0.05;"
        return ["bash", "-c", "".join(start.format(rank) for rank in (0, 1)) + "wait"]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[_Ranks]:
    spec = EngineSpec("ranks", tmp_path, cores=f"{CORES[0]}|{CORES[-1]}")
    engine = _Ranks(spec, tmp_path)
    engine.start()
    try:
        yield engine
    finally:
        engine.kill()


def _titles(engine: Engine) -> dict[str, psutil.Process]:
    found = {}
    for process in engine.processes():
        with suppress(psutil.NoSuchProcess):
            found |= {word: process for word in process.cmdline()[:1]}
    return found


def test_each_rank_is_bound_to_its_own_core(ranks: _Ranks) -> None:
    names = [f"VLLM::Worker_TP{rank}" for rank in (0, 1)]
    deadline = time.monotonic() + 300
    while not set(names) <= _titles(ranks).keys():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = [_titles(ranks)[name] for name in names]
    for worker in workers:  # as NixlConnector leaves them
        worker.cpu_affinity([CORES[-1]])
    ranks.bind_workers()
    assert [worker.cpu_affinity() for worker in workers] == [[CORES[0]], [CORES[-1]]]
