"""U_end of prompts that Python code builds instead of a Jinja template: a rule per encoder.

Each rule knows the generation-only text that the encoder appends; the tokens of that text are then
compared with the prompt's tail as for templates, so a changed encoder gives ``tail_mismatch`` and
never a wrong offset.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from backhaul.render.reasons import Reason, UEnd

_BAR = "\uff5c"
"""The full-width bar of DeepSeek's special tokens."""

_TASK = rf"<{_BAR}(?:action|query|authority|domain|title|read_url){_BAR}>"

_DEEPSEEK_HEADER = re.compile(
    rf"(?:<{_BAR}Assistant{_BAR}>(?:<think>|</think>)?(?:{_TASK})?|{_TASK})\Z"
)

_DEEPSEEK_V32_AFTER_TOOLS = re.compile(r">\n\n(?:<think>|</think>)\Z")
"""Starts one character early: ``>`` and the line breaks are one token."""

_DEEPSEEK_CLOSED = f"<{_BAR}end\u2581of\u2581sentence{_BAR}>"

HARMONY_HEADER = "<|start|>assistant"

KIMI_K3_END_OF_MESSAGE = "<|end_of_msg|>"
KIMI_K3_HEADERS = tuple(
    f'<|open|>message role="assistant"<|sep|><|open|>{channel}<|sep|>'
    for channel in ("think", "response")
)

KIMI_K3_OPENING_TOKENS_MAX = 64
"""More than the opening tag of any message that the encoder writes, even at a character each."""

_KIMI_K3_CONTROL = re.compile(
    r'^<\|open\|>message role="system" type="(tool-choice|response-format)"'
)

MISTRAL_TOOLS = "[AVAILABLE_TOOLS]"
MISTRAL_SYSTEM_STAYS = 7
"""From this tokenizer version on the system message is written first, not into the last user's."""


def deepseek_suffix(text: str) -> str | None:
    """Generation-only text at the end of a DeepSeek V3.2 or V4 prompt; empty where an assistant
    message ends it, None where the end is of no known form."""
    for pattern in (_DEEPSEEK_HEADER, _DEEPSEEK_V32_AFTER_TOOLS):
        found = pattern.search(text)
        if found is not None:
            return found[0]
    return "" if text.endswith(_DEEPSEEK_CLOSED) else None


def kimi_k3_u_end(prompt: Sequence[int], end_of_message: int, headers: Sequence[list[int]]) -> UEnd:
    """U_end of a Kimi K3 prompt: after the last end-of-message token, if a known header follows.

    Args:
        prompt: token ids.
        end_of_message: id of ``KIMI_K3_END_OF_MESSAGE``.
        headers: token ids of each of ``KIMI_K3_HEADERS``.
    """
    for header in headers:
        start = len(prompt) - len(header)
        if start > 0 and list(prompt[start:]) == list(header):
            closed = prompt[start - 1] == end_of_message
            return UEnd(start) if closed else UEnd(None, Reason.TAIL_MISMATCH)
    return UEnd(None, Reason.TAIL_MISMATCH)


def kimi_k3_after_control_text(found: UEnd, opening: str) -> UEnd:
    """``found`` unless the last message is one with which the encoder states a tool choice or a
    response format: that one is written anew at the end of every prompt.

    Args:
        found: from ``kimi_k3_u_end``.
        opening: text of the first tokens of the prompt's last message.
    """
    if _KIMI_K3_CONTROL.match(opening):
        return UEnd(None, Reason.MOVING_CONTROL_TEXT)
    return found


def mistral_u_end(prompt: Sequence[int], tools_token: int | None, *, moves_system: bool) -> UEnd:
    """U_end of a mistral_common prompt: it ends with the user's message, so nothing is
    generation-only; but the block of tools is written with the last user message and moves on.

    Args:
        prompt: token ids.
        tools_token: id of ``MISTRAL_TOOLS``, or None where the vocabulary has none.
        moves_system: the conversation has a system message and the tokenizer writes it into the
            last user message, as those before version 7 do.
    """
    if moves_system or (tools_token is not None and tools_token in prompt):
        return UEnd(None, Reason.MOVING_CONTROL_TEXT)
    return UEnd(len(prompt)) if prompt else UEnd(None, Reason.OPAQUE_PROMPT)
