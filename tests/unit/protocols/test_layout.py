"""Which blocks make up a checkpoint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.protocols.errors import UnsupportedError
from backhaul.protocols.layout import (
    CacheLayout,
    GroupKind,
    GroupLayout,
    block_hash_index,
    checkpoint_objects,
    required_blocks,
)


def group(kind: GroupKind, block: int, index: int = 0, window: int = 0) -> GroupLayout:
    return GroupLayout(index=index, kind=kind, block_tokens=block, window_tokens=window)


def test_full_attention_needs_every_block_below_the_boundary() -> None:
    assert required_blocks(group(GroupKind.FULL, 16), 64) == range(4)


def test_recurrent_needs_exactly_the_state_taken_at_the_boundary() -> None:
    assert required_blocks(group(GroupKind.RECURRENT, 16), 64) == range(3, 4)


@pytest.mark.parametrize(
    ("window", "first"),
    # The token at 64 reads window - 1 earlier tokens: 63 .. 64 - (window - 1).
    [(1, 4), (2, 3), (17, 3), (18, 2), (49, 1), (50, 0), (1000, 0)],
)
def test_sliding_window_needs_what_the_next_token_reads(window: int, first: int) -> None:
    assert required_blocks(group(GroupKind.WINDOW, 16, window=window), 64) == range(first, 4)


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 8))
def test_sliding_window_covers_the_window_and_no_block_more(
    window: int, blocks: int, block: int
) -> None:
    boundary = blocks * block
    needed = required_blocks(group(GroupKind.WINDOW, block, window=window), boundary)
    read = [t for t in range(boundary - window + 1, boundary) if t >= 0]
    assert set(needed) == {t // block for t in read}


def test_a_block_of_several_hash_units_is_named_by_its_last() -> None:
    coarse = group(GroupKind.FULL, 64)
    assert [block_hash_index(coarse, i, 16) for i in range(3)] == [3, 7, 11]


def test_boundary_grid_is_the_least_common_multiple() -> None:
    layout = CacheLayout(
        groups=(group(GroupKind.FULL, 32), group(GroupKind.RECURRENT, 48, 1)), hash_tokens=16
    )
    assert layout.boundary_tokens == 96


def test_objects_of_a_checkpoint_over_two_groups() -> None:
    layout = CacheLayout(
        groups=(group(GroupKind.FULL, 32), group(GroupKind.RECURRENT, 64, 1)), hash_tokens=32
    )
    hashes = [bytes([i]) for i in range(6)]
    assert checkpoint_objects(layout, 128, hashes) == [
        (0, b"\x00"), (0, b"\x01"), (0, b"\x02"), (0, b"\x03"), (1, b"\x03"),
    ]  # fmt: skip


@pytest.mark.parametrize("boundary", [0, -64, 32, 96])
def test_a_boundary_off_the_grid_is_refused(boundary: int) -> None:
    layout = CacheLayout(groups=(group(GroupKind.FULL, 64),), hash_tokens=64)
    with pytest.raises(ValueError, match="multiple of 64"):
        checkpoint_objects(layout, boundary, [b"a", b"b"])


def test_hashes_that_end_before_the_boundary_are_refused() -> None:
    layout = CacheLayout(groups=(group(GroupKind.FULL, 64),), hash_tokens=64)
    with pytest.raises(ValueError, match="end before boundary 128"):
        checkpoint_objects(layout, 128, [b"a"])


@pytest.mark.parametrize(
    ("groups", "unit", "message"),
    [
        ((), 16, "no KV cache group"),
        ((group(GroupKind.FULL, 40),), 16, "blocks of 40 tokens"),
        ((group(GroupKind.FULL, 16),), 0, "at least 1"),
        ((group(GroupKind.WINDOW, 16),), 16, "need one"),
        ((group(GroupKind.FULL, 16, window=4),), 16, "others have none"),
    ],
)
def test_impossible_layouts_are_refused(
    groups: tuple[GroupLayout, ...], unit: int, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        CacheLayout(groups=groups, hash_tokens=unit)


@pytest.mark.parametrize(
    ("chunk", "first"),
    # The token at 64 reads the tokens of its own chunk: from the last multiple of `chunk` on.
    [(16, 4), (32, 4), (64, 4), (48, 3), (24, 3), (40, 2), (128, 0), (1000, 0)],
)
def test_chunked_attention_needs_the_chunk_that_the_next_token_lies_in(
    chunk: int, first: int
) -> None:
    assert required_blocks(group(GroupKind.CHUNK, 16, window=chunk), 64) == range(first, 4)


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 8))
def test_chunked_attention_covers_the_chunk_and_no_block_more(
    chunk: int, blocks: int, block: int
) -> None:
    boundary = blocks * block
    needed = required_blocks(group(GroupKind.CHUNK, block, window=chunk), boundary)
    assert set(needed) == {t // block for t in range(boundary // chunk * chunk, boundary)}


def test_copies_are_owned_by_the_first_of_their_ranks() -> None:
    shared = GroupLayout(index=0, kind=GroupKind.FULL, block_tokens=16, copies=2)
    assert [shared.owner(rank) for rank in range(4)] == [0, 0, 2, 2]
    assert [group(GroupKind.FULL, 16).owner(rank) for rank in range(3)] == [0, 1, 2]
    with pytest.raises(UnsupportedError, match="multiple of the copies"):
        CacheLayout(groups=(shared,), hash_tokens=16, ranks=3)
