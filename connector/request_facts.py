"""What the structure of a request with messages tells about its reply, for the policy ``auto``.

Roles, fields and token ids are looked at, and what template and parsers declare; no text is. Where
something cannot be known so, it is left out.
"""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from backhaul.render.reasoning import ReasoningUse

_TOOL_STARTS = ("tool_calls_start_token", "tool_call_start_token", "bot_token")
"""Under which vLLM's tool parsers keep the text of the token that opens a call."""


class Parsers(NamedTuple):
    """vLLM's parser classes for a server's replies; None where it was given none."""

    tool: Any = None
    reasoning: Any = None


def parsers_of(online_renderer: Any) -> Parsers:
    """The parsers that a server was started with."""
    parser = getattr(online_renderer, "parser", None)
    return Parsers(
        getattr(parser, "tool_parser_cls", None), getattr(parser, "reasoning_parser_cls", None)
    )


def message_facts(request: Any) -> dict[str, Any]:
    """What roles and tools say."""
    last = _messages(request)[-1:]
    role = role_of(last[0]) if last else ""
    return {
        "user_turn": role == "user",
        "tool_continuation": role == "tool",
        "tools": offers_tools(request),
    }


def offers_tools(request: Any) -> bool:
    """Whether the reply may call a tool."""
    return bool(getattr(request, "tools", None)) and request.tool_choice != "none"


def reasoning_kept(use: ReasoningUse | None, request: Any) -> bool | None:
    """Whether the next prompt will contain the reply's reasoning.

    The template must write it there, and the client must give it back: the earlier replies in this
    very request say whether it does.
    """
    if use is None:
        return None
    messages = _messages(request)
    in_loop = bool(messages) and role_of(messages[-1]) == "tool"
    if use is ReasoningUse.NEVER or (use is ReasoningUse.BY_POSITION and not in_loop):
        return False
    replies = [message for message in messages if role_of(message) in ("assistant", "reasoning")]
    if not replies:
        return None
    return any(_field(reply, "reasoning") or _has_reasoning(reply) for reply in replies[-2:])


def reply_reasons(parsers: Parsers, tokenizer: Any, suffix: Sequence[int]) -> bool | None:
    """Whether the reply may begin with reasoning: the server parses it, and the generation-only
    text does not close it. None without a parser."""
    if parsers.reasoning is None:
        return None
    return not _reasoning_parser(parsers.reasoning, tokenizer).is_reasoning_end(list(suffix))


def rewrites(parsers: Parsers, tokenizer: Any, request: Any) -> list[int] | None:
    """Token ids with which a piece of the reply begins that comes back rewritten: a tool call,
    whose arguments are parsed and written anew. None where the tool parser does not declare it."""
    if parsers.tool is None or not offers_tools(request):
        return []
    start = _tool_start(parsers.tool, tokenizer)
    return None if start is None else [start]


def lost_suffix(prompt: Sequence[int], u_end: int, request: Any) -> int | None:
    """Position from which the prompt's generation-only tokens are not found before an earlier
    reply: at the next turn they will not stand before this one either. None where all of them are,
    or there is no earlier reply to tell."""
    if not any(role_of(message) == "assistant" for message in _messages(request)):
        return None
    history = array("Q", prompt[:u_end]).tobytes()
    suffix = prompt[u_end:]
    tokens = array("Q", suffix).tobytes()
    lengths = range(1, len(suffix) + 1)
    # Where one length is not found, no longer one is.
    found = bisect_left(
        lengths, True, key=lambda length: not _contains(history, tokens[: 8 * length])
    )
    return None if found == len(suffix) else u_end + found


def _contains(history: bytes, tokens: bytes) -> bool:
    at = history.find(tokens)
    while at % 8 and at != -1:
        at = history.find(tokens, at + 1)
    return at != -1


def _messages(request: Any) -> Sequence[Any]:
    messages = getattr(request, "messages", None) or getattr(request, "input", None)
    if isinstance(messages, str):
        return ({"role": "user"},)
    return messages if isinstance(messages, Sequence) else ()


def _field(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, Mapping) else getattr(message, name, None)


def role_of(message: Any) -> str:
    """The role; of an item of the Responses API its kind stands for it."""
    kind = _field(message, "type")
    if kind in ("function_call_output", "custom_tool_call_output"):
        return "tool"
    if kind in ("function_call", "custom_tool_call"):
        return "assistant"
    return "reasoning" if kind == "reasoning" else str(_field(message, "role") or "")


def _has_reasoning(message: Any) -> bool:
    return bool(_field(message, "reasoning_content")) or role_of(message) == "reasoning"


@functools.lru_cache(maxsize=8)
def _reasoning_parser(parser: Any, tokenizer: Any) -> Any:
    return parser(tokenizer)


@functools.lru_cache(maxsize=8)
def _tool_start(parser: Any, tokenizer: Any) -> int | None:
    made = parser(tokenizer)
    engine = getattr(made, "_parser_engine", None)
    declared = getattr(getattr(engine, "parser_engine_config", None), "token_id_terminals", {})
    texts = (declared.get("TOOL_START"), *(getattr(made, name, None) for name in _TOOL_STARTS))
    text = next((text for text in texts if isinstance(text, str) and text), None)
    found = made.vocab.get(text) if text is not None else None
    return found if isinstance(found, int) else None
