"""Shows which services are up while they start."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.table import Table


class StartProgress:
    """Shows which services are up."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.on_change: Callable[[Table], Any] = lambda table: None
        self.on_ready: Callable[[str, float], Any] = lambda name, age_s: None
        self._state: dict[str, tuple[float, bool]] = {}

    def update(self, name: str, age_s: float, healthy: bool) -> None:
        """See ``processes.Progress``."""
        was_healthy = self._state.get(name, (0.0, False))[1]
        self._state[name] = (age_s, healthy)
        if healthy and not was_healthy:
            self.on_ready(name, age_s)
        self.on_change(self.table())

    def table(self) -> Table:
        """One row per service."""
        table = Table(box=None, show_header=False)
        for name, (age_s, healthy) in self._state.items():
            state = "[green]ready[/]" if healthy else "starting"
            table.add_row(name, state, f"{age_s:.0f} s")
        return table
