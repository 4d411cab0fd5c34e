"""What roles, fields, token ids and declarations tell about a reply, and what they do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.connector.request_facts import (
    Parsers,
    lost_suffix,
    message_facts,
    parsers_of,
    reasoning_kept,
    reply_reasons,
    rewrites,
)
from backhaul.render.reasoning import ReasoningUse

NEVER, BY_POSITION, ALWAYS = ReasoningUse
USER: dict[str, Any] = {"role": "user", "content": "q"}
PLAIN = {"role": "assistant", "content": "a"}
REASONED = {**PLAIN, "reasoning": "r"}
TOOL = {"role": "tool", "content": "t"}
CALL = {"type": "function_call"}


def chat(*messages: Any, **fields: Any) -> Any:
    return SimpleNamespace(
        messages=list(messages), **{"tools": None, "tool_choice": "auto"} | fields
    )


def responses(*items: Any) -> Any:
    return SimpleNamespace(input=list(items), tools=[1], tool_choice="auto")


@pytest.mark.parametrize(
    ("request_", "user_turn", "tool_continuation", "tools"),
    [
        (chat(USER), True, False, False),
        (chat(USER, tools=[1]), True, False, True),
        (chat(USER, tools=[1], tool_choice="none"), True, False, False),
        (chat(USER, PLAIN, TOOL, tools=[1]), False, True, True),
        (chat(USER, PLAIN), False, False, False),
        (chat(), False, False, False),
        (responses(USER, CALL, {"type": "function_call_output"}), False, True, True),
        (responses({"type": "message", "role": "user"}), True, False, True),
        (SimpleNamespace(input="hi", tools=[], tool_choice="auto"), True, False, False),
        (responses(SimpleNamespace(type="message", role="user")), True, False, True),
    ],
)  # fmt: skip
def test_roles_and_tools(
    request_: Any, user_turn: bool, tool_continuation: bool, tools: bool
) -> None:
    facts = {"user_turn": user_turn, "tool_continuation": tool_continuation, "tools": tools}
    assert message_facts(request_) == facts


@pytest.mark.parametrize(
    ("use", "messages", "kept"),
    [
        (None, [USER], None),
        (NEVER, [USER], False),
        (NEVER, [USER, REASONED, TOOL], False),
        # The next user message moves a reply out of reach; the next step of a loop does not.
        (BY_POSITION, [USER], False),
        (BY_POSITION, [USER, REASONED, USER], False),
        (BY_POSITION, [USER, REASONED, TOOL], True),
        (BY_POSITION, [USER, PLAIN, TOOL], False),
        (ALWAYS, [USER], None),
        (ALWAYS, [USER, REASONED, USER], True),
        (ALWAYS, [USER, {**PLAIN, "reasoning_content": "r"}, USER], True),
        (ALWAYS, [USER, PLAIN, USER], False),
        (ALWAYS, [USER, {"type": "reasoning"}, PLAIN, USER], True),
    ],
)
def test_reasoning_is_kept_where_template_and_client_keep_it(
    use: ReasoningUse | None, messages: list[Any], kept: bool | None
) -> None:
    assert reasoning_kept(use, chat(*messages)) is kept


HEADER, THINK = [1, 2], [7, 8]
OLD = [*HEADER, 30, 9]


@pytest.mark.parametrize(
    ("history", "suffix", "start"),
    [
        ([5, 6, *OLD, 5], HEADER, None),
        ([5, 6, *OLD, 5], [*HEADER, *THINK], 9),  # header kept, the rest is not
        ([5, *HEADER, *THINK, 30, 5], [*HEADER, *THINK], None),
        ([5, *HEADER, 7, 30, 5], [*HEADER, *THINK], 9),
        ([5, 6, 30], HEADER, 3),
        ([5, 6, 30], [], None),
    ],
)
def test_a_suffix_that_earlier_replies_lack_will_be_gone(
    history: list[int], suffix: list[int], start: int | None
) -> None:
    prompt = [*history, *suffix]
    assert lost_suffix(prompt, len(history), chat(USER, PLAIN, USER)) == start
    assert lost_suffix(prompt, len(history), chat(USER)) is None, "no earlier reply"


@given(
    st.lists(st.sampled_from([0, 1, 256, 2**24, 2**24 + 1]), max_size=20),
    st.lists(st.sampled_from([0, 1, 256, 2**24, 2**24 + 1]), min_size=1, max_size=4),
)
def test_the_lost_part_begins_after_the_longest_start_that_is_found(
    history: list[int], suffix: list[int]
) -> None:
    def found(length: int) -> bool:
        ends = range(length, len(history) + 1)
        return any(history[e - length : e] == suffix[:length] for e in ends)

    longest = max(n for n in range(len(suffix) + 1) if found(n))
    start = lost_suffix([*history, *suffix], len(history), chat(PLAIN))
    assert start == (None if longest == len(suffix) else len(history) + longest)


# -- vLLM's parsers --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("vllm")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<think>", "</think>", "<tool_call>", "</tool_call>", "a", "<unk>"]
    model = models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="<unk>")


def parsers(tool: str | None, reasoning: str | None, **arguments: Any) -> Parsers:
    from vllm.parser import ParserManager

    parser = ParserManager.get_parser(
        tool_parser_name=tool, reasoning_parser_name=reasoning, enable_auto_tools=tool is not None
    )
    server = SimpleNamespace(
        parser=parser, model_config=None, effective_chat_template_kwargs=lambda request: arguments
    )
    return parsers_of(server, chat(USER))


@pytest.mark.parametrize("tool", ["hermes", "qwen3_xml"])
def test_a_tool_parser_declares_where_a_call_begins(tokenizer: Any, tool: str) -> None:
    found = parsers(tool, None)
    assert rewrites(found, tokenizer, chat(USER, tools=[1])) == [2]
    assert rewrites(found, tokenizer, chat(USER)) == [], "without tools nothing is rewritten"


def test_what_is_not_declared_is_not_known(tokenizer: Any) -> None:
    class Silent:
        vocab: dict[str, int] = {}  # noqa: RUF012

        def __init__(self, tokenizer: Any) -> None: ...

    assert rewrites(Parsers(Silent), tokenizer, chat(USER, tools=[1])) is None
    assert rewrites(Parsers(), tokenizer, chat(USER, tools=[1])) == []
    assert reply_reasons(Parsers(), tokenizer, [4]) is None
    assert parsers_of(SimpleNamespace(parser=None), chat(USER)) == Parsers()


@pytest.mark.parametrize(
    ("suffix", "reasons"), [([4], True), ([4, 0], True), ([4, 0, 1], False), ([4, 0, 4, 1], False)]
)
@pytest.mark.parametrize("reasoning", ["deepseek_r1", "qwen3"])
def test_a_reply_reasons_unless_the_prompt_closes_it(
    tokenizer: Any, reasoning: str, suffix: list[int], reasons: bool
) -> None:
    assert reply_reasons(parsers(None, reasoning), tokenizer, suffix) is reasons


@pytest.mark.parametrize(
    ("reasoning", "arguments", "reasons"),
    [
        # DeepSeek's replies reason only where the request says so, Holo2's unless it says no.
        ("deepseek_v3", {}, False),
        ("deepseek_v3", {"thinking": True}, True),
        ("deepseek_v3", {"enable_thinking": True, "tools": [{}]}, True),
        ("holo2", {}, True),
        ("holo2", {"thinking": False}, False),
    ],
)
def test_parsers_are_set_by_the_templates_arguments(
    tokenizer: Any, reasoning: str, arguments: dict[str, Any], reasons: bool
) -> None:
    found = parsers("qwen3_xml", reasoning, **arguments)
    assert reply_reasons(found, tokenizer, [4]) is reasons
    assert rewrites(found, tokenizer, chat(USER, tools=[1])) == [2]
