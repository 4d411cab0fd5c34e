"""Where checkpoints end, by the numbers of the specification."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.connector.endpoints import (
    PromptEnds,
    decode_end,
    deepest_usable,
    parse_hints,
    prompt_ends,
    publishes_decode_end,
    wants_decode_end,
)
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.options import FinishReason, Options, Policy

B = 64


def options(**values: Any) -> Options:
    return Options(store="backhaul://h:1", **values)


def ends(policy: Policy = Policy.BOTH, **values: Any) -> PromptEnds:
    arguments: dict[str, Any] = {
        "options": options(policy=policy), "u_end": None, "prompt_tokens": 1000, "junction": 0,
        "grid": B, "carries_prompt": False,
    }  # fmt: skip
    return prompt_ends(**{**arguments, **values})


@pytest.mark.parametrize("u_end", [1, 500, 1000])
def test_a_valid_u_end_is_taken(u_end: int) -> None:
    assert parse_hints({"u_end": u_end}, 1000).u_end == u_end


@pytest.mark.parametrize(
    "value", [0, -1, 1001, 10**30, True, False, 5.0, "5", [5], {"a": 1}, float("nan")]
)
def test_an_invalid_u_end_is_named_and_ignored(value: Any) -> None:
    hints = parse_hints({"u_end": value}, 1000)
    assert hints.u_end is None
    assert hints.rejected == ("u_end",)


@pytest.mark.parametrize("name", ["publish", "load"])
@pytest.mark.parametrize(("value", "on"), [(None, True), (True, True), (False, False)])
def test_a_request_may_opt_out(name: str, value: Any, on: bool) -> None:
    assert getattr(parse_hints({name: value}, 10), name) is on


@pytest.mark.parametrize(
    ("value", "on"), [(None, False), (True, True), (False, False), (1, False), ("yes", False)]
)
def test_only_true_marks_a_users_turn(value: Any, on: bool) -> None:
    hints = parse_hints({"u_end": 5, "user_turn": value}, 10)
    assert (hints.user_turn, hints.u_end) == (on, 5)
    assert hints.rejected == (() if value is None or isinstance(value, bool) else ("user_turn",))


@pytest.mark.parametrize("name", ["publish", "load"])
@pytest.mark.parametrize("value", [0, "no", [], 1.0])
def test_a_malformed_opt_out_is_named_and_ignored(name: str, value: Any) -> None:
    hints = parse_hints({name: value, "u_end": 5}, 10)
    assert (hints.publish, hints.load, hints.u_end) == (True, True, 5)
    assert hints.rejected == (name,)


@pytest.mark.parametrize("params", ["x", 3, [], True])
def test_hints_that_are_no_object_are_named_and_ignored(params: Any) -> None:
    assert parse_hints(params, 10).rejected == ("backhaul",)


def test_absent_hints_and_another_legs_answer_are_fine() -> None:
    assert parse_hints(None, 10).rejected == ()
    assert parse_hints({"selected": None, "loaded_tokens": 3}, 10).rejected == ()


@pytest.mark.parametrize(
    ("policy", "input_end", "prompt_end", "decodes"),
    [
        (Policy.MAIN_SPARSE, 0, 960, False),
        (Policy.INPUT_END, 448, 0, False),
        (Policy.DECODE_END, 0, 0, True),
        (Policy.BOTH, 448, 0, True),
    ],
)
def test_policies_choose_the_ends(
    policy: Policy, input_end: int, prompt_end: int, decodes: bool
) -> None:
    chosen = ends(policy, u_end=500, junction=128)
    assert (chosen.input_end, chosen.prompt_end) == (input_end, prompt_end)
    assert chosen.shared_prefix == 128, "junctions are kept in every policy"
    assert wants_decode_end(policy) is decodes


def test_the_prompt_end_is_published_where_nobody_else_carries_the_prompt() -> None:
    assert ends(carries_prompt=True).prompt_end == 960
    assert ends(carries_prompt=False).prompt_end == 0
    forced = options(publish_prompt_end=True)
    assert ends(options=forced).prompt_end == 960


@pytest.mark.parametrize(("n", "end"), [(63, 0), (64, 0), (65, 64), (128, 64), (129, 128)])
def test_the_prompt_end_leaves_a_token_to_compute(n: int, end: int) -> None:
    assert ends(carries_prompt=True, prompt_tokens=n).prompt_end == end


@pytest.mark.parametrize(("n", "end"), [(63, 0), (64, 0), (127, 0), (128, 64), (200, 128)])
def test_an_eagle_group_lowers_the_prompt_end_by_a_block(n: int, end: int) -> None:
    assert ends(carries_prompt=True, prompt_tokens=n, drops_block=True).prompt_end == end


def test_a_junction_inside_a_block_is_handed_on_as_it_is() -> None:
    chosen = ends(Policy.BOTH, u_end=500, junction=144)
    assert (chosen.shared_prefix, chosen.junction) == (128, 144)
    assert chosen.stops_after(0) == [144, 448]
    assert chosen.stops_after(128) == [144, 448]
    assert (chosen.kept_with(128), chosen.kept_with(192)) == (144, 192)
    assert ends(junction=128).kept_with(128) == 128


def test_stops_are_taken_lowest_first_and_only_above_the_resumed_position() -> None:
    chosen = PromptEnds(input_end=448, shared_prefix=128, prompt_end=960)
    assert chosen.stops_after(0) == [128, 448]
    assert chosen.stops_after(128) == [448]
    assert chosen.stops_after(448) == []


def test_two_ends_on_one_boundary_are_one_checkpoint_of_two_kinds() -> None:
    chosen = PromptEnds(input_end=448, shared_prefix=448)
    assert chosen.stops_after(0) == [448]
    assert chosen.kinds_at(448) == (CheckpointKind.INPUT_END, CheckpointKind.SHARED_PREFIX)
    assert chosen.kinds_at(0) == ()


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([16, 64, 544]))
def test_decode_end_is_the_floor_of_prompt_plus_output_minus_one(
    prompt: int, output: int, grid: int
) -> None:
    total = prompt + output
    # Asynchronous scheduling may have computed the last sampled token too; it does not count.
    for committed in (total - 1, total):
        end = decode_end(committed=committed, total_tokens=total, grid=grid)
        assert end == (prompt + output - 1) // grid * grid


def test_decode_end_never_exceeds_what_was_committed() -> None:
    assert decode_end(committed=127, total_tokens=300, grid=64) == 64


@pytest.mark.parametrize(
    ("reason", "allowed", "published"),
    [
        (FinishReason.STOP, (FinishReason.STOP,), True),
        (FinishReason.LENGTH, (FinishReason.STOP,), False),
        (FinishReason.LENGTH, (FinishReason.STOP, FinishReason.LENGTH), True),
        (FinishReason.ABORT, (FinishReason.STOP,), False),
        (None, tuple(FinishReason), False),
    ],
)
def test_only_the_listed_finish_reasons_publish(
    reason: FinishReason | None, allowed: tuple[FinishReason, ...], published: bool
) -> None:
    assert publishes_decode_end(reason, allowed) is published


@given(
    st.sets(st.integers(1, 50)), st.integers(0, 50), st.integers(0, 50), st.sets(st.integers(1, 50))
)
def test_the_deepest_usable_boundary(
    boundaries: set[int], local: int, limit: int, denied: set[int]
) -> None:
    chosen = deepest_usable(
        boundaries, local_tokens=local, limit_tokens=limit, denied=frozenset(denied)
    )
    good = {b for b in boundaries if local < b <= limit and b not in denied}
    assert chosen == (max(good) if good else 0)


@pytest.mark.parametrize(
    ("value", "told"), [(True, True), (False, False), (None, False), (1, False)]
)
def test_token_ids_are_told_where_asked_for(value: object, told: bool) -> None:
    hints = parse_hints({"return_prompt_token_ids": value}, 10)
    assert hints.return_prompt_token_ids is told
    assert hints.rejected == (("return_prompt_token_ids",) if value == 1 and not told else ())
