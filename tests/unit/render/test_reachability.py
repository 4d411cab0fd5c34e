"""Which end of a turn is found in the next one, on vendors' templates and tokenizers.

The table of docs/u_end.md is what the templates give. Below it, what a reply loses on its way
through a client and a template: the model's own tokens are set against those of the next turn's
prompt. Where they differ, D_end is not a prefix of it; U_end, which lies before the reply, is.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import reachability
from reachability import THINKING, Turn, take_turn, text_of
from real_templates import BY_LABEL, FAMILIES, RESULT, SYSTEM, Family, answer, call, user

PAGE = (Path(__file__).parents[3] / "docs" / "u_end.md").read_text()
ROWS = {line.split("|")[1].strip(): line for line in PAGE.splitlines() if line.startswith("| ")}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.label)
def test_the_row_is_as_documented(family: Family) -> None:
    row = reachability.row(family)
    assert ROWS[row.split("|")[1].strip()] == row


def test_every_thinking_family_is_one() -> None:
    assert {f.label for f in FAMILIES} >= reachability.THINKING


# -- replies that are written again ---------------------------------------------------------------

ASKED = [SYSTEM, user("Weather in Oslo?")]


def called(family: Family, **arguments: Any) -> dict[str, Any]:
    """A tool call; the thoughts are there because a loop keeps them."""
    message = call("Look it up." if family.label in THINKING else None)
    message["tool_calls"][0]["function"]["arguments"] = {"city": "Oslo", **arguments}
    return message


def next_prompt(family: Family, output: dict[str, Any], following: dict[str, Any]) -> list[int]:
    """Of the turn after the one in which the client got ``output``."""
    tools = following["role"] == "tool"
    text, _ = text_of(family, [*ASKED, output, following], tools=tools, generate=True)
    return family.encode(text)


def turn_of(family: Family, output: dict[str, Any], *, tools: bool) -> Turn:
    """The turn, with the output as the template writes it."""
    return take_turn(family, ASKED, output, tools=tools)


def said(family: Family, turn: Turn, output: dict[str, Any], *, tools: bool) -> str:
    """That output's text."""
    prompt, _ = text_of(family, ASKED, tools=tools, generate=True)
    whole, _ = text_of(family, [*ASKED, output], tools=tools, generate=False)
    assert turn.decode is not None and whole.startswith(prompt)
    text = whole[len(prompt) :]
    tokens = family.encode(text)
    kept = len(turn.decode) - len(turn.prompt)
    assert tokens[:kept] == turn.decode[len(turn.prompt) :]
    return text


def divergence(turn: Turn, sampled: list[int], following: list[int]) -> int | None:
    """Position of the first token of the reply that did not come back; None: all did. The input
    did in any case."""
    assert following[: turn.u_end] == turn.prompt[: turn.u_end]
    tokens = [*turn.prompt, *sampled]
    for position, (ours, theirs) in enumerate(zip(tokens, following, strict=False)):
        if ours != theirs:
            return position
    return None


def check_rewritten(
    family: Family, output: dict[str, Any], model: str, template: str, *, tools: bool = True
) -> None:
    """The model wrote ``model`` where the template writes ``template``."""
    turn = turn_of(family, output, tools=tools)
    text = said(family, turn, output, tools=tools)
    assert text.count(template) == 1
    following = next_prompt(family, output, RESULT if tools else user("Thank you."))
    faithful = family.encode(text)
    first = divergence(turn, faithful, following)
    assert first is None or first >= len(turn.decode or ())
    lossy = family.encode(text.replace(template, model))
    changed = next(i for i, (a, b) in enumerate(zip(faithful, lossy, strict=False)) if a != b)
    assert divergence(turn, lossy, following) == len(turn.prompt) + changed


@pytest.mark.parametrize("label", ["Qwen3.5", "Nemotron-3-Nano", "Nemotron-3-Ultra"])
@pytest.mark.parametrize(
    ("value", "python", "as_json"), [(True, "True", "true"), (None, "None", "null")]
)
def test_booleans_that_a_template_writes_as_python_does(
    label: str, value: Any, python: str, as_json: str
) -> None:
    family = BY_LABEL[label]
    check_rewritten(family, called(family, exact=value), as_json, python)


@pytest.mark.parametrize(
    "label", ["Qwen3.6", "Qwen3.8", "GLM-5", "GLM-5.3", "MiniMax-M2", "Kimi-K2", "Granite-4.0"]
)
def test_booleans_that_a_template_writes_as_json(label: str) -> None:
    family = BY_LABEL[label]
    output = called(family, exact=True)
    turn = turn_of(family, output, tools=True)
    assert "true" in said(family, turn, output, tools=True)
    assert turn.decode is not None
    sampled = turn.decode[len(turn.prompt) :]
    assert divergence(turn, sampled, next_prompt(family, output, RESULT)) is None


@pytest.mark.parametrize(
    "label", ["Qwen3-Next-Instruct", "Kimi-K2", "Granite-4.0", "Granite-4.1", "GLM-5", "Qwen3.6"]
)
def test_json_spacing(label: str) -> None:
    """Of the arguments as a whole, or of one argument that is an object."""
    family = BY_LABEL[label]
    output = called(family, near={"place": "sea"})
    check_rewritten(family, output, '{"place":"sea"}', '{"place": "sea"}')


@pytest.mark.parametrize(
    "label",
    ["Qwen3.6 preserve_thinking", "Qwen3.8", "GLM-5.3", "Nemotron-3-Nano thinking off"],
)
@pytest.mark.parametrize("padded", ["  Rain.", "Rain. \n"])
def test_white_space_that_a_template_trims(label: str, padded: str) -> None:
    family = BY_LABEL[label]
    thought = None if "off" in label else "So be it."
    output = answer("Rain.", thought)
    turn = turn_of(family, output, tools=False)
    text = said(family, turn, output, tools=False)
    before, after = text.rsplit("Rain.", 1)
    following = next_prompt(family, answer(padded, thought), user("Thank you."))
    first = divergence(turn, family.encode(before + padded + after), following)
    trimmed = not (label.startswith("Nemotron") and padded.startswith(" "))
    assert (first is not None and first >= len(turn.prompt)) is trimmed


@pytest.mark.parametrize("label", ["Kimi-K2.5", "Kimi-K3 (port)"])
def test_call_ids_that_a_client_renames(label: str) -> None:
    family = BY_LABEL[label]
    output = called(family)
    turn = turn_of(family, output, tools=True)
    assert turn.decode is not None
    sampled = turn.decode[len(turn.prompt) :]
    assert divergence(turn, sampled, next_prompt(family, output, RESULT)) is None
    renamed = copy.deepcopy(output)
    renamed["tool_calls"][0]["id"] = "call_7"
    following = next_prompt(family, renamed, RESULT | {"tool_call_id": "call_7"})
    first = divergence(turn, sampled, following)
    written = label == "Kimi-K2.5"
    # Kimi K3 writes a call by its name and number, not by its id.
    assert (first is not None and first >= len(turn.prompt)) is written


@pytest.mark.parametrize(
    "label",
    [
        "Qwen3-Next-Instruct", "Qwen3.8 thinking off", "Nemotron-3-Nano thinking off", "GLM-5.3",
        "Kimi-K2", "DeepSeek-V3.1", "DeepSeek-V4 (port)",
    ],
)  # fmt: skip
def test_byte_pair_seams(label: str) -> None:
    """A model may sample a word in other pieces than those that its text is split into."""
    family = BY_LABEL[label]
    output = answer("unbelievable weather", "So be it." if label in THINKING else None)
    turn = turn_of(family, output, tools=False)
    text = said(family, turn, output, tools=False)
    following = next_prompt(family, output, user("Thank you."))
    whole = family.encode(text)
    kept = len(turn.decode or ()) - len(turn.prompt)
    start = text.index("unbelievable")
    pieces = next(
        tokens
        for cut in range(start + 1, start + 12)
        if (tokens := [*family.encode(text[:cut]), *family.encode(text[cut:])]) != whole
    )
    assert divergence(turn, whole[:kept], following) is None
    first = divergence(turn, pieces, following)
    seam = next(i for i, (a, b) in enumerate(zip(pieces, whole, strict=False)) if a != b)
    assert first == len(turn.prompt) + seam


def test_the_end_token_is_another_one_in_history() -> None:
    """gpt-oss ends with ``<|return|>``, history writes ``<|end|>``: D_end must end before it."""
    family = BY_LABEL["gpt-oss"]
    returned, end = family.encode("<|return|>"), family.encode("<|end|>")
    output = answer("Rain.")
    turn = turn_of(family, output, tools=False)
    sampled = [*family.encode("<|channel|>final<|message|>Rain."), *returned]
    following = next_prompt(family, output, user("Thank you."))
    assert divergence(turn, sampled, following) == len(turn.prompt) + len(sampled) - 1
    assert divergence(turn, sampled[:-1], following) is None
    assert following[len(turn.prompt) + len(sampled) - 1 :][:1] == end


@pytest.mark.parametrize("label", ["Qwen3.8 thinking off", "Kimi-K2", "Granite-4.0"])
def test_a_reply_without_its_end_token(label: str) -> None:
    """Cut at its limit: the template ends it, after the last token that was sampled."""
    family = BY_LABEL[label]
    cut = answer("Rain and")
    turn = turn_of(family, cut, tools=False)
    following = next_prompt(family, cut, user("Go on."))
    sampled = family.encode("Rain and")
    assert divergence(turn, sampled, following) is None
    # What followed in the model's mind is gone: a reply that was cut later does not match.
    longer = family.encode("Rain and wind")
    assert divergence(turn, longer, following) == len(turn.prompt) + len(sampled)
