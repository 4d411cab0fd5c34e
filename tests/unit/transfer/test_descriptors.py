"""Descriptor arithmetic: whatever is joined or cut, the same bytes go to the same places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.transfer.base import MemoryKind, MemoryRegion, Segments
from backhaul.transfer.descriptors import Objects, Pairs, RegionTable, batches, coalesced

TABLE = RegionTable(
    [
        MemoryRegion(1000, 500),
        MemoryRegion(1500, 500),  # touches the first, but is registered by itself
        MemoryRegion(9000, 500, MemoryKind.VRAM, 3),
    ]
)


def segments(*rows: tuple[int, int]) -> Segments:
    return np.array(rows, dtype=np.uint64).reshape(-1, 2)


def pair(objects: list[Segments], remote: list[int], table: RegionTable = TABLE) -> Pairs:
    return Objects(objects).pairs(np.array(remote, dtype=np.uint64), table)


def bytes_of(pairs: Pairs) -> list[tuple[int, int]]:
    """(local, remote) address of every byte, in order."""
    return [
        (int(local) + i, int(remote) + i)
        for local, remote, nbytes in zip(pairs.local, pairs.remote, pairs.nbytes, strict=True)
        for i in range(int(nbytes))
    ]


ROW = st.one_of(
    st.tuples(st.integers(1000, 1400), st.integers(0, 100)),
    st.tuples(st.integers(1500, 1900), st.integers(0, 100)),
    st.tuples(st.integers(9000, 9400), st.integers(0, 100)),
)
OBJECT = st.lists(ROW, max_size=6).map(lambda rows: segments(*rows))


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(st.lists(st.tuples(OBJECT, st.integers(0, 1 << 40)), max_size=5), st.integers(1, 200))
def test_every_byte_keeps_its_place(objects: list[tuple[Segments, int]], limit: int) -> None:
    expected = []
    for rows, remote in objects:
        far = remote
        for address, nbytes in rows.tolist():
            expected += [(address + i, far + i) for i in range(nbytes)]
            far += nbytes
    pairs = pair([rows for rows, _ in objects], [remote for _, remote in objects])
    assert bytes_of(pairs) == expected
    joined = coalesced(pairs)
    assert bytes_of(joined) == expected
    assert (joined.region == TABLE.find(joined.local, joined.nbytes)).all()
    runs = batches(joined, TABLE, limit)
    assert [one for run in runs for one in bytes_of(run)] == expected
    for run in runs:
        assert 0 < int(run.nbytes.sum()) < 2 * limit
        assert len(set(TABLE.is_device[run.region].tolist())) == 1


def test_neighbours_become_one() -> None:
    objects = [segments((1000, 100), (1100, 50)), segments((1150, 50)), segments((1300, 50))]
    joined = coalesced(pair(objects, [0, 150, 200]))
    assert joined.local.tolist() == [1000, 1300]
    assert joined.nbytes.tolist() == [200, 50]


def test_regions_that_touch_are_not_joined_across() -> None:
    joined = coalesced(pair([segments((1400, 100), (1500, 100))], [0]))
    assert joined.nbytes.tolist() == [100, 100]


@pytest.mark.parametrize("row", [(999, 2), (1999, 2), (1450, 100), (8999, 1), (9500, 1)])
def test_memory_outside_is_refused(row: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not in attached memory"):
        pair([segments(row)], [0])


def test_overlapping_regions_become_one() -> None:
    table = RegionTable([MemoryRegion(0, 10), MemoryRegion(5, 10), MemoryRegion(0, 10)])
    assert table.regions == (MemoryRegion(0, 15),)
    with pytest.raises(ValueError, match="overlap"):
        RegionTable([MemoryRegion(0, 10), MemoryRegion(5, 10, MemoryKind.VRAM)])


def test_sizes_of_objects() -> None:
    objects = Objects([segments((0, 3), (9, 4)), segments(), segments((5, 0)), segments((1, 2))])
    assert objects.sizes.tolist() == [7, 0, 0, 2]
    assert objects.ends.tolist() == [7, 7, 7, 9]
    assert Objects([]).sizes.tolist() == []


def test_no_regions_hold_nothing() -> None:
    with pytest.raises(ValueError, match="not in attached memory"):
        pair([segments((0, 1))], [0], RegionTable([]))
