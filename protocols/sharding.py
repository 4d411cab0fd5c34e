"""How a page is cut over tensor-parallel ranks, and which bytes go where when their number changes.

A page is a sequence of ``Rows``: ``count`` rows, in each of them arrays side by side. The ranks
share out the *units* of an array (heads, groups, channels): consecutive ones where the units
divide by the ranks; where there are fewer units than ranks, each unit lies on several consecutive
ranks alike. Page of rank 1 of 2, a convolution state of two rows over q, k, v of 4, 4, 8 heads::

    row 0   q[2] q[3]  k[2] k[3]  v[4] v[5] v[6] v[7]
    row 1   q[2] q[3]  k[2] k[3]  v[4] v[5] v[6] v[7]

Descriptions hold numbers over all ranks, so they are the same at any tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
"""Records come from anybody, and are compared with everybody's."""
_PIECES_MAX = 64
"""Runs of rows in a page, and arrays in a row; a page has up to two, a row up to four."""


class Part(msgspec.Struct, frozen=True):
    """One array of a row: ``units`` over all ranks, ``nbytes`` each."""

    units: _Count
    nbytes: _Count


class Rows(msgspec.Struct, frozen=True):
    """``count`` rows of the same parts."""

    count: _Count
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=_PIECES_MAX)]


Page = Annotated[tuple[Rows, ...], msgspec.Meta(max_length=_PIECES_MAX)]


class Run(NamedTuple):
    """``pieces`` of ``nbytes`` each, in a page of the rank ``source`` and in one's own: where the
    first begins and how far the next one is, in bytes."""

    source: int
    source_offset: int
    source_stride: int
    offset: int
    stride: int
    nbytes: int
    pieces: int


def divides(page: Page, ranks: int) -> bool:
    """Whether ``ranks`` can share the page out."""
    return all(
        part.units % ranks == 0 or ranks % part.units == 0 for rows in page for part in rows.parts
    )


def held_units(units: int, ranks: int, rank: int) -> range:
    """Units of an array that ``rank`` of ``ranks`` holds."""
    if units % ranks == 0:
        share = units // ranks
        return range(rank * share, (rank + 1) * share)
    if ranks % units == 0:
        one = rank * units // ranks
        return range(one, one + 1)
    raise ValueError(f"{units} units cannot be shared out among {ranks} ranks")


def page_bytes(page: Page, ranks: int) -> int:
    """Bytes of one rank's page."""
    return sum(rows.count * _row_bytes(rows, ranks) for rows in page)


def conversion(page: Page, sources: int, ranks: int, rank: int) -> list[Run]:
    """Where the bytes of ``rank`` of ``ranks`` lie in the pages of ``sources`` ranks. Of a unit
    that several sources hold, the first one's is taken."""
    runs: list[Run] = []
    start = source_start = 0
    for rows in page:
        stride, source_stride = _row_bytes(rows, ranks), _row_bytes(rows, sources)
        column = source_column = 0
        for part in rows.parts:
            own = held_units(part.units, ranks, rank)
            for source, units in _holders(part.units, own, sources):
                theirs = held_units(part.units, sources, source)
                runs.append(
                    Run(
                        source,
                        source_start + source_column + (units.start - theirs.start) * part.nbytes,
                        source_stride,
                        start + column + (units.start - own.start) * part.nbytes,
                        stride,
                        len(units) * part.nbytes,
                        rows.count,
                    )
                )
            column += len(own) * part.nbytes
            source_column += len(held_units(part.units, sources, 0)) * part.nbytes
        start += rows.count * stride
        source_start += rows.count * source_stride
    return runs


def convert(
    runs: Sequence[Run], sources: dict[int, Bytes], layers: int, size: int, source_size: int
) -> Bytes:
    """One object of ``layers`` pages of ``size`` bytes, out of the same object of each source rank
    (pages of ``source_size`` bytes)."""
    out = np.empty(layers * size, dtype=np.uint8)
    for run in runs:
        _pieces(out, run.offset, run.stride, run, layers, size)[...] = _pieces(
            sources[run.source], run.source_offset, run.source_stride, run, layers, source_size
        )
    return out


def _row_bytes(rows: Rows, ranks: int) -> int:
    return sum(len(held_units(part.units, ranks, 0)) * part.nbytes for part in rows.parts)


def _holders(units: int, wanted: range, sources: int) -> Iterator[tuple[int, range]]:
    """(source, units) that together are ``wanted``, in order."""
    for source in range(sources):
        theirs = held_units(units, sources, source)
        common = range(max(wanted.start, theirs.start), min(wanted.stop, theirs.stop))
        if common:
            yield source, common
            wanted = range(common.stop, wanted.stop)


def _pieces(data: Bytes, offset: int, stride: int, run: Run, layers: int, size: int) -> Bytes:
    """View [layers, pieces, nbytes] of a run's pieces in an object."""
    end = (layers - 1) * size + offset + (run.pieces - 1) * stride + run.nbytes
    if end > len(data):
        raise ValueError(f"a run ends at byte {end} of an object of {len(data)}")
    return np.lib.stride_tricks.as_strided(
        data[offset:], (layers, run.pieces, run.nbytes), (size, stride, 1)
    )
