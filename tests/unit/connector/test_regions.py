"""Addresses of a block: dense runs of strided tensors, checked by reading the memory."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from backhaul.connector.regions import GroupRegions, dense_runs, memory_regions  # noqa: E402
from backhaul.protocols.errors import UnsupportedError  # noqa: E402


def read(segments: "np.ndarray") -> bytes:
    return b"".join(ctypes.string_at(int(a), int(n)) for a, n in segments)


@given(st.permutations([0, 1, 2, 3]), st.lists(st.integers(1, 4), min_size=4, max_size=4))
@settings(max_examples=60)
def test_a_permuted_dense_array_is_one_run(order: list[int], shape: list[int]) -> None:
    array = np.empty(shape).transpose(order)
    strides = tuple(s // array.itemsize for s in array.strides)
    assert dense_runs(array.shape, strides) == [(0, array.size)]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_runs_cover_each_element_once(a: int, b: int, c: int, gap: int) -> None:
    base = np.zeros((a, b, c + gap))
    view = base[:, :, :c]
    strides = tuple(s // view.itemsize for s in view.strides)
    covered = [o + i for o, n in dense_runs(view.shape, strides) for i in range(n)]
    flat = np.arange(base.size).reshape(base.shape)[:, :, :c].ravel().tolist()
    assert sorted(covered) == sorted(flat)
    assert covered == sorted(covered)


def test_segments_read_exactly_the_blocks_bytes() -> None:
    blocks, page, state = 5, 96, 80
    backing = torch.arange(2 * blocks * page, dtype=torch.int64).to(torch.uint8)
    attention = backing[: blocks * page].view(blocks, 2, 4, 12)
    # A recurrent layer uses the first 80 bytes of each padded 96-byte page.
    recurrent = backing[blocks * page :].view(blocks, page)[:, :state].view(blocks, 1, 1, state)
    group = GroupRegions([attention, recurrent], blocks)
    assert group.object_bytes == page + state
    for block in range(1, blocks):
        expected = attention[block].numpy().tobytes() + recurrent[block].numpy().tobytes()
        assert read(group.segments(block)) == expected


def test_kernel_blocks_are_grouped_into_vllms_blocks() -> None:
    cache = torch.arange(12 * 4, dtype=torch.int32).view(12, 4)
    group = GroupRegions([cache], 3)  # four kernel blocks a block
    assert read(group.segments(2)) == cache[8:12].numpy().tobytes()


def test_a_page_with_gaps_is_read_in_pieces() -> None:
    cache = torch.arange(3 * 2 * 8, dtype=torch.uint8).view(3, 2, 8)[:, :, :5]
    group = GroupRegions([cache], 3)
    assert group.segments(1).shape == (2, 2)
    assert read(group.segments(1)) == cache[1].numpy().tobytes()


@pytest.mark.parametrize("block", [0, -1, 5, 99])
def test_the_null_block_and_blocks_outside_are_refused(block: int) -> None:
    group = GroupRegions([torch.zeros(5, 8)], 5)
    with pytest.raises(ValueError, match="outside"):
        group.segments(block)


def test_kernel_blocks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="7 kernel blocks"):
        GroupRegions([torch.zeros(7, 8)], 3)


def test_layers_that_share_an_allocation_are_registered_once() -> None:
    backing = torch.zeros(64, dtype=torch.int8)
    other = torch.zeros(32, dtype=torch.int8)
    regions = memory_regions({"a": backing[:32], "b": backing[32:], "c": other})
    assert sorted(r.nbytes for r in regions) == [32, 64]
