"""KV events of a running engine, as a router receives them: over ZMQ, in vLLM's own form."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from e2e_kit import AlonePair, B, block_hashes, boundary, tokens

from backhaul.protocols.layout import GroupKind
from backhaul.transfer.backends.inspector import StoreInspector

MEDIUM = "BACKHAUL"


class Subscriber:
    """Takes whatever the engine's publisher sends."""

    def __init__(self, socket: Any) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.events: list[Any] = []
        self.sequence: list[int] = []

    def receive(self, wait_s: float) -> int:
        """Take what arrives; the number of messages."""
        before = len(self.sequence)
        while self._socket.poll(wait_s * 1000):
            _, number, payload = self._socket.recv_multipart()
            self.sequence.append(int.from_bytes(number, "big"))
            self.events += self._decoder.decode(payload).events
        return len(self.sequence) - before


@pytest.fixture
def subscriber(alone: AlonePair, rng: random.Random) -> Iterator[Subscriber]:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(f"tcp://127.0.0.1:{alone.events_port}")
        socket.subscribe("")
        one = Subscriber(socket)
        deadline = time.monotonic() + 20.0
        while not one.receive(0.2):  # a subscriber hears nothing of what was sent before it came
            assert time.monotonic() < deadline, "nothing is published"
            alone.both.complete(tokens(rng, 2 * B), max_tokens=1)
        alone.assert_idle()
        one.receive(0.5)
        one.events.clear()
        yield one


def test_a_subscriber_learns_of_the_store_s_checkpoints_apart_from_the_engine_s_blocks(
    alone: AlonePair,
    rng: random.Random,
    subscriber: Subscriber,
    eventually: Callable[[Callable[[], Any], str], None],
) -> None:
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    prompt = tokens(rng, 300)
    leg = alone.both.complete(prompt, max_tokens=60, ignore_eos=True)
    end = boundary(300, 60)
    history = [*prompt, *leg.tokens]
    names = [maybe_convert_block_hash(name) for name in block_hashes(history, end)]

    def ours() -> list[Any]:
        subscriber.receive(0.05)
        stored = [e for e in subscriber.events if isinstance(e, BlockStored)]
        return [e for e in stored if e.medium == MEDIUM]

    with StoreInspector(alone.store.uri, timeout_s=5) as inspector:
        (domain,) = [d for d in inspector.domains() if d.id == domain_of(alone)]
    groups = {group.index: group for group in domain.record.layout.groups}
    eventually(
        lambda: {e.group_idx for e in ours() if e.block_hashes[-1] == names[-1]} == set(groups),
        "every group of D_end is announced",
    )
    for event in ours():
        group = groups[event.group_idx]
        recurrent = group.kind is GroupKind.RECURRENT
        assert event.kv_cache_spec_kind == ("mamba" if recurrent else "full_attention")
        assert (event.locality, event.block_size) == ("REMOTE", group.block_tokens)
        first = names.index(event.block_hashes[0])
        count = len(event.block_hashes)
        assert event.block_hashes == names[first : first + count]
        assert count == 1 or not recurrent, "a state stands at one boundary"
        assert event.token_ids == history[first * B : (first + count) * B]
        assert event.parent_block_hash == (names[first - 1] if first else None)
    attention = [e for e in ours() if groups[e.group_idx].kind is GroupKind.FULL]
    announced = [name for event in attention for name in event.block_hashes]
    assert announced == names, "each block once, in the order of the prefix"
    # The engine's own cache announces the same hashes, told apart by the medium.
    own = [e for e in subscriber.events if isinstance(e, BlockStored) and e.medium != MEDIUM]
    assert own and {e.medium for e in own}.isdisjoint({MEDIUM})
    assert set(names) & {name for event in own for name in event.block_hashes}
    numbers = subscriber.sequence
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "none was lost"


def domain_of(alone: AlonePair) -> str:
    """The cache domain of the engine, as its metrics name it."""
    (name,) = [n for n in alone.both.metrics() if n.startswith("backhaul:info")]
    return name.partition("domain=")[2].partition(",")[0].rstrip("}")
