"""Pages cut over ranks and put together again for another number of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.protocols.sharding import (
    Bytes,
    Page,
    Part,
    Rows,
    conversion,
    convert,
    divides,
    held_units,
    page_bytes,
)

RANKS = st.sampled_from([1, 2, 4, 8])
PARTS = st.builds(Part, units=st.sampled_from([1, 2, 4, 8, 16]), nbytes=st.integers(1, 6))
PAGES = st.lists(
    st.builds(
        Rows, count=st.integers(1, 4), parts=st.lists(PARTS, min_size=1, max_size=3).map(tuple)
    ),
    min_size=1,
    max_size=3,
).map(tuple)


def shard(page: Page, ranks: int, rank: int, layers: int) -> Bytes:
    """The object of one rank, cut unit by unit from pages in which every byte of the unsharded
    whole has its own value (modulo 251)."""
    pieces = []
    for layer in range(layers):
        base = layer * 17
        for rows in page:
            for _ in range(rows.count):
                for part in rows.parts:
                    for unit in range(part.units):
                        if unit in held_units(part.units, ranks, rank):
                            pieces.append(np.arange(base, base + part.nbytes) % 251)
                        base += part.nbytes
    return np.concatenate(pieces).astype(np.uint8)


@given(page=PAGES, sources=RANKS, ranks=RANKS, layers=st.integers(1, 3), data=st.data())
def test_converting_shards_equals_sharding_anew(
    page: Page, sources: int, ranks: int, layers: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    runs = conversion(page, sources, ranks, rank)
    objects = {one: shard(page, sources, one, layers) for one in {run.source for run in runs}}
    assert all(len(one) == layers * page_bytes(page, sources) for one in objects.values())
    found = convert(runs, objects, layers, page_bytes(page, ranks), page_bytes(page, sources))
    assert found.tobytes() == shard(page, ranks, rank, layers).tobytes()


@given(page=PAGES, sources=RANKS, ranks=RANKS)
def test_only_ranks_that_hold_a_part_are_read(page: Page, sources: int, ranks: int) -> None:
    for rank in range(ranks):
        for run in conversion(page, sources, ranks, rank):
            assert 0 <= run.source < sources
            # Of ranks that hold a unit alike only the first is read.
            share = max(sources // max(max(p.units for r in page for p in r.parts), 1), 1)
            assert run.source % share == 0


def test_units_that_the_ranks_cannot_share_out() -> None:
    assert not divides((Rows(1, (Part(6, 1),)),), 4)
    with pytest.raises(ValueError, match="6 units cannot be shared out among 4 ranks"):
        held_units(6, 4, 0)


def test_an_object_that_is_too_short_is_refused() -> None:
    page = (Rows(2, (Part(4, 2),)),)
    runs = conversion(page, 2, 1, 0)
    short = {source: np.zeros(7, dtype=np.uint8) for source in (0, 1)}
    with pytest.raises(ValueError, match="of an object of 7"):
        convert(runs, short, 1, page_bytes(page, 1), page_bytes(page, 2))
