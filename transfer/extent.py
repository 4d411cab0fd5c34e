"""How far a prefix's objects reach in a domain, attention and recurrent state apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backhaul.protocols.checkpoint import Reason
from backhaul.protocols.layout import GroupKind, GroupLayout
from backhaul.transfer.entries import Domain


class Extent(NamedTuple):
    """In tokens; 0 also where the model has no group of that kind.

    Attributes:
        attention: boundary up to which every full-attention group has its objects.
        recurrent: deepest boundary at which every recurrent group has its state.
    """

    attention: int = 0
    recurrent: int = 0


def matched_extent(domain: Domain, boundary_hashes: Sequence[bytes], visible: int) -> Extent:
    """Extents of the prefix whose entry i ends at boundary (i + 1) * B.

    ``visible`` is the boundary of the deepest visible checkpoint, where both are known to be. Only
    the object that ends on each boundary is looked at: the others of that block came with it.
    """
    grid = domain.boundary_tokens
    full = _groups(domain, GroupKind.FULL)
    states = _groups(domain, GroupKind.RECURRENT)
    start = visible // grid
    attention = start
    while full and attention < len(boundary_hashes):
        if not _complete(domain, full, boundary_hashes[attention]):
            break
        attention += 1
    recurrent = len(boundary_hashes)
    while states and recurrent > start:
        if _complete(domain, states, boundary_hashes[recurrent - 1]):
            break
        recurrent -= 1
    return Extent(attention * grid if full else 0, recurrent * grid if states else 0)


def incomplete_ends(
    domain: Domain, boundary_hashes: Sequence[bytes], extent: Extent, visible: int
) -> list[tuple[int, Reason]]:
    """Boundaries above ``visible`` to which objects of one class reach and those of the other do
    not, each with what is missing: the deepest one of either class.

    A branch off another request's prompt has the attention that they share and no state; what an
    abandoned publication leaves behind may be either.
    """
    grid = domain.boundary_tokens
    states = _groups(domain, GroupKind.RECURRENT)
    found = []
    attention, recurrent = extent
    if (
        states
        and attention > visible
        and not _complete(domain, states, boundary_hashes[attention // grid - 1])
    ):
        found.append((attention, Reason.STATE_MISSING))
    if _groups(domain, GroupKind.FULL) and recurrent > max(visible, attention):
        found.append((recurrent, Reason.ATTENTION_MISSING))
    return found


def _groups(domain: Domain, kind: GroupKind) -> list[GroupLayout]:
    return [group for group in domain.record.layout.groups if group.kind is kind]


def _complete(domain: Domain, groups: Sequence[GroupLayout], block_hash: bytes) -> bool:
    """Whether every rank that stores a group's objects has committed this one."""
    ranks = domain.record.layout.ranks
    for group in groups:
        for rank in range(0, ranks, group.copies):
            # Most are not there at all, and a plain tuple is an equal key that is made faster.
            entry = domain.objects.get((rank, group.index, block_hash))  # type: ignore[call-overload]
            if entry is None or not entry.committed:
                return False
    return True
