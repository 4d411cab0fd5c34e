"""What the structure of a request with messages tells about its reply, for the policy ``auto``.

Roles, fields and token ids are looked at, and what template and parsers declare; no text is. Where
something cannot be known so, it is left out.
"""

from __future__ import annotations

import functools
import inspect
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from backhaul.render.reasoning import ReasoningUse

_TOOL_STARTS = ("tool_calls_start_token", "tool_call_start_token", "bot_token")
"""Under which vLLM's tool parsers keep the text of the token that opens a call."""


class Parsers(NamedTuple):
    """vLLM's parser classes for a server's replies; None where it was given none.

    ``arguments``: those of a request's chat template, by which parsers are set as well (thinking
    switched off, say).
    """

    tool: Any = None
    reasoning: Any = None
    model_config: Any = None
    arguments: Mapping[str, Any] = {}


def parsers_of(online_renderer: Any, request: Any) -> Parsers:
    """The parsers that a server was started with, as vLLM makes them for this request."""
    parser = getattr(online_renderer, "parser", None)
    if parser is None:
        return Parsers()
    return Parsers(
        getattr(parser, "tool_parser_cls", None),
        getattr(parser, "reasoning_parser_cls", None),
        getattr(online_renderer, "model_config", None),
        online_renderer.effective_chat_template_kwargs(request),
    )


def turn_fact(request: Any) -> dict[str, Any]:
    """Whether the last message is a user's: all that policies need that always take the same
    ends."""
    messages = getattr(request, "messages", None)
    last = messages[-1] if isinstance(messages, list) and messages else None
    # Of a chat request it is a plain dictionary, which is asked without detours.
    role = last.get("role") if type(last) is dict else _last_role(request)
    return {"user_turn": True} if role == "user" else {}


def message_facts(request: Any) -> dict[str, Any]:
    """What roles and tools say."""
    role = _last_role(request)
    return {
        "user_turn": role == "user",
        "tool_continuation": role == "tool",
        "tools": offers_tools(request),
    }


def _last_role(request: Any) -> str:
    last = _messages(request)[-1:]
    return role_of(last[0]) if last else ""


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
    parser = _made(parsers.reasoning, tokenizer, parsers)
    return not parser.is_reasoning_end(list(suffix))


def rewrites(parsers: Parsers, tokenizer: Any, request: Any) -> list[int] | None:
    """Token ids with which a piece of the reply begins that comes back rewritten: a tool call,
    whose arguments are parsed and written anew. None where the tool parser does not declare it."""
    if parsers.tool is None or not offers_tools(request):
        return []
    start = _tool_start(_made(parsers.tool, tokenizer, parsers))
    return None if start is None else [start]


def lost_suffix(prompt: Sequence[int], u_end: int, request: Any) -> int | None:
    """Position from which the prompt's generation-only tokens are not found before an earlier
    reply: at the next turn they will not stand before this one either. None where all of them are,
    or there is no earlier reply to tell."""
    if not any(role_of(message) == "assistant" for message in _messages(request)):
        return None
    whole = array("I", prompt).tobytes()
    size = len(whole) // len(prompt)
    tokens = whole[u_end * size :]
    suffix = len(prompt) - u_end
    # Where one length is not found, no longer one is.
    found = bisect_left(
        range(1, suffix + 1),
        True,
        key=lambda length: not _contains(whole, u_end * size, tokens[: size * length], size),
    )
    return None if found == suffix else u_end + found


def _contains(whole: bytes, end: int, tokens: bytes, size: int) -> bool:
    """Whether the tokens are found in the first ``end`` bytes, of ``size`` bytes each."""
    at = whole.find(tokens, 0, end)
    while at % size and at != -1:
        at = whole.find(tokens, at + 1, end)
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


def _made(parser: Any, tokenizer: Any, parsers: Parsers) -> Any:
    """The parser, set by the template's arguments where it takes them; once for equal ones."""
    plain = bool | int | float | str
    settings = tuple(
        sorted(item for item in parsers.arguments.items() if isinstance(item[1], plain))
    )
    key = (parser, tokenizer, settings)
    if (made := _parsers.get(key)) is None:
        if len(_parsers) >= _PARSERS_MAX:
            _parsers.clear()
        made = _parsers[key] = (
            parser(
                tokenizer, model_config=parsers.model_config, chat_template_kwargs=dict(settings)
            )
            if _takes_any(parser)
            else parser(tokenizer)
        )
    return made


_PARSERS_MAX = 64
_parsers: dict[Any, Any] = {}


@functools.lru_cache(maxsize=8)
def _takes_any(parser: Any) -> bool:
    """Older tool parsers take nothing beside tokenizer and tools."""
    kinds = (one.kind for one in inspect.signature(parser).parameters.values())
    return inspect.Parameter.VAR_KEYWORD in kinds


def _tool_start(made: Any) -> int | None:
    engine = getattr(made, "_parser_engine", None)
    declared = getattr(getattr(engine, "parser_engine_config", None), "token_id_terminals", {})
    texts = (declared.get("TOOL_START"), *(getattr(made, name, None) for name in _TOOL_STARTS))
    text = next((text for text in texts if isinstance(text, str) and text), None)
    found = made.vocab.get(text) if text is not None else None
    return found if isinstance(found, int) else None
