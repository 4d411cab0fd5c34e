"""The end of a user's message, from the chat plugin's flag to the daemon's order of eviction."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness import BLOCK, HYBRID, Group, Pair, new_uri
from sim_kit import daemon, tokens

from backhaul.connector.request_facts import message_facts
from backhaul.transfer.base import Store
from backhaul.transfer.registry import open_store

B = BLOCK


@pytest.fixture
def uri() -> Iterator[str]:
    """The smallest daemon: a tool loop and some ten long prompts fit into it."""
    with daemon("--capacity", "1MiB") as one:
        yield one


@pytest.fixture
def store(uri: str) -> Iterator[Store]:
    one = open_store(uri, client_name="reader")
    yield one
    one.close()


def hints(u_end: int, *roles: str) -> dict[str, Any]:
    """What the plugin says of a request whose messages have these roles."""
    messages = [{"role": role, "content": "x"} for role in roles]
    request = SimpleNamespace(messages=messages, tools=[{"type": "function"}], tool_choice="auto")
    return {"backhaul": {"u_end": u_end, **message_facts(request)}}


def test_the_end_of_the_users_message_outlives_the_tool_loop_in_a_full_store(
    uri: str, store: Store
) -> None:
    pair = Pair(uri)
    groups = (Group(layers=8), Group(layers=8, recurrent=True))
    engine = pair.engine(groups=groups, num_blocks=256, budget=512)

    def evicted() -> int:
        return store.stats(timeout_s=300).counters["evicted_user_turns"]

    def stored() -> set[bytes]:
        return {bytes(one.block_hash) for one in store.list_checkpoints(timeout_s=300)}

    roles = ["user"]
    prompt = tokens(3 * B + 3, 1)
    ends = []
    for step in range(3):
        ends.append((len(prompt) - 1) // B * B)
        name = engine.submit(prompt, B + 2, params=hints(len(prompt) - 1, *roles))
        engine.drain()
        engine.check_idle()
        roles += ["assistant", "tool"]
        history = engine.finished[name].history
        hashes = [bytes(one) for one in engine.requests[name].block_hashes]
        prompt = history + tokens(2 * B, 10 + step)
    user_end, *loop = (hashes[end // B - 1] for end in ends)
    assert stored() >= {user_end, *loop}
    assert engine.counters["publications|input_end"] >= 3
    assert engine.counters["user_turns_published"] == 1

    others = 0
    while user_end in (held := stored()):
        assert evicted() == 0
        deepest = held & set(loop)
        engine.run(tokens(4 * B, 100 + others), B)
        engine.check_idle()
        others += 1
        assert others < 400, "the store is never full"
    assert not deepest, "the loop's own ends went first"
    assert evicted() == 1
    assert engine.counters["user_turns_published"] == 1
    pair.close()


@pytest.mark.parametrize(
    ("last", "blocks", "published"),
    [("user", 3, True), ("tool", 3, False), ("user", 20, False)],
    ids=["user", "tool", "too_long"],
)
def test_running_replies_give_up_their_pins_for_the_end_of_a_users_message(
    last: str, blocks: int, published: bool
) -> None:
    """As many as are needed; none where all of them are not enough."""
    pair = Pair(new_uri())
    limit = {"max_pinned_fraction": 9.5 / 2048, "stream_ahead": False}
    engine = pair.engine(groups=HYBRID, num_blocks=2048, budget=512, options=limit)
    # They reach their next positions one after another, and hold two then.
    replies = [engine.submit(tokens(2 * B + 1 + 5 * i, i), 200 * B) for i in range(3)]
    decode_pins = engine.backhaul._half._publisher._decode_pins
    while len(decode_pins) < len(replies):
        engine.step()
    given_up = 0
    for i in range(1 if published else B):
        prompt = tokens(blocks * B + 3, 9 + i)
        name = engine.submit(prompt, 2, params=hints(blocks * B + 2, "user", last))
        while name in engine.live:
            engine.step()
            running = set(replies) & set(engine.live)
            given_up = max(given_up, len(running - set(decode_pins)))
    assert engine.counters["publication_failures|pin_limit"] >= 1
    for reply in replies:
        engine.abort(reply)
    engine.drain()
    engine.check_idle()
    assert not decode_pins
    assert engine.counters["user_turns_published"] == published
    assert (0 < given_up < len(replies)) is published
    pair.close()
