"""Loads of checkpoints that engines with other parallel sizes published.

Whole objects of the ranks that hold a part of ours are read into a buffer, where their checksums
are compared; our page is put together from them and copied into vLLM's cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from backhaul.connector.messages import BlockRef, LoadJob
from backhaul.connector.pages import with_kernel_blocks
from backhaul.connector.regions import kv_blocks, memory_order
from backhaul.protocols.checkpoint import ObjectKey, Reason
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.layout import CacheLayout, GroupKind
from backhaul.protocols.sharding import Bytes, Run, conversion, convert, page_bytes
from backhaul.protocols.stages import Portion, portions
from backhaul.transfer.base import (
    LoadItem,
    MemoryKind,
    MemoryRegion,
    Store,
    TransferResult,
    Unsettled,
)


def unlike_groups(told: CacheLayout, own: CacheLayout) -> list[int]:
    """Groups of which the scheduler half describes other pages than this rank has, by their index.

    It sees one spec for a whole group, and the first pipeline stage only; converting by what it
    says would cut such pages in wrong places.
    """
    known = {group.index: group for group in own.groups}
    return [
        one.index
        for one in told.groups
        if (mine := known.get(one.index)) is None
        or (mine.page, mine.page_bytes, mine.interior, mine.copies)
        != (one.page, one.page_bytes, one.interior, one.copies)
    ]


class Converter:
    """One per worker. One load at a time, since they share the buffer: not thread-safe."""

    def __init__(
        self,
        store: Store,
        rank: int,
        tensors: Mapping[int, Sequence[Any]],
        num_blocks: int,
        buffer_bytes: int,
    ) -> None:
        """``tensors``: group index -> the cache tensors of its layers, in their order."""
        self._store = store
        self._rank = rank
        self._tensors = tensors
        self._num_blocks = num_blocks
        self._buffer: Bytes = np.empty(buffer_bytes, dtype=np.uint8)
        self._unsettled: Unsettled | None = None

    @property
    def region(self) -> MemoryRegion:
        """The buffer, to be attached to the store."""
        return MemoryRegion(self._buffer.ctypes.data, self._buffer.nbytes, MemoryKind.DRAM)

    def load(
        self, job: LoadJob, ours: DomainRecord, *, verify: bool, timeout_s: float
    ) -> TransferResult:
        """Fill the job's blocks. ``ours``: this engine's domain.

        A transfer that was given up may go on into the buffer but never into vLLM's pages, so the
        result has nothing unsettled.
        """
        assert job.source is not None
        if self._unsettled is not None and not self._unsettled.settled():
            return TransferResult(ok=False, reason=Reason.TIMEOUT)
        self._unsettled = None
        deadline = time.monotonic() + timeout_s
        return self._load(job, ours, job.source, verify=verify, deadline=deadline)

    def _load(
        self,
        job: LoadJob,
        ours: DomainRecord,
        theirs: DomainRecord,
        *,
        verify: bool,
        deadline: float,
    ) -> TransferResult:
        plans = {
            group: _Plan(ours, theirs, group, self._rank, len(tensors), self._kernel_blocks(group))
            for group, tensors in self._tensors.items()
        }
        nbytes = 0
        for batch in self._batches(job.blocks, plans):
            places: list[list[Bytes]] = []
            items: list[LoadItem] = []
            used = 0
            for block in batch:
                plan = plans[block.group]
                places.append([])
                for source in plan.sources:
                    place = self._buffer[used : used + source.nbytes]
                    used += source.nbytes
                    places[-1].append(place)
                    key = ObjectKey(source.owner, block.group, block.block_hash)
                    segments = np.array([[place.ctypes.data, place.nbytes]], dtype=np.uint64)
                    items.append(LoadItem(key, segments))
            result = self._store.read(
                job.lease, items, verify=verify, timeout_s=max(deadline - time.monotonic(), 0.001)
            )
            nbytes += result.nbytes
            if not result.ok:
                self._unsettled = result.unsettled
                return TransferResult(ok=False, reason=result.reason, nbytes=nbytes)
            for block, found in zip(batch, places, strict=True):
                self._put(block, plans[block.group].page_of(found))
        return TransferResult(ok=True, nbytes=nbytes)

    def _batches(
        self, blocks: Sequence[BlockRef], plans: Mapping[int, _Plan]
    ) -> list[list[BlockRef]]:
        """Blocks whose sources fit into the buffer together. Raises ``ValueError`` for one that
        does not fit alone."""
        batches: list[list[BlockRef]] = [[]]
        room = self._buffer.nbytes
        for block in blocks:
            plan = plans[block.group]
            needed = sum(source.nbytes for source in plan.sources)
            if needed > self._buffer.nbytes:
                raise ValueError(f"one block takes {needed} bytes of convert_buffer_bytes")
            if needed > room:
                batches.append([])
                room = self._buffer.nbytes
            batches[-1].append(block)
            room -= needed
        return batches

    def _kernel_blocks(self, group: int) -> int:
        return int(self._tensors[group][0].shape[0]) // self._num_blocks

    def _put(self, block: BlockRef, content: Bytes) -> None:
        """Copy an object into the pages of a block, layer by layer."""
        import torch

        start = 0
        for tensor in self._tensors[block.group]:
            page = kv_blocks(tensor, self._num_blocks)[block.block_id]
            page = page.permute(memory_order(page.stride()))
            size = page.numel() * page.element_size()
            data = torch.from_numpy(content[start : start + size])
            page.copy_(data.view(page.dtype).view(page.shape))
            start += size
        if page.device.type == "cuda":
            torch.cuda.current_stream(page.device).synchronize()


class _Source(NamedTuple):
    """An object that ours is made of: whose it is, its bytes, and what of it is used."""

    owner: int
    nbytes: int
    tensor_rank: int
    portion: Portion


class _Plan:
    """How objects of one group are made, for one pair of domains."""

    def __init__(
        self,
        ours: DomainRecord,
        theirs: DomainRecord,
        group: int,
        rank: int,
        layers: int,
        kernel_blocks: int,
    ) -> None:
        layout = next(one for one in ours.layout.groups if one.index == group)
        source_layout = next(one for one in theirs.layout.groups if one.index == group)
        page = layout.page
        if layout.kind is not GroupKind.RECURRENT:
            page = with_kernel_blocks(page, ours.kv_layout, kernel_blocks)
        # vLLM numbers its ranks stage by stage.
        stage, tensor_rank = divmod(rank, ours.tensor_parallel)
        self._size = page_bytes(page, ours.tensor_parallel)
        self._source_size = page_bytes(page, theirs.tensor_parallel)
        self._runs: list[Run] = conversion(
            page, theirs.tensor_parallel, ours.tensor_parallel, tensor_rank
        )
        self.sources = [
            _Source(
                source_layout.owner(portion.stage * theirs.tensor_parallel + one),
                portion.of * self._source_size,
                one,
                portion,
            )
            for portion in portions(ours, theirs, group, stage, layers)
            for one in sorted({run.source for run in self._runs})
        ]

    def page_of(self, found: Sequence[Bytes]) -> Bytes:
        """Our object out of theirs, which are in the order of ``sources``."""
        size = self._source_size
        pieces: dict[Portion, dict[int, Bytes]] = {}
        for source, data in zip(self.sources, found, strict=True):
            first, end = source.portion.first, source.portion.first + source.portion.layers
            used = data[first * size : end * size]
            pieces.setdefault(source.portion, {})[source.tensor_rank] = used
        parts = [
            convert(self._runs, sources, portion.layers, self._size, size)
            for portion, sources in pieces.items()
        ]
        return np.concatenate(parts)
