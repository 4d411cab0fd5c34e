"""What a turn's request says of itself, as the connector reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from backhaul.benchmarks.reuse.trace import Turn

REWRITTEN = 0
"""Stands for the token with which the parser begins to rewrite a simulated reply."""
_KEPT = -1


def hints_of(turn: Turn) -> dict[str, object]:
    """``kv_transfer_params["backhaul"]`` as the plugin that renders the prompt would fill it. A
    turn without a template says only what it has: the absence of tools or reasoning in a trace
    may mean that the trace leaves them out."""
    reasons = turn.reasoning_tokens > 0
    return {
        "u_end": turn.u_end,
        "user_turn": turn.user_turn,
        "boundaries": list(turn.boundaries) or None,
        "suffix_start": turn.suffix_start,
        "rewrites": _rewrites(turn),
        "tool_continuation": turn.tool_continuation,
        "tools": turn.tools if turn.template else turn.tools or None,
        "reasoning": reasons if turn.template else reasons or None,
        "reasoning_kept": turn.reasoning_kept,
        "template": turn.template,
    }


def _rewrites(turn: Turn) -> list[int] | None:
    """Token ids with which rewriting begins. Of a reply of which nothing is kept the renderer
    asks for nothing."""
    if not turn.verbatim_tokens:
        return None
    return [] if turn.verbatim_tokens >= turn.output_tokens else [REWRITTEN]


class ReplyTokens(Sequence[int]):
    """Token ids of a turn's prompt and reply, as far as the parser tells them apart: ``REWRITTEN``
    where it stops keeping the reply."""

    def __init__(self, turn: Turn) -> None:
        self._tokens = turn.prompt_tokens + turn.output_tokens
        kept = turn.output_tokens if turn.verbatim_tokens is None else turn.verbatim_tokens
        self._rewritten = turn.prompt_tokens + kept

    def __len__(self) -> int:
        return self._tokens

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._tokens))]
        if not 0 <= index < self._tokens:
            raise IndexError(index)
        return REWRITTEN if index == self._rewritten else _KEPT
