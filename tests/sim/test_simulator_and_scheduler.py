"""The simulator of `backhaul simulate` against vLLM's real scheduler and the real connector: the
same hits, token for token, over generated workloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from harness import BLOCK, HYBRID, MODEL_CONFIG, Group, Pair, new_uri
from sim_kit import daemon

from backhaul.benchmarks.reuse.contents import Contents
from backhaul.benchmarks.reuse.deployment import Deployment, Routing
from backhaul.benchmarks.reuse.model_shape import ModelShape
from backhaul.benchmarks.reuse.record import RequestResult
from backhaul.benchmarks.reuse.simulator import Experiment, Simulator, simulate
from backhaul.benchmarks.reuse.trace import Turn
from backhaul.benchmarks.reuse.turn_hints import hints_of
from backhaul.benchmarks.reuse.workloads import WORKLOADS, Sizes, workload
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.policy import Policy
from backhaul.protocols.work import FULL, ModelWork, model_work
from backhaul.transfer.base import CheckpointInfo, StoreStats
from backhaul.transfer.registry import open_store
from backhaul.transfer.strategies import DEFAULT, Admission, Eviction, Strategies

SHAPE = ModelShape(
    name="sim",
    kv_bytes=64,
    state_bytes=512,
    prefill=ModelWork(2000, ((FULL, 1),)),
    grid=BLOCK,
    state_pages=2,
)
SIZES = Sizes(
    conversations=2,
    turns=2,
    system=40,
    user=12,
    reasoning=9,
    reply=8,
    tool_result=10,
    tool_rounds=2,
    branches=3,
    arrival_s=1e6,  # one request after the other, everything published in between
    reply_s=1e4,
)
POLICIES = (
    Policy.MAIN_SPARSE,
    Policy.INPUT_END,
    Policy.DECODE_END,
    Policy.BOTH,
    Policy.AUTO,
    Policy.BOUNDARIES,
)
SHARES = ("shared_system", "mixed")
# Every workload and every policy, sticky and not; each policy on as many of both.
CASES = [
    (name, POLICIES[(i + 3 * j) % len(POLICIES)], routing)
    for i, name in enumerate(WORKLOADS)
    for j, routing in enumerate((Routing.STICKY, Routing.FORGET))
]


def real(
    trace: list[Turn],
    policy: Policy,
    routing: Routing,
    uri: str = "",
    groups: Sequence[Group] = HYBRID,
    **options: Any,
) -> dict[str, tuple[Any, ...]]:
    """What the scheduler and the connector of a prefill engine say of each request."""
    pair = Pair(uri or new_uri())
    prefill, decode = (
        pair.engine(
            name=name,
            sibling=True,
            groups=groups,
            num_blocks=1024,
            options={"policy": policy, **options},
        )
        for name in ("prefill", "decode")
    )
    content, found = Contents(range(2, 1000)), {}
    for turn in trace:
        if routing is Routing.FORGET:
            assert prefill.scheduler.reset_prefix_cache()
        prompt = content.ids(turn.prompt)
        name = prefill.submit(
            prompt[:-1],
            1,
            stops=False,
            params={"do_remote_decode": True, "backhaul": hints_of(turn)},
            handed_over=prompt[-1],
        )
        prefill.drain()
        record = prefill.finished[name].params["backhaul"]
        selected = record["selected"] or {"kind": "", "boundary": 0}
        found[turn.request] = (
            record["prompt_tokens"],
            record["local_tokens"],
            record["loaded_tokens"],
            selected["kind"],
            selected["boundary"],
        )
        ours = {**hints_of(turn), "ends": record["chosen"]["ends"]}
        handed = {"do_remote_prefill": True, "backhaul": ours}
        done = decode.run(prompt, turn.output_tokens, params=handed)
        content.generated(turn, done.output)
    pair.check_idle()
    pair.close()
    return found


def as_recorded(result: RequestResult) -> tuple[Any, ...]:
    return (
        result.prompt_tokens,
        result.local_tokens,
        result.loaded_tokens,
        result.selected,
        result.selected_boundary,
    )


@pytest.mark.parametrize(("name", "policy", "routing"), CASES)
def test_the_same_tokens_are_found(name: str, policy: Policy, routing: Routing) -> None:
    # A junction is learnt by the second conversation and used by the third.
    sizes = msgspec.structs.replace(SIZES, conversations=4) if name in SHARES else SIZES
    trace = workload(name, sizes, seed=1)
    experiment = Experiment(
        workload=name,
        shape=SHAPE,
        deployment=Deployment(prefill_workers=1, routing=routing),
        policy=policy,
    )
    simulated = {r.request: as_recorded(r) for r in simulate(experiment, trace)[0]}
    assert simulated == real(trace, policy, routing)


# -- under pressure, over the real daemon -----------------------------------------------------

LAYERS = 64
GROUPS = (Group(layers=LAYERS), Group(layers=LAYERS, recurrent=True))
OBJECT_BYTES = LAYERS * 32 * BLOCK
"""Of an attention block."""
STATE_BYTES = LAYERS * (3 * 8 * 2 + 2 * 4 * 4 * 4)
"""What of a state's page is no padding."""
CAPACITY_BYTES = 1 << 20
"""The smallest daemon: 64 objects."""
WORK = model_work(MODEL_CONFIG)
"""What the engines' publications say."""
assert WORK is not None
PRESSED = ModelShape(
    name="pressed",
    kv_bytes=OBJECT_BYTES // BLOCK,
    state_bytes=STATE_BYTES,
    prefill=WORK,
    grid=BLOCK,
    state_pages=1,
)
BUDGET_BYTES_PER_TOKEN = 900
BURST_BYTES = 12 * OBJECT_BYTES
COUNTED = (
    *("checkpoints_created", "checkpoints_merged", "granted_objects", "granted_bytes"),
    *("committed_objects", "full_objects", "over_budget_objects"),
    *("evictions_capacity", "evicted_bytes", "evicted_user_turns", "evicted_loose_objects"),
    *(f"{what}_{kind}" for what in ("evicted_checkpoints", "evicted_state_bytes", "logical_ends",
                                    "duplicate_ends") for kind in CheckpointKind),
)  # fmt: skip
"""What both stores must agree on, eviction by kind included."""


def left(infos: Sequence[CheckpointInfo]) -> list[tuple[Any, ...]]:
    """What a store still holds, in the order of its arrival."""
    return [(info.boundary, info.kinds, info.state_bytes, info.attention_bytes) for info in infos]


def pressed(
    trace: list[Turn], policy: Policy, strategies: Strategies, *options: str
) -> tuple[StoreStats, int]:
    """The same trace against the real daemon and in the simulator: the same tokens, the same
    evictions, the same checkpoints left. Answers what the daemon counted, and the traffic that it
    saw in tokens of lookups."""
    capacity = 0 if strategies.admission is Admission.BUDGET else CAPACITY_BYTES
    simulator = Simulator(
        Experiment(
            workload="pressed",
            shape=PRESSED,
            deployment=Deployment(prefill_workers=1, routing=Routing.FORGET),
            policy=policy,
            capacity_bytes=capacity,
            strategies=strategies,
        )
    )
    simulated = {r.request: as_recorded(r) for r in simulator.run(trace)[0]}
    simulator.check()
    assert simulator.store is not None
    index = simulator.store.index
    with daemon("--eviction", strategies.eviction, *options) as uri:
        found = real(trace, policy, Routing.FORGET, uri, GROUPS, stream_ahead=False)
        store = open_store(uri, client_name="reader")
        stats = store.stats(timeout_s=300)
        infos = store.list_checkpoints(timeout_s=300)
        store.close()
    assert simulated == found
    assert {name: stats.counters[name] for name in COUNTED} == {
        name: index.counters[name] for name in COUNTED
    }
    assert left(infos) == left(index.list_checkpoints(None, 0, simulator.clock.now))
    assert stats.used_bytes == index.stats().used_bytes
    assert any(loaded for _, _, loaded, _, _ in found.values())
    # Prefill leaves the last token to decode and one to itself; decode looks nothing up.
    traffic = sum((turn.prompt_tokens - 2) // BLOCK * BLOCK for turn in trace)
    return stats, traffic


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("full_replay", Policy.BOTH),
        ("tool_loop", Policy.DECODE_END),
        ("mixed", Policy.INPUT_END),
    ],
)
def test_the_same_is_evicted_at_equal_capacity(name: str, policy: Policy) -> None:
    trace = interleaved(name)
    stats, _ = pressed(trace, policy, DEFAULT, f"--capacity={CAPACITY_BYTES}")
    assert stats.capacity_bytes == CAPACITY_BYTES >= stats.used_bytes
    assert stats.counters["evictions_capacity"] > 0, "no pressure"


def test_the_same_is_evicted_by_saved_work() -> None:
    """Uses lie in other times here and there, so that work alone must tell what goes first."""
    alpha = 1e6
    stats, _ = pressed(
        interleaved("tool_loop"),
        Policy.BOTH,
        Strategies(eviction=Eviction.MARCONI, marconi_alpha=alpha),
        f"--capacity={CAPACITY_BYTES}",
        f"--marconi-alpha={alpha}",
    )
    assert stats.counters["evictions_capacity"] > 0, "no pressure"


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("full_replay", Policy.BOTH),
        ("tool_loop", Policy.AUTO),
        ("branching", Policy.INPUT_END),
    ],
)
def test_the_same_is_admitted_at_equal_bytes(name: str, policy: Policy) -> None:
    trace = interleaved(name)
    strategies = Strategies(
        admission=Admission.BUDGET,
        admit_bytes_per_token=BUDGET_BYTES_PER_TOKEN,
        admit_burst_bytes=BURST_BYTES,
    )
    stats, traffic = pressed(
        trace,
        policy,
        strategies,
        "--capacity=64MiB",
        "--admission=budget",
        f"--admit-per-token={BUDGET_BYTES_PER_TOKEN}",
        f"--admit-burst={BURST_BYTES}",
    )
    assert stats.counters["over_budget_objects"] > 3, "no pressure"
    assert stats.counters["evictions_capacity"] == 0
    # Publications come whole here, so that none goes into debt.
    assert stats.counters["granted_bytes"] <= BURST_BYTES + BUDGET_BYTES_PER_TOKEN * traffic


def interleaved(name: str) -> list[Turn]:
    """Conversations that take turns, so that each finds the store as others left it; one request
    after the other."""
    sizes = msgspec.structs.replace(SIZES, conversations=5, arrival_s=1.0, reply_s=1e4)
    return [
        msgspec.structs.replace(turn, arrival_s=1e3 * number)
        for number, turn in enumerate(workload(name, sizes, seed=2))
    ]
