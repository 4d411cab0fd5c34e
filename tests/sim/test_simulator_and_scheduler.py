"""The simulator of `backhaul simulate` against vLLM's real scheduler and the real connector: the
same hits, token for token, over generated workloads."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from harness import BLOCK, Pair, new_uri

from backhaul.benchmarks.reuse.contents import Contents
from backhaul.benchmarks.reuse.deployment import Deployment, Routing
from backhaul.benchmarks.reuse.model_shape import ModelShape
from backhaul.benchmarks.reuse.record import RequestResult
from backhaul.benchmarks.reuse.simulator import Experiment, simulate
from backhaul.benchmarks.reuse.trace import Turn
from backhaul.benchmarks.reuse.turn_hints import hints_of
from backhaul.benchmarks.reuse.workloads import WORKLOADS, Sizes, workload
from backhaul.protocols.policy import Policy

SHAPE = ModelShape(
    name="sim",
    kv_bytes=64,
    state_bytes=512,
    active_parameters=1e3,
    pair_flops=1.0,
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


def real(trace: list[Turn], policy: Policy, routing: Routing) -> dict[str, tuple[Any, ...]]:
    """What the scheduler and the connector of a prefill engine say of each request."""
    pair = Pair(new_uri())
    prefill, decode = (
        pair.engine(name=name, sibling=True, num_blocks=1024, options={"policy": policy})
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
