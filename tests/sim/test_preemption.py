"""vLLM preempts a request, whatever it is doing: its positions in the reply are discarded and its
pins given back; it starts over, is computed right, and ends like one that was never disturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from harness import FULL, HYBRID, Group, SimEngine
from sim_bench import (
    B,
    Bench,
    about_to_finish,
    decoding,
    hold,
    loaded,
    loading,
    loading_in_vain,
    looking_up,
    prefilling,
    publishing,
    step_until,
    waiting,
)
from sim_faults import WRITE_SLOW
from sim_kit import ASYNC, kinds, tokens
from vllm.v1.request import RequestStatus

from backhaul.protocols.checkpoint import CheckpointKind

State = Callable[[Bench, SimEngine, list[int]], str]
LATE = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


def preempt(engine: SimEngine, name: str) -> None:
    """The pool looks full to the running request until vLLM has preempted it."""
    manager, before = engine.scheduler.kv_cache_manager, engine.requests[name].num_preemptions
    allocate = manager.allocate_slots

    def full(request: Any, *arguments: Any, **keywords: Any) -> Any:
        if request.request_id == name:
            return None
        return allocate(request, *arguments, **keywords)

    with patch.object(manager, "allocate_slots", full):
        step_until(engine, lambda: engine.requests[name].num_preemptions > before)


def resumed_after_a_load(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    name = engine.submit(history + tokens(50, 6), 20)
    step_until(engine, lambda: engine.status(name) is RequestStatus.RUNNING)
    assert engine.backhaul._half._requests[name].loaded
    assert engine.requests[name].is_prefill_chunk
    return name


def publishing_the_input_end(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    """U_end is being sent while the rest of the prompt is computed."""
    hold(bench, WRITE_SLOW)
    name = engine.submit(tokens(80, 7), 20, u_end=2 * B)
    step_until(engine, lambda: bool(engine.gauges()["open_jobs"]))
    assert engine.requests[name].is_prefill_chunk
    return name


def streaming(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    """Blocks of the reply are being sent ahead."""
    hold(bench, WRITE_SLOW)  # first: a job that is under way already may end at any time
    name = decoding(bench, engine, history)
    tracked = engine.backhaul._half._requests[name]
    step_until(engine, lambda: bool(tracked.stream_job))
    return name


def starting_over(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    """Preempted once already, while it decoded, and back at its prompt."""
    name = decoding(bench, engine, history + tokens(50, 6))
    preempt(engine, name)
    step_until(engine, lambda: engine.status(name) is RequestStatus.RUNNING)
    return name


def engines(bench: Bench, asynchronous: bool, late: bool) -> tuple[SimEngine, list[int]]:
    """An engine with two slots, and a prompt of which the store holds a part."""
    engine = bench.engine(
        name="prefill", asynchronous=asynchronous, late=late, max_requests=2, budget=24
    )
    decode = bench.engine(name="decode")
    return engine, decode.run(tokens(3 * B + 1, 1), 2 * B).history + tokens(5, 2)


def check(bench: Bench, engine: SimEngine, name: str, *, lost_end: bool = False) -> None:
    """The request ends as if nothing had happened: right, and its D_end can be loaded, unless it
    was lost with the blocks; then P_end is the deepest."""
    bench.faults.go_on()
    engine.drain()
    done = engine.finished[name]
    assert done.reason == "stop"
    bench.always()
    second = bench.engine(name="other").run(done.history + tokens(3, 8), 4)
    deepest = len(done.prompt if lost_end else done.history) - 1
    assert second.resumed == second.loaded == deepest // B * B
    bench.check_idle()


@ASYNC
@LATE
@pytest.mark.parametrize(
    "state",
    [
        resumed_after_a_load,
        prefilling,
        publishing_the_input_end,
        decoding,
        streaming,
        publishing,
        about_to_finish,
        starting_over,
    ],
    ids=lambda state: state.__name__,
)
def test_a_running_request(bench: Bench, state: State, asynchronous: bool, late: bool) -> None:
    engine, history = engines(bench, asynchronous, late)
    name = state(bench, engine, history)
    tracked = engine.backhaul._half._requests[name]
    preempt(engine, name)
    # With two steps in flight its last token may arrive with the preemption.
    ended = name in engine.finished
    assert engine.status(name) is RequestStatus.PREEMPTED or (ended and state is about_to_finish)
    assert not (tracked.pins or tracked.decode_pin), "a preempted request holds no pin"
    if state in (publishing_the_input_end, streaming):
        assert engine.gauges()["held_blocks"], "what is being sent stays held"
    bench.always()
    check(bench, engine, name, lost_end=ended)


def test_a_preempted_request_asks_again_and_is_traffic_once(bench: Bench) -> None:
    engine, history = engines(bench, asynchronous=False, late=False)
    bench.faults.repeats.clear()
    name = resumed_after_a_load(bench, engine, history)
    preempt(engine, name)
    engine.drain()
    assert engine.finished[name].reason == "stop"
    assert bench.faults.repeats == [False, True]


@ASYNC
@LATE
@pytest.mark.parametrize(
    "state",
    [waiting, looking_up, loading, loading_in_vain, loaded],
    ids=lambda state: state.__name__,
)
def test_a_request_that_waits_beside_one_that_is_preempted(
    bench: Bench, state: State, asynchronous: bool, late: bool
) -> None:
    """vLLM preempts running requests only: what another one waits for goes on."""
    engine, history = engines(bench, asynchronous, late)
    victim = engine.submit(tokens(2 * B, 9), 600)  # still runs when the other one waits
    step_until(engine, lambda: engine.status(victim) is RequestStatus.RUNNING)
    name = state(bench, engine, history)
    preempt(engine, victim)
    assert not engine.requests[name].num_preemptions
    check(bench, engine, name)
    assert engine.finished[victim].reason == "stop"


@ASYNC
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_preemption(bench: Bench, asynchronous: bool, late: bool) -> None:
    engine = bench.engine(
        asynchronous=asynchronous, late=late, num_blocks=30, max_tokens=136, groups=HYBRID[:2]
    )
    decode = bench.engine(name="decode", groups=HYBRID[:2])
    history = decode.run(tokens(2 * B, 1), 2 * B).history
    for seed in range(4):
        engine.submit(tokens(2 * B + seed, seed), 60)
    engine.submit(history + tokens(3, 3), 60)
    tracked = engine.backhaul._half._requests
    while engine.live:
        engine.step()
        engine.check()
        for name in engine.live:
            if engine.status(name) is RequestStatus.PREEMPTED:
                assert not tracked[name].pins, "a preempted request holds no pin"
    preempted = sum(request.num_preemptions for request in engine.requests.values())
    assert preempted, "the pool is too small for all of them"
    bench.check_idle()


@ASYNC
def test_output_computed_again_has_no_end_where_no_chunk_ended(
    bench: Bench, asynchronous: bool
) -> None:
    """The chunk of the reply goes over 3 B, and the kernels export the state at its last hash
    boundary into the block that would be that of 3 B. So D_end is where the chunk began."""
    groups = (FULL, Group(layers=2, recurrent=True, exports=True))
    engine = bench.engine(
        groups=groups, unit=B // 4, asynchronous=asynchronous, max_requests=2, budget=14
    )
    name = engine.submit(tokens(2 * B, 1), 2 * B - 1)
    request = engine.requests[name]
    step_until(engine, lambda: request.num_output_tokens >= 13)
    preempt(engine, name)
    for block in engine.pool.blocks:  # others took what it had
        engine.pool._maybe_evict_cached_block(block)
    computed = {request.num_computed_tokens}
    while engine.step():
        computed.add(request.num_computed_tokens)
    assert 2 * B in computed and computed.isdisjoint(range(2 * B + 1, 3 * B + 5))
    bench.check_idle()
    assert kinds(bench.pair)[-1] == (2 * B, {CheckpointKind.DECODE_END})
