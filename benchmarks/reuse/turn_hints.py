"""What a turn's request says of itself, as the connector reads it."""

from __future__ import annotations

from backhaul.benchmarks.reuse.trace import Turn


def hints_of(turn: Turn) -> dict[str, object]:
    """``kv_transfer_params["backhaul"]`` as the plugin that renders the prompt would fill it. A
    turn without a template says only what it has: the absence of tools or reasoning in a trace
    may mean that the trace leaves them out."""
    reasons = turn.reasoning_tokens > 0
    return {
        "u_end": turn.u_end,
        "user_turn": turn.user_turn,
        "tool_continuation": turn.tool_continuation,
        "tools": turn.tools if turn.template else turn.tools or None,
        "reasoning": reasons if turn.template else reasons or None,
        "reasoning_kept": turn.reasoning_kept,
        "template": turn.template,
    }
