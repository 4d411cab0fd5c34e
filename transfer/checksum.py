"""Checksums of objects: what proves at a load that bytes are those that were published.

XXH3 (64 bit) over the object's bytes in order, wherever its segments lie; against accidents, not
against an attacker. 0 means "none", so a digest of 0 becomes 1.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Sequence

import xxhash

from backhaul.transfer.base import MemoryKind, MemoryRegion, Segments

ChecksumFunction = Callable[[Segments], int]
"""Checksum of one object, never 0; any thread, must not hold the GIL for long. The result may
depend on the bytes in their order only, not on how they are cut into segments."""

NO_CHECKSUM = 0


class HostChecksum:
    """A ``ChecksumFunction`` for host memory that stays mapped while this is in use."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        host = [r for r in sorted(regions) if r.kind is MemoryKind.DRAM and r.nbytes]
        self._starts = [region.address for region in host]
        self._views = [
            memoryview((ctypes.c_ubyte * region.nbytes).from_address(region.address))
            for region in host
        ]

    def __call__(self, segments: Segments) -> int:
        """Raises ``ValueError`` for a segment outside the regions."""
        digest = xxhash.xxh3_64()
        for address, nbytes in segments.tolist():
            found = bisect.bisect_right(self._starts, address) - 1
            view = self._views[found]
            start = address - self._starts[found]
            if found < 0 or start + nbytes > len(view):
                raise ValueError(f"{nbytes} bytes at {address:#x} are not in attached host memory")
            digest.update(view[start : start + nbytes])
        return digest.intdigest() or 1


class ObjectChecksums:
    """Picks the algorithm for an object by where it lies."""

    def __init__(
        self, regions: Sequence[MemoryRegion], device: ChecksumFunction | None = None
    ) -> None:
        """``device``: for memory that the host cannot read; without it such objects have none."""
        self._host: ChecksumFunction = HostChecksum(regions)
        self._device = device
        self._on_device = [r for r in regions if r.kind is not MemoryKind.DRAM]

    def __call__(self, segments: Segments) -> int:
        """The checksum, or ``NO_CHECKSUM`` for device memory without an algorithm."""
        if self._on_device and len(segments) and self._is_device(int(segments[0, 0])):
            return self._device(segments) if self._device else NO_CHECKSUM
        return self._host(segments)

    def _is_device(self, address: int) -> bool:
        return any(r.address <= address < r.address + r.nbytes for r in self._on_device)
