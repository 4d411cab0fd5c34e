"""The order in which a trace's requests are sent when time is left out: wave by wave.

A request belongs to the wave after that of the request it follows, so a wave holds at most one
request of each line of a conversation, and everything that it may reuse was generated before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from backhaul.benchmarks.reuse.trace import Turn


def waves(turns: Iterable[Turn]) -> list[list[Turn]]:
    """The turns by depth, each wave in the order of arrival.

    Raises ``ValueError`` where a turn follows one that the trace does not have, or itself.
    """
    by_name = {turn.request: turn for turn in turns}
    depths: dict[str, int] = {}
    for turn in by_name.values():
        path: list[str] = []
        name = turn.request
        while name and name not in depths:
            if name not in by_name:
                raise ValueError(f"request {path[-1]!r} follows {name!r}, which is not there")
            if name in path:
                raise ValueError(f"request {name!r} follows itself")
            path.append(name)
            name = by_name[name].after
        depth = depths[name] if name else -1
        for name in reversed(path):
            depth += 1
            depths[name] = depth
    done: list[list[Turn]] = [[] for _ in range(max(depths.values(), default=-1) + 1)]
    for turn in sorted(by_name.values(), key=lambda turn: turn.arrival_s):
        done[depths[turn.request]].append(turn)
    return done
