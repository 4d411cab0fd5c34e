"""A conversation in token ids that a client replays in full at every turn.

Each turn's prompt is ``history + generation prefix``; U_end is the length of the history. What the
model generated is appended as it was, so the next prompt extends it token for token, unless the
client rewrites it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Encoder(Protocol):
    """Turns template text into token ids."""

    def __call__(self, text: str) -> list[int]:
        """Token ids of ``text``, special tokens recognised, none added."""
        ...


def load_encoder(model: Path) -> Encoder:
    """The tokenizer that lies beside a model."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


class Conversation:
    """History of one dialogue in ChatML."""

    def __init__(self, encode: Encoder, system: str) -> None:
        self._encode = encode
        self.history: list[int] = encode(f"<|im_start|>system\n{system}<|im_end|>\n")

    def add_user(self, text: str) -> None:
        """The user speaks."""
        self.history += self._encode(f"<|im_start|>user\n{text}<|im_end|>\n")

    def add_tool_result(self, text: str) -> None:
        """A tool answers."""
        self.history += self._encode(
            f"<|im_start|>user\n<tool_response>{text}</tool_response><|im_end|>\n"
        )

    @property
    def u_end(self) -> int:
        """Tokens of stable history, before the generation prefix."""
        return len(self.history)

    def prompt(self) -> list[int]:
        """What the engine is asked to continue."""
        return self.history + self._encode("<|im_start|>assistant\n")

    def add_reply(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Append the reply as generated; the end token is added where generation left it out."""
        end = self._encode("<|im_end|>")
        reply = list(tokens)
        if reply[-1:] != end:
            reply += end
        self.history = [*prompt, *reply, *self._encode("\n")]

    def add_rewritten_reply(self, text: str) -> None:
        """The client stores something else than what was generated, e.g. without its reasoning."""
        self.history += self._encode(f"<|im_start|>assistant\n{text}<|im_end|>\n")


def filler(seed: int, tokens: int) -> str:
    """Deterministic lower-case text of about ``tokens`` tokens (one a character)."""
    words, state = [], seed * 2_654_435_761 % 2**32 + 1
    length = 0
    while length < tokens:
        state = (state * 1_103_515_245 + 12_345) % 2**31
        shifts = (3, 7, 11, 15, 19)[: 2 + state % 4]
        word = "".join(chr(97 + (state >> shift) % 26) for shift in shifts)
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:tokens]
