"""Text as spans: how many tokens a piece of text has, and which of them an earlier piece has too.

Logs hold text, not tokens. The rule where nothing better is given: four characters a token, rounded
up per piece; a prefix that two pieces share counts as far as its tokens are whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol

import xxhash

from backhaul.benchmarks.reuse.trace import Span, first, length, merged

CHARACTERS_PER_TOKEN = 4

KEPT_CHARACTERS_MAX = 32 << 20
"""Of text that later pieces are compared with; the least recently used goes first."""

_HEAD_CHARACTERS = 16
"""Texts that share less than this are not compared: four tokens at most are lost."""

_CANDIDATES_MAX = 16
"""Pieces with the same head that a new one is compared with, latest first. Bounds the work where
a file holds many variants of one text."""


class TokenCount(Protocol):
    """Counts tokens of text."""

    def count(self, text: str, characters: int | None = None) -> int:
        """Tokens of the text, or those that lie wholly within its first ``characters``."""
        ...


class CharacterEstimate:
    """Four characters a token."""

    def count(self, text: str, characters: int | None = None) -> int:
        if characters is None or characters >= len(text):
            return -(-len(text) // CHARACTERS_PER_TOKEN)
        return characters // CHARACTERS_PER_TOKEN


class TokenizerCount:
    """Counts with a tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str, characters: int | None = None) -> int:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if characters is None or characters >= len(text):
            return len(encoding.ids)
        return sum(1 for _start, stop in encoding.offsets if stop <= characters)


class Pieces:
    """Gives each piece of text its spans: equal text has equal spans, and text that begins like an
    earlier piece begins with that piece's spans, as long as that one is kept."""

    def __init__(self, tokens: TokenCount) -> None:
        self._tokens = tokens
        self._known: OrderedDict[str, tuple[Span, ...]] = OrderedDict()
        self._heads: dict[str, OrderedDict[str, None]] = {}
        self.kept_characters = 0

    def spans(self, text: str) -> tuple[Span, ...]:
        """The text's content, empty for empty text."""
        if not text:
            return ()
        if (known := self._known.get(text)) is not None:
            self._known.move_to_end(text)
            return known
        total = self._tokens.count(text)
        shared = self._shared(text)
        start = min(length(shared), total)
        source = f"text {xxhash.xxh3_64_hexdigest(text.encode())}"
        spans = merged((*first(shared, start), Span(source, start, total)))
        self._keep(text, spans)
        return spans

    def _shared(self, text: str) -> tuple[Span, ...]:
        """Spans of the tokens that the text shares with the earlier piece most like it."""
        best, characters = "", 0
        alike: Iterable[str] = reversed(self._heads.get(text[:_HEAD_CHARACTERS], OrderedDict()))
        for i, other in enumerate(alike):
            if i == _CANDIDATES_MAX:
                break
            common = common_prefix(text, other)
            if common > characters:
                best, characters = other, common
        if not characters:
            return ()
        tokens = min(self._tokens.count(text, characters), self._tokens.count(best, characters))
        return first(self._known[best], tokens)

    def _keep(self, text: str, spans: tuple[Span, ...]) -> None:
        self._known[text] = spans
        self._heads.setdefault(text[:_HEAD_CHARACTERS], OrderedDict())[text] = None
        self.kept_characters += len(text)
        while self.kept_characters > KEPT_CHARACTERS_MAX and len(self._known) > 1:
            old, _ = self._known.popitem(last=False)
            self.kept_characters -= len(old)
            alike = self._heads[old[:_HEAD_CHARACTERS]]
            del alike[old]
            if not alike:
                del self._heads[old[:_HEAD_CHARACTERS]]


def common_prefix(one: str, other: str) -> int:
    """Characters that two texts share from the start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
