"""What a lookup came to: what is counted of it, and what the record gives as the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from harness import Pair, SimEngine
from sim_bench import B, Bench
from sim_kit import tokens
from sim_record import check_counters, check_record

from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointMatch,
    LookupOutcome,
    NotAsked,
    Reason,
)
from backhaul.transfer.base import LookupResult, Store


def looked_up(engine: SimEngine) -> Counter[str]:
    """Lookups by result."""
    found = {k.partition("|")[2]: n for k, n in engine.counters.items() if k.startswith("lookups|")}
    return Counter({name: int(n) for name, n in found.items() if n})


def with_gone(boundaries: list[int]) -> Callable[[Store], Store]:
    """A store that also remembers evicted checkpoints at ``boundaries``, and holds nothing."""

    def wrap(store: Store) -> Store:
        lookup = store.lookup

        def remembers(*args: Any, **more: Any) -> LookupResult:
            result = lookup(*args, **more)
            if result.lease is not None:
                store.release([result.lease], timeout_s=300)
            gone = tuple(
                CheckpointMatch(
                    boundary=boundary, kinds=(CheckpointKind.DECODE_END,), consumable=False,
                    reason=Reason.EVICTED, retained=False, hash_matched=False,
                )
                for boundary in sorted(boundaries, reverse=True)
            )  # fmt: skip
            return replace(result, matches=gone, lease=None)

        store.lookup = remembers  # type: ignore[method-assign]
        return store

    return wrap


def not_asked(engine: SimEngine) -> dict[str, float]:
    """Requests of which the store was not asked, by reason."""
    found = {k.partition("|")[2]: n for k, n in engine.counters.items() if "not_asked|" in k}
    return {name: n for name, n in found.items() if n}


LONG, SHORT = 3 * B + 2, B
NOT_ASKED: dict[NotAsked, tuple[str, int, dict[str, Any]]] = {
    NotAsked.ROLE: ("kv_producer", LONG, {}),
    NotAsked.HANDED_OVER: ("kv_both", LONG, {"params": {"do_remote_prefill": True}}),
    NotAsked.OPTED_OUT: ("kv_both", LONG, {"params": {"backhaul": {"load": False}}}),
    NotAsked.NO_CACHE_READ: ("kv_both", LONG, {"reads_cache": False}),
    NotAsked.BELOW_GRID: ("kv_both", SHORT, {}),
}


@pytest.mark.parametrize("why", NotAsked)
def test_why_the_store_was_not_asked_is_told_and_counted(pair: Pair, why: NotAsked) -> None:
    role, length, asked = NOT_ASKED[why]
    engine = pair.engine(role=role)
    record = check_record(engine, engine.run(tokens(length, 1), 3, **asked))
    assert (record.not_asked, record.lookup) == (why, None)
    assert not_asked(engine) == {why: 1} and not looked_up(engine)
    check_counters(engine)
    pair.check_idle()


def test_one_token_past_the_first_boundary_is_looked_up(pair: Pair) -> None:
    engine = pair.engine()
    record = check_record(engine, engine.run(tokens(B + 1, 1), 3))
    assert (record.not_asked, record.lookup) == (None, LookupOutcome.MISS)
    assert not not_asked(engine) and looked_up(engine) == {"miss": 1}


@pytest.mark.parametrize("at", range(1, 8))
def test_only_what_lies_above_the_local_hit_is_the_reason(pair: Pair, at: int) -> None:
    gone: list[int] = []
    engine = pair.engine(wrap=with_gone(gone))
    prompt = tokens(4 * B + 3, 1)
    check_record(engine, engine.run(prompt, 3))
    gone.append(at * B)
    record = check_record(engine, engine.run([*prompt, *tokens(3 * B + 2, 2)], 3))
    assert record.local_tokens > 0 and record.loaded_tokens == 0
    assert [c.reason for c in record.candidates] == ["evicted"]
    assert record.reason == ("evicted" if at * B > record.local_tokens else None)
    pair.engines[0].check_idle()


def test_what_was_found_and_not_used_is_no_miss(pair: Pair) -> None:
    decode = pair.engine(name="decode")
    history = decode.run(tokens(3 * B + 2, 1), 2 * B).history
    decode.check_idle()
    assert looked_up(decode) == {"miss": 1}
    prefill = pair.engine(name="prefill", role="kv_consumer")
    prompt = history + tokens(3, 2)
    assert prefill.run(prompt, 3).loaded == 5 * B
    again = check_record(prefill, prefill.run(prompt, 3))
    assert again.local_tokens == 5 * B and again.reason is None
    assert looked_up(prefill) == {"hit": 1, "passed_over": 1}
    assert prefill.counters["candidates_passed_over|local_hit|decode_end"] == 1
    picky = pair.engine(name="picky", role="kv_consumer", options={"min_load_tokens": len(prompt)})
    assert picky.run(prompt, 3).loaded == 0
    assert looked_up(picky) == {"passed_over": 1}
    pair.check_idle()


def test_a_load_that_failed_is_not_tried_again_and_no_miss(bench: Bench) -> None:
    decode = bench.engine(name="decode")
    history = decode.run(tokens(3 * B + 2, 1), 2 * B).history
    decode.check_idle()
    prefill = bench.engine(name="prefill", role="kv_consumer")
    bench.always("read_fails")
    record = check_record(prefill, prefill.run(history + tokens(3, 2), 3))
    assert record.reason == "load_failed"
    results = looked_up(prefill)
    assert results["passed_over"] == 1 and set(results) == {"hit", "passed_over"}
    bench.always()
    bench.check_idle()
