"""The simulator: its books, and hits that can be told beforehand."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.benchmarks.reuse.deployment import Deployment, Routing
from backhaul.benchmarks.reuse.figures import QUESTIONS, contexts, gather
from backhaul.benchmarks.reuse.model_shape import PRESETS, preset
from backhaul.benchmarks.reuse.record import ArmResult, EndFate, PromptEndAt, RequestResult
from backhaul.benchmarks.reuse.relations import Relations
from backhaul.benchmarks.reuse.report import format_bytes
from backhaul.benchmarks.reuse.simulator import Experiment, Simulator
from backhaul.benchmarks.reuse.trace import Span, Turn
from backhaul.benchmarks.reuse.workloads import WORKLOADS, Sizes, workload
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.options import Policy
from backhaul.transfer.admission import AdmitAll

TINY = preset("tiny-hybrid")
B = TINY.grid
SMALL = Sizes(
    conversations=5, turns=3, system=300, user=60, reasoning=120, reply=70, tool_result=80
)
ALONE = Deployment(prefill_workers=1, routing=Routing.FORGET)
POLICIES: list[Policy | None] = [None, *Policy]


def run(
    trace: list[Turn],
    policy: Policy | None = Policy.BOTH,
    deployment: Deployment = ALONE,
    **more: object,
) -> tuple[list[RequestResult], ArmResult, Simulator]:
    """Run and check the books."""
    simulator = Simulator(
        Experiment(workload="w", shape=TINY, deployment=deployment, policy=policy, **more)  # type: ignore[arg-type]
    )
    results, arm = simulator.run(trace)
    simulator.check()
    assert len(results) == len(trace) == arm.requests
    return results, arm, simulator


def total_hits(results: list[RequestResult]) -> int:
    return sum(result.hit_tokens for result in results)


@pytest.mark.parametrize("routing", Routing)
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_books_agree(name: str, routing: Routing) -> None:
    trace = workload(name, SMALL, seed=3)
    known = {turn.request: turn for turn in trace}
    for policy in POLICIES:
        deployment = Deployment(prefill_workers=3, routing=routing)
        results, arm, _ = run(trace, policy, deployment)
        again, same_arm, _ = run(trace, policy, deployment)
        assert (again, same_arm) == (results, arm), "equal arguments give equal results"
        ended = {r.request: r.arrival_s + r.residency_s for r in results}
        for result in results:
            turn = known[result.request]
            assert result.prompt_tokens == turn.prompt_tokens - 1
            assert result.recomputed_tokens >= 1 and result.loaded_tokens >= 0
            assert result.hit_tokens % B == 0
            assert (result.loaded_tokens > 0) is bool(result.selected)
            assert all(hit < result.hit_tokens for hit in result.without.values())
            assert result.added_flops == {
                kind: TINY.prefill_flops(hit, result.hit_tokens)
                for kind, hit in result.without.items()
            }
            assert 0 < result.ttft_s <= result.residency_s
            assert 0 <= result.saved_flops < result.prefill_flops
            selected = [
                result.decode_end, result.input_end, result.prompt_end
            ].count(EndFate.SELECTED)  # fmt: skip
            assert not selected or result.selected
            assert result.arrival_s >= turn.arrival_s
            if turn.after:
                assert result.arrival_s >= ended[turn.after]
            if policy is None:
                assert not result.loaded_tokens
        kinds = arm.kinds.values()
        # A checkpoint changes its name where a second end joins it: only the sums are equal.
        assert sum(k.logical - k.duplicates for k in kinds) == sum(k.created for k in kinds)
        for kind in kinds:
            assert kind.state_bytes == kind.created * TINY.state_bytes


def test_relations_follow_the_trace_and_not_the_policy() -> None:
    """However contention orders the ends, each request stays what it is in the trace."""
    trace = workload("branching", msgspec.structs.replace(SMALL, conversations=8, think_s=0.5))
    relations = Relations(TINY.grid, handed_tokens=1)
    expected = {turn.request: relations.add(turn) for turn in trace}
    crowded = Deployment(prefill_workers=2, decode_workers=1, decode_slots=2)
    crowded = msgspec.structs.replace(crowded, prefill_flops_per_s=3e10)
    orders = []
    for policy in (None, Policy.DECODE_END, Policy.BOTH):
        results = run(trace, policy, crowded)[0]
        assert {r.request: r.relation for r in results} == expected
        orders.append([r.request for r in results])
    assert len({tuple(order) for order in orders}) > 1, "policies end requests in other orders"


@pytest.mark.parametrize("policy", [Policy.DECODE_END, Policy.BOTH])
def test_a_replay_resumes_at_d_end(policy: Policy) -> None:
    results, _, _ = run(workload("full_replay", SMALL), policy)
    assert sum(bool(r.relation.continuation) for r in results) == 5 * 2
    for result in results:
        assert result.loaded_tokens == result.relation.decode_end, result
        if result.relation.continuation:
            assert result.decode_end is EndFate.SELECTED and result.producer_age == 1


def test_a_rewritten_reply_resumes_at_u_end_or_nowhere() -> None:
    trace = workload("reasoning_dropped", SMALL)
    for policy in (Policy.INPUT_END, Policy.BOTH):
        for result in run(trace, policy)[0]:
            assert result.loaded_tokens == result.relation.input_end
            if result.relation.continuation:
                assert result.decode_end is EndFate.REWRITTEN
                assert result.input_end is EndFate.SELECTED
    assert total_hits(run(trace, Policy.DECODE_END)[0]) == 0


def test_what_a_tool_loop_leaves_is_the_u_end_of_the_users_turn() -> None:
    """The next user message drops the loop's reasoning, so that the D_end and the U_end of the
    loop's last step are gone, and the report says what was used instead."""
    trace = workload("tool_loop", SMALL)
    known = {turn.request: turn for turn in trace}
    rates = {}
    for policy in (None, Policy.DECODE_END, Policy.BOTH):
        results, arm, _ = run(trace, policy)
        rewritten = [r for r in results if CheckpointKind.DECODE_END in r.relation.rewritten]
        assert len(rewritten) == 5 * 2
        for result in rewritten if policy is Policy.BOTH else ():
            step = known[known[result.request].after]
            while not step.user_turn:
                step = known[step.after]
            assert result.loaded_tokens == (step.u_end or 0) // B * B
            assert CheckpointKind.INPUT_END in result.selected_kinds
        (context,) = contexts(gather([*results, arm]))
        answer = {f.name: f.estimate.value for f in QUESTIONS[3].figures(context)}
        rates[policy] = (answer["input_end_fallback_rate"], answer["where rewritten"])
    assert rates == {
        None: (None, None),
        Policy.DECODE_END: (None, None),
        Policy.BOTH: (1.0, 1.0),
    }


def test_sticky_routing_finds_p_end_where_it_can_be_reached() -> None:
    sticky = Deployment(prefill_workers=3, routing=Routing.STICKY)
    for result in run(workload("full_replay", SMALL), None, sticky)[0]:
        assert result.local_tokens == result.relation.prompt_end
    # The generation prefix is rewritten: P_end matches only where it lies before it, and else
    # that of an earlier turn.
    unreachable = 0
    for result in run(workload("reasoning_dropped", SMALL), None, sticky)[0]:
        if CheckpointKind.PROMPT_END in result.relation.rewritten:
            unreachable += 1
            assert result.local_tokens < result.relation.input_end
        else:
            assert result.local_tokens == result.relation.prompt_end
    assert unreachable


def test_elsewhere_nothing_is_found_without_a_store() -> None:
    assert total_hits(run(workload("mixed", SMALL), None)[0]) == 0


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("routing", Routing)
def test_p_end_is_absent_where_no_worker_holds_it(routing: Routing, workers: int) -> None:
    """What an arm is called is what its requests find of their history's P_end."""
    deployment = Deployment(prefill_workers=workers, routing=routing)
    results = run(workload("full_replay", SMALL), Policy.BOTH, deployment)[0]
    continued = [r for r in results if r.relation.continuation]
    found = {r.local_tokens > 0 for r in continued}
    assert found == {continued[0].arm.prompt_end is PromptEndAt.PRESENT}


@given(seed=st.integers(0, 10_000), name=st.sampled_from(WORKLOADS), sticky=st.booleans())
@settings(max_examples=10, deadline=None)
def test_no_policy_loses_to_none_without_pressure(seed: int, name: str, sticky: bool) -> None:
    sizes = msgspec.structs.replace(SMALL, conversations=3)
    trace = workload(name, sizes, seed=seed)
    routing = Routing.STICKY if sticky else Routing.FORGET
    deployment = Deployment(prefill_workers=1, routing=routing)
    nothing = total_hits(run(trace, None, deployment)[0])
    for policy in (Policy.INPUT_END, Policy.DECODE_END, Policy.BOTH):
        assert total_hits(run(trace, policy, deployment)[0]) >= nothing


@given(seed=st.integers(0, 10_000), name=st.sampled_from(WORKLOADS))
@settings(max_examples=6, deadline=None)
def test_both_ends_find_what_either_finds(seed: int, name: str) -> None:
    """Per request, with room for everything and all of it published in time."""
    trace = workload(name, msgspec.structs.replace(SMALL, conversations=3), seed=seed)
    both, one, other = (
        {r.request: r.hit_tokens for r in run(trace, policy)[0]}
        for policy in (Policy.BOTH, Policy.INPUT_END, Policy.DECODE_END)
    )
    assert all(both[name] >= max(one[name], other[name]) for name in both)


def test_pressure_stays_within_the_capacity_and_is_counted() -> None:
    trace = workload("full_replay", SMALL)
    free, roomy, _ = run(trace)
    capacity = roomy.peak_used_bytes // 4
    results, arm, simulator = run(trace, capacity_bytes=capacity)
    assert arm.peak_used_bytes <= capacity
    assert sum(kind.evicted for kind in arm.kinds.values()) > 0
    assert total_hits(results) < total_hits(free)
    assert simulator.store is not None
    assert simulator.store.index.counters["evictions_capacity"] > 0


def test_a_store_smaller_than_a_checkpoint_costs_misses_only() -> None:
    results, arm, _ = run(workload("full_replay", SMALL), capacity_bytes=TINY.state_bytes)
    assert total_hits(results) == 0 and arm.refused > 0


def test_prefills_lookups_are_traffic_to_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    credited: list[int] = []
    monkeypatch.setattr(AdmitAll, "credit", lambda _, tokens: credited.append(tokens))
    trace = workload("full_replay", SMALL)
    run(trace)
    expected = [(turn.prompt_tokens - 2) // B * B for turn in trace]
    assert sorted(credited) == sorted(expected), "without the token handed over and the last one"


def test_a_request_whose_lease_ran_out_in_the_queue_is_no_further_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    credited: list[int] = []
    monkeypatch.setattr(AdmitAll, "credit", lambda _, tokens: credited.append(tokens))
    trace = [
        Turn(request=f"r{i}", prompt=(Span(f"p{i}", 0, 10 * B),), output=(Span(f"o{i}", 0, 5),))
        for i in range(4)
    ]
    slow = msgspec.structs.replace(ALONE, step_s=60.0)
    _, _, simulator = run(trace, deployment=slow)
    assert simulator.store is not None
    assert simulator.store.index.counters["lookups"] > len(trace), "nobody waited too long"
    assert credited == [9 * B] * len(trace)


def test_boundaries_find_what_was_supplied_and_what_the_parser_keeps() -> None:
    """A loop's message outlives it, a kept reply comes back, dropped control text does not."""
    tool_loop = workload("tool_loop", SMALL)
    asked = {turn.request: turn.boundaries[0] for turn in tool_loop}
    for result in run(tool_loop, Policy.BOUNDARIES)[0]:
        if result.relation.tool_continuation:
            assert result.loaded_tokens == result.relation.decode_end
        elif result.relation.continuation:
            before = next(t.after for t in tool_loop if t.request == result.request)
            assert result.loaded_tokens == asked[before] // B * B
        assert result.selected in ("", CheckpointKind.BOUNDARY)
    for result in run(workload("reasoning_dropped", SMALL), Policy.BOUNDARIES)[0]:
        assert result.loaded_tokens == result.relation.input_end


@pytest.mark.parametrize("kept", [0, 3 * B // 2, 200, None])
def test_boundaries_end_where_the_parser_begins_to_rewrite(kept: int | None) -> None:
    before, turn = loop()
    trace = [msgspec.structs.replace(before, verbatim_tokens=kept), turn]
    second = run(trace, Policy.BOUNDARIES)[0][1]
    whole = (before.prompt_tokens + before.output_tokens - 1) // B * B
    expected = min((before.prompt_tokens + (kept or 0)) // B * B, whole) if kept else 0
    assert second.loaded_tokens == expected


def test_a_small_worker_keeps_less() -> None:
    trace = workload("full_replay", SMALL)
    ample = run(trace, None, Deployment(prefill_workers=1, routing=Routing.STICKY))[0]
    one_prompt = 60 * TINY.block_bytes
    tight = Deployment(prefill_workers=1, routing=Routing.STICKY, local_bytes=one_prompt)
    assert total_hits(run(trace, None, tight)[0]) < total_hits(ample)
    # Shorter than one prompt: it still runs, alone.
    run(trace, None, Deployment(prefill_workers=1, local_bytes=4 * TINY.block_bytes))
    run(trace, Policy.BOTH, Deployment(prefill_workers=1, local_bytes=4 * TINY.block_bytes))


def test_queues_show_in_the_time_to_first_token() -> None:
    trace = workload("full_replay", msgspec.structs.replace(SMALL, conversations=20, turns=1))
    slow, more = (
        Deployment(prefill_workers=n, routing=Routing.FORGET, prefill_flops_per_s=1e9)
        for n in (1, 10)
    )
    mean = [sum(r.ttft_s for r in run(trace, Policy.BOTH, d)[0]) / 20 for d in (slow, more)]
    assert mean[0] > 5 * mean[1]
    slots = Deployment(decode_workers=1, decode_slots=1)
    assert run(trace, None, slots)[1].seconds > 20 * 0.02 * 70


def loop(reply: int = 200) -> list[Turn]:
    """A reply and the tool result that comes back at once."""
    prompt = (Span("p", 0, 320),)
    output = (Span("o", 0, reply),)
    return [
        Turn(request="a", prompt=prompt, output=output),
        Turn(
            request="b",
            after="a",
            prompt=(*prompt, *output, Span("t", 0, 40)),
            output=(Span("q", 0, 5),),
        ),
    ]


def test_an_agent_that_comes_back_at_once_waits_for_the_publication() -> None:
    results, _, _ = run(loop())
    assert results[1].decode_end is EndFate.SELECTED
    # A link on which the state alone takes longer than the bounded wait.
    slow = msgspec.structs.replace(ALONE, write_bytes_per_s=TINY.state_bytes * 2.0)
    results, _, _ = run(loop(), deployment=slow)
    assert results[1].decode_end is EndFate.UNUSABLE and results[1].reason == "uncommitted"
    assert results[1].ttft_s < 0.5


def test_a_junction_is_learnt_at_the_second_request() -> None:
    system = Span("system", 0, 20 * B)
    trace = [
        Turn(
            request=f"r{i}",
            arrival_s=i * 60.0,
            prompt=(system, Span(f"u{i}", 0, 3 * B)),
            output=(Span(f"o{i}", 0, 5),),
        )
        for i in range(4)
    ]
    sticky = Deployment(prefill_workers=1, routing=Routing.STICKY)
    for policy in (None, Policy.BOTH):
        hits = [r.hit_tokens for r in run(trace, policy, sticky)[0]]
        assert hits == [0, 0, 20 * B, 20 * B]


@pytest.mark.parametrize("field", ["prefill_workers", "decode_slots", "write_bytes_per_s"])
def test_an_impossible_deployment_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Deployment(**{field: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PRESETS)
def test_a_worker_s_bytes_are_those_of_all_its_ranks(name: str) -> None:
    """Attention that lies whole on every rank takes its room on each of them."""
    shape = preset(name)
    prompt = (Span("p", 0, 20 * shape.grid),)
    again = (*prompt, Span("more", 0, 10))
    trace = [
        Turn(request=name, arrival_s=1e5 * number, prompt=content, output=(Span(name, 0, 5),))
        for number, (name, content) in enumerate((("a", prompt), ("b", again)))
    ]
    hits = []
    for pages in (10, 40):
        deployment = Deployment(
            prefill_workers=1,
            routing=Routing.STICKY,
            local_bytes=pages * shape.kv_bytes * shape.grid * shape.state_ranks,
        )
        experiment = Experiment(workload="w", shape=shape, deployment=deployment, policy=None)
        hits.append(Simulator(experiment).run(trace)[0][1].hit_tokens)
    assert hits == [0, 19 * shape.grid], "20 blocks and a state fit 40 pages and not 10"


@pytest.mark.parametrize("name", PRESETS)
def test_a_state_fits_the_page_of_one_block(name: str) -> None:
    shape = preset(name)
    assert shape.state_bytes <= shape.state_pages * shape.page_bytes
    assert shape.grid % 16 == 0 and shape.source
    assert bool(shape.assumed) is (shape.state_ranks > 1), "what a worker's ranks share is assumed"
    assert shape.prefill_flops(0, 100) == pytest.approx(
        shape.prefill_flops(0, 40) + shape.prefill_flops(40, 100)
    )


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'gpt'; presets: qwen3\.5-35b-a3b"):
        preset("gpt")


def test_the_documentation_gives_the_presets_and_the_defaults() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reuse.md").read_text()
    for shape in PRESETS.values():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{shape.name}`"))
        kv_bytes, state, grid, flops = (text.strip() for text in row.strip("|").split("|")[1:])
        assert kv_bytes == f"{shape.kv_bytes:,} B" and grid == f"{shape.grid:,}"
        assert state == format_bytes(shape.state_bytes)
        assert float(flops) == float(f"{shape.prefill_flops(0, 1):.3g}"), shape.name
    default = Deployment()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for name in (f for f in default.__struct_fields__ if f not in ("routing", "handed_tokens")):
        row = next(line for line in rows if f"`{name}`" in line)
        names = re.findall(r"`(\w+)`", row.split("|")[1])
        values = [text.strip() for text in row.split("|")[2].split(":")[0].split(",")]
        assert float(values[names.index(name)]) == float(getattr(default, name)), name
    assert all(f"`{name}`" in page for name in WORKLOADS)
