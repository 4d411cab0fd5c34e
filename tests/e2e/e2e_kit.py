"""What the end-to-end tests do over and over: turns, replays, comparisons, idle checks."""

from __future__ import annotations

import json
import math
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Self

import httpx

from backhaul.deploy.engines import (
    Engine,
    EngineSpec,
    StoreDaemon,
    backhaul_config,
    pair_config,
)
from backhaul.deploy.pair import EngineClient, Leg, Pair, Turn, scrape
from backhaul.deploy.processes import Cluster, free_port
from backhaul.deploy.tiny_model import TOKEN_IDS
from backhaul.protocols.layout import checkpoint_objects
from backhaul.transfer.backends.inspector import StoreInspector
from backhaul.transfer.registry import open_store

B = 32
"""The boundary grid that vLLM derives for the tiny model; a test checks it against the engine."""

END = TOKEN_IDS["<|im_end|>"]

COLD_TOLERANCE = 0.25
"""Largest difference in log-probability (nats) between a loaded state and a cold recompute. The
gated delta net runs in bfloat16 on CPUs; other chunk boundaries alone move results by 0.13."""

GAUGES = ("held_blocks", "pins", "open_leases", "open_jobs", "tracked_requests")


def boundary(prompt: int, output: int) -> int:
    """D_end: floor(n / B) * B with n = prompt + output - 1."""
    return (prompt + output - 1) // B * B


def ends_after(tokens: int) -> dict[str, Any]:
    """Sampling parameters under which a reply ends by itself (EOS) after ``tokens`` tokens: the
    end token is forbidden before and certain then. The end token itself is the last one."""
    return {
        "max_tokens": tokens + 4,
        "min_tokens": tokens - 1,
        "logit_bias": {str(END): 100.0},
    }


def tokens(rng: random.Random, count: int) -> list[int]:
    """Random letters: prompts that share no prefix with any other."""
    return [rng.randrange(97, 123) for _ in range(count)]


def worst_difference(a: Leg, b: Leg) -> float:
    """Largest difference over both legs' best tokens, up to where their tokens diverge (nats)."""
    worst = 0.0
    for position, (x, y) in enumerate(zip(a.logprobs, b.logprobs, strict=False)):
        for token in set(x) & set(y):
            worst = max(worst, abs(x[token] - y[token]))
        if a.tokens[position] != b.tokens[position]:
            break
    return worst


def margin(leg: Leg, position: int) -> float:
    """Difference between the two best tokens at a position (nats)."""
    best = sorted(leg.logprobs[position].values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else math.inf


def agree(a: Leg, b: Leg, tolerance: float) -> bool:
    """Log-probabilities within ``tolerance`` and greedy tokens equal wherever the margin between
    the two best exceeds it. After a permitted divergence the rest cannot be compared."""
    for position, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)):
        common = set(a.logprobs[position]) & set(b.logprobs[position])
        if any(abs(a.logprobs[position][t] - b.logprobs[position][t]) > tolerance for t in common):
            return False
        if x != y:
            return margin(a, position) <= tolerance
    return True


def call_probe(client: EngineClient, method: str, *args: Any) -> Any:
    """Call a probe method on the engine's worker."""
    response = httpx.post(
        f"{client.engine.url}/collective_rpc",
        json={"method": method, "args": list(args), "timeout": 60},
        timeout=90,
    )
    response.raise_for_status()
    return response.json()["results"][0]


@contextmanager
def tampered(client: EngineClient, mode: str) -> Iterator[None]:
    """Spoil what loads put into memory for the length of the block."""
    call_probe(client, "probe_tamper", mode)
    try:
        yield
    finally:
        call_probe(client, "probe_tamper", "off")


class Session:
    """A pair with the operations of the tests."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._random = random.Random(4711)

    def tokens(self, count: int) -> list[int]:
        """A prompt that shares no prefix with any earlier one."""
        return tokens(self._random, count)

    def run(self, prompt: Sequence[int], **options: Any) -> Turn:
        """Prefill and decode."""
        return self.pair.run(prompt, **{"stream": False, **options})

    def turn(self, prompt: Sequence[int], reply: int, *, u_end: Any = None) -> Turn:
        """A turn whose reply ends by itself after ``reply`` tokens, end token included."""
        turn = self.run(prompt, u_end=u_end, **ends_after(reply))
        assert len(turn.decode.tokens) == reply and turn.decode.tokens[-1] == END
        assert turn.decode.finish_reason == "stop"
        return turn

    def prefill(self, prompt: Sequence[int], **options: Any) -> Leg:
        """Prefill only, with log-probabilities of the first token. Not marked for a decode leg:
        NIXL would keep its blocks until one comes."""
        return self.pair.prefill.complete(prompt, max_tokens=1, logprobs=10, **options)

    def cold(self, prompt: Sequence[int], max_tokens: int = 8) -> Leg:
        """A recompute that nothing cached can help, on the decode engine: a cache salt of its own
        keeps every block hash apart."""
        return self.pair.decode.complete(
            prompt, max_tokens=max_tokens, logprobs=10, cache_salt=uuid.uuid4().hex
        )

    def continue_on_prefill(self, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> Leg:
        """Run a prompt on the prefill engine alone, so that what it loaded decides the output."""
        return self.pair.prefill.complete(prompt, max_tokens=max_tokens, logprobs=10, **more)

    def forget_locally(self) -> None:
        """Empty the prefill engine's own prefix cache, as another prefill worker would have it."""
        self.pair.prefill.reset_prefix_cache()

    def rpc(self, client: EngineClient, method: str, *args: Any) -> Any:
        """Call a probe method on the engine's worker."""
        return call_probe(client, method, *args)

    @contextmanager
    def gate(self, client: EngineClient, operation: str) -> Iterator[None]:
        """Hold an operation of a worker's store for the length of the block."""
        self.rpc(client, "probe_close_gate", operation)
        try:
            yield
        finally:
            self.rpc(client, "probe_open_gate", operation)

    @contextmanager
    def tampered(self, client: EngineClient, mode: str) -> Iterator[None]:
        """See the function of that name."""
        with tampered(client, mode):
            yield

    def gauges(self, client: EngineClient) -> dict[str, float]:
        """The engine's state gauges."""
        metrics = client.metrics()
        return {name: metrics.get(f"backhaul:{name}", 0.0) for name in GAUGES}

    def settle(self) -> None:
        """Wait until nothing is under way on either engine, so that publications are consumable."""
        time.sleep(0.1)  # the front end enters a step's gauges just after it answered
        for client in (self.pair.prefill, self.pair.decode):
            wait_until(lambda c=client: not any(self.gauges(c).values()), "engine is idle")

    def assert_idle(self) -> None:
        """No pin, lease, job or request state is left, in the engines and in the store."""
        for client in (self.pair.prefill, self.pair.decode):
            assert_idle(client, lambda c=client: self.nudge(c))
        store = lambda: scrape(self.pair.store.http_url, "backhaul:store_")  # noqa: E731
        wait_until(
            lambda: (
                store()["backhaul:store_leases"] == 0
                and store()["backhaul:store_publications"] == 0
            ),
            "store has no lease and no publication",
        )

    def nudge(self, client: EngineClient) -> None:
        """A tiny request: makes an idle engine report its gauges."""
        client.complete([97, 98, 99], max_tokens=1)

    def ensure_store(self) -> None:
        """Start the store again where a test killed it."""
        store = self.pair.store
        if store.pid is None:
            store.start()
            store.wait_healthy(60)


class AlonePair:
    """Three engines that run Backhaul alone, one of each role: the producer publishes P_end, the
    others load it."""

    def __init__(
        self, model: Path, log_dir: Path, args: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self.store = StoreDaemon(log_dir, capacity="8MiB")  # few prompts of 1,000 tokens
        common = (
            *args,
            "--no-async-scheduling",
            "--num-gpu-blocks-override=160",
            "--max-model-len=4096",
        )
        options: Mapping[str, Any] = {"stream_min_bytes": 1, "publish_on": ["stop", "length"]}
        self.events_port = free_port()
        endpoint = f"tcp://*:{self.events_port}"
        events = json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint})
        self.engines = [
            Engine(
                EngineSpec(
                    name=name,
                    model=model,
                    cores=core,
                    kv_transfer_config=backhaul_config(self.store.uri, role, **options),
                    args=(*common, *extra),
                    env=env,
                ),
                log_dir,
            )
            for name, core, role, extra in (
                ("producer", "0", "kv_producer", ()),
                # Keeps every boundary locally, so that it holds the states that it publishes.
                (
                    *("both", "1", "kv_both"),
                    ("--prefix-cache-retention-interval=32", f"--kv-events-config={events}"),
                ),
                ("consumer", "0", "kv_consumer", ()),
            )
        ]
        self._cluster = Cluster([self.store, *self.engines])

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        self.clients = [EngineClient(engine) for engine in self.engines]
        self.producer, self.both, self.consumer = self.clients
        return self

    def __exit__(self, *error: Any) -> None:
        self._cluster.__exit__(*error)

    def assert_idle(self) -> None:
        """See ``Session.assert_idle``."""
        for client in self.clients:
            assert_idle(client, lambda c=client: c.complete([97], max_tokens=1))


class Solo:
    """One engine that runs Backhaul (``kv_both``): it publishes what it decodes, forgets it, and
    loads it again. Started by whoever runs ``services``.

    It has a store of its own, unless it shares another's ``store``; with ``nixl`` it runs Backhaul
    beside NIXL, as one worker of a P/D pair.
    """

    def __init__(
        self,
        model: Path,
        log_dir: Path,
        *,
        core: str,
        args: Sequence[str],
        env: Mapping[str, str],
        store: StoreDaemon | None = None,
        nixl: bool = False,
    ) -> None:
        self.store = store or StoreDaemon(log_dir, name=f"store-{model.name}", capacity="128MiB")
        configure = pair_config if nixl else backhaul_config
        self.engine = Engine(
            EngineSpec(
                name=model.name if store is None else f"{model.name}-decode",
                model=model,
                cores=core,
                kv_transfer_config=configure(
                    self.store.uri, stream_min_bytes=1, publish_on=["stop", "length"]
                ),
                args=(
                    "--max-model-len=1024",
                    "--num-gpu-blocks-override=512",
                    *args,
                ),
                env=env,
            ),
            log_dir,
        )
        self.services = (self.engine,) if store else (self.store, self.engine)
        self.client = EngineClient(self.engine)

    def run(self, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> Leg:
        """A reply of exactly ``max_tokens`` tokens, with log-probabilities."""
        return self.client.complete(
            prompt, max_tokens=max_tokens, ignore_eos=True, logprobs=10, **more
        )

    def turn(self, prompt: Sequence[int], reply: int, rng: random.Random, **more: Any) -> list[int]:
        """Run a turn, let it be published, and answer the next turn's prompt: 24 tokens more."""
        leg = self.run(prompt, reply, **more)
        assert len(leg.tokens) == reply
        self.settle()
        return [*prompt, *leg.tokens, *tokens(rng, 24)]

    def cold(self, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> Leg:
        """A recompute that nothing cached can help; publishes nothing."""
        leg = self.run(
            prompt,
            max_tokens,
            cache_salt=uuid.uuid4().hex,
            transfer={"backhaul": {"publish": False}},
            **more,
        )
        assert leg.cached_tokens == 0
        return leg

    def forget(self) -> None:
        """Empty the engine's prefix cache, and the memory behind it: what a request then resumes
        from can only have come out of the store."""
        self.settle()
        self.client.reset_prefix_cache()
        call_probe(self.client, "probe_zero")

    def settle(self) -> None:
        """Wait until nothing is under way: every gauge is back at zero."""
        assert_idle(self.client, lambda: self.client.complete([97], max_tokens=1))


def assert_idle(client: EngineClient, nudge: Any) -> None:
    """All gauges are zero, within 20 s."""
    deadline = time.monotonic() + 20.0
    while True:
        metrics = client.metrics()
        # An engine that ran no step yet has not reported any.
        left = {name: metrics.get(f"backhaul:{name}", math.inf) for name in GAUGES}
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, f"{client.engine.name} still holds {left}"
        nudge()
        time.sleep(0.2)


def wait_until(condition: Any, what: str, seconds: float = 20.0) -> None:
    """Poll a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds:.0f} s: {what}"
        time.sleep(0.1)


def block_hashes(prompt: Sequence[int], end: int) -> list[Any]:
    """vLLM's own chained hashes of a prompt's blocks up to ``end``."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    hashes: list[Any] = []
    for start in range(0, end, B):
        parent = hashes[-1] if hashes else None
        hashes.append(hash_block_tokens(function, parent, prompt[start : start + B], None))
    return hashes


def published_checksums(
    uri: str, prompt: Sequence[int], end: int, *, ranks: int = 1
) -> list[set[str]]:
    """Checksums (hex) of all objects of the checkpoint at ``end``, as their writers gave them: one
    set a rank."""
    import grpc

    from backhaul.protocols import store_pb2 as pb
    from backhaul.protocols import store_pb2_grpc as rpc

    hashes = [bytes(value) for value in block_hashes(prompt, end)]
    store = open_store(uri, client_name="test")
    with StoreInspector(uri, timeout_s=5) as inspector:
        domain = next(d for d in inspector.domains() if d.record.layout.ranks == ranks)
    result = store.lookup(domain.id, hashes, lease_s=10, timeout_s=5)
    assert result.lease is not None and result.matches[0].boundary == end
    found: list[set[str]] = [set() for _ in range(ranks)]
    with grpc.insecure_channel(uri.removeprefix("backhaul://")) as channel:
        stub = rpc.CatalogStub(channel)
        for rank, (group, name) in product(
            range(ranks), checkpoint_objects(domain.record.layout, end, hashes)
        ):
            keys = [pb.Key(rank=rank, group=group, block_hash=name)]
            reply = stub.Locate(pb.LocateRequest(lease_id=result.lease, keys=keys))
            found[rank].add(f"{reply.locations[0].checksum:016x}")
    store.release([result.lease], timeout_s=5)
    store.close()
    return found
