"""What parts one cache domain from another, remembered per pair: lookups and engines ask again and
again, and a comparison goes through every field of both records."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from backhaul.protocols.checkpoint import DomainId
from backhaul.protocols.comparison import compare
from backhaul.transfer.entries import Domain

PAIRS_MAX = 4096
"""The pair asked for longest ago gives way."""
VALUE_MAX = 200
"""Characters of a value: people read it."""


class FirstDifference(NamedTuple):
    """Path of the first field that keeps bytes from being used, with both values, cut to
    ``VALUE_MAX``; all "" where the bytes can be converted."""

    field: str = ""
    ours: str = ""
    theirs: str = ""


class DomainDifferences:
    """Holds no record, so that what it keeps of domains that are gone is small. Not thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[DomainId, DomainId], FirstDifference] = OrderedDict()

    def first(self, ours: Domain, theirs: Domain) -> FirstDifference:
        """What keeps ``theirs`` bytes from being used in ``ours``."""
        pair = ours.id, theirs.id
        known = self._known.get(pair)
        if known is None:
            known = self._known[pair] = _first(ours, theirs)
            if len(self._known) > PAIRS_MAX:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(pair)
        return known


def _first(ours: Domain, theirs: Domain) -> FirstDifference:
    found = compare(ours.record, theirs.record)
    cause = next((one for one in found.causes if one.path == found.field), None)
    if cause is None:
        return FirstDifference()
    return FirstDifference(cause.path, cause.ours[:VALUE_MAX], cause.theirs[:VALUE_MAX])
