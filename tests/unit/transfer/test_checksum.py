"""Checksums: what they depend on and what they refuse."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.transfer.base import MemoryKind, MemoryRegion, Segments
from backhaul.transfer.checksum import NO_CHECKSUM, HostChecksum, ObjectChecksums

MEMORY = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
BASE = MEMORY.ctypes.data


def rows(*pairs: tuple[int, int]) -> Segments:
    """Segments from (offset in MEMORY, bytes)."""
    return np.array([(BASE + at, size) for at, size in pairs], dtype=np.uint64).reshape(-1, 2)


@pytest.fixture
def checksum() -> HostChecksum:
    return HostChecksum([MemoryRegion(BASE, 2048), MemoryRegion(BASE + 2048, 2048)])


def test_is_xxh3_over_the_bytes_in_order(checksum: HostChecksum) -> None:
    data = MEMORY[3000:3100].tobytes() + MEMORY[10:20].tobytes()
    assert checksum(rows((3000, 100), (10, 10))) == xxhash.xxh3_64_intdigest(data)


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(st.lists(st.integers(0, 2048), max_size=8))
def test_does_not_depend_on_how_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 2048]
    pieces = [(a, b - a) for a, b in itertools.pairwise(edges)]
    checksum = HostChecksum([MemoryRegion(BASE, 4096)])
    assert checksum(rows(*pieces)) == checksum(rows((0, 2048)))


def test_sees_a_flipped_bit_and_swapped_segments(checksum: HostChecksum) -> None:
    before = checksum(rows((0, 1000), (2048, 1000)))
    assert checksum(rows((2048, 1000), (0, 1000))) != before
    MEMORY[999] ^= 1
    try:
        assert checksum(rows((0, 1000), (2048, 1000))) != before
    finally:
        MEMORY[999] ^= 1


def test_is_never_zero(checksum: HostChecksum, monkeypatch: pytest.MonkeyPatch) -> None:
    class Zero:
        def update(self, data: memoryview) -> None: ...

        def intdigest(self) -> int:
            return 0

    monkeypatch.setattr(xxhash, "xxh3_64", Zero)
    assert checksum(rows((0, 10))) == 1


@pytest.mark.parametrize("segment", [(2000, 100), (4090, 10), (-8, 8)])
def test_refuses_memory_that_was_not_attached(
    checksum: HostChecksum, segment: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match="not in attached"):
        checksum(rows(segment))


class TestDeviceMemory:
    REGIONS = (
        MemoryRegion(BASE, 4096),
        MemoryRegion(0x7000_0000_0000, 4096, MemoryKind.VRAM, 0),
    )
    ON_DEVICE = np.array([(0x7000_0000_0100, 64)], dtype=np.uint64)

    def test_has_no_checksum_by_itself(self) -> None:
        checksums = ObjectChecksums(self.REGIONS)
        assert checksums(self.ON_DEVICE) == NO_CHECKSUM
        assert checksums(rows((0, 64))) != NO_CHECKSUM

    def test_is_given_to_the_connectors_function(self) -> None:
        checksums = ObjectChecksums(self.REGIONS, device=lambda segments: int(segments[0, 1]))
        assert checksums(self.ON_DEVICE) == 64
        assert checksums(rows((0, 64))) == xxhash.xxh3_64_intdigest(MEMORY[:64].tobytes())
