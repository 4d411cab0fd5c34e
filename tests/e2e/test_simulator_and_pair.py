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
from backhaul.benchmarks.reuse.workloads import Sizes, workload

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
    ("routing", "names"),
    [
        (Routing.FORGET, ("reasoning_dropped", "tool_loop", "branching")),
        (Routing.STICKY, ("full_replay", "tool_loop", "shared_system")),
    ],
)
def test_the_same_tokens_are_found(pair: Session, routing: Routing, names: tuple[str, ...]) -> None:
    trace: list[Turn] = []
    for name in names:
        shared = name == "shared_system"
        sizes = msgspec.structs.replace(SIZES, conversations=3, turns=1) if shared else SIZES
        # Another seed per case: the pair's store remembers.
        trace += workload(name, sizes, seed=list(Routing).index(routing))
    deployment = Deployment(prefill_workers=1, routing=routing)
    results = []
    for name in names:  # the workloads share nothing, so each may have a cluster of its own
        part = [turn for turn in trace if turn.conversation.startswith(name)]
        experiment = Experiment(workload=name, shape=preset("tiny-hybrid"), deployment=deployment)
        results += simulate(experiment, part)[0]
    simulated = {result.request: result for result in results}

    content = Contents(VOCABULARY)
    found, expected = {}, {}
    for turn in trace:
        if routing is Routing.FORGET:
            pair.forget_locally()
        ran = pair.run(content.ids(turn.prompt), u_end=turn.u_end, **ends_after(turn.output_tokens))
        content.generated(turn, ran.decode.tokens)
        pair.settle()
        record = ran.prefill.backhaul
        assert record is not None
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
    if routing is Routing.STICKY:
        assert any(local for _, local, _, _, _ in found.values())
