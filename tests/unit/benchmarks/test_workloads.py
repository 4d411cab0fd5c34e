"""Workloads: what a history keeps is what the workload's name promises."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.benchmarks.reuse.relations import Relations
from backhaul.benchmarks.reuse.trace import Turn, first, shared_prefix
from backhaul.benchmarks.reuse.workloads import WORKLOADS, Sizes, workload
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.errors import ConfigError

SMALL = Sizes(conversations=6, turns=3, system=60, user=20, reasoning=30, reply=20, tool_result=25)


def pairs(turns: list[Turn]) -> list[tuple[Turn, Turn]]:
    """(predecessor, turn) of every continuation."""
    known = {turn.request: turn for turn in turns}
    return [(known[turn.after], turn) for turn in turns if turn.after]


def common(before: Turn, turn: Turn) -> int:
    return shared_prefix((*before.prompt, *before.output), turn.prompt)


@pytest.mark.parametrize("name", WORKLOADS)
@given(seed=st.integers(0, 1000), turns=st.integers(1, 4), branches=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_a_trace_is_sound(name: str, seed: int, turns: int, branches: int) -> None:
    sizes = Sizes(
        conversations=5, turns=turns, branches=branches, system=40, user=9, reasoning=7, reply=8
    )
    trace = workload(name, sizes, seed=seed)
    assert trace == workload(name, sizes, seed=seed)
    seen: set[str] = set()
    arrivals = [turn.arrival_s for turn in trace]
    assert arrivals == sorted(arrivals)
    for turn in trace:
        assert turn.request not in seen
        assert not turn.after or turn.after in seen, "a predecessor comes first"
        seen.add(turn.request)
        assert turn.u_end is not None and 0 < turn.u_end < turn.prompt_tokens
        assert turn.reasoning_tokens < turn.output_tokens
    # The input before U_end is always part of the next prompt in the same loop or history.
    for before, turn in pairs(trace):
        assert common(before, turn) >= 40 // 2 or name == "mixed"


def test_other_seeds_share_nothing() -> None:
    one, other = workload("mixed", SMALL, seed=1), workload("mixed", SMALL, seed=2)
    assert all(shared_prefix(a.prompt, b.prompt) == 0 for a in one for b in other)


def test_full_replay_keeps_every_token() -> None:
    for before, turn in pairs(workload("full_replay", SMALL)):
        assert common(before, turn) == before.prompt_tokens + before.output_tokens


def test_dropped_reasoning_keeps_the_input_only() -> None:
    for before, turn in pairs(workload("reasoning_dropped", SMALL)):
        assert common(before, turn) == before.u_end


def test_a_tool_loop_replays_its_steps_and_is_rewritten_at_the_next_user_message() -> None:
    trace = workload("tool_loop", SMALL)
    assert sum(turn.tool_continuation for turn in trace) == 6 * 3 * SMALL.tool_rounds
    for before, turn in pairs(trace):
        if turn.tool_continuation:
            assert before.calls_tool
            assert common(before, turn) == before.prompt_tokens + before.output_tokens
        else:
            assert not before.calls_tool and turn.user_turn
            loop = next(t for t in trace if t.request == turn.after)
            while loop.tool_continuation:
                loop = next(t for t in trace if t.request == loop.after)
            # The end of the user's message that began the loop outlives it.
            assert common(loop, turn) == loop.u_end


def test_branches_continue_one_history() -> None:
    trace = workload("branching", SMALL)
    relations = Relations(grid=1)
    found = {turn.request: relations.add(turn) for turn in trace}
    assert {r.continuation for r in found.values()} == {0, 1, 2, 3}
    for turn in trace:
        relation = found[turn.request]
        if not relation.continuation:
            continue
        edited = any("/edit" in span.source for span in turn.prompt)
        before = next(t for t in trace if t.request == turn.after)
        newly = edited and not any("/edit" in span.source for span in before.prompt)
        assert (CheckpointKind.DECODE_END in relation.rewritten) is newly
        assert relation.prompt_end and relation.input_end


def test_a_shared_system_prompt_is_one_prefix() -> None:
    openings = [turn for turn in workload("shared_system", SMALL) if not turn.after]
    assert len(openings) == SMALL.conversations
    system = first(openings[0].prompt, SMALL.system)
    for turn in openings[1:]:
        assert shared_prefix(openings[0].prompt, turn.prompt) == SMALL.system
        assert first(turn.prompt, SMALL.system) == system
    relations = Relations(grid=1)
    assert [relations.add(turn).reuse for turn in openings] == list(range(len(openings)))


@pytest.mark.parametrize(("field", "value"), [("turns", 0), ("tool_s", -1.0), ("system", -5)])
def test_impossible_sizes_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Sizes(**{field: value})


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(ConfigError, match="'nonsense'; known: full_replay"):
        workload("nonsense")
