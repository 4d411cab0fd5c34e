"""Pairs of memory ranges that a transfer copies between: pure arithmetic on numpy columns.

An object is contiguous in the store and scattered over pages on the worker::

    store     [ offset ................................. )
    worker    [ segment 0 )      [ segment 1 )   [ segment 2 )
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backhaul.transfer.base import MemoryKind, MemoryRegion, Segments

Column = npt.NDArray[np.uint64]
_ZERO = np.uint64(0)


class Pairs(NamedTuple):
    """Columns of equal length. Row i copies ``nbytes[i]`` between ``local[i]`` and ``remote[i]``.

    ``region``: index of the registered region that holds the local side. The rows together are the
    objects' bytes in order, however they are joined or cut.
    """

    local: Column
    remote: Column
    nbytes: Column
    region: npt.NDArray[np.intp]

    def rows(self, where: slice | npt.NDArray[np.bool_]) -> Pairs:
        """Those rows only."""
        return Pairs(self.local[where], self.remote[where], self.nbytes[where], self.region[where])


class RegionTable:
    """Registered memory by address. Overlapping regions (vLLM's layers share tensors) become one;
    regions that merely touch stay apart, as each is registered by itself."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        """Raises ``ValueError`` where memory of two kinds or devices overlaps."""
        merged: list[MemoryRegion] = []
        for region in sorted(regions):
            last = merged[-1] if merged else None
            if last is None or region.address >= last.address + last.nbytes:
                merged.append(region)
                continue
            if (last.kind, last.device) != (region.kind, region.device):
                raise ValueError(f"{last} and {region} overlap")
            end = max(last.address + last.nbytes, region.address + region.nbytes)
            merged[-1] = last._replace(nbytes=end - last.address)
        self.regions = tuple(merged)
        self.is_device = np.array([r.kind is not MemoryKind.DRAM for r in merged], dtype=np.bool_)
        self.devices = np.array([r.device for r in merged], dtype=np.uint64)
        self._starts = np.array([r.address for r in merged], dtype=np.uint64)
        self._ends = np.array([r.address + r.nbytes for r in merged], dtype=np.uint64)

    def find(self, address: Column, nbytes: Column) -> npt.NDArray[np.intp]:
        """Region of each range. Raises ``ValueError`` where one lies outside all of them."""
        found = np.searchsorted(self._starts, address, side="right") - 1
        inside = found >= 0
        inside &= address + nbytes <= self._ends[found] if self.regions else False
        if not inside.all():
            row = int(np.argmin(inside))
            raise ValueError(
                f"{int(nbytes[row])} bytes at {int(address[row]):#x} are not in attached memory"
            )
        return found


class Objects:
    """Several objects' segments in one table.

    Attributes:
        local, nbytes: address and bytes of every segment.
        sizes: bytes of every object.
        ends: bytes of every object and all before it.
    """

    def __init__(self, segments: Sequence[Segments]) -> None:
        flat = np.concatenate([*segments, np.empty((0, 2), dtype=np.uint64)])
        self.local = np.ascontiguousarray(flat[:, 0])
        self.nbytes = np.ascontiguousarray(flat[:, 1])
        self._counts = np.array([len(one) for one in segments], dtype=np.intp)
        self._reach = np.concatenate([[_ZERO], np.cumsum(self.nbytes, dtype=np.uint64)])
        self.ends: Column = self._reach[np.cumsum(self._counts)]
        self.sizes: Column = np.diff(self.ends, prepend=_ZERO)

    def pairs(self, remote: Column, table: RegionTable) -> Pairs:
        """Rows that copy between the objects and ``remote``, each object's address in the store.
        Raises ``ValueError`` for a segment outside of ``table``."""
        # How far into its object a segment begins.
        shift = self._reach[:-1] - np.repeat(self.ends - self.sizes, self._counts)
        far = np.repeat(remote, self._counts) + shift
        filled = self.nbytes > 0
        local, nbytes = self.local[filled], self.nbytes[filled]
        return Pairs(local, far[filled], nbytes, table.find(local, nbytes))


def coalesced(pairs: Pairs) -> Pairs:
    """Join neighbouring rows that continue each other on both sides, inside one region."""
    if len(pairs.local) < 2:
        return pairs
    local, remote, nbytes, region = pairs
    joins = local[1:] == local[:-1] + nbytes[:-1]
    joins &= remote[1:] == remote[:-1] + nbytes[:-1]
    joins &= region[1:] == region[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~joins]))
    total = np.add.reduceat(nbytes, first)
    return Pairs(local[first], remote[first], total, region[first])


def batches(pairs: Pairs, table: RegionTable, nbytes_max: int) -> list[Pairs]:
    """Cut into runs of about ``nbytes_max`` (below twice that), each of one memory kind."""
    if not len(pairs.local):
        return []
    pairs = _split(pairs, np.uint64(nbytes_max))
    starts = np.cumsum(pairs.nbytes) - pairs.nbytes
    run = starts // np.uint64(nbytes_max)
    kind = table.is_device[pairs.region]
    cuts = np.flatnonzero((run[1:] != run[:-1]) | (kind[1:] != kind[:-1])) + 1
    edges = [0, *cuts.tolist(), len(run)]
    return [pairs.rows(slice(a, b)) for a, b in itertools.pairwise(edges)]


def _split(pairs: Pairs, nbytes_max: np.uint64) -> Pairs:
    """Cut rows longer than ``nbytes_max`` into pieces."""
    pieces = ((pairs.nbytes + nbytes_max - np.uint64(1)) // nbytes_max).astype(np.intp)
    if int(pieces.max()) == 1:
        return pairs
    row = np.repeat(np.arange(len(pieces)), pieces)
    piece = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    shift = piece.astype(np.uint64) * nbytes_max
    length = np.minimum(pairs.nbytes[row] - shift, nbytes_max)
    return Pairs(pairs.local[row] + shift, pairs.remote[row] + shift, length, pairs.region[row])
