"""Why the connector leaves vLLM's divergent local hits off: what would change, in tokens and bytes.

With ``supports_divergent_local_hybrid_hits`` vLLM offers the full-attention groups' own hit A in
place of the joint hit J, asks the connector for what lies above A, and where it gets nothing takes
J and assigns the junction afresh. Here J is 0 and A is 12 blocks; the store holds a checkpoint H.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import BLOCK, Pair, SimEngine, new_uri
from sim_kit import kinds, tokens

from backhaul.connector.connector import BackhaulConnector
from backhaul.protocols.checkpoint import CheckpointKind

B = BLOCK
A = 12 * B


@pytest.fixture(params=[False, True], ids=["joint", "divergent"])
def divergent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    on = bool(request.param)
    name = "supports_divergent_local_hybrid_hits"
    if on:
        monkeypatch.setattr(BackhaulConnector, name, property(lambda self: True))
    else:
        assert not getattr(Pair(new_uri()).engine().backhaul, name)
    return on


def lose_states(engine: SimEngine) -> None:
    """Evict every recurrent state from the engine's own prefix cache."""
    groups = {group for group, _ in engine.recurrent}
    for block in engine.pool.blocks:
        if block.block_hash and int.from_bytes(block.block_hash[-4:], "big") in groups:
            engine.pool._maybe_evict_cached_block(block)


@pytest.mark.parametrize(
    ("stored", "resumed", "attention_blocks"),
    [
        # H, then (joint, divergent): where the request resumes, attention blocks loaded.
        (6 * B, (6 * B, 0), (6, 0)),
        (A, (A, 0), (12, 0)),
        (15 * B, (15 * B, 15 * B), (15, 3)),
    ],
    ids=["H < A", "H = A", "H > A"],
)
def test_what_divergent_hits_gain_and_lose(
    pair: Pair,
    divergent: bool,
    monkeypatch: pytest.MonkeyPatch,
    stored: int,
    resumed: tuple[int, int],
    attention_blocks: tuple[int, int],
) -> None:
    whole = tokens(16 * B, 1)
    pair.engine(name="other").run(whole[: stored + 1], 1)
    engine = pair.engine(name="prefill", role="kv_consumer")
    engine.run(whole[:A] + tokens(2, 5), 2)
    lose_states(engine)
    before: Any = engine.counters["load_bytes"]
    starts = []
    execute = engine.runner.execute

    def watched(step: Any) -> Any:
        starts.extend(new.num_computed_tokens for new in step.scheduled_new_reqs)
        return execute(step)

    monkeypatch.setattr(engine.runner, "execute", watched)
    engine.run(whole, 3)
    pair.check_idle()
    assert starts == [resumed[divergent]]
    facts = engine.backhaul._half._facts
    state = sum(facts.object_bytes[group] for group, _ in engine.recurrent)
    loaded = engine.counters["load_bytes"] - before
    blocks = attention_blocks[divergent]
    assert loaded == (blocks * facts.object_bytes[0] + state if blocks else 0)


def test_divergent_hits_undo_the_end_of_the_input(pair: Pair, divergent: bool) -> None:
    """Nothing is stored: vLLM assigns the junction again, over the chunk end set for U_end."""
    engine = pair.engine()
    prompt = tokens(A + 2, 1)
    engine.run(prompt, 2, params={"backhaul": {"publish": False}})
    lose_states(engine)
    engine.run(prompt[:A] + tokens(4 * B, 3), 2, u_end=14 * B + 1)
    found = {boundary for boundary, one in kinds(pair) if CheckpointKind.INPUT_END in one}
    assert found == (set() if divergent else {14 * B})
