"""Shows which services are up while they start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from backhaul.deploy.console import Console

LINE_EVERY_S = 15.0


def say_stopping() -> None:
    """For ``Cluster``'s ``on_interrupt``: engines take some seconds to end."""
    with suppress(OSError):  # whoever read it may have gone, and must not be waited for
        print("backhaul: stopping ...", file=sys.stderr, flush=True)


class StartProgress:
    """Shows which services are up: a table that changes in place (``on_change``), or a line now
    and then where nothing can change in place (``on_line``)."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.on_change: Callable[[Table], Any] = lambda table: None
        self.on_line: Callable[[str], Any] = lambda line: None
        self._state: dict[str, tuple[float, bool]] = {}
        self._line_at = self.started + LINE_EVERY_S

    @contextmanager
    def shown(self, console: Console) -> Iterator[None]:
        """Show it there for the length of the block, in the way that the console allows."""
        if not console.is_terminal:
            self.on_line = console.print
            yield
            return
        with Live(self.table(), console=console, refresh_per_second=4) as live:
            self.on_change = live.update
            yield

    def update(self, name: str, age_s: float, healthy: bool) -> None:
        """See ``processes.Progress``."""
        was_healthy = self._state.get(name, (0.0, False))[1]
        self._state[name] = (age_s, healthy)
        if healthy and not was_healthy:
            self.on_line(f"  {name} ready after {age_s:.0f} s")
        elif (now := time.monotonic()) >= self._line_at:
            self._line_at = now + LINE_EVERY_S
            waiting = [n for n, (_, ready) in self._state.items() if not ready]
            self.on_line(f"  waiting for {', '.join(waiting)}: {age_s:.0f} s")
        self.on_change(self.table())

    def table(self) -> Table:
        """One row per service."""
        table = Table(box=None, show_header=False)
        for name, (age_s, healthy) in self._state.items():
            state = Text("ready", "green") if healthy else "starting"
            table.add_row(name, state, f"{age_s:.0f} s")
        return table
