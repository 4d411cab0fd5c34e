"""vLLM has the connector's cache reset, as around a change of weights: from then on the engine
takes and gives nothing that others share, and its requests go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import SimEngine
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
from sim_faults import WRITE_SLOW
from sim_kit import ASYNC, tokens
from sim_record import check_record

from backhaul.connector import scheduler
from backhaul.transfer.registry import open_store


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines about a reset."""
    lines: list[str] = []

    def warn(text: str, *values: object) -> None:
        if "until it is restarted" in text:
            lines.append(text % values)

    # Not a handler: what runs in this process before may have set loggers as it needs them.
    monkeypatch.setattr(scheduler.logger, "warning", warn)
    return lines


def content(bench: Bench) -> set[tuple[int, bytes]]:
    """Everything that lookups can find."""
    store = open_store(bench.where.uri, client_name="look")
    found = store.list_checkpoints(timeout_s=300)
    store.close()
    return {(info.boundary, bytes(info.block_hash)) for info in found}


def sending(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    """A checkpoint is being written."""
    bench.always(WRITE_SLOW)
    name = engine.submit(history[: 2 * B + 3], 2 * B, u_end=2 * B)
    step_until(engine, lambda: bench.faults.happened[WRITE_SLOW] > 0)
    return name


def not_dispatched(bench: Bench, engine: SimEngine, history: list[int]) -> str:
    """A request has ended, and no rank has been told yet what to send of it."""
    publisher = engine.backhaul._half._publisher
    name = engine.submit(history, 2 * B)
    step_until(engine, lambda: name in engine.finished or bool(publisher._outbox))
    return name


@ASYNC
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "state",
    [
        waiting, looking_up, loading, loading_in_vain, loaded, prefilling, decoding, publishing,
        sending, not_dispatched, about_to_finish, finished,
    ],
    ids=lambda state: state.__name__,
)  # fmt: skip
def test_after_a_reset_nothing_is_loaded_or_published(
    bench: Bench, said: list[str], state: Callable[..., str], ranks: int, asynchronous: bool
) -> None:
    decode = bench.engine(name="decode", ranks=ranks)
    engine = bench.engine(
        name="prefill",
        ranks=ranks,
        asynchronous=asynchronous,
        late=asynchronous,
        max_requests=2,
        budget=24,
        num_blocks=64,
        options={"publish_on": ["stop", "length"]},
    )
    history = decode.run(tokens(3 * B + 1, 1), 2 * B).history + tokens(5, 2)
    decode.check_idle()
    name = state(bench, engine, history)
    settled = engine.requests[name].num_output_tokens > 0
    live = name in engine.live
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    before = content(bench)
    assert not engine.gauges()["pins"]
    bench.faults.go_on()
    bench.always()
    engine.drain()
    if not settled:
        assert engine.finished[name].loaded == 0
        assert not engine.finished[name].params.get("backhaul", {}).get("candidates")
    if live:
        assert engine.finished[name].params["backhaul"]["decode_end_reason"] == "cache_reset"
    lost = "publication_failures|cache_reset"
    failures, withheld = engine.counters[lost], 0
    loads = sum(n for k, n in engine.counters.items() if k.startswith("loads|"))
    for seed, prompt in ((7, history), (8, tokens(3 * B, 8)), (9, history)):
        done = engine.run(prompt + tokens(B, seed), 2 * B, u_end=2 * B)
        record = check_record(engine, done)
        assert done.loaded == 0 and record.reason == "cache_reset" and not record.candidates
        assert record.decode_end_reason == "cache_reset"
        assert record.input_end.outcome in ("cache_reset", "resumed_past")
        withheld += 1 + (record.input_end.outcome == "cache_reset")
    assert engine.counters["lookups|cache_reset"] >= 3
    assert engine.counters[lost] - failures == withheld
    assert loads == sum(n for k, n in engine.counters.items() if k.startswith("loads|"))
    assert content(bench) == before, "nothing became visible"
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert len(said) == 1
    # Others go on sharing what was there.
    other = bench.engine(name="other", ranks=ranks)
    assert other.run(history, 3).loaded > 0
    assert content(bench) > before
    bench.check_idle()


def test_a_local_reset_is_no_reset_of_the_connector(bench: Bench, said: list[str]) -> None:
    """``/reset_prefix_cache`` without ``reset_external``."""
    engine = bench.engine()
    first = engine.run(tokens(3 * B + 1, 1), 2 * B)
    engine.check_idle()
    before = content(bench)
    assert engine.scheduler.reset_prefix_cache()
    assert content(bench) == before
    again = engine.run(first.history + tokens(3, 2), 2 * B)
    assert again.loaded == (len(first.history) - 1) // B * B
    engine.check_idle()
    assert content(bench) > before and not said
    bench.check_idle()
