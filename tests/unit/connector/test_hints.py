"""What a request says of itself is taken where it makes sense, and else named and ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.connector.hints import (
    KEY_CHARS_MAX,
    PROMPT_TAIL,
    RequestHints,
    parse_hints,
    whole_prompt,
)
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.policy import EXTRA_MAX, HINT_FIELDS, Known, Matched, Policy
from backhaul.protocols.record import RequestRecord


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


GOOD: dict[str, list[tuple[Any, Any]]] = {
    "prompt_length": [(1, 1), (11, 11)],
    "prompt_tail": [([], ()), ([0, 7], (0, 7)), ([1] * PROMPT_TAIL, (1,) * PROMPT_TAIL)],
    "policy": [("auto", Policy.AUTO), ("boundaries", Policy.BOUNDARIES)],
    "boundaries": [([], ()), ([7, 3, 3], (7, 3, 3)), ([10] * EXTRA_MAX, (10,) * EXTRA_MAX)],
    "template": [("", ""), ("t" * KEY_CHARS_MAX, "t" * KEY_CHARS_MAX)],
    "client": [("agent/1", "agent/1")],
    "tool_continuation": [(True, True), (False, False)],
    "tools": [(True, True), (False, False)],
    "reasoning": [(True, True), (False, False)],
    "reasoning_kept": [(True, True), (False, False)],
    "suffix_start": [(1, 1), (10, 10)],
    "rewrites": [([], ()), ([5, 0], (5, 0))],
    "ends": [([], ()), (["decode_end"], (CheckpointKind.DECODE_END,))],
}
BAD: dict[str, list[Any]] = {
    "prompt_length": [0, -1, True, "3", [3]],
    "prompt_tail": [5, [-1], ["5"], [True], [1] * (PROMPT_TAIL + 1)],
    "policy": ["sometimes", 3, [], {}],
    "boundaries": [3, "3", [0], [11], [True], [1.0], [1] * (EXTRA_MAX + 1), {"a": 1}],
    "template": [3, "t" * (KEY_CHARS_MAX + 1), ["t"]],
    "client": [b"c", {}, "c" * 10_000],
    "tool_continuation": [1, "yes"],
    "tools": [0, []],
    "reasoning": ["no"],
    "reasoning_kept": [1.0],
    "suffix_start": [0, 11, True, "3"],
    "rewrites": [5, [-1], ["5"], [True], [1] * 17],
    "ends": ["decode_end", ["deep_end"], [None], [["decode_end"]]],
}


@pytest.mark.parametrize(
    ("name", "value", "read"), [(n, v, r) for n, pairs in GOOD.items() for v, r in pairs]
)
def test_values_that_make_sense_are_taken(name: str, value: Any, read: Any) -> None:
    hints = parse_hints({name: value, "u_end": 5}, 10)
    assert getattr(hints, name) == read
    assert (hints.u_end, hints.rejected) == (5, ())


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_values_that_make_none_are_named_and_ignored(name: str, value: Any) -> None:
    hints = parse_hints({name: value, "u_end": 5}, 10)
    assert hints.rejected == (name,)
    assert hints == RequestHints(u_end=5, rejected=(name,))


ODD = [*(v for values in BAD.values() for v in values), *(v for p in GOOD.values() for v, _ in p)]


@given(st.dictionaries(st.sampled_from(HINT_FIELDS), st.sampled_from([None, *ODD])))
def test_nothing_raises_and_what_is_rejected_counts_as_absent(params: dict[str, Any]) -> None:
    hints = parse_hints(params, 10)
    assert set(hints.rejected) <= params.keys()
    kept = {name: value for name, value in params.items() if name not in hints.rejected}
    assert msgspec.structs.replace(hints, rejected=()) == parse_hints(kept, 10)


def test_the_fields_are_listed_and_documented() -> None:
    assert (*HINT_FIELDS, "rejected") == RequestHints.__struct_fields__
    text = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    for name in HINT_FIELDS:
        assert f"| `{name}` |" in text, f"hint {name} is not documented"


def test_no_field_of_an_answer_is_read_as_a_hint() -> None:
    assert not set(HINT_FIELDS) & set(RequestRecord.__struct_fields__)


def test_a_policy_sees_what_was_said() -> None:
    hints = parse_hints(
        {"u_end": 5, "boundaries": [3], "tools": True, "suffix_start": 4, "reasoning": False}, 10
    )
    history = Matched(decode_end_matched=1)
    assert hints.known(history, verbatim_end=9) == Known(
        u_end=5, offsets=(3,), tools=True, suffix_start=4, reasoning=False, history=history,
        verbatim_end=9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "told"), [(True, True), (False, False), (None, False), (1, False)]
)
def test_token_ids_are_asked_for(value: object, told: bool) -> None:
    hints = parse_hints({"return_prompt_token_ids": value}, 10)
    assert hints.return_prompt_token_ids is told
    assert hints.rejected == (("return_prompt_token_ids",) if value == 1 and not told else ())


@given(st.lists(st.integers(0, 2**20), min_size=2, max_size=200), st.integers(0, 80))
def test_a_prompt_that_was_cut_is_told_whole_or_not_at_all(ids: list[int], dropped: int) -> None:
    """NIXL's prefill side drops the last token, or as many as a drafter looks ahead: a decode
    worker that was given the rest would answer another prompt."""
    left = ids[: len(ids) - dropped] if dropped else ids
    said = {"prompt_length": len(ids), "prompt_tail": ids[-PROMPT_TAIL:]}
    hints = parse_hints(said, len(left))
    assert hints.rejected == ()
    known = len(ids) - len(left) <= PROMPT_TAIL
    assert whole_prompt(left, hints, cut=True) == (ids if known else None)
    assert whole_prompt(left, RequestHints(), cut=True) is None
    assert whole_prompt(ids, RequestHints(), cut=False) == ids
    assert whole_prompt([*ids, 1], hints, cut=True) is None
