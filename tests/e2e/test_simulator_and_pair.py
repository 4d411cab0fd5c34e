"""The simulator and the real pair find the same tokens, request by request."""

from __future__ import annotations

import msgspec
import pytest
from e2e_kit import Session, ends_after

from backhaul.benchmarks.reuse.contents import Contents
from backhaul.benchmarks.reuse.deployment import Deployment, Routing
from backhaul.benchmarks.reuse.model_shape import preset
from backhaul.benchmarks.reuse.simulator import Experiment, simulate
from backhaul.benchmarks.reuse.trace import Turn
from backhaul.benchmarks.reuse.turn_hints import hints_of
from backhaul.benchmarks.reuse.workloads import Sizes, workload
from backhaul.protocols.policy import Policy, Why

VOCABULARY = range(97, 123)
SIZES = Sizes(
    conversations=1,
    turns=2,
    system=200,
    user=40,
    reasoning=24,
    reply=20,
    tool_result=50,
    tool_rounds=2,
    branches=2,
    arrival_s=1e5,  # one request after the other, everything published in between
    reply_s=1e3,
)


@pytest.mark.parametrize(
    ("routing", "policy", "names"),
    [
        (Routing.FORGET, Policy.BOTH, ("reasoning_dropped", "tool_loop", "branching")),
        (Routing.STICKY, Policy.BOTH, ("full_replay", "tool_loop", "shared_system")),
        (Routing.FORGET, Policy.AUTO, ("tool_loop",)),
    ],
)
def test_the_same_tokens_are_found(
    pair: Session, routing: Routing, policy: Policy, names: tuple[str, ...]
) -> None:
    trace: list[Turn] = []
    seed = list(Routing).index(routing) + len(Routing) * (policy is Policy.AUTO)
    for name in names:
        shared = name == "shared_system"
        sizes = msgspec.structs.replace(SIZES, conversations=3, turns=1) if shared else SIZES
        # Another seed per case: the pair's store remembers.
        trace += workload(name, sizes, seed=seed)
    deployment = Deployment(prefill_workers=1, routing=routing)
    results = []
    for name in names:  # the workloads share nothing, so each may have a cluster of its own
        part = [turn for turn in trace if turn.conversation.startswith(name)]
        experiment = Experiment(
            workload=name, shape=preset("tiny-hybrid"), deployment=deployment, policy=policy
        )
        results += simulate(experiment, part)[0]
    simulated = {result.request: result for result in results}

    content = Contents(VOCABULARY)
    found, expected = {}, {}
    whys: list[str] = []
    for turn in trace:
        if routing is Routing.FORGET:
            pair.forget_locally()
        told = {name: value for name, value in hints_of(turn).items() if value not in (None, "")}
        ran = pair.run(
            content.ids(turn.prompt),
            # What `auto` learns it keeps by client: other tests taught these engines, too.
            hints={**told, "policy": policy, "client": f"simulated, {policy}, {routing}"},
            **ends_after(turn.output_tokens),
        )
        content.generated(turn, ran.decode.tokens)
        pair.settle()
        record, decode = ran.prefill.backhaul, ran.decode.backhaul
        assert record is not None and decode is not None
        assert decode["chosen"]["ends"] == record["chosen"]["ends"], "two halves of one choice"
        whys.append(record["chosen"]["why"])
        selected = record["selected"] or {"kind": "", "boundary": 0}
        found[turn.request] = (
            record["prompt_tokens"],
            record["local_tokens"],
            record["loaded_tokens"],
            selected["kind"],
            selected["boundary"],
        )
        result = simulated[turn.request]
        expected[turn.request] = (
            result.prompt_tokens,
            result.local_tokens,
            result.loaded_tokens,
            result.selected,
            result.selected_boundary,
        )
    assert found == expected
    assert any(loaded for _, _, loaded, _, _ in found.values())
    if policy is Policy.AUTO:  # what decode, which looks nothing up, could not know by itself
        assert whys[-1] == Why.HISTORY_MATCHES
    if routing is Routing.STICKY:
        assert any(local for _, local, _, _, _ in found.values())
