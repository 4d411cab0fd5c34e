"""A model without weights: every cached byte is a known function of the exact token prefix.

The digest of the first n tokens is chained, ``d(n) = H(d(n - 1), token n)``. A layer's KV at
position p is expanded from d(p + 1), a layer's recurrent state after n tokens from d(n), and the
next token is drawn from d(n). A forward pass starts from what it *finds* in the cache: found as
expected, the digest goes on; anything else is hashed into it, so that one wrong byte changes every
byte and token from there on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

VOCABULARY = 1000
STOP_TOKEN = 1

ROOT = b"\0" * 16


def extend(digest: bytes, token: int) -> bytes:
    """The digest of one token more."""
    return hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=16).digest()


def expand(digest: bytes, tag: str, nbytes: int) -> bytes:
    """The bytes that a layer (named by ``tag``) keeps for a prefix."""
    return hashlib.shake_128(digest + tag.encode()).digest(nbytes)


def disturb(digest: bytes, found: bytes) -> bytes:
    """The digest of a cache that does not hold what it should."""
    return hashlib.blake2b(digest + found, digest_size=16).digest()


def draw(digest: bytes) -> int:
    """The next token. Never ``STOP_TOKEN``: requests say where they stop."""
    return 2 + int.from_bytes(digest[:4], "little") % (VOCABULARY - 2)


class Prefix:
    """Digests of every prefix of a growing token sequence: ``prefix[n]`` covers n tokens."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.digests = [ROOT]
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.digests.append(extend(self.digests[-1], token))

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        del self.digests[length + 1 :]

    def __len__(self) -> int:
        return len(self.digests) - 1

    def __getitem__(self, length: int) -> bytes:
        return self.digests[length]


def cold_output(
    prompt: Sequence[int], count: int, *, stops: bool, says: Sequence[int] = ()
) -> list[int]:
    """What a request yields without any cache: ``count`` tokens, the last one ``STOP_TOKEN`` if
    it ``stops``, the first ones what the model ``says``."""
    prefix, output = Prefix(prompt), []
    for i in range(count):
        drawn = says[i] if i < len(says) else draw(prefix[len(prefix)])
        token = STOP_TOKEN if stops and i == count - 1 else drawn
        output.append(token)
        prefix.extend([token])
    return output
