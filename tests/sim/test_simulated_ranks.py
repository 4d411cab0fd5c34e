"""Several ranks: visible with every rank's part, and stored once what all of them hold."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from harness import ATTENTION, BLOCK, FULL, HYBRID, STATE, Group, Pair, new_uri
from sim_kit import kinds, tokens

from backhaul.connector.worker import WorkerHalf
from backhaul.protocols.errors import StoreUnavailable
from backhaul.transfer.base import TransferResult
from backhaul.transfer.registry import open_store

B = BLOCK
LATENT = Group(layers=2, latent=True)


def lose_rank(monkeypatch: pytest.MonkeyPatch, lost: int, *, midway: bool) -> None:
    """Rank ``lost`` sends nothing, or everything but its commit of a checkpoint."""
    publish = WorkerHalf._publish

    def failing(self: WorkerHalf, job: Any) -> TransferResult:
        if self._rank != lost:
            return publish(self, job)
        if midway:
            publish(self, job._replace(manifest=None))
        raise StoreUnavailable("this rank is gone")

    monkeypatch.setattr(WorkerHalf, "_publish", failing)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("midway", [False, True], ids=["before", "midway"])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("groups", [HYBRID, (LATENT, STATE), (LATENT,)])
def test_a_rank_that_dies_while_publishing_leaves_nothing_visible(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    groups: tuple[Group, ...],
    lost: int,
    midway: bool,
    asynchronous: bool,
) -> None:
    decode = pair.engine(name="decode", ranks=2, groups=groups, asynchronous=asynchronous)
    prefill = pair.engine(name="prefill", ranks=2, groups=groups)
    with monkeypatch.context() as patch:
        lose_rank(patch, lost, midway=midway)
        first = decode.run(tokens(3 * B + 2, 1), 2 * B)
        assert kinds(pair) == []
    second = prefill.run(first.history + tokens(9, 2), 6)
    assert second.resumed == 0
    pair.check_idle()
    again = decode.run(first.history + tokens(9, 2), 2 * B)
    third = prefill.run(again.history + tokens(9, 3), 6)
    assert third.resumed == (len(again.history) - 1) // B * B
    pair.check_idle()


def test_a_latent_cache_is_stored_once_for_all_ranks(pair: Pair) -> None:
    sizes = {}
    for name, group, ranks in (("latent", LATENT, 2), ("sharded", FULL, 2), ("one", LATENT, 1)):
        here = Pair(new_uri())
        decode, prefill = (here.engine(groups=(group, STATE), ranks=ranks) for _ in range(2))
        first = decode.run(tokens(3 * B + 2, 1), 2 * B)
        second = prefill.run(first.history + tokens(9, 2), 6)
        assert second.loaded == (len(first.history) - 1) // B * B
        here.check_idle()
        store = open_store(here.uri, client_name="look")
        deepest = max(store.list_checkpoints(timeout_s=300), key=lambda one: one.boundary)
        sizes[name] = deepest.attention_bytes, deepest.state_bytes
        store.close()
        here.close()
    assert sizes["latent"][0] == sizes["one"][0] == sizes["sharded"][0] // 2
    assert sizes["latent"][1] == sizes["sharded"][1] == 2 * sizes["one"][1]


@pytest.mark.parametrize("other", [False, True], ids=["as told", "others"])
def test_a_rank_whose_pages_are_not_as_told_ends_conversions_for_the_engine(
    pair: Pair, other: bool
) -> None:
    """vLLM told the scheduler half of one layer; what the engine does by itself goes on."""
    engine = pair.engine(ranks=2, groups=ATTENTION)
    half = engine.backhaul._half
    assert all(group.page for group in half._facts.layout.groups)
    if other:
        worker = engine.workers[1]._worker
        groups = tuple(msgspec.structs.replace(g, page=()) for g in worker._layout.groups)
        worker._layout = msgspec.structs.replace(worker._layout, groups=groups)
    first = engine.run(tokens(3 * B + 2, 1), 2 * B)
    assert half._catalog._convertible._closed is other
    assert half._presence._member.converts is not other
    assert engine.run(first.history + tokens(3, 2), 3).resumed == (len(first.history) - 1) // B * B
    pair.check_idle()


def test_what_every_rank_travels_over_is_shown(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a rank's next connection does without falls back to 0."""
    engine = pair.engine(ranks=2, groups=ATTENTION)
    stores = [worker._worker._store for worker in engine.workers]

    def shown(*transports: tuple[str, ...]) -> dict[str, int]:
        for store, names in zip(stores, transports, strict=True):
            monkeypatch.setattr(store, "transports", lambda names=names: names)
        engine.run(tokens(3 * B + 2, len(engine.finished)), 3)
        prefix = "transport_ranks|"
        return {k.removeprefix(prefix): n for k, n in engine.shown.items() if prefix in k}

    assert shown((), ()) == {}
    assert shown(("cma/memory",), ()) == {"cma/memory": 1}
    assert shown(("cma/memory",), ("cma/memory", "tcp/lo")) == {"cma/memory": 2, "tcp/lo": 1}
    assert shown(("rc/x:1",), ("rc/x:1",)) == {"cma/memory": 0, "tcp/lo": 0, "rc/x:1": 2}
    pair.check_idle()
