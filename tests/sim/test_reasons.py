"""Every reason that a metric or a record can give, each made to happen once.

The scenarios are keyed by the label values themselves, so that a reason nobody can produce, or one
that is produced and not listed, fails here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import BLOCK, HANGS_S, MIXED, Pair, SimEngine, new_uri
from sim_kit import tokens
from sim_record import check_counters, check_record

from backhaul.connector.outcome import Answered, Outcome, count_outcome, matched_tokens
from backhaul.connector.stats import StatsRecorder
from backhaul.protocols import store_pb2
from backhaul.protocols.candidates import Limits
from backhaul.protocols.candidates import tag_candidates as tag
from backhaul.protocols.checkpoint import ObjectKey, PublicationId, Reason
from backhaul.protocols.errors import (
    StoreDenied,
    StoreError,
    StoreFull,
    StoreRejected,
    StoreUnavailable,
)
from backhaul.protocols.layout import GroupKind
from backhaul.protocols.metrics import CANDIDATE_REASON, LOAD_REASON, PUBLICATION_REASON
from backhaul.transfer.backends import wire
from backhaul.transfer.base import CommitResult, Grant, GrantStatus, Store, TransferResult, Written
from backhaul.transfer.registry import open_store

B = BLOCK
Scenario = Callable[[Pair], dict[str, float]]


def counted(engine: SimEngine, prompt: list[int]) -> dict[str, float]:
    """Run a request; the engine's counters, checked."""
    check_record(engine, engine.run(prompt, 3))
    engine.check_idle()
    check_counters(engine)
    return dict(engine.counters)


def published(pair: Pair, **more: Any) -> list[int]:
    """A history whose D_end is in the store."""
    decode = pair.engine(name="decode", **more)
    history = decode.run(tokens(4 * B + 3, 1), 3 * B).history
    decode.check_idle()
    return history


# -- candidates -------------------------------------------------------------------------------


def hash_mismatch(pair: Pair) -> dict[str, float]:
    decode = pair.engine(name="decode")
    first = decode.run(tokens(4 * B + 7, 1), 3 * B, u_end=4 * B + 1)
    decode.check_idle()
    return counted(pair.engine(name="prefill"), first.prompt[: 4 * B + 1] + tokens(6 * B, 3))


def domain_mismatch(pair: Pair) -> dict[str, float]:
    return counted(pair.engine(name="other", groups=MIXED), published(pair) + tokens(3, 2))


def state_missing(pair: Pair) -> dict[str, float]:
    """A branch off a prompt: three blocks are shared, and no state ends there."""
    shared = published(pair)[: 3 * B + 2]
    return counted(pair.engine(name="prefill"), shared + tokens(2 * B, 9))


def attention_missing(pair: Pair) -> dict[str, float]:
    """A publication that came to its state and no further."""
    engine = pair.engine()
    name = engine.submit(tokens(4 * B + 3, 1), 1)
    half = engine.backhaul._half
    half._catalog.drop(name)  # the lookup began before what follows
    layout = half._facts.layout
    hashes = engine.requests[name].block_hashes
    ends = bytes(hashes[2 * B // layout.hash_tokens - 1])
    store = open_store(pair.uri, client_name="other")
    domain = store.open_domain(half._facts.domain, timeout_s=300)
    keys = [
        ObjectKey(rank, group.index, ends)
        for group in layout.groups
        if group.kind is GroupKind.RECURRENT
        for rank in range(layout.ranks)
    ]
    sizes = half._facts.object_bytes
    cut_short = PublicationId("cut short")
    wants = [(key, sizes[key.group]) for key in keys]
    grants = store.reserve(domain, cut_short, wants, timeout_s=300)
    written = [Written(grant.key, grant.token, 0) for grant in grants]
    store.commit(domain, cut_short, 0, written, timeout_s=300)
    engine.drain()
    check_record(engine, engine.finished[name])
    store.abandon(cut_short, timeout_s=300)
    store.close()
    return dict(engine.counters)


def evicted(_: Pair) -> dict[str, float]:
    small = Pair(new_uri("24KiB"))
    decode = small.engine(name="decode")
    first = decode.run(tokens(3 * B, 1), 2 * B)
    for seed in range(10, 18):
        decode.run(tokens(3 * B, seed), 2 * B)
        decode.check_idle()
    counters = counted(small.engine(name="prefill", role="kv_consumer"), [*first.history, 2, 3])
    small.close()
    return counters


def uncommitted(pair: Pair) -> dict[str, float]:
    engine = pair.engine(options={"publication_wait_s": 0})
    name = engine.submit(tokens(3 * B + 3, 1), 3)
    half = engine.backhaul._half
    half._catalog.drop(name)
    store = open_store(pair.uri, client_name="other")
    domain = store.open_domain(half._facts.domain, timeout_s=300)
    store.announce(
        domain, 2 * B, bytes(engine.requests[name].block_hashes[1]), ttl_s=60, timeout_s=300
    )
    engine.drain()
    store.close()
    return dict(engine.counters)


def failed_load(reason: Reason) -> Scenario:
    """A load that ends so."""

    def scenario(pair: Pair) -> dict[str, float]:
        history = published(pair)
        prefill = pair.engine(name="prefill", wrap=lambda store: reading(store, reason))
        return counted(prefill, history + tokens(3, 2))

    return scenario


def reading(store: Store, outcome: Reason | Exception) -> Store:
    """``store``, whose reads end so."""

    def read(*_: Any, **__: Any) -> TransferResult:
        if isinstance(outcome, Exception):
            raise outcome
        return TransferResult(ok=False, reason=outcome)

    store.read = read  # type: ignore[method-assign]
    return store


def of_a_newer_store(_: Pair) -> dict[str, float]:
    """A reason that this version does not know."""
    match = store_pb2.Match(boundary=B, kinds=["decode_end"], reason="brand_new")
    found = wire.lookup_result(store_pb2.LookupReply(matches=[match])).matches
    recorder = StatsRecorder()
    outcome = Outcome(
        prompt_tokens=9,
        local_tokens=0,
        loaded_tokens=0,
        other_tokens=0,
        selected=None,
        candidates=tag(found, 0, Limits(local_tokens=0, limit_tokens=9)),
        matched=matched_tokens(Answered(found), has_recurrent=True),
    )
    count_outcome(outcome, recorder, asked=True)
    report = recorder.report({})
    assert report is not None
    counters: dict[str, float] = report.data["counters"]
    return counters


CANDIDATES: dict[str, Scenario] = {
    Reason.HASH_MISMATCH: hash_mismatch,
    Reason.DOMAIN_MISMATCH: domain_mismatch,
    Reason.STATE_MISSING: state_missing,
    Reason.ATTENTION_MISSING: attention_missing,
    Reason.EVICTED: evicted,
    Reason.UNCOMMITTED: uncommitted,
    Reason.UNREACHABLE: failed_load(Reason.UNREACHABLE),
    Reason.LOAD_FAILED: failed_load(Reason.CORRUPT),
    Reason.INTERNAL: of_a_newer_store,
}


@pytest.mark.parametrize("reason", CANDIDATE_REASON.values)
def test_a_candidate_s_reason(pair: Pair, reason: str) -> None:
    counters = CANDIDATES[reason](pair)
    assert sum(n for k, n in counters.items() if k.startswith(f"candidates_unconsumable|{reason}|"))


# -- loads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", LOAD_REASON.values)
def test_a_failed_load_s_reason(pair: Pair, reason: str) -> None:
    """As a store says it of the transfer; Backhaul's own fault is an exception."""
    history = published(pair)
    errors = {"store_full": StoreFull("x"), "denied": StoreDenied("x"), "internal": KeyError("x")}
    outcome = errors.get(reason, Reason(reason))
    prefill = pair.engine(name="prefill", wrap=lambda store: reading(store, outcome))
    counters = counted(prefill, history + tokens(3, 2))
    assert counters[f"load_failures|{reason}"] >= 1
    assert counters["requests|none"] == 1 and "loads|decode_end" not in counters


def test_a_lookup_that_is_not_permitted(pair: Pair) -> None:
    """As a proxy in front of the store refuses it."""

    def wrap(store: Store) -> Store:
        def lookup(*_: Any, **__: Any) -> Any:
            raise StoreDenied("x")

        store.lookup = lookup  # type: ignore[method-assign]
        return store

    engine = pair.engine(wrap=wrap)
    record = check_record(engine, engine.run(tokens(3 * B, 1), 3))
    assert record.reason == "denied" and record.candidates == ()
    assert engine.counters["lookups|denied"] == 1
    engine.check_idle()


# -- publications -----------------------------------------------------------------------------


def refused(reserve: StoreError | None = None, write: Reason | None = None) -> Scenario:
    """A publication that a store ends so."""

    def wrap(store: Store) -> Store:
        def fails(*_: Any, **__: Any) -> Any:
            if reserve is not None:
                raise reserve
            return TransferResult(ok=False, reason=write)

        setattr(store, "write" if reserve is None else "reserve", fails)
        return store

    def scenario(pair: Pair) -> dict[str, float]:
        engine = pair.engine(wrap=wrap)
        engine.run(tokens(3 * B + 2, 1), 2 * B)
        engine.check_idle()
        return dict(engine.counters)

    return scenario


def over_budget(pair: Pair) -> dict[str, float]:
    """The store admits no more bytes."""

    def wrap(store: Store) -> Store:
        reserve = store.reserve

        def refuses(*args: Any, **more: Any) -> list[Grant]:
            grants = reserve(*args, **more)
            return [grant._replace(status=GrantStatus.OVER_BUDGET) for grant in grants]

        store.reserve = refuses  # type: ignore[method-assign]
        return store

    engine = pair.engine(wrap=wrap)
    engine.run(tokens(3 * B + 2, 1), 2 * B)
    engine.check_idle()
    return dict(engine.counters)


def gone_ahead(pair: Pair) -> dict[str, float]:
    """The store lost what was sent ahead."""

    def wrap(store: Store) -> Store:
        commit = store.commit

        def forgets(*args: Any, **more: Any) -> CommitResult:
            result = commit(*args, **more)
            return result._replace(visible=False, missing=(ObjectKey(0, 0, b"gone"),))

        store.commit = forgets  # type: ignore[method-assign]
        return store

    engine = pair.engine(wrap=wrap)
    engine.run(tokens(3 * B + 2, 1), 2 * B)
    engine.check_idle()
    return dict(engine.counters)


def dropped(group_kind: GroupKind) -> Scenario:
    """vLLM has let go of a block before it could be held."""

    def scenario(pair: Pair) -> dict[str, float]:
        engine = pair.engine()
        half = engine.backhaul._half
        layout = half._facts.layout
        publisher = half._publisher
        of_kind = [group.index for group in layout.groups if group.kind is group_kind]
        scheduled, finished = publisher.on_scheduled, publisher.on_finished

        def without(table: Any) -> Any:
            return [
                [0] * len(ids) if index in of_kind else list(ids) for index, ids in enumerate(table)
            ]

        publisher.on_scheduled = lambda tracked, n, table: scheduled(tracked, n, without(table))
        publisher.on_finished = lambda tracked, table, **more: finished(
            tracked, without(table), **more
        )
        engine.run(tokens(3 * B + 2, 1), 2 * B)
        engine.check_idle()
        return dict(engine.counters)

    return scenario


def no_room_for_pins(pair: Pair) -> dict[str, float]:
    engine = pair.engine(options={"max_pinned_fraction": 0.001})
    engine.run(tokens(3 * B + 2, 1), 2 * B)
    engine.check_idle()
    return dict(engine.counters)


def nobody_who_loads(pair: Pair) -> dict[str, float]:
    engine = pair.engine(name="decode", role="kv_producer", options={"no_path": "disable"})
    deadline = time.monotonic() + HANGS_S
    while engine.backhaul._half._presence._known.state.value == "unknown":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.run(tokens(3 * B + 2, 1), 2 * B)
    engine.check_idle()
    return dict(engine.counters)


def aborted(pair: Pair, **options: Any) -> dict[str, float]:
    """The client hangs up while a D_end is at hand."""
    engine = pair.engine(options=options)
    name = engine.submit(tokens(3 * B + 2, 1), 20 * B)
    while len(engine.requests[name].output_token_ids) < 3 * B:
        engine.step()
    engine.abort(name)
    engine.drain()
    engine.check_idle()
    return dict(engine.counters)


def reset(pair: Pair) -> dict[str, float]:
    """vLLM has the connector's cache reset while a reply is decoded."""
    engine = pair.engine()
    name = engine.submit(tokens(3 * B + 2, 1), 3 * B)
    while len(engine.requests[name].output_token_ids) < B:
        engine.step()
    engine.backhaul.reset_cache()
    engine.drain()
    engine.check_idle()
    return dict(engine.counters)


PUBLICATIONS: dict[str, Scenario] = {
    Reason.STATE_MISSING: dropped(GroupKind.RECURRENT),
    Reason.ATTENTION_MISSING: dropped(GroupKind.FULL),
    Reason.EVICTED: gone_ahead,
    Reason.UNCOMMITTED: refused(StoreRejected("x")),
    Reason.UNREACHABLE: refused(StoreUnavailable("x")),
    Reason.NO_PUBLICATION_PATH: nobody_who_loads,
    Reason.LEASE_EXPIRED: refused(write=Reason.LEASE_EXPIRED),
    Reason.TIMEOUT: refused(write=Reason.TIMEOUT),
    Reason.STORE_FULL: refused(StoreFull("x")),
    Reason.OVER_BUDGET: over_budget,
    Reason.DENIED: refused(StoreDenied("x")),
    Reason.PIN_LIMIT: no_room_for_pins,
    Reason.ABORTED: aborted,
    Reason.CACHE_RESET: reset,
    Reason.INTERNAL: refused(StoreError("x")),
}


def test_an_abort_whose_end_is_published_is_no_failure(pair: Pair) -> None:
    counters = aborted(pair, publish_on=["stop", "abort"])
    assert counters["publications|decode_end"] == 1
    assert counters.get("publication_failures|aborted", 0) == 0


@pytest.mark.parametrize("reason", PUBLICATION_REASON.values)
def test_a_failed_publication_s_reason(pair: Pair, reason: str) -> None:
    counters = PUBLICATIONS[reason](pair)
    assert counters[f"publication_failures|{reason}"] >= 1


def test_the_scenarios_are_the_labels() -> None:
    assert set(CANDIDATES) == set(CANDIDATE_REASON.values)
    assert set(PUBLICATIONS) == set(PUBLICATION_REASON.values)
    everywhere = {*CANDIDATE_REASON.values, *LOAD_REASON.values, *PUBLICATION_REASON.values}
    assert everywhere == set(Reason), "a reason that occurs nowhere is no reason"
