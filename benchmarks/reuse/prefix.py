"""Chained hashes of a content's boundaries, from spans: nothing is done per token."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from backhaul.benchmarks.reuse.trace import Span, merged

_CHAINS_MAX = 4096
"""Conversations remembered; the one unused longest is hashed from its beginning again."""


@dataclass(slots=True)
class _Chain:
    content: tuple[Span, ...]
    hashes: list[bytes]


class BoundaryHashes:
    """Entry i of a content's hashes names its first (i + 1) * grid tokens.

    Two contents have equal entries exactly as far as their spans agree in whole blocks. What a
    conversation's content shares with its previous one is not hashed again.
    """

    def __init__(self, grid: int, *, chains_max: int = _CHAINS_MAX) -> None:
        self._grid = grid
        self._chains_max = chains_max
        self._chains: OrderedDict[str, _Chain] = OrderedDict()
        self.hashed_blocks = 0
        """Blocks hashed so far: what the cost is linear in."""

    def of(self, content: Sequence[Span], conversation: str = "") -> list[bytes]:
        """The hashes of every whole block. ``conversation``: whose content it is; "" for none."""
        whole = merged(content)
        known = self._chains.get(conversation) if conversation else None
        hashes: list[bytes] = []
        if known is not None:
            hashes = known.hashes[: _common(known.content, whole) // self._grid]
        hashes = self._extend(hashes, whole)
        if conversation:
            self._chains[conversation] = _Chain(whole, hashes)
            self._chains.move_to_end(conversation)
            if len(self._chains) > self._chains_max:
                self._chains.popitem(last=False)
        return hashes

    def _extend(self, hashes: list[bytes], content: tuple[Span, ...]) -> list[bytes]:
        digest = hashes[-1] if hashes else b""
        position, block_end = 0, (len(hashes) + 1) * self._grid
        pieces: list[str] = []
        for span in content:
            end = position + span.tokens
            while block_end <= end:
                begin = max(position, block_end - self._grid)
                pieces.append(_piece(span, begin - position, block_end - position))
                digest = hashlib.blake2b(
                    digest + "\n".join(pieces).encode(), digest_size=16
                ).digest()
                hashes.append(digest)
                self.hashed_blocks += 1
                pieces = []
                block_end += self._grid
            begin = max(position, block_end - self._grid)
            if begin < end:
                pieces.append(_piece(span, begin - position, end - position))
            position = end
        return hashes


def _piece(span: Span, start: int, stop: int) -> str:
    return f"{span.start + start} {span.start + stop} {span.source}"


def _common(one: Sequence[Span], other: Sequence[Span]) -> int:
    """``shared_prefix`` of contents that are merged already."""
    total = 0
    for a, b in zip(one, other, strict=False):
        if a == b:
            total += a.stop - a.start
            continue
        if a.source == b.source and a.start == b.start:
            total += min(a.stop, b.stop) - a.start
        break
    return total
