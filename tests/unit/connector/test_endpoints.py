"""Where checkpoints end, by the numbers of the specification."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backhaul.connector.endpoints import (
    PromptEnds,
    VerbatimEnd,
    choose_ends,
    chosen_kinds,
    decode_end,
    may_publish_decode,
    prompt_ends,
    publishes_decode_end,
    verbatim_end,
    why_no_decode_end,
)
from backhaul.connector.hints import RequestHints
from backhaul.protocols.candidates import deepest_usable
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.options import FinishReason, Options
from backhaul.protocols.policy import Matched, Policy, Why
from backhaul.protocols.record import DecodeEndReason

B = 64


def options(**values: Any) -> Options:
    return Options(store="backhaul://h:1", **values)


def ends(policy: Policy = Policy.BOTH, **values: Any) -> PromptEnds:
    hints = RequestHints(
        u_end=values.get("u_end"), boundaries=values.pop("boundaries", ()),
        suffix_start=values.pop("suffix_start", None),
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "options": options(), "choice": choose_ends(policy, hints, Matched()), "u_end": None,
        "prompt_tokens": 1000, "junction": 0, "grid": B, "carries_prompt": False,
    }  # fmt: skip
    return prompt_ends(**{**arguments, **values})


@given(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 50), st.integers(1, 400))
@example(wanted=True, replies=True, included=True, blocks=2, prompt_tokens=17)
@example(wanted=True, replies=True, included=True, blocks=0, prompt_tokens=1)
def test_a_decode_end_that_is_not_sent_has_one_reason(
    wanted: bool, replies: bool, included: bool, blocks: int, prompt_tokens: int
) -> None:
    boundary = 8 * blocks
    reason = why_no_decode_end(
        wanted=wanted, replies=replies, finish_included=included, boundary=boundary,
        prompt_tokens=prompt_tokens,
    )  # fmt: skip
    assert (reason is DecodeEndReason.NOT_WANTED) == (not wanted)
    assert (reason is DecodeEndReason.NO_REPLY) == (wanted and not replies)
    wanted &= replies
    assert (reason is DecodeEndReason.FINISH_EXCLUDED) == (wanted and not included)
    kept = reason is DecodeEndReason.NOT_KEPT
    assert kept == (wanted and included and boundary >= max(prompt_tokens - 1, 1))


@pytest.mark.parametrize(
    ("policy", "input_end", "prompt_end", "decodes"),
    [
        (Policy.MAIN_SPARSE, 0, 960, False),
        (Policy.INPUT_END, 448, 0, False),
        (Policy.DECODE_END, 0, 0, True),
        (Policy.BOTH, 448, 0, True),
        (Policy.AUTO, 448, 0, True),
        (Policy.BOUNDARIES, 0, 0, True),
    ],
)
def test_policies_choose_the_ends(
    policy: Policy, input_end: int, prompt_end: int, decodes: bool
) -> None:
    chosen = ends(policy, u_end=500, junction=128)
    assert (chosen.input_end, chosen.prompt_end) == (input_end, prompt_end)
    assert chosen.shared_prefix == 128, "junctions are kept in every policy"
    assert may_publish_decode(policy) is decodes


def test_extra_boundaries_are_floored_and_kept_apart_from_the_prompts_end() -> None:
    chosen = ends(Policy.BOUNDARIES, u_end=500, boundaries=(63, 64, 130, 700, 1000), junction=128)
    assert (chosen.input_end, chosen.prompt_end) == (0, 0)
    assert chosen.extra == (64, 128, 640, 960)
    assert chosen.stops_after(0) == [64, 128, 640, 960]
    assert chosen.stops_after(128) == [640, 960]
    assert chosen.kinds_at(128) == (CheckpointKind.SHARED_PREFIX, CheckpointKind.BOUNDARY)
    assert chosen.kinds_at(640) == (CheckpointKind.BOUNDARY,)
    assert ends(Policy.BOTH, u_end=500, boundaries=(64,)).extra == ()
    assert ends(Policy.BOUNDARIES, suffix_start=300).extra == (256,)


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (("input_end",), (CheckpointKind.INPUT_END,)),
        (("decode_end",), (CheckpointKind.DECODE_END,)),
        ((), ()),
    ],
)
def test_the_second_leg_takes_the_firsts_choice(
    given: tuple[str, ...], kinds: tuple[CheckpointKind, ...]
) -> None:
    hints = RequestHints(u_end=5, ends=tuple(map(CheckpointKind, given)))
    choice = choose_ends(Policy.AUTO, hints, Matched())
    assert (chosen_kinds(choice), choice.why) == (kinds, Why.HANDED_OVER)
    fixed = choose_ends(Policy.BOTH, hints, Matched())
    assert chosen_kinds(fixed) == (CheckpointKind.INPUT_END, CheckpointKind.DECODE_END)


@given(
    st.lists(st.integers(0, 4), max_size=12),
    st.sets(st.integers(0, 9), max_size=3),
    st.lists(st.integers(0, 12)).map(sorted),
)
def test_the_verbatim_end_is_before_the_first_rewritten_token(
    reply: list[int], rewrites: set[int], steps: list[int]
) -> None:
    prompt = [next(iter(rewrites), 0)] * 5  # what stands in the prompt does not matter
    finder = VerbatimEnd(5, rewrites)
    kept = next((i for i, token in enumerate(reply) if token in rewrites), len(reply))
    for step in steps:
        committed = min(step, len(reply))
        seen = finder.end(prompt + reply[:committed], 5 + committed)
        assert seen == 5 + min(kept, committed)
    assert finder.end(prompt, 3) == 3


@pytest.mark.parametrize(
    ("policy", "hints", "found"),
    [
        (Policy.BOUNDARIES, {"rewrites": (7,)}, True),
        (Policy.BOUNDARIES, {"rewrites": ()}, True),
        (Policy.BOUNDARIES, {}, False),
        (Policy.BOTH, {"rewrites": (7,)}, False),
        (Policy.BOUNDARIES, {"rewrites": (7,), "reasoning": True, "reasoning_kept": False}, False),
        (Policy.BOUNDARIES, {"rewrites": (7,), "reasoning": False, "reasoning_kept": False}, True),
    ],
)
def test_when_the_verbatim_end_can_be_known(
    policy: Policy, hints: dict[str, Any], found: bool
) -> None:
    assert (verbatim_end(policy, RequestHints(**hints), 5) is not None) is found


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


def test_a_step_reaches_the_ends_behind_its_start_up_to_its_own() -> None:
    chosen = PromptEnds(input_end=448, shared_prefix=128, prompt_end=960, extra=(640,))
    assert chosen.within(0, 960) == {128, 448, 640, 960}
    assert chosen.within(128, 959) == {448, 640}
    assert chosen.within(640, 640) == set()


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
