"""What is said of a request: its candidates' tags and reasons, its record, its counters, vLLM's
own counts, the request log, and KV events."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import ATTENTION, BLOCK, HYBRID, MIXED, Finished, Group, Pair, SimEngine, new_uri
from sim_faults import Faults, FaultyStore, Restartable
from sim_kit import ASYNC, tokens
from sim_record import check_counters, check_record
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from backhaul.protocols.checkpoint import CheckpointKind, DomainId
from backhaul.protocols.record import CANDIDATES_MAX, Candidate, LoggedRequest, RequestRecord
from backhaul.transfer.base import LookupResult, Store
from backhaul.transfer.registry import open_store

B = BLOCK


def run(engine: SimEngine, prompt: list[int], output: int, **more: Any) -> tuple[Finished, Any]:
    """Run a request; its checked record as well."""
    done = engine.run(prompt, output, **more)
    record = check_record(engine, done)
    engine.check_idle()
    check_counters(engine)
    return done, record


def at(record: RequestRecord, boundary: int) -> Candidate:
    (found,) = [one for one in record.candidates if one.boundary == boundary]
    return found


# -- tags -------------------------------------------------------------------------------------


def test_a_rewritten_output_names_the_end_that_no_longer_matches(pair: Pair) -> None:
    decode, prefill = pair.engine(name="decode"), pair.engine(name="prefill")
    u_end = 4 * B + 1
    first = decode.run(tokens(u_end, 1) + tokens(6, 2), 2 * B, u_end=u_end)
    decode.check_idle()
    deep = (len(first.history) - 1) // B * B
    _, record = run(prefill, first.prompt[:u_end] + tokens(6 * B, 3), 5)
    assert (record.selected.boundary, record.selected.kind) == (4 * B, "input_end")
    missed = at(record, deep)
    assert CheckpointKind.DECODE_END in missed.kinds
    assert (missed.retained, missed.hash_matched, missed.reason) == (True, False, "hash_mismatch")
    assert prefill.counters["decode_end_missed|input_end"] == 1
    assert prefill.counters["candidates_unconsumable|hash_mismatch|decode_end"] == 1
    assert prefill.counters["requests|input_end"] == 1


def test_a_shallower_checkpoint_is_passed_over(pair: Pair) -> None:
    decode, prefill = pair.engine(name="decode"), pair.engine(name="prefill")
    u_end = 4 * B + 1
    first = decode.run(tokens(u_end, 1) + tokens(6, 2), 2 * B, u_end=u_end)
    decode.check_idle()
    done, record = run(prefill, first.history + tokens(B, 3), 5)
    deep = (len(first.history) - 1) // B * B
    assert record.selected.boundary == done.loaded == deep
    assert record.selected.producer.startswith("decode-")
    shallow = at(record, 4 * B)
    assert (shallow.consumable, shallow.selected) == (True, False)
    assert (shallow.reason, shallow.passed_over) == (None, "shallower")
    assert record.matched.joint == record.matched.attention == record.matched.recurrent == deep
    assert prefill.counters["incremental_tokens|decode_end"] == deep - max(
        one.boundary for one in record.candidates if not one.selected
    )


def test_the_local_hit_and_the_minimum_pass_a_checkpoint_over(pair: Pair) -> None:
    decode = pair.engine(name="decode")
    first = decode.run(tokens(4 * B + 3, 1), 3 * B)
    decode.check_idle()
    deep = (len(first.history) - 1) // B * B
    demanding = pair.engine(name="demanding", options={"min_load_tokens": 100})
    _, record = run(demanding, [*first.history, 3], 4)
    assert at(record, deep).passed_over == "small_gain"
    assert record.selected is None and record.reason is None
    assert demanding.counters["requests|none"] == 1
    _, again = run(demanding, [*first.history, 3], 4)
    assert again.local_tokens >= deep
    assert at(again, deep).passed_over == "local_hit"


def test_what_is_announced_is_not_retained_yet(pair: Pair) -> None:
    engine = pair.engine(options={"publication_wait_s": 0})
    name = engine.submit(tokens(3 * B + 3, 1), 3)
    half = engine.backhaul._half
    engine.backhaul._half._catalog.drop(name)  # the lookup began before the announcement
    hashes = engine.requests[name].block_hashes
    store = open_store(pair.uri, client_name="other")
    domain = store.open_domain(half._facts.domain, timeout_s=300)
    store.announce(domain, 2 * B, bytes(hashes[1]), ttl_s=60, timeout_s=300)
    engine.drain()
    record = check_record(engine, engine.finished[name])
    coming = at(record, 2 * B)
    assert (coming.retained, coming.reason, coming.kinds) == (False, "uncommitted", ())
    assert engine.counters["candidates|known|unknown"] == 1
    store.close()


def test_what_was_evicted_is_not_retained_any_more() -> None:
    small = Pair(new_uri("24KiB"))
    decode = small.engine(name="decode")
    prefill = small.engine(name="prefill", role="kv_consumer")
    first = decode.run(tokens(3 * B, 1), 2 * B)
    deep = (len(first.history) - 1) // B * B
    for seed in range(10, 18):
        decode.run(tokens(3 * B, seed), 2 * B)
        decode.check_idle()
    _, record = run(prefill, first.history + tokens(3, 2), 3)
    gone = at(record, deep)
    assert (gone.retained, gone.hash_matched, gone.reason) == (False, False, "evicted")
    assert record.reason == "evicted" and record.selected is None
    assert prefill.counters["candidates_unconsumable|evicted|decode_end"] == 1
    small.check_idle()
    small.close()


def test_another_domain_s_checkpoint_is_retained_and_matched_and_of_no_use(pair: Pair) -> None:
    decode = pair.engine(name="decode")
    other = pair.engine(name="other", groups=MIXED)
    first = decode.run(tokens(4 * B, 1), 2 * B)
    decode.check_idle()
    other.run(tokens(3, 5), 1)
    _, record = run(other, first.history + tokens(3, 2), 3)
    deep = (len(first.history) - 1) // B * B
    foreign = at(record, deep)
    assert (foreign.retained, foreign.hash_matched, foreign.consumable) == (True, True, False)
    assert foreign.reason == "domain_mismatch"
    assert record.matched.joint == 0 and record.matched.exact_hash == deep


@ASYNC
def test_a_failed_load_is_said_of_its_checkpoint(asynchronous: bool) -> None:
    faults = Faults({}, 1, slow_s=0.01)
    where = Restartable(new_uri())
    pair = Pair(where.uri)
    decode = pair.engine(name="decode")
    prefill = pair.engine(
        name="prefill", asynchronous=asynchronous, wrap=lambda _: FaultyStore(where, faults)
    )
    first = decode.run(tokens(4 * B, 1), 2 * B, u_end=2 * B)
    decode.check_idle()
    deep = (len(first.history) - 1) // B * B
    faults.rates["read_fails"] = 1.0
    _, record = run(prefill, first.history + tokens(3, 2), 3)
    assert record.selected is None and record.reason == "load_failed"
    assert at(record, deep).reason == "load_failed" and at(record, deep).hash_matched
    shallow = [one for one in record.candidates if one.boundary < deep]
    assert shallow and all(
        one.reason == "load_failed" or one.passed_over == "loads_over" for one in shallow
    )
    pair.close()


@pytest.mark.parametrize(
    ("fault", "reason"), [("lookup_raises", "unreachable"), ("lookup_slow", "timeout")]
)
def test_a_store_that_does_not_answer_leaves_a_reason(fault: str, reason: str) -> None:
    faults = Faults({fault: 1.0}, 1, slow_s=600.0)
    where = Restartable(new_uri())
    pair = Pair(where.uri)
    engine = pair.engine(
        wrap=lambda _: FaultyStore(where, faults), options={"lookup_timeout_s": 0.05}
    )
    done = engine.run(tokens(3 * B, 1), 3)
    record = check_record(engine, done)
    assert (record.reason, record.candidates) == (reason, ())
    assert engine.counters[f"lookups|{reason}"] == 1
    faults.go_on()
    pair.close()


def test_a_record_stays_small(pair: Pair) -> None:
    engine = pair.engine(name="many", budget=512)
    other = pair.engine(name="other", role="kv_consumer", budget=512)
    history = tokens(3, 1)
    for turn in range(CANDIDATES_MAX + 4):
        history = engine.run(history + tokens(3, turn), B).history
    _, record = run(other, [*history, 4], 2)
    assert len(record.candidates) == CANDIDATES_MAX
    assert record.candidates[0].selected
    assert len(json.dumps(msgspec.to_builtins(record))) < 4096


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": "tenant"}, {"cache_salt": "other"}),
        ({"lora_request": LoRARequest("a", 1, "/a")}, {"lora_request": LoRARequest("b", 2, "/b")}),
    ],
    ids=["salt", "adapter"],
)
def test_equal_tokens_under_another_salt_or_adapter_are_strangers(
    pair: Pair, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """One domain and one store: vLLM's own hash chain keeps them apart, and lets equals meet."""
    decode, prefill = pair.engine(name="decode"), pair.engine(name="prefill", role="kv_consumer")
    first = decode.run(tokens(4 * B + 3, 1), 2 * B, u_end=2 * B, keys=one)
    decode.check_idle()
    for keys in (other, {}):
        _, record = run(prefill, first.history, 3, keys=keys)
        assert record.candidates == () and record.local_tokens + record.loaded_tokens == 0
        assert record.matched.exact_hash == 0
    _, record = run(prefill, first.history, 3, keys=one)
    assert record.loaded_tokens == (len(first.history) - 1) // B * B


# -- the record beside vLLM's numbers ---------------------------------------------------------


@ASYNC
@pytest.mark.parametrize(
    ("groups", "unit"),
    [(HYBRID, None), (HYBRID, B // 2), (MIXED, None), (ATTENTION, None)],
    ids=["hybrid", "finer unit", "mixed", "attention"],
)
def test_every_prompt_token_has_one_source(
    groups: tuple[Group, ...], unit: int | None, asynchronous: bool
) -> None:
    pair = Pair(new_uri())
    layout = "BLHNC" if unit else "LBHNC"
    both = [
        pair.engine(
            name=n, groups=groups, asynchronous=asynchronous, budget=24, unit=unit, layout=layout
        )
        for n in "pd"
    ]
    history = tokens(2 * B + 3, 1)
    sources: dict[str, int] = dict.fromkeys(("local", "loaded", "other", "recomputed"), 0)
    for turn in range(8):
        done = both[turn % 3 % 2].run(history, 3 + 5 * turn % 17, u_end=len(history) - 1)
        record = check_record(both[0], done)
        for name in sources:
            sources[name] += getattr(record, f"{name}_tokens")
        history = done.history + tokens(1 + 3 * turn % 11, turn)
    assert sources["loaded"] and sources["local"] and not sources["other"]
    for name, expected in sources.items():
        assert sum(one.counters[f"prompt_tokens|{name}"] for one in both) == expected
    for one in both:
        check_counters(one)
    pair.check_idle()
    pair.close()


@ASYNC
def test_beside_a_connector_that_hands_prompts_over(pair: Pair, asynchronous: bool) -> None:
    prefill, decode = (
        pair.engine(name=name, sibling=True, asynchronous=asynchronous) for name in ("p", "d")
    )
    history = tokens(4 * B + 2, 1)
    for turn in range(3):
        name = prefill.submit(
            history[:-1],
            1,
            stops=False,
            u_end=len(history) - 3,
            params={"do_remote_decode": True, "do_remote_prefill": False},
            handed_over=history[-1],
        )
        prefill.drain()
        leg = check_record(prefill, prefill.finished[name])
        assert leg.other_tokens == 0
        answer = prefill.finished[name].params
        assert answer["remote_request_id"] == name, "the sibling's keys are there as well"
        assert answer["remote_prefill_cached_tokens"] == leg.local_tokens + leg.loaded_tokens
        assert bool(leg.selected) == bool(turn)
        done = decode.run(history, 2 * B, params=answer)
        record = check_record(decode, done)
        assert record.other_tokens and record.selected is None
        assert record.other_tokens + record.local_tokens == len(history) - 1
        history = done.history + tokens(5, turn)
    for engine in (prefill, decode):
        check_counters(engine)
    assert decode.counters["prompt_tokens|loaded"] == 0
    pair.check_idle()


def test_the_records_keys_are_no_hints(pair: Pair) -> None:
    """A proxy hands one leg's answer to the next leg as it is."""
    engine = pair.engine()
    first = engine.run(tokens(3 * B, 1), B, u_end=2 * B)
    engine.run(tokens(3 * B, 2), B, params={"backhaul": first.params["backhaul"]})
    assert not [name for name in engine.counters if name.startswith("hints_rejected")]
    pair.check_idle()


@pytest.mark.parametrize(
    ("u_end", "more", "outcome"),
    [
        (None, {}, "absent"),
        (4 * B + 1, {}, "published"),
        (B - 1, {}, "below_grid"),
        (10**6, {}, "rejected"),
        (4 * B, {"options": {"policy": "decode_end"}}, "not_wanted"),
        (4 * B, {"role": "kv_consumer"}, "not_wanted"),
    ],
)
def test_what_became_of_the_end_of_the_input(
    pair: Pair, u_end: int | None, more: dict[str, Any], outcome: str
) -> None:
    _, record = run(pair.engine(**more), tokens(6 * B, 1), 3, u_end=u_end)
    assert record.input_end.outcome == outcome
    published = outcome == "published"
    assert record.input_end.given == (None if outcome in ("absent", "rejected") else u_end)
    assert record.input_end.boundary == (4 * B if published else 0)
    assert record.forced_chunk_ends == ((4 * B,) if published else ())


def test_the_end_of_an_input_that_was_resumed_past(pair: Pair) -> None:
    engine, other = pair.engine(name="one"), pair.engine(name="other")
    first = engine.run(tokens(6 * B, 1), 2 * B)
    engine.check_idle()
    _, record = run(other, [*first.history, 3], 3, u_end=3 * B)
    assert record.selected and record.input_end.outcome == "resumed_past"


@ASYNC
def test_what_a_conversation_looks_like_from_its_checkpoints(
    pair: Pair, asynchronous: bool
) -> None:
    """First and later reuse, how many requests ago, and the work that was spared."""
    decode = pair.engine(name="decode", asynchronous=asynchronous)
    prefill = pair.engine(name="prefill", role="kv_consumer", asynchronous=asynchronous)
    again = pair.engine(name="again", role="kv_consumer", asynchronous=asynchronous)
    work = prefill.backhaul._half._facts.work
    assert work is not None and work.per_token > 0
    first = decode.run(tokens(4 * B + 3, 1), 2 * B, u_end=4 * B)
    decode.check_idle()
    _, record = run(prefill, first.history + tokens(3, 2), 3)
    assert record.reuse == "first" and record.selected.producer_age == "previous"
    assert record.selected.avoided_flops == work.flops(0, record.selected.boundary)
    deep = record.selected.boundary
    assert prefill.counters["avoided_prefill_flops|decode_end"] == work.flops(0, deep)
    assert prefill.counters["selections|decode_end|previous"] == 1
    # On an engine of its own: where the first turn's attention lies but not its state, the end of
    # that turn would become a shared prefix, past which the store names no rewritten ends.
    elsewhere = pair.engine(name="elsewhere", asynchronous=asynchronous)
    second = elsewhere.run(first.history + tokens(3, 2), 3 * B)
    elsewhere.check_idle()
    _, record = run(again, first.history + tokens(3, 2), 3)
    assert record.reuse == "steady", "others have looked it up"
    assert again.counters["continuation_tokens|steady|reused"] == record.selected.boundary
    # The second reply is rewritten: the first one's end matches, and there is a later one.
    rewritten = first.history + tokens(3, 2) + tokens(len(second.history) - len(first.history), 7)
    _, record = run(pair.engine(name="third", role="kv_consumer"), rewritten, 3)
    assert record.selected.boundary == deep and record.selected.kind == "decode_end"
    assert record.selected.producer_age == "two_earlier"


def test_the_age_of_a_checkpoint_is_counted_from_its_commit(pair: Pair) -> None:
    decode, prefill = pair.engine(name="decode"), pair.engine(name="prefill")
    begun = time.monotonic()
    first = decode.run(tokens(4 * B + 3, 1), 2 * B)
    decode.check_idle()
    committed = time.monotonic()
    time.sleep(0.3)
    asked = time.monotonic()
    _, record = run(prefill, first.history + tokens(3, 2), 3)
    assert asked - committed <= record.selected.age_s + 0.001
    assert record.selected.age_s <= time.monotonic() - begun
    assert at(record, record.selected.boundary).age_s == record.selected.age_s


def test_a_branch_is_learnt_once(pair: Pair) -> None:
    """Two prompts share a prefix whose end has no state: the second misses it and leaves one."""
    engine = pair.engine(name="one", options={"policy": "decode_end"})
    shared = tokens(5 * B + 3, 1)
    run(engine, shared + tokens(2 * B, 2), 3)
    _, second = run(engine, shared + tokens(2 * B, 3), 3)
    assert second.junction == 5 * B
    assert engine.counters["branch_learning_misses"] == 1
    assert engine.counters["branch_learning_tokens"] == 5 * B - second.local_tokens
    _, third = run(engine, shared + tokens(2 * B, 4), 3)
    assert third.junction == 0 and third.local_tokens + third.loaded_tokens == 5 * B
    assert engine.counters["branch_learning_misses"] == 1
    other = pair.engine(name="other", role="kv_consumer")
    _, fourth = run(other, shared + tokens(2 * B, 5), 3)
    assert fourth.loaded_tokens == 5 * B and other.counters["branch_learning_misses"] == 0


def counted_with_ranks(ranks: int) -> dict[str, float]:
    """Everything that two turns count, bytes per rank."""
    pair = Pair(new_uri())
    decode, prefill = (pair.engine(name=name, ranks=ranks) for name in ("decode", "prefill"))
    first = decode.run(tokens(3 * B + 2, 1), 4 * B, u_end=2 * B)
    decode.check_idle()
    run(prefill, first.history + tokens(9, 2), 6)
    pair.check_idle()
    pair.close()
    counters = dict(decode.counters + prefill.counters)
    counters.pop("publish_bytes")  # a piece still under way at the end may be sent twice
    return {name: n / ranks if "bytes" in name else n for name, n in counters.items()}


def test_the_number_of_ranks_multiplies_nothing_but_bytes() -> None:
    one, two = counted_with_ranks(1), counted_with_ranks(2)
    assert one == two
    assert one["publications|decode_end"] == 2 and one["loads|decode_end"] == 1
    assert one["published_state_bytes|decode_end"] > 0


@pytest.mark.parametrize("sibling", [False, True], ids=["alone", "in MultiConnector"])
def test_vllm_counts_what_was_loaded_as_cached_on_a_host(pair: Pair, sibling: bool) -> None:
    decode = pair.engine(name="decode", sibling=sibling)
    prefill = pair.engine(name="prefill", sibling=sibling)
    first = decode.run(tokens(4 * B + 3, 1), 3 * B)
    decode.check_idle()
    stats = prefill.scheduler.connector_prefix_cache_stats
    seen: dict[CacheHitSource, int] = {}
    prompt = first.history + tokens(5, 2)
    name = prefill.submit(prompt, 3)
    while prefill.step():
        now = prefill.scheduler.connector_prefix_cache_stats
        seen = dict(stats.hits_by_source) or seen
        stats = now
    done = prefill.finished[name]
    assert done.loaded == (len(first.history) - 1) // B * B
    assert seen == {CacheHitSource.HOST: done.loaded}
    pair.check_idle()


@pytest.mark.parametrize("preempted", [False, True], ids=["new", "preempted"])
def test_vllm_counts_a_load_as_admitted_also_where_it_fails(preempted: bool) -> None:
    faults = Faults({"read_fails": 1.0}, 1, slow_s=0.01)
    where = Restartable(new_uri())
    pair = Pair(where.uri)
    decode = pair.engine(name="decode")
    prefill = pair.engine(name="prefill", wrap=lambda _: FaultyStore(where, faults))
    first = decode.run(tokens(4 * B + 3, 1), 3 * B)
    decode.check_idle()
    name = prefill.submit(first.history + tokens(5, 2), 3)
    prefill.requests[name].num_preemptions = int(preempted)
    admitted: list[int] = []
    before = prefill.scheduler.connector_prefix_cache_stats
    while prefill.step():
        admitted += before.hits_by_source.values()
        before = prefill.scheduler.connector_prefix_cache_stats
        if preempted and prefill.counters["load_failures|load_failed"]:
            prefill.requests[name].num_preemptions = 0  # it never ran, as the runner knows
    assert (admitted[0] == (len(first.history) - 1) // B * B) != preempted
    assert prefill.finished[name].loaded == 0
    assert not any(name.startswith("loaded_tokens") for name in prefill.counters)
    assert prefill.counters["load_failures|load_failed"] > 0
    # What never arrived can be taken off again.
    assert prefill.counters["failed_load_tokens"] == sum(admitted)
    pair.close()


@ASYNC
@pytest.mark.parametrize("sibling", [False, True], ids=["alone", "in MultiConnector"])
def test_an_engine_shows_its_domain_before_any_request(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, sibling: bool, asynchronous: bool
) -> None:
    """And sleeps then."""
    engine = pair.engine(sibling=sibling, asynchronous=asynchronous)
    shown: dict[str, Any] = {}

    def count(stats: dict[str, Any]) -> None:
        shown.update(stats.get("BackhaulConnector", stats).get("gauges", {}))

    monkeypatch.setattr(engine, "_count", count)
    engine.drain()
    domain = engine.backhaul._half._facts.domain.domain_id
    assert shown[f"info|{domain}|both"] == 1 and engine.steps == 1


# -- the request log --------------------------------------------------------------------------


def test_the_log_has_the_record_of_every_request(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    engine = pair.engine(options={"request_log": str(path)})
    done = [engine.run(tokens(3 * B, seed), B, u_end=2 * B) for seed in range(4)]
    gone = engine.submit(tokens(3 * B, 9), 100)
    for _ in range(4):
        engine.step()
    engine.abort(gone)
    engine.drain()
    pair.check_idle()
    engine.close()
    lines = path.read_bytes().splitlines()
    logged = [msgspec.json.decode(line, type=LoggedRequest) for line in lines]
    assert [one.request_id for one in logged] == [*(one.name for one in done), gone]
    assert [one.finish for one in logged] == ["FINISHED_STOPPED"] * 4 + ["FINISHED_ABORTED"]
    for line, one in zip(lines, done, strict=False):
        plain = json.loads(line)
        assert {name: plain[name] for name in one.params["backhaul"]} == one.params["backhaul"]


# -- KV events --------------------------------------------------------------------------------


class Published:
    """Stands in for vLLM's publisher."""

    def __init__(self, engine: SimEngine) -> None:
        self.events: list[Any] = []
        engine.scheduler.kv_event_publisher = self  # type: ignore[assignment]

    def publish(self, batch: KVEventBatch) -> None:
        """Over the wire and back, as a subscriber sees it."""
        packed = msgspec.msgpack.Encoder().encode(batch)
        self.events += msgspec.msgpack.Decoder(KVEventBatch).decode(packed).events

    def shutdown(self) -> None:
        """Nothing to stop."""

    def ours(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind) and e.medium == "BACKHAUL"]


@pytest.mark.parametrize("sibling", [False, True], ids=["alone", "in MultiConnector"])
def test_what_was_committed_is_announced_as_kv_events(pair: Pair, sibling: bool) -> None:
    decode = pair.engine(name="decode", sibling=sibling, kv_events=True, ranks=2)
    published = Published(decode)
    first = decode.run(tokens(3 * B + 2, 1), 2 * B, u_end=2 * B)
    decode.check_idle()
    stored = published.ours(BlockStored)
    deep = (len(first.history) - 1) // B * B
    hashes = [maybe_convert_block_hash(h) for h in decode.requests[first.name].block_hashes]
    attention, *states = [e for e in stored if e.parent_block_hash is None or e.group_idx]
    assert attention.group_idx == 0 and attention.kv_cache_spec_kind == "full_attention"
    ends = {info.boundary for info in open_store(pair.uri).list_checkpoints(timeout_s=300)}
    for event in stored:
        assert event.block_size == B and event.locality == "REMOTE"
        start = 0
        if event.parent_block_hash is not None:
            start = (hashes.index(event.parent_block_hash) + 1) * B
        count = len(event.block_hashes)
        assert event.block_hashes == hashes[start // B : start // B + count]
        assert event.token_ids == first.history[start : start + count * B]
        assert start + count * B in ends, "only what is a checkpoint, not what is under way"
    attention = [name for e in stored if e.group_idx == 0 for name in e.block_hashes]
    assert attention == hashes[: deep // B], "each block once"
    by_group = {
        group: {event.block_hashes[-1] for event in stored if event.group_idx == group}
        for group in range(3)
    }
    assert by_group[1] == by_group[2] == {hashes[end // B - 1] for end in ends}
    # Two ends may become visible in either order: the deeper one has told the other's attention.
    assert by_group[0] <= by_group[1]
    assert {event.kv_cache_spec_kind for event in states} >= {"mamba"}
    assert len([e for e in stored if e.group_idx]) == 2 * len(ends), "once for both ranks"
    assert deep in ends


def test_what_a_lookup_finds_gone_is_announced_as_removed() -> None:
    small = Pair(new_uri("24KiB"))
    decode = small.engine(name="decode")
    prefill = small.engine(name="prefill", role="kv_consumer", kv_events=True)
    published = Published(prefill)
    first = decode.run(tokens(3 * B, 1), 2 * B)
    for seed in range(10, 18):
        decode.run(tokens(3 * B, seed), 2 * B)
        decode.check_idle()
    prefill.run(first.history + tokens(3, 2), 3)
    deep = (len(first.history) - 1) // B * B
    gone = maybe_convert_block_hash(decode.requests[first.name].block_hashes[deep // B - 1])
    removed = [e for e in published.ours(BlockRemoved) if e.block_hashes == [gone]]
    assert [event.group_idx for event in removed] == [1, 2], "states only: attention is shared"
    small.check_idle()
    small.close()


def test_without_the_users_consent_there_are_no_events(pair: Pair) -> None:
    engine = pair.engine()
    published = Published(engine)
    engine.run(tokens(3 * B + 2, 1), 2 * B)
    engine.check_idle()
    assert not published.events


# -- random histories -------------------------------------------------------------------------


class Listing:
    """A store that compares every answer with what is listed at that moment."""

    def __init__(self) -> None:
        self.compared = 0
        self.wrong: list[str] = []  # lookups run on threads, where nobody sees an assertion

    def wrap(self, store: Store) -> Store:
        lookup = store.lookup

        def visible() -> set[tuple[str, int, bytes]]:
            listed = store.list_checkpoints(None, timeout_s=300)
            return {(one.domain, one.boundary, one.block_hash) for one in listed}

        def compared(domain: DomainId, hashes: Sequence[bytes], **more: Any) -> LookupResult:
            before = visible()
            result = lookup(domain, hashes, **more)
            if visible() == before:
                self.compare(domain, hashes, result, before)
            return result

        store.lookup = compared  # type: ignore[method-assign]
        return store

    def compare(
        self,
        domain: str,
        hashes: Sequence[bytes],
        result: LookupResult,
        visible: set[tuple[str, int, bytes]],
    ) -> None:
        self.compared += 1
        answered = {match.boundary: match for match in result.matches}
        for index, block_hash in enumerate(hashes):
            boundary = (index + 1) * B
            homes = {where for where, at, name in visible if (at, name) == (boundary, block_hash)}
            match = answered.get(boundary)
            tags = (match.hash_matched, match.consumable) if match else (False, False)
            if tags != (bool(homes), domain in homes):
                self.wrong.append(f"{boundary}: {match} but listed in {homes} of {domain}")
            if match and match.retained and not homes and match.reason != "hash_mismatch":
                self.wrong.append(f"{boundary}: {match} is not listed")


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_in_two_domains_under_pressure(seed: int) -> None:
    """Tags against what the store lists at the moment of the lookup's answer."""
    r = random.Random(seed)
    pair = Pair(new_uri("48KiB"))
    listing = Listing()
    engines = [
        pair.engine(name="a", budget=32, wrap=listing.wrap),
        pair.engine(name="b", budget=32, asynchronous=True, wrap=listing.wrap),
        pair.engine(name="c", budget=32, groups=MIXED, wrap=listing.wrap),
    ]
    history = [tokens(2 * B, n) for n in range(3)]
    reasons: set[str] = set()
    for step in range(40):
        engine, i = r.choice(engines), r.randrange(3)
        kept = len(history[i]) if r.random() < 0.6 else r.randrange(1, len(history[i]))
        prompt = (history[i][:kept] + tokens(r.randrange(1, B), 100 + step))[:100]
        u_end = r.choice([None, min(kept, len(prompt))])
        _, record = run(engine, prompt, r.randrange(1, 2 * B), u_end=u_end)
        history[i] = engine.finished[f"{engine.name}-{len(engine.finished)}"].history
        reasons |= {str(c.reason or c.passed_over) for c in record.candidates}
    assert {"evicted", "domain_mismatch"} <= reasons, reasons
    assert listing.wrong == [] and listing.compared > 30
    pair.engines[0].check_idle()
    pair.close()


def test_the_tags_of_a_record_contradict_each_other_never() -> None:
    """Every combination is either on the ladder, with exactly one reason, or refused."""
    accepted = 0
    names = ("retained", "hash_matched", "consumable", "selected")
    for flags in itertools.product([False, True], repeat=4):
        for reason, over in itertools.product([None, "evicted"], [None, "shallower"]):
            plain = {"boundary": 8, "kinds": [], **dict(zip(names, flags, strict=True))}
            plain |= {"reason": reason, "passed_over": over}
            ladder = list(flags) == sorted(flags, reverse=True)
            fits = (reason is None) == flags[2] and (over is None) != (flags[2] and not flags[3])
            try:
                msgspec.convert(plain, Candidate)
            except msgspec.ValidationError:
                assert not (ladder and fits)
            else:
                assert ladder and fits
                accepted += 1
    assert accepted == 5
