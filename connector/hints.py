"""What a request says of itself: ``kv_transfer_params["backhaul"]``, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.policy import EXTRA_MAX, Known, Matched, Policy

KEY_CHARS_MAX = 128
"""Of ``template`` and ``client``: a digest or a name; they are kept as keys."""
PROMPT_TAIL = 64
"""Ids at the prompt's end that the plugin tells; NIXL's prefill side drops one, or as many as a
drafter looks ahead."""
REWRITES_MAX = 16
"""Token ids with which a parser's rewriting begins: one or two a model."""

_Read = Callable[[Any, int], Any]
"""Checks one value, given the prompt's length in tokens; raises ``ValueError``."""


class RequestHints(msgspec.Struct, frozen=True, kw_only=True):
    """The hints of one request. Positions are tokens; None where nothing was said.

    Attributes:
        u_end: the U_end position.
        user_turn: the last message before it is a user's.
        publish: this request's checkpoints may be published.
        load: this request may load from the store.
        policy: overrides the engine's.
        boundaries: positions that the application wants kept, for ``boundaries``.
        template: names the chat template, and ``client`` who sends, for the history of matches.
        tool_continuation, tools, reasoning, reasoning_kept, suffix_start: see ``Known``.
        rewrites: token ids with which a piece of the reply begins that the parser rewrites. Empty:
            it keeps all of it.
        return_prompt_token_ids: the prompt's token ids go into the response, for APIs that have no
            field for them.
        prompt_length, prompt_tail: tokens of the prompt as it was rendered, and the last ids of it.
        ends: the ends that another leg of the same request chose.
        rejected: names of fields whose value was ignored, to be counted.
    """

    u_end: int | None = None
    user_turn: bool = False
    publish: bool = True
    load: bool = True
    policy: Policy | None = None
    boundaries: tuple[int, ...] = ()
    template: str = ""
    client: str = ""
    tool_continuation: bool = False
    tools: bool | None = None
    reasoning: bool | None = None
    reasoning_kept: bool | None = None
    suffix_start: int | None = None
    rewrites: tuple[int, ...] | None = None
    return_prompt_token_ids: bool = False
    prompt_length: int | None = None
    prompt_tail: tuple[int, ...] = ()
    ends: tuple[CheckpointKind, ...] | None = None
    rejected: tuple[str, ...] = ()

    def known(self, history: Matched, *, verbatim_end: int | None = None) -> Known:
        """What a policy gets to see of the request."""
        return Known(
            tool_continuation=self.tool_continuation,
            tools=self.tools,
            reasoning=self.reasoning,
            reasoning_kept=self.reasoning_kept,
            user_turn=self.user_turn,
            history=history,
            u_end=self.u_end,
            offsets=self.boundaries,
            verbatim_end=verbatim_end,
            suffix_start=self.suffix_start,
        )


def whole_prompt(token_ids: Sequence[int], hints: RequestHints, *, cut: bool) -> list[int] | None:
    """The prompt's token ids as it was rendered; None where they are not known. ``cut``: another
    connector has dropped the last ones of ``token_ids``."""
    if not cut:
        return list(token_ids)
    if hints.prompt_length is None:
        return None
    dropped = hints.prompt_length - len(token_ids)
    if not 0 <= dropped <= len(hints.prompt_tail):
        return None
    return [*token_ids, *hints.prompt_tail[len(hints.prompt_tail) - dropped :]]


def parse_hints(params: object, prompt_tokens: int) -> RequestHints:
    """Read a request's hints. Never raises: what is malformed is named in ``rejected`` and counts
    as absent. Unknown fields are left alone, since a proxy may hand one leg's answer to the
    other."""
    if params is None:
        return RequestHints()
    if not isinstance(params, dict):
        return RequestHints(rejected=("backhaul",))
    read: dict[str, Any] = {}
    rejected: list[str] = []
    for name, check in _FIELDS.items():
        value = params.get(name)
        if value is None:
            continue
        try:
            read[name] = check(value, prompt_tokens)
        except ValueError:
            rejected.append(name)
    return RequestHints(**read, rejected=tuple(rejected))


def _position(value: Any, prompt_tokens: int) -> int:
    if type(value) is not int or not 1 <= value <= prompt_tokens:
        raise ValueError
    return value


def _positions(value: Any, prompt_tokens: int) -> tuple[int, ...]:
    return tuple(_position(one, prompt_tokens) for one in _items(value, EXTRA_MAX))


def _switch(value: Any, _: int) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _key(value: Any, _: int) -> str:
    if not isinstance(value, str) or len(value) > KEY_CHARS_MAX:
        raise ValueError
    return value


def _policy(value: Any, _: int) -> Policy:
    return Policy(value)


def _length(value: Any, _: int) -> int:
    if type(value) is not int or value < 1:
        raise ValueError
    return value


def _tail(value: Any, _: int) -> tuple[int, ...]:
    return _ids(value, PROMPT_TAIL)


def _token_ids(value: Any, _: int) -> tuple[int, ...]:
    return _ids(value, REWRITES_MAX)


def _ids(value: Any, most: int) -> tuple[int, ...]:
    found = _items(value, most)
    if any(type(one) is not int or one < 0 for one in found):
        raise ValueError
    return tuple(found)


def _kinds(value: Any, _: int) -> tuple[CheckpointKind, ...]:
    return tuple(CheckpointKind(one) for one in _items(value, len(CheckpointKind)))


def _items(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list | tuple) or len(value) > most:
        raise ValueError
    return list(value)


_FIELDS: dict[str, _Read] = {
    "u_end": _position,
    "user_turn": _switch,
    "publish": _switch,
    "load": _switch,
    "policy": _policy,
    "boundaries": _positions,
    "template": _key,
    "client": _key,
    "tool_continuation": _switch,
    "tools": _switch,
    "reasoning": _switch,
    "reasoning_kept": _switch,
    "suffix_start": _position,
    "rewrites": _token_ids,
    "return_prompt_token_ids": _switch,
    "prompt_length": _length,
    "prompt_tail": _tail,
    "ends": _kinds,
}
