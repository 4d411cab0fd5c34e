"""Engines that share one store."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from harness.engine import SimEngine
from harness.stored import check_store

_names = count(1)


_running: list[SimEngine] = []
"""Engines of every pair: two pairs may be opened on one store."""


@dataclass
class Pair:
    """Engines that share one store."""

    uri: str
    engines: list[SimEngine] = field(default_factory=list)

    def engine(self, **keywords: Any) -> SimEngine:
        """One more engine."""
        engine = SimEngine(self.uri, **keywords)
        self.engines.append(engine)
        _running.append(engine)
        return engine

    def check_idle(self) -> None:
        """Everything is given back, and what is stored is right."""
        for engine in self.engines:
            engine.check_idle()
        self.checkpoints()

    def checkpoints(self) -> int:
        """Read the store back; the number of checkpoints in it."""
        connected = [e for e in self.engines if e.scheduler.connector is not None]
        return check_store(self.uri, connected[0], _running) if connected else 0

    def close(self) -> None:
        """Stop every engine."""
        for engine in self.engines:
            engine.close()
            _running.remove(engine)


def new_uri(capacity: str = "64MiB") -> str:
    """The address of a store of its own."""
    return f"inprocess://sim-{next(_names)}?capacity={capacity}"
