"""How a model's cache is cut into groups, blocks and objects; which blocks a checkpoint needs.

Token positions and block indices of one group with block size ``s``::

    block index      0            1            2
    tokens       [0, s)       [s, 2s)      [2s, 3s)
    state kept   after s      after 2s     after 3s     (recurrent groups)

A checkpoint at boundary ``b`` (a multiple of every group's ``s``) needs, of each group: all blocks
below ``b`` (full attention and MLA), the blocks that the window ending at ``b`` still reads
(sliding window), those of the chunk that ``b`` lies in (chunked local attention; none where ``b``
begins a chunk), or the one block whose state was taken after exactly ``b`` tokens (recurrent).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from backhaul.protocols.errors import UnsupportedError
from backhaul.protocols.sharding import Page

GROUPS_MAX = 128
"""KV cache groups of an engine; vLLM makes a handful, of most models one to five."""
RANKS_MAX = 1 << 16
TOKENS_MAX = 1 << 32
"""Tokens of a block, of a window, and between two boundaries: far above any context. A boundary's
position, that many tokens times the blocks of the longest prefix, still fits 64 bits."""
BYTES_MAX = 1 << 40
"""Bytes of a page."""
_LAYERS_MAX = 4096
TEXT_MAX = 4096
"""Characters of a description."""
NAME_MAX = 256
"""Characters of a name or digest."""

Name = Annotated[str, msgspec.Meta(max_length=NAME_MAX)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]
"""What a record read from somebody else is held to; every store keeps and compares it."""
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]


class GroupKind(enum.StrEnum):
    """What a KV cache group holds."""

    FULL = "full_attention"
    WINDOW = "sliding_window"
    CHUNK = "chunked_local"
    RECURRENT = "recurrent"


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group as every rank sees it.

    Attributes:
        index: position in vLLM's list of groups; part of every object's key.
        kind: what the group holds.
        block_tokens: tokens per block.
        window_tokens: tokens that a sliding window reads, the current one included, or tokens of
            a chunk of local attention; 0 otherwise.
        page_bytes: bytes of one block of one layer, unpadded; part of the cache domain.
        draft: whether its layers belong to the model that drafts.
        layers: number of layers; an object holds one page of each.
        members: digest of the layers' names in their order, which is the order inside an object.
        numbers: the layers' numbers in the model, in the same order; () where they have none. Of
            several pipeline stages those of the first one.
        interior: what a page consists of (heads, sizes, state shapes), as people read it.
        copies: consecutive ranks that hold the same bytes; the first of them stores them for all.
        page: how a page is cut over tensor-parallel ranks, the same for any number of them; ()
            where that is not known.
    """

    index: _Small
    kind: GroupKind
    block_tokens: Tokens
    window_tokens: Tokens = 0
    page_bytes: Annotated[int, msgspec.Meta(ge=0, le=BYTES_MAX)] = 0
    draft: bool = False
    layers: _Small = 0
    members: Name = ""
    numbers: Annotated[tuple[_Small, ...], msgspec.Meta(max_length=_LAYERS_MAX)] = ()
    interior: Text = ""
    copies: _Ranks = 1
    page: Page = ()

    def owner(self, rank: int) -> int:
        """The rank whose shard of this group ``rank`` holds, too: part of every object's key."""
        return rank // self.copies * self.copies


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """All groups of an engine and the grid of its block hashes.

    Attributes:
        groups: every group that takes part in prefix caching, ordered by index.
        hash_tokens: tokens per prefix hash (vLLM's hash block size); divides every block size.
        ranks: workers that each hold a shard of every object (tensor x pipeline parallel).
    """

    groups: Annotated[tuple[GroupLayout, ...], msgspec.Meta(max_length=GROUPS_MAX)]
    hash_tokens: Tokens
    ranks: _Ranks = 1

    def __post_init__(self) -> None:
        if not self.groups:
            raise UnsupportedError("the engine has no KV cache group: nothing can be carried")
        if self.ranks < 1 or self.hash_tokens < 1:
            raise UnsupportedError(
                f"ranks={self.ranks}, hash_tokens={self.hash_tokens}: both must be at least 1"
            )
        indices = [group.index for group in self.groups]
        if indices != sorted(set(indices)):
            raise UnsupportedError(f"groups {indices}: each index once, in ascending order")
        for group in self.groups:
            if group.copies < 1 or self.ranks % group.copies:
                raise UnsupportedError(
                    f"group {group.index} is said to lie in {group.copies} copies over "
                    f"{self.ranks} ranks; the ranks must be a multiple of the copies"
                )
            windowed = group.kind in (GroupKind.WINDOW, GroupKind.CHUNK)
            if windowed is not (group.window_tokens > 0):
                raise UnsupportedError(
                    f"group {group.index} ({group.kind}) has a window of {group.window_tokens} "
                    "tokens; sliding-window and chunked groups need one, others have none"
                )
            if group.block_tokens < 1 or group.block_tokens % self.hash_tokens:
                raise UnsupportedError(
                    f"group {group.index} has blocks of {group.block_tokens} tokens, not a "
                    f"multiple of the {self.hash_tokens}-token hash unit"
                )
        if self.boundary_tokens > TOKENS_MAX:
            raise UnsupportedError(
                f"blocks of {sorted({group.block_tokens for group in self.groups})[:8]} tokens "
                f"have no common boundary within {TOKENS_MAX} tokens: no checkpoint would exist"
            )

    @property
    def boundary_tokens(self) -> int:
        """The boundary grid B: the least common multiple of all groups' block sizes, in tokens."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def has_recurrent(self) -> bool:
        """Whether any group holds recurrent state."""
        return any(group.kind is GroupKind.RECURRENT for group in self.groups)


def required_blocks(group: GroupLayout, boundary: int) -> range:
    """Block indices of ``group`` that a checkpoint at ``boundary`` (tokens) consists of."""
    end = boundary // group.block_tokens
    if group.kind is GroupKind.FULL:
        return range(end)
    if group.kind is GroupKind.RECURRENT:
        return range(max(end - 1, 0), end)
    if group.kind is GroupKind.CHUNK:
        chunk = boundary // group.window_tokens * group.window_tokens
        return range(min(chunk // group.block_tokens, end), end)
    # The token at position `boundary` reads the window_tokens - 1 tokens before it, as vLLM's
    # SlidingWindowManager counts them.
    contiguous = math.ceil(max(group.window_tokens - 1, 0) / group.block_tokens)
    return range(max(end - contiguous, 0), end)


def block_hash_index(group: GroupLayout, block: int, hash_tokens: int) -> int:
    """Index into a request's hash list of the hash that names ``block`` of ``group``.

    A block that spans several hash units is named by its last one, as in vLLM's
    ``BlockHashListWithBlockSize``.
    """
    return (block + 1) * group.block_tokens // hash_tokens - 1


def checkpoint_objects(
    layout: CacheLayout, boundary: int, hashes: Sequence[bytes]
) -> list[tuple[int, bytes]]:
    """(group index, block hash) of every object of one rank of the checkpoint at ``boundary``.

    ``hashes`` is the request's hash list in units of ``layout.hash_tokens``; it must reach
    ``boundary``. Raises ``ValueError`` where it does not or where ``boundary`` is off the grid.
    """
    if boundary <= 0 or boundary % layout.boundary_tokens:
        raise ValueError(f"{boundary} is not a positive multiple of {layout.boundary_tokens}")
    if len(hashes) * layout.hash_tokens < boundary:
        raise ValueError(
            f"{len(hashes)} hashes of {layout.hash_tokens} tokens end before boundary {boundary}"
        )
    return [
        (group.index, hashes[block_hash_index(group, block, layout.hash_tokens)])
        for group in layout.groups
        for block in required_blocks(group, boundary)
    ]
