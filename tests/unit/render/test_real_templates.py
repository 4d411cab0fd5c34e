"""U_end of vendors' templates against a render without the flag, which exists in tests only."""

from __future__ import annotations

from typing import Any

import pytest
from real_templates import (
    BY_LABEL,
    FAMILIES,
    RESULT,
    SINGLE,
    SYSTEM,
    TOOLS,
    answer,
    call,
    load,
    user,
    variables,
)

from backhaul.render.reasons import Reason
from backhaul.render.tokens import u_end_tokens


def conversations() -> dict[str, tuple[list[dict[str, Any]], bool]]:
    """Name -> messages, and whether tools are offered."""
    called = call("They want weather.")
    first = [SYSTEM, user("Good morning.")]
    second = [*first, answer("Good morning!", "A greeting."), user("Weather in Oslo?")]
    return {
        "first turn": (first, False),
        "no system message": ([user("Good morning.")], False),
        "second turn": (second, False),
        "tools": (second, True),
        "tool result": ([*second, called, RESULT], True),
        "after a tool loop": (
            [*second, called, RESULT, answer("Rain.", "Read it."), user("And Bergen?")],
            True,
        ),
        "line breaks": ([SYSTEM, user("one\n\ntwo\n\n")], False),
        "special text": ([user("<think>no</think> {{ braces }} äöü 你好 🙂")], False),
    }


CASES = [(f.label, name) for f in FAMILIES for name in conversations()]


@pytest.mark.parametrize(("label", "name"), CASES)
def test_u_end_is_where_the_render_without_the_flag_ends(label: str, name: str) -> None:
    family = BY_LABEL[label]
    messages, tools = conversations()[name]
    values = variables(family, messages, tools=tools)
    plain, marked = load(family.template)
    text = plain.render(**values, add_generation_prompt=True)
    without = plain.render(**values, add_generation_prompt=False)

    rendering = marked.render(**values, add_generation_prompt=True)
    assert rendering is not None
    assert rendering.text == text
    assert rendering.u_end is not None
    assert text[: rendering.u_end] == without
    # DeepSeek-V3.1 writes no header after a tool result.
    headless = name == "tool result" and label.startswith("DeepSeek-V3.1")
    assert bool(text[rendering.u_end :].strip()) is not headless
    off = marked.render(**values, add_generation_prompt=False)
    assert off is not None
    assert (off.text, off.u_end) == (without, len(without))

    prompt = family.encode(text)
    found = u_end_tokens(prompt, family.encode(text[rendering.u_end :]))
    assert found.tokens == len(family.encode(without))
    assert prompt[: found.tokens] == family.encode(without)


@pytest.mark.parametrize("name", [n for n, (_, tools) in conversations().items() if not tools])
def test_chatml_of_vllm_whose_last_message_ends_with_the_flag_only(name: str) -> None:
    """A render without the flag lacks the end of the last message, so the next turn's counts."""
    messages, _ = conversations()[name]
    plain, marked = load("vllm/template_chatml")
    rendering = marked.render(messages=messages, add_generation_prompt=True)
    assert rendering is not None and rendering.u_end is not None
    assert rendering.text == plain.render(messages=messages, add_generation_prompt=True)
    assert rendering.text[rendering.u_end :] == "<|im_start|>assistant\n"
    more = [*messages, answer("Yes."), user("Why?")]
    following = plain.render(messages=more, add_generation_prompt=True)
    assert following.startswith(rendering.text[: rendering.u_end])


def test_a_header_that_only_earlier_questions_have_moves_nothing() -> None:
    """DeepSeek-R1-0528 of xinference ends earlier questions itself, the last one by its guard."""
    _, marked = load("xinference/deepseek-r1-0528")
    for messages, tools in conversations().values():
        values = {"messages": messages, "tools": TOOLS if tools else None, **SINGLE}
        rendering = marked.render(**values, add_generation_prompt=True)
        assert rendering is not None and rendering.u_end is not None
        more = [*messages, answer("Yes."), user("Why?")]
        following = marked.render(**values | {"messages": more}, add_generation_prompt=True)
        assert following is not None
        assert following.text.startswith(rendering.text[: rendering.u_end])


@pytest.mark.parametrize(
    ("label", "kwargs"),
    [
        ("Nemotron-3-Super", {"low_effort": True}),
        ("Nemotron-3-Ultra", {"medium_effort": True}),
        ("Kimi-K3 (port)", {"tool_choice": "required"}),
        ("Kimi-K3 (port)", {"response_format": {"type": "json_object"}}),
    ],
)
def test_control_text_that_moves_is_seen(label: str, kwargs: dict[str, Any]) -> None:
    family = BY_LABEL[label]
    values = variables(family, [SYSTEM, user("Hello.")], tools=False) | kwargs
    plain, marked = load(family.template)
    rendering = marked.render(**values, add_generation_prompt=True)
    assert rendering is not None
    assert rendering.text == plain.render(**values, add_generation_prompt=True)
    assert (rendering.u_end, rendering.reason) == (None, Reason.MOVING_CONTROL_TEXT)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama_cpp/mistralai-Ministral-3-14B-Reasoning-2512", Reason.UNGUARDED),
        ("llama_cpp/mistralai-Mistral-Nemo-Instruct-2407", Reason.UNGUARDED),
        ("llama_cpp/Reka-Edge", Reason.REFUSED),
    ],
)
def test_templates_of_which_nothing_is_known(name: str, reason: Reason) -> None:
    assert load(name)[1].reason is reason
