"""Eviction by the prefill work that a checkpoint saves and the bytes that it takes.

Work is counted from the next shallower checkpoint of the same prefix, since that is what a request
would fall back to; bytes are those that would be free. Attention blocks are shared, so a checkpoint
that others extend costs its state only::

    efficiency = work(parent's boundary -> boundary) / (state + attention blocks beyond the parent)

Both strategies keep the rule of users' turns: the end of a user's message, on which a rewritten
tool loop falls back, is worth no less than what that loop left behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backhaul.transfer.entries import Checkpoint
from backhaul.transfer.eviction import recency
from backhaul.transfer.eviction_columns import ColumnQueue, Columns, Flags, Floats, scaled

_IDLE_MIN_S = 1e-3
"""Two uses within a scheduler pass are at the same time."""


class SavedWorkPerByte:
    """Least saved work per byte and second of idleness first.

    How often a checkpoint will be used is not known; the reciprocal of the time since its last use
    stands for it, without which a large one of a conversation that is over would never go. Where
    all are equally efficient, this is least recently used first.
    """

    def order(self, checkpoints: Sequence[Checkpoint], now: float) -> list[Checkpoint]:
        """See ``EvictionStrategy``."""
        worth = {one: efficiency(one) / max(now - one.used_at, _IDLE_MIN_S) for one in checkpoints}
        worth = with_user_turns(worth)
        return sorted(checkpoints, key=lambda one: (worth[one], recency(one)))

    def queue(self) -> ColumnQueue:
        """See ``EvictionStrategy``."""
        return ColumnQueue(self.worth, efficiency, recency)

    def worth(self, columns: Columns, now: float) -> tuple[Floats, Flags]:
        """The same over columns."""
        worth = columns.efficiency / np.maximum(now - columns.used_at, _IDLE_MIN_S)
        return worth, np.zeros_like(columns.shared)


class Marconi:
    """The utility of Marconi (arXiv 2411.19379, section 4.2): ``recency + alpha * efficiency``.

    Both are scaled to 0 ... 1 over the candidates; with ``alpha`` 0 this is least recently used
    first. Those that several others extend go last: there they are no candidates. Other than there,
    ``alpha`` is given and not tuned by replaying traffic, and a use also refreshes those that the
    used one extends.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha

    def order(self, checkpoints: Sequence[Checkpoint], now: float) -> list[Checkpoint]:
        """See ``EvictionStrategy``."""
        recent = _scaled({one: one.used_at for one in checkpoints})
        efficient = _scaled({one: efficiency(one) for one in checkpoints})
        worth = {one: recent[one] + self.alpha * efficient[one] for one in checkpoints}
        worth = with_user_turns(worth)
        return sorted(
            checkpoints, key=lambda one: (len(one.children) > 1, worth[one], recency(one))
        )

    def queue(self) -> ColumnQueue:
        """See ``EvictionStrategy``."""
        return ColumnQueue(self.worth, efficiency, recency)

    def worth(self, columns: Columns, now: float) -> tuple[Floats, Flags]:
        """The same over columns; what several others extend goes last."""
        worth = scaled(columns.used_at) + self.alpha * scaled(columns.efficiency)
        return worth, columns.shared


def efficiency(checkpoint: Checkpoint) -> float:
    """FLOPs saved per byte that would be free without it; at least one byte."""
    parent = checkpoint.parent.boundary if checkpoint.parent else 0
    work = checkpoint.domain.work.saved_work(parent, checkpoint.boundary)
    return work / max(freed_bytes(checkpoint), 1.0)


def freed_bytes(checkpoint: Checkpoint) -> float:
    """Bytes that evicting it would free, its attention taken as evenly spread over its tokens."""
    if checkpoint.children:
        return checkpoint.state_bytes
    parent = checkpoint.parent.boundary if checkpoint.parent else 0
    own = (checkpoint.boundary - parent) / checkpoint.boundary
    return checkpoint.state_bytes + own * checkpoint.attention_bytes


def with_user_turns(worth: dict[Checkpoint, float]) -> dict[Checkpoint, float]:
    """Raise the worth of each users' turn to the highest of what extends it, up to the next users'
    turn."""
    raised = dict(worth)
    above: dict[Checkpoint, float] = {}
    for one in sorted(worth, key=lambda one: -one.boundary):
        if one.user_turn:
            raised[one] = max(raised[one], above.get(one, 0.0))
        parent = one.parent
        # What is leased is no candidate, but a users' turn stands before its loop all the same.
        while parent is not None and parent not in worth and not parent.user_turn:
            parent = parent.parent
        if parent in worth and not one.user_turn:
            best = max(raised[one], above.get(one, 0.0))
            above[parent] = max(above.get(parent, 0.0), best)
    return raised


def _scaled(values: dict[Checkpoint, float]) -> dict[Checkpoint, float]:
    """To 0 ... 1; all 0 where all are equal."""
    low, high = min(values.values(), default=0.0), max(values.values(), default=0.0)
    span = high - low
    return {one: (value - low) / span if span > 0 else 0.0 for one, value in values.items()}
