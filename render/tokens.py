"""From characters to tokens: count the suffix's tokens and compare them with the prompt's tail.

Needs neither character offsets (which slow tokenizers and multimodal prompts lack) nor a second
tokenisation of the prompt. Placeholders that were expanded in the history do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from backhaul.render.reasons import Reason, UEnd


def u_end_tokens(prompt: Sequence[int], suffix: Sequence[int]) -> UEnd:
    """U_end of a prompt whose generation-only text has the tokens ``suffix`` on its own.

    Where the prompt does not end in exactly these tokens (a token spans the boundary, or the prompt
    was cut), U_end is unknown.
    """
    start = len(prompt) - len(suffix)
    if start < 1 or [*prompt[start:]] != [*suffix]:
        return UEnd(None, Reason.TAIL_MISMATCH)
    return UEnd(start)
