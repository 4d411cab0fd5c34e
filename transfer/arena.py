"""An allocator over a range of bytes: offsets only, no memory, no I/O.

Best fit with coalescing. Every extent starts and ends on a multiple of the alignment, so the range
is always a seamless row of allocated and free extents, and no two free extents touch::

    |  allocated  |  free  |  allocated  |  allocated  |      free      |
    0                                                              capacity
"""

from __future__ import annotations

from collections.abc import Iterable

from sortedcontainers import SortedList

ALIGNMENT = 256
"""Covers every element type, a cache line and the widest vector load on CPU and GPU. Larger would
waste space on small test models, smaller would only lengthen the books."""


class Arena:
    """Not thread-safe. ``allocate`` and ``free`` cost O(log n) in the number of free extents."""

    def __init__(self, capacity_bytes: int, alignment: int = ALIGNMENT) -> None:
        """``capacity_bytes`` is rounded down to a multiple of ``alignment``."""
        if alignment < 1 or capacity_bytes < alignment:
            raise ValueError(f"an arena of {capacity_bytes} bytes cannot hold one of {alignment}")
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes // alignment * alignment
        self.used_bytes = 0
        self._allocated: dict[int, int] = {}  # offset -> bytes, rounded up
        self._free: dict[int, int] = {0: self.capacity_bytes}  # offset -> bytes
        self._free_ends: dict[int, int] = {self.capacity_bytes: 0}  # end -> offset
        self._free_by_size = SortedList([(self.capacity_bytes, 0)])  # (bytes, offset)

    @property
    def largest_free_bytes(self) -> int:
        """The longest free extent."""
        return int(self._free_by_size[-1][0]) if self._free_by_size else 0

    def __len__(self) -> int:
        """The number of allocated extents."""
        return len(self._allocated)

    def rounded(self, nbytes: int) -> int:
        """What ``nbytes`` occupy."""
        return -(-nbytes // self.alignment) * self.alignment

    def extent_bytes(self, offset: int) -> int:
        """What the extent at ``offset`` occupies. Raises ``KeyError`` where none starts there."""
        return self._allocated[offset]

    def fits(self, nbytes: int) -> bool:
        """Whether ``allocate(nbytes)`` would succeed now."""
        return self.rounded(nbytes) <= self.largest_free_bytes

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a fresh extent, or None where no free extent is long enough."""
        if nbytes < 1:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        size = self.rounded(nbytes)
        position = self._free_by_size.bisect_left((size, 0))
        if position == len(self._free_by_size):
            return None
        extent, offset = self._free_by_size[position]
        self._remove_free(offset, extent)
        if extent > size:
            self._add_free(offset + size, extent - size)
        self._allocated[offset] = size
        self.used_bytes += size
        return int(offset)

    def free(self, offset: int) -> None:
        """Give an extent back. Raises ``ValueError`` where none starts at ``offset``."""
        size = self._allocated.pop(offset, None)
        if size is None:
            raise ValueError(f"nothing is allocated at offset {offset}")
        self.used_bytes -= size
        start, end = offset, offset + size
        if start in self._free_ends:
            start = self._free_ends[start]
            self._remove_free(start, offset - start)
        if end in self._free:
            following = self._free[end]
            self._remove_free(end, following)
            end += following
        self._add_free(start, end - start)

    def largest_gap_bytes(self, kept: Iterable[int]) -> int:
        """The longest free extent there would be if only the extents at offsets ``kept`` stayed."""
        largest = position = 0
        for offset in sorted(kept):
            largest = max(largest, offset - position)
            position = offset + self._allocated[offset]
        return max(largest, self.capacity_bytes - position)

    def check(self) -> None:
        """Recompute the books. Raises ``AssertionError`` with what differs."""
        rows = sorted(
            [(o, n, False) for o, n in self._allocated.items()]
            + [(o, n, True) for o, n in self._free.items()]
        )
        position, previous_free = 0, False
        for offset, size, is_free in rows:
            assert offset == position, f"gap or overlap: extent at {offset}, expected {position}"
            assert size > 0 and size % self.alignment == 0, f"extent at {offset} has {size} bytes"
            assert not (is_free and previous_free), f"free extents meet at {offset}"
            position, previous_free = offset + size, is_free
        assert position == self.capacity_bytes, f"extents end at {position}"
        used = sum(self._allocated.values())
        assert used == self.used_bytes, f"used_bytes {self.used_bytes}, extents hold {used}"
        by_size = sorted((n, o) for o, n in self._free.items())
        assert list(self._free_by_size) == by_size, "free extents by size differ"
        ends = {o + n: o for o, n in self._free.items()}
        assert self._free_ends == ends, "free extents by end differ"

    def _add_free(self, offset: int, size: int) -> None:
        self._free[offset] = size
        self._free_ends[offset + size] = offset
        self._free_by_size.add((size, offset))

    def _remove_free(self, offset: int, size: int) -> None:
        del self._free[offset]
        del self._free_ends[offset + size]
        self._free_by_size.remove((size, offset))
