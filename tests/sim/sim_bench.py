"""A pair of engines on a store that can be made to fail, and requests brought into a state."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from harness import BLOCK, HANGS_S, Pair, SimEngine, new_uri
from sim_faults import Faults, FaultyStore, Restartable
from sim_kit import tokens
from vllm.v1.request import RequestStatus

B = BLOCK


class Bench:
    """Engines on one store that can be made to fail."""

    def __init__(self, capacity: str = "64MiB", slow_s: float = 0.2) -> None:
        self.where = Restartable(new_uri(capacity))
        self.faults = Faults(slow_s=slow_s)
        self.pair = Pair(self.where.uri)

    def engine(self, *, options: dict[str, Any] | None = None, **keywords: Any) -> SimEngine:
        """One more engine."""
        return self.pair.engine(
            options={"publication_wait_s": 0.01, **(options or {})},
            wrap=lambda _: FaultyStore(self.where, self.faults),
            **keywords,
        )

    def always(self, *names: str) -> None:
        """From now on exactly these faults happen, every time."""
        self.faults.rates = dict.fromkeys(names, 1.0)

    def check_idle(self) -> None:
        """Everything was given back, on every engine and in the store."""
        self.pair.uri = self.where.uri
        self.pair.check_idle()


def step_until(engine: SimEngine, condition: Callable[[], bool]) -> None:
    """Step until something is so."""
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert engine.step() or condition(), "the engine went to sleep"
        engine.check()
        assert time.monotonic() < deadline
        time.sleep(0.0005)  # the connector's threads may be what it waits for


def hold(bench: Bench, *names: str) -> None:
    """From now on these happen, and go on happening until the faults go on."""
    bench.faults.slow_s = 3600.0
    bench.always(*names)


# -- requests in a state; each answers the request's name ----------------------------------------


def waiting(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    """Of an engine with two slots, both taken."""
    for seed in range(3, 5 - len(engine.live)):
        one = engine.submit(tokens(B, seed), 200)
        step_until(engine, lambda: engine.status(one) is RequestStatus.RUNNING)  # noqa: B023
    name = engine.submit(history, 20)
    for _ in range(4):
        engine.step()
    assert engine.status(name) is RequestStatus.WAITING
    return name


def looking_up(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    hold(bench, "lookup_slow")
    name = engine.submit(history, 20)
    step_until(engine, lambda: bench.faults.happened["lookup_slow"] == 1)
    return name


def loading(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    hold(bench, "read_slow")
    name = engine.submit(history, 20)
    step_until(engine, lambda: engine.status(name) is RequestStatus.WAITING_FOR_REMOTE_KVS)
    return name


def loading_in_vain(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    name = loading(bench, engine, history)
    bench.always("read_slow", "read_unsettled")
    return name


def loaded(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    name = loading(bench, engine, history)
    bench.faults.go_on()
    received = engine.scheduler.finished_recving_kv_req_ids
    step_until(engine, lambda: name in received)
    return name


def prefilling(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    name = engine.submit(tokens(80, 5), 20)
    step_until(engine, lambda: engine.requests[name].num_computed_tokens > 16)
    assert engine.requests[name].is_prefill_chunk
    return name


def decoding(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    name = engine.submit(history, 40)
    step_until(engine, lambda: engine.requests[name].num_output_tokens > 2 * B)
    return name


def publishing(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    bench.always("write_unsettled")
    return decoding(bench, engine, history)


def about_to_finish(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    name = engine.submit(history, 2 * B)
    step_until(engine, lambda: engine.requests[name].num_output_tokens == 2 * B - 1)
    return name


def finished(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    name = engine.submit(history, 2 * B)
    step_until(engine, lambda: name in engine.finished)
    return name
