"""The last few things that kept checkpoints from being used, for people who look right now."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from backhaul.protocols.checkpoint import CheckpointKind, DomainId

EVENTS_MAX = 50
"""More than fits on a screen; what happened before is in the counters."""


class RecentEvent(NamedTuple):
    """What happened to which checkpoint, and why. ``at``: seconds on the index's clock;
    ``times``: how often in a row."""

    at: float
    what: str
    reason: str
    domain: DomainId
    boundary: int
    kinds: tuple[CheckpointKind, ...]
    times: int = 1


class RecentEvents:
    """Bounded, newest first when iterated. Repeats of the newest event only count."""

    def __init__(self) -> None:
        self._events: deque[RecentEvent] = deque(maxlen=EVENTS_MAX)

    def note(
        self,
        now: float,
        what: str,
        reason: str,
        domain: DomainId,
        boundary: int = 0,
        kinds: Sequence[CheckpointKind] = (),
    ) -> None:
        """Remember one event at ``now``."""
        event = RecentEvent(now, what, str(reason), domain, boundary, tuple(kinds))
        if self._events and self._events[-1][1:-1] == event[1:-1]:
            event = event._replace(times=self._events.pop().times + 1)
        self._events.append(event)

    def newest_first(self) -> list[RecentEvent]:
        """All that is remembered."""
        return list(reversed(self._events))
