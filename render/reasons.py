"""Why a prompt's U_end is what it is: the closed list that is counted and shown."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Reason(enum.StrEnum):
    """Why U_end is unknown. Every unknown has exactly one of these."""

    UNGUARDED = "unguarded"
    """The template has no branch that depends on add_generation_prompt."""
    REFUSED = "refused"
    """The flag is used in a way whose effect cannot be known from the template's text."""
    MOVING_CONTROL_TEXT = "moving_control_text"
    """Control text sits in the last user message and will move on with the next turn."""
    TAIL_MISMATCH = "tail_mismatch"
    """The prompt's last tokens are not those of the generation-only text (merged, truncated)."""
    REWRITTEN = "rewritten"
    """The rendered text was changed afterwards, before it was tokenised."""
    OPAQUE_PROMPT = "opaque_prompt"
    """No render was seen: token ids or embeddings came from outside."""
    UNKNOWN_RENDERER = "unknown_renderer"
    """vLLM renders this model with code for which there is no rule."""
    MALFORMED_PARAMS = "malformed_params"
    """kv_transfer_params or its "backhaul" entry is not an object."""
    ERROR = "error"
    """Finding it raised; the request goes on without."""


class UEnd(NamedTuple):
    """``tokens`` is U_end in tokens, or None with the ``reason``; never both, never neither."""

    tokens: int | None
    reason: Reason | None = None
