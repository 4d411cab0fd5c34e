"""Where a block's bytes lie: from the layers' cache tensors to (address, bytes) segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from backhaul.protocols.errors import UnsupportedError
from backhaul.transfer.base import MemoryKind, MemoryRegion, Segments


class GroupRegions:
    """Addresses of every block of one group on this rank.

    An object's bytes are its layers' pages one after the other, in ``layers`` order; a page that
    is not dense in memory contributes its dense runs, in ascending order of their position in the
    page.
    """

    def __init__(self, tensors: Sequence[Any], num_blocks: int) -> None:
        bases, strides, sizes = [], [], []
        for tensor in tensors:
            blocks = kv_blocks(tensor, num_blocks)
            item = blocks.element_size()
            runs = dense_runs(tuple(blocks.shape[1:]), tuple(blocks.stride()[1:]))
            for offset, length in runs:
                bases.append(blocks.data_ptr() + offset * item)
                strides.append(blocks.stride(0) * item)
                sizes.append(length * item)
        self._bases = np.asarray(bases, dtype=np.uint64)
        self._strides = np.asarray(strides, dtype=np.uint64)
        self._sizes = np.asarray(sizes, dtype=np.uint64)
        self.num_blocks = num_blocks
        self.object_bytes = int(self._sizes.sum())

    def segments(self, block_id: int) -> Segments:
        """Memory of one block: shape [n, 2], uint64, columns (address, bytes)."""
        if not 0 < block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is outside 1 ... {self.num_blocks - 1}")
        segments: npt.NDArray[np.uint64] = np.empty((len(self._bases), 2), dtype=np.uint64)
        segments[:, 0] = self._bases + self._strides * np.uint64(block_id)
        segments[:, 1] = self._sizes
        return segments


def kv_blocks(tensor: Any, num_blocks: int) -> Any:
    """The tensor with vLLM's blocks as dimension 0 (kernel blocks may be finer)."""
    count = int(tensor.shape[0])
    if count == num_blocks:
        return tensor
    if count % num_blocks:
        raise UnsupportedError(
            f"a cache tensor of {count} kernel blocks does not divide into {num_blocks} KV blocks"
        )
    return tensor.unflatten(0, (num_blocks, -1))


def dense_runs(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(offset, length) of the contiguous runs that make up a strided array, in elements.

    Dimensions are taken in the order of their stride, so a permuted but gapless array is one run.
    The runs are ascending.
    """
    dims = sorted(
        ((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1),
    )
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    offsets = [0]
    for stride, size in dims:
        offsets = [base + i * stride for i in range(size) for base in offsets]
    return [(offset, length) for offset in sorted(offsets)]


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Dimensions of a strided array as they lie in memory, outermost first."""
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def memory_regions(tensors: Mapping[str, Any]) -> list[MemoryRegion]:
    """The distinct allocations behind the cache tensors, for registration."""
    regions: dict[int, MemoryRegion] = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        on_device = tensor.device.type != "cpu"
        regions[storage.data_ptr()] = MemoryRegion(
            address=storage.data_ptr(),
            nbytes=storage.nbytes(),
            kind=MemoryKind.VRAM if on_device else MemoryKind.DRAM,
            device=(tensor.device.index or 0) if on_device else 0,
        )
    return list(regions.values())
