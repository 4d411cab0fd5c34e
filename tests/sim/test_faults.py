"""Whatever the store does, and whenever a request goes away: a cache miss at worst."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from harness import HYBRID
from sim_bench import (
    B,
    Bench,
    about_to_finish,
    decoding,
    finished,
    loaded,
    loading,
    loading_in_vain,
    looking_up,
    prefilling,
    publishing,
    step_until,
    waiting,
)
from sim_faults import FAULTS
from sim_kit import ASYNC, tokens
from vllm.v1.request import RequestStatus

# -- one fault at a time ----------------------------------------------------------------------

_LOOKUP_REASONS = {
    "lookup_raises": "unreachable",
    "lookup_slow": "timeout",
    "lookup_bug": "internal",
}
_LOAD_REASONS = {
    "read_fails": "load_failed",
    "read_corrupt": "corrupt",
    "read_unsettled": "timeout",
    "read_bug": "internal",
}
_PUBLISH_REASONS = {
    "reserve_raises": "unreachable",
    "reserve_full": "store_full",
    "write_fails": "timeout",
    "write_unsettled": "timeout",
    "commit_raises": "uncommitted",
}
_HARMLESS = {"read_slow", "release_raises"}


def test_every_fault_is_covered() -> None:
    covered = {*_LOOKUP_REASONS, *_LOAD_REASONS, *_PUBLISH_REASONS, *_HARMLESS}
    assert covered == set(FAULTS)


@ASYNC
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("fault", [*_LOOKUP_REASONS, *_LOAD_REASONS, *sorted(_HARMLESS)])
def test_a_fault_while_loading(bench: Bench, fault: str, policy: str, asynchronous: bool) -> None:
    decode = bench.engine(name="decode")
    prefill = bench.engine(
        name="prefill",
        asynchronous=asynchronous,
        policy=policy,
        options={"lookup_timeout_s": 0.1} if fault == "lookup_slow" else {},
    )
    first = decode.run(tokens(3 * B + 1, 1), 2 * B)
    deep = (len(first.history) - 1) // B * B
    prompt = first.history + tokens(5, 2)
    bench.always(fault)
    if fault == "lookup_slow":
        bench.faults.slow_s = 600.0
    second = prefill.run(prompt, 2 * B)
    bench.faults.go_on()
    assert second.reason == "stop"
    assert second.loaded == (deep if fault in _HARMLESS else 0)
    if reason := _LOOKUP_REASONS.get(fault):
        assert prefill.counters[f"lookups|{reason}"] == 1
        assert second.params["backhaul"]["reason"] == reason
    if reason := _LOAD_REASONS.get(fault):
        assert prefill.counters["lookups|hit"] >= 1
        assert prefill.counters[f"load_failures|{reason}"] >= 1
        assert second.params["backhaul"]["reason"] == reason
    bench.always()
    third = bench.engine(name="later").run(second.history + tokens(2, 3), 3)
    assert third.loaded == (len(second.history) - 1) // B * B, "all is well again"
    bench.check_idle()


@ASYNC
@pytest.mark.parametrize("fault", _PUBLISH_REASONS)
def test_a_fault_while_publishing(bench: Bench, fault: str, asynchronous: bool) -> None:
    decode = bench.engine(name="decode", asynchronous=asynchronous)
    bench.always(fault)
    first = decode.run(tokens(3 * B + 1, 1), 3 * B, u_end=2 * B + 1)
    assert decode.counters[f"publication_failures|{_PUBLISH_REASONS[fault]}"] >= 2
    assert not any(name.startswith("publications|") for name in decode.counters)
    bench.always()
    second = decode.run(first.history + tokens(5, 2), 2 * B)
    third = bench.engine(name="prefill").run(second.history + tokens(5, 2), 3)
    assert third.loaded == (len(second.history) - 1) // B * B, "all is well again"
    bench.check_idle()


def test_a_failed_load_falls_back_to_the_local_hit_and_is_not_tried_again(bench: Bench) -> None:
    decode, prefill = bench.engine(name="decode"), bench.engine(name="prefill", role="kv_consumer")
    first = decode.run(tokens(3 * B + 1, 1), 3 * B)
    prefill.run(first.prompt, 1, stops=False)
    bench.always("read_fails")
    second = prefill.run(first.history + tokens(5, 2), 3)
    assert (second.resumed, second.loaded) == (3 * B, 0)
    assert prefill.counters["load_failures|load_failed"] == 1
    bench.check_idle()


def test_a_failed_load_falls_back_to_the_next_deepest_checkpoint(bench: Bench) -> None:
    decode, prefill = bench.engine(name="decode"), bench.engine(name="prefill")
    first = decode.run(tokens(4 * B + 6, 1), 3 * B, u_end=2 * B + 3)
    bench.faults.rates = {"read_fails": 1.0}
    name = prefill.submit(first.history + tokens(5, 2), 3)
    step_until(prefill, lambda: bench.faults.happened["read_fails"] == 1)
    bench.always()
    prefill.drain()
    assert prefill.finished[name].loaded == 4 * B, "P_end, since D_end failed"
    bench.check_idle()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_load_in_a_pool_that_holds_the_request_only_once(
    bench: Bench, policy: str
) -> None:
    # vLLM keeps the room that a failed load's request still needs reserved, against itself too,
    # so that a second load may never get blocks; without a load there is no such limit.
    decode = bench.engine(name="decode", groups=HYBRID[:2])
    first = decode.run(tokens(12 * B + 6, 1), 3 * B, u_end=10 * B + 3)
    bench.always("read_fails")
    small = {"num_blocks": 24, "max_tokens": 20 * B, "groups": HYBRID[:2]}
    prefill = bench.engine(name="prefill", policy=policy, **small)
    name = prefill.submit(first.history + tokens(5, 2), 3)
    step_until(prefill, lambda: bench.faults.happened["read_fails"] == 1)
    bench.always()
    step_until(prefill, lambda: name in prefill.finished)
    candidates = prefill.finished[name].params["backhaul"]["candidates"]
    assert "loads_over" in [one.get("passed_over") for one in candidates]
    prefill.drain()
    bench.check_idle()


@ASYNC
def test_pages_of_a_load_that_goes_on_are_not_reused(bench: Bench, asynchronous: bool) -> None:
    decode = bench.engine(name="decode")
    prefill = bench.engine(
        name="prefill", asynchronous=asynchronous, late=asynchronous, num_blocks=40
    )
    first = decode.run(tokens(3 * B + 1, 1), 3 * B)
    bench.always("read_unsettled")
    names = [prefill.submit(first.history + tokens(5, seed), 3 * B) for seed in range(4)]
    for _ in range(200):
        prefill.step()
        prefill.check()
    bench.always()
    prefill.drain()
    assert {prefill.finished[name].reason for name in names} == {"stop"}
    assert prefill.counters["load_failures|timeout"] >= 1
    bench.check_idle()


@ASYNC
def test_a_restarted_store(bench: Bench, asynchronous: bool) -> None:
    decode = bench.engine(name="decode", asynchronous=asynchronous)
    prefill = bench.engine(name="prefill", asynchronous=asynchronous)
    history = decode.run(tokens(3 * B + 1, 1), 3 * B).history
    bench.where.restart()
    assert prefill.run(history + tokens(5, 2), 3).loaded == 0
    # While a request decodes, what it has sent ahead gets lost.
    name = decode.submit(tokens(2 * B, 5), 6 * B)
    step_until(decode, lambda: decode.counters["publish_bytes"] > 0 and len(decode.live) == 1)
    for _ in range(3 * B):
        decode.step()
    bench.where.restart()
    decode.drain()
    # While a lookup's answer waits, its lease gets lost.
    later = decode.run(decode.finished[name].history + tokens(3, 1), 2 * B)
    bench.always("read_slow")
    other = prefill.submit(later.history + tokens(5, 2), 3)
    step_until(prefill, lambda: bench.faults.happened["read_slow"] == 1)
    bench.where.restart()
    prefill.drain()
    assert prefill.finished[other].loaded == 0
    assert prefill.counters["load_failures|lease_expired"] == 1
    bench.check_idle()


def test_a_store_that_is_too_small() -> None:
    bench = Bench(capacity="16KiB")
    decode, prefill = bench.engine(name="decode"), bench.engine(name="prefill")
    for seed in range(12):
        first = decode.run(tokens(3 * B + seed, seed), 3 * B)
        prefill.run(first.history + tokens(5, seed), B)
    huge = decode.run(tokens(60 * B, 99), 2 * B)
    assert decode.counters["publication_failures|store_full"] >= 1
    assert prefill.run(huge.history, 3).loaded == 0
    bench.check_idle()
    bench.pair.close()


@ASYNC
def test_decode_never_waits_for_the_store(asynchronous: bool) -> None:
    """Which stands still until it has finished: a step that waited would hang."""
    bench = Bench(slow_s=3600)
    engine = bench.engine(asynchronous=asynchronous, options={"lookup_timeout_s": 600})
    history = bench.engine(name="other").run(tokens(3 * B, 1), B).history
    decoding = engine.submit(tokens(3 * B, 5), 60)
    step_until(engine, lambda: engine.status(decoding) is RequestStatus.RUNNING)
    bench.always("read_slow", "write_unsettled")
    loading = engine.submit(history + tokens(9, 1), 60)
    step_until(engine, lambda: bench.faults.happened["read_slow"] > 0)
    bench.always("lookup_slow", "read_slow", "write_unsettled")
    looking_up = engine.submit(history + tokens(9, 2), 60)
    step_until(engine, lambda: decoding in engine.finished)
    assert bench.faults.happened["write_unsettled"] and bench.faults.happened["lookup_slow"]
    assert not {loading, looking_up} & engine.finished.keys()
    bench.always()
    bench.faults.go_on()
    engine.drain()
    bench.check_idle()
    bench.pair.close()


@ASYNC
@pytest.mark.parametrize("fraction", [0.0, 0.05])
def test_no_room_for_pins(bench: Bench, fraction: float, asynchronous: bool) -> None:
    decode = bench.engine(asynchronous=asynchronous, options={"max_pinned_fraction": fraction})
    history = tokens(9 * B, 1)
    for turn in range(3):
        history = decode.run(history, 3 * B).history + tokens(5, turn)
    assert decode.counters["publication_failures|pin_limit"] >= 1
    bench.check_idle()


# -- requests that go away --------------------------------------------------------------------


@ASYNC
@pytest.mark.parametrize("publish_on", [["stop"], ["stop", "length", "abort"]], ids=["stop", "all"])
@pytest.mark.parametrize(
    "state",
    [
        waiting,
        looking_up,
        loading,
        loading_in_vain,
        loaded,
        prefilling,
        decoding,
        publishing,
        about_to_finish,
        finished,
    ],
    ids=lambda state: state.__name__,
)
def test_an_abort(
    bench: Bench, state: Callable[..., str], publish_on: list[str], asynchronous: bool
) -> None:
    options = {"publish_on": publish_on}
    decode = bench.engine(name="decode")
    engine = bench.engine(
        name="prefill",
        asynchronous=asynchronous,
        late=asynchronous,
        max_requests=2,
        budget=24,
        num_blocks=48,
        options=options,
    )
    history = decode.run(tokens(3 * B + 1, 1), 2 * B).history + tokens(5, 2)
    name = state(bench, engine, history)
    engine.abort(name)
    bench.faults.go_on()
    step_until(engine, lambda: name not in engine.scheduler.requests)
    # At once, so that pages which a given-up transfer may still touch would be handed out again.
    again = [engine.submit(tokens(6 * B, seed), 2 * B) for seed in range(20, 24)]
    while engine.live:
        engine.step()
        engine.check()
    bench.always()
    engine.drain()
    assert {engine.finished[one].reason for one in again} == {"stop"}
    assert engine.run(history + tokens(B, 7), 5).reason == "stop"
    bench.check_idle()


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_that_outlives_its_request_counts_as_none(bench: Bench, fails: bool) -> None:
    decode, engine = bench.engine(name="decode"), bench.engine(name="prefill")
    history = decode.run(tokens(3 * B + 1, 1), 2 * B).history + tokens(5, 2)
    bench.faults.slow_s = 600.0
    name = loading(bench, engine, history)
    step_until(engine, lambda: bench.faults.happened["read_slow"] == 1)
    engine.abort(name)
    bench.always(*["read_fails"] * fails)
    bench.faults.go_on()
    engine.drain()
    engine.check_idle()
    counted = {key.partition("|")[0] for key in engine.counters}
    assert not counted & {"loads", "loaded_tokens", "requests"}
    assert bool(engine.counters["load_failures|load_failed"]) is fails
    bench.always()
    assert engine.run(history, 5).loaded == 5 * B
    bench.check_idle()


def test_an_abort_before_a_reply_loses_no_end_of_it(bench: Bench) -> None:
    engine = bench.engine(budget=24)
    name = prefilling(bench, engine, [])
    engine.abort(name)
    engine.drain()
    assert not engine.counters["publication_failures|aborted"]
    bench.check_idle()


def test_a_cache_reset_gives_pins_back(bench: Bench) -> None:
    engine = bench.engine()
    name = engine.submit(tokens(2 * B, 1), 60)
    step_until(engine, lambda: engine.requests[name].num_output_tokens > 2 * B)
    assert engine.gauges()["pins"]
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert not engine.gauges()["pins"]
    engine.drain()
    bench.check_idle()


def test_a_reset_that_preempts_running_requests_finds_no_pin_in_its_way(bench: Bench) -> None:
    engine = bench.engine(options={"stream_ahead": False})
    name = engine.submit(tokens(2 * B, 1), 200)

    def pinned_and_nothing_under_way() -> bool:
        gauges = engine.gauges()
        decoding = engine.requests[name].num_output_tokens > 2 * B
        return bool(decoding and gauges["pins"] and not gauges["open_jobs"])

    step_until(engine, pinned_and_nothing_under_way)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not engine.gauges()["held_blocks"]
    engine.drain()
    bench.check_idle()


@ASYNC
def test_a_thousand_short_requests_leave_nothing_behind(bench: Bench, asynchronous: bool) -> None:
    engine = bench.engine(asynchronous=asynchronous, num_blocks=64, budget=128)
    generator = random.Random(5)
    stems = [tokens(2 * B + 3, seed) for seed in range(8)]
    for _ in range(50):
        names = []
        for _ in range(20):
            prompt = generator.choice(stems) + tokens(3, generator.randrange(9))
            names.append(engine.submit(prompt, generator.randrange(1, 5), u_end=2 * B + 1))
        for _ in range(3):
            engine.step()
        engine.abort(generator.choice(engine.live or names))
        engine.drain()
        engine.check()
    assert len(engine.finished) == 1000
    assert engine.counters["lookups|hit"] + engine.counters["lookups|not_taken"] >= 1
    half = engine.backhaul._half
    engine.check_idle()
    assert not half._requests and not half._aborted_loads and not half._pinned
    assert not half._catalog._pending
    publisher, consumer = half._publisher, half._consumer
    assert not (publisher._open or publisher._sending or publisher._outbox)
    assert consumer is not None and not (consumer._open or consumer._outbox)
    bench.check_idle()
