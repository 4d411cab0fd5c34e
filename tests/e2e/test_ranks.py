"""One engine over two workers, by tensor and by pipeline parallelism: every rank carries its own
shard, and a checkpoint is visible with all of them or not at all."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from conftest import PROBE_ARGS, PROBE_ENV
from e2e_kit import (
    COLD_TOLERANCE,
    B,
    agree,
    assert_idle,
    boundary,
    call_probe,
    published_checksums,
    tokens,
    wait_until,
    worst_difference,
)

from backhaul.deploy.engines import (
    WORKER_TITLE,
    Engine,
    EngineSpec,
    StoreDaemon,
    backhaul_config,
    pair_config,
)
from backhaul.deploy.pair import EngineClient, Leg, scrape
from backhaul.deploy.processes import Cluster
from backhaul.deploy.tiny_model import build_tiny_model
from backhaul.protocols.checkpoint import ObjectKey, PublicationId
from backhaul.transfer.backends.inspector import StoreInspector
from backhaul.transfer.base import CheckpointInfo, GrantStatus, Visibility
from backhaul.transfer.listing import ListQuery
from backhaul.transfer.registry import open_store

CAPACITY = 64 << 20
RANKS = 2
RECURRENT_GROUPS = 1
END = boundary(300, 60)
PUBLICATION_TTL_S = 10.0
QUARANTINE_S = 10.0
"""What the daemon waits before it gives away space that a lost writer may still write to."""

ARGS = {
    "tensor": ("--tensor-parallel-size=2",),
    "pipeline": ("--pipeline-parallel-size=2",),
}


class Ranks:
    """A store, one engine of two ranks, and with tensor parallelism one of a single rank. All
    publish and load."""

    def __init__(self, kind: str, model: Path, log_dir: Path) -> None:
        self.kind = kind
        self.store = StoreDaemon(
            log_dir,
            capacity=str(CAPACITY),
            args=(f"--publication-ttl={PUBLICATION_TTL_S}",),
        )
        engines = {kind: ARGS[kind]} | ({"single": ()} if kind == "tensor" else {})
        # Engines of one and two ranks are workers of one P/D pair, Backhaul beside NIXL.
        configure = pair_config if kind == "tensor" else backhaul_config
        self.engines = [
            Engine(
                EngineSpec(
                    name=name,
                    model=model,
                    cores="0|1" if name == kind else "0",
                    kv_transfer_config=configure(
                        self.store.uri,
                        stream_min_bytes=1,
                        publish_on=["stop", "length"],
                        lookup_timeout_s=2.0,  # a busy machine
                    ),
                    args=(
                        *PROBE_ARGS,
                        *args,
                        "--no-async-scheduling",
                        "--num-gpu-blocks-override=160",
                        "--max-model-len=4096",
                        # The engine itself keeps every state that it publishes.
                        f"--prefix-cache-retention-interval={B}",
                    ),
                    env=PROBE_ENV,
                ),
                log_dir,
            )
            for name, args in engines.items()
        ]
        self.engine = self.engines[0]
        self.client, *others = [EngineClient(engine) for engine in self.engines]
        self.clients = {RANKS: self.client} | dict(zip((1,), others, strict=False))

    def run(self, prompt: list[int], max_tokens: int) -> Leg:
        return self.client.complete(prompt, max_tokens=max_tokens, logprobs=10, ignore_eos=True)

    def assert_idle(self) -> None:
        for client in self.clients.values():
            assert_idle(client, lambda c=client: c.complete([97], max_tokens=1))

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a probe method on every worker: one answer a rank."""
        body = {"method": method, "args": list(args), "timeout": 60}
        response = httpx.post(f"{self.engine.url}/collective_rpc", json=body, timeout=90)
        response.raise_for_status()
        answers: list[Any] = response.json()["results"]
        return answers

    def counters(self) -> dict[str, float]:
        return {
            name: value
            for name, value in self.client.metrics().items()
            if "_total" in name and "_bytes" not in name
        }

    def checkpoints(self) -> list[CheckpointInfo]:
        """What lookups can find."""
        with StoreInspector(self.store.uri, timeout_s=5.0) as store:
            return list(store.all(ListQuery()))

    def names(self) -> set[bytes]:
        """The prefixes of what lookups can find."""
        return {one.block_hash for one in self.checkpoints()}

    def pending(self) -> set[bytes]:
        """The prefixes of what some rank has committed and another has not."""
        with StoreInspector(self.store.uri, timeout_s=5.0) as store:
            query = ListQuery(visibilities=frozenset({Visibility.PENDING}))
            return {one.block_hash for one in store.all(query)}

    def stats(self) -> dict[str, float]:
        return scrape(self.store.http_url, "backhaul:store_")

    def workers(self) -> list[psutil.Process]:
        """Processes of the ranks, in their order."""
        titles = {}
        for process in self.engine.processes():
            with suppress(psutil.Error):  # it ended, perhaps only just
                titles[process] = " ".join(process.cmdline())
        found = [process for process, title in titles.items() if title.startswith(WORKER_TITLE)]
        return sorted(found, key=lambda process: titles[process])


@pytest.fixture(scope="module", params=list(ARGS))
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    directory = tmp_path_factory.mktemp(request.param)
    model = build_tiny_model(directory / "two-stage", attention_interval=2)
    one = Ranks(request.param, model, directory)
    with Cluster([one.store, *one.engines]):
        one.rpc("probe_make_stage_buffers")
        yield one


@pytest.fixture(autouse=True)
def _idle(ranks: Ranks) -> Iterator[None]:
    """Whatever a test did, nothing may be left behind in an engine that lives."""
    yield
    if len(ranks.workers()) == RANKS:
        ranks.assert_idle()


def second_turn(ranks: Ranks, rng: random.Random) -> list[int]:
    """A prompt of which the first ``END`` tokens are a published D_end, and end on a boundary."""
    prompt = tokens(rng, 300)
    first = ranks.run(prompt, 60)
    ranks.assert_idle()
    second = [*prompt, *first.tokens, *tokens(rng, 24)]
    # No deeper boundary, whose state a first run of it would leave behind for a second.
    assert boundary(300, 60) == (len(second) - 1) // B * B == END
    return second


def test_a_load_equals_the_state_that_the_engine_holds_itself(
    ranks: Ranks, rng: random.Random
) -> None:
    """Once from its own prefix cache, once, all pages zeroed, from the store."""
    second = second_turn(ranks, rng)
    local = ranks.run(second, 8)
    assert local.backhaul is not None and local.backhaul["loaded_tokens"] == 0
    assert local.cached_tokens == END
    ranks.assert_idle()
    ranks.client.reset_prefix_cache()
    ranks.rpc("probe_zero")
    before = ranks.counters()
    loaded = ranks.run(second, 8)
    assert loaded.backhaul is not None
    assert loaded.backhaul["loaded_tokens"] == loaded.cached_tokens == END
    assert loaded.tokens == local.tokens
    assert worst_difference(loaded, local) == 0.0

    pages = [set(digests) for digests in ranks.rpc("probe_digests")]
    shards = published_checksums(ranks.store.uri, second, END, ranks=RANKS)
    assert not shards[0] & shards[1], "two ranks stored the same bytes"
    for rank, shard in enumerate(shards):
        assert len(shard) == END // B + RECURRENT_GROUPS
        assert shard <= pages[rank], f"rank {rank} holds other bytes than it published"

    ranks.assert_idle()
    counted = {n: v - before.get(n, 0) for n, v in ranks.counters().items() if v != before.get(n)}
    for name in ("requests_total{selected=decode_end}", "lookups_total{result=hit}",
                 "loads_total{kind=decode_end}"):  # fmt: skip
        assert counted[f"backhaul:{name}"] == 1, counted
    assert counted["backhaul:loaded_tokens_total{kind=decode_end}"] == END


def test_the_store_counts_the_state_of_all_ranks(ranks: Ranks, rng: random.Random) -> None:
    before = ranks.client.metrics()
    second_turn(ranks, rng)
    after = ranks.client.metrics()
    name = "backhaul:published_state_bytes_total{kind=decode_end}"
    published = after[name] - before.get(name, 0.0)
    newest = max(ranks.checkpoints(), key=lambda one: -one.age_s)
    assert newest.boundary == END
    assert newest.state_bytes == published == sum(map(int, ranks.rpc("probe_state_bytes")))


@pytest.mark.parametrize("late", range(RANKS))
def test_visible_once_the_last_rank_has_committed(
    ranks: Ranks, rng: random.Random, late: int
) -> None:
    prompt = tokens(rng, 300)
    before = ranks.names()
    ranks.rpc("probe_close_gate", "commit", late)
    try:
        ranks.run(prompt, 60)
        # P_end and D_end
        wait_until(lambda: len(ranks.pending()) == 2, "the other rank commits")
        pending = ranks.pending()
        assert ranks.names() == before
    finally:
        ranks.rpc("probe_open_gate", "commit")
    ranks.assert_idle()
    assert ranks.names() - before == pending


@pytest.mark.parametrize("ranks", ["tensor"], indirect=True)
@pytest.mark.parametrize(("source", "target"), [(1, RANKS), (RANKS, 1)])
def test_a_checkpoint_of_another_number_of_ranks_is_converted(
    ranks: Ranks, rng: random.Random, source: int, target: int
) -> None:
    prompt = tokens(rng, 300)
    first = ranks.clients[source].complete(prompt, max_tokens=60, ignore_eos=True)
    ranks.assert_idle()
    second = [*prompt, *first.tokens, *tokens(rng, 24)]
    loading = ranks.clients[target]
    leg = loading.complete(second, max_tokens=8, logprobs=10, ignore_eos=True)
    assert leg.backhaul is not None and leg.backhaul["reason"] is None
    assert leg.backhaul["loaded_tokens"] == leg.cached_tokens == END
    assert leg.backhaul["selected"]["kind"] == "decode_end"
    chosen = next(one for one in leg.backhaul["candidates"] if one["selected"])
    with StoreInspector(ranks.store.uri, timeout_s=5.0) as store:
        of = {one.id: one.record.tensor_parallel for one in store.domains()}
    assert of[chosen["domain"]] == source
    salt = uuid.uuid4().hex
    cold = loading.complete(second, max_tokens=8, logprobs=10, ignore_eos=True, cache_salt=salt)
    assert agree(leg, cold, COLD_TOLERANCE)


MISCUTS = ("heads", "states", "projections")


@pytest.mark.parametrize("ranks", ["tensor"], indirect=True)
@pytest.mark.parametrize(("source", "target"), [(1, RANKS), (RANKS, 1)])
def test_a_shard_in_the_wrong_place_breaks_the_comparison(
    ranks: Ranks, rng: random.Random, source: int, target: int
) -> None:
    """The one above can fail. The second prompt ends right behind the boundary, so that what the
    convolution remembers still decides the reply."""
    prompt = tokens(rng, 300)
    first = ranks.clients[source].complete(prompt, max_tokens=54, ignore_eos=True)
    ranks.assert_idle()
    second = [*prompt, *first.tokens]
    assert len(second) == END + 2
    loading = ranks.clients[target]
    agrees = {}
    cold = loading.complete(
        second, max_tokens=8, logprobs=10, ignore_eos=True, cache_salt=uuid.uuid4().hex
    )
    for cut in ("off", *MISCUTS):
        ranks.assert_idle()
        loading.reset_prefix_cache()
        call_probe(loading, "probe_convert", cut)
        try:
            # Unpublished, or its own domain would hold the end when the next one asks.
            leg = loading.complete(
                second,
                max_tokens=8,
                logprobs=10,
                ignore_eos=True,
                transfer={"backhaul": {"publish": False}},
            )
        finally:
            call_probe(loading, "probe_convert", "off")
        assert leg.backhaul is not None and leg.backhaul["reason"] is None
        assert leg.backhaul["loaded_tokens"] == leg.cached_tokens == END
        agrees[cut] = agree(leg, cold, COLD_TOLERANCE)
    assert agrees == {"off": True} | dict.fromkeys(MISCUTS, False)
    ranks.assert_idle()
    loading.reset_prefix_cache()  # the last of them must not serve another test


@pytest.mark.parametrize("ranks", ["tensor"], indirect=True)
@pytest.mark.parametrize(("prefilling", "decoding"), [(1, RANKS), (RANKS, 1)])
def test_a_turn_goes_from_prefill_to_decode_and_back(
    ranks: Ranks, rng: random.Random, prefilling: int, decoding: int
) -> None:
    """Over workers of different sizes: the prompt by NIXL, the reply's end through the store."""
    prefill, decode = ranks.clients[prefilling], ranks.clients[decoding]
    prompt = tokens(rng, 300)
    handed = {"do_remote_decode": True, "do_remote_prefill": False}
    first = prefill.complete(prompt, max_tokens=1, transfer=handed)
    transfer = first.kv_transfer_params
    reply = decode.complete(prompt, max_tokens=60, ignore_eos=True, transfer=transfer)
    assert reply.backhaul is not None
    assert reply.backhaul["other_tokens"] >= len(prompt) - 1, "the prompt was handed over"
    ranks.assert_idle()
    second = [*prompt, *reply.tokens, *tokens(rng, 24)]
    leg = prefill.complete(second, max_tokens=8, logprobs=10, ignore_eos=True)
    assert leg.backhaul is not None and leg.backhaul["selected"]["kind"] == "decode_end"
    assert leg.cached_tokens == END
    salt = uuid.uuid4().hex
    cold = prefill.complete(second, max_tokens=8, logprobs=10, ignore_eos=True, cache_salt=salt)
    assert agree(leg, cold, COLD_TOLERANCE)


KILL = {"tensor": (1, "write"), "pipeline": (0, "commit")}
"""Which rank dies, and what it was about to do."""


def test_a_rank_that_is_killed_while_publishing_leaves_nothing(
    ranks: Ranks, rng: random.Random
) -> None:
    """Last: no engine of this kind runs afterwards."""
    lost, operation = KILL[ranks.kind]
    before = ranks.names()
    ranks.rpc("probe_close_gate", operation, lost)
    ranks.run(tokens(rng, 900), 40)
    assert ranks.stats()["backhaul:store_publications"] > 0
    ranks.workers()[lost].kill()
    wait_until(lambda: not ranks.workers(), "the engine ends with its worker", seconds=60)
    assert ranks.names() == before
    wait_until(
        lambda: ranks.stats()["backhaul:store_publications"] == 0,
        "the publications run out",
        seconds=PUBLICATION_TTL_S + 10,
    )
    assert ranks.names() == before
    if operation == "write":  # what was reserved and never written is the last to be given back
        wait_until(lambda: fills(ranks), "all space can be had", seconds=QUARANTINE_S + 10)


def fills(ranks: Ranks) -> bool:
    """Whether a publication gets the whole pool: nothing in it is held by anybody."""
    with StoreInspector(ranks.store.uri, timeout_s=5.0) as inspector:
        record = inspector.domains()[0].record
    store = open_store(ranks.store.uri, client_name="test")
    store.open_domain(record, timeout_s=5)
    group = record.layout.groups[0].index
    wants = [(ObjectKey(0, group, bytes([i]) * 32), 1 << 20) for i in range(CAPACITY >> 20)]
    publication = PublicationId("whole pool")
    grants = store.reserve(record.domain_id, publication, wants, timeout_s=5)
    store.abandon(publication, timeout_s=5)
    store.close()
    return all(grant.status is GrantStatus.GRANTED for grant in grants)
