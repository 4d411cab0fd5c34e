"""Log lines that anybody who can reach a port could cause: one per so long, the others counted."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

LOG_INTERVAL_S = 10.0
"""One line per so long; the next one says how many came in between."""

_FROM_OUTSIDE = ("asyncio", "uvicorn.error", "grpc._cython.cygrpc")
"""Loggers of what serves connections: a line per malformed request, and a traceback per connection
for which no file is left."""
_UNREAD = "ExecuteBatchError raised in core"
"""How gRPC's line begins where a connection ended while an answer was being sent. It adds a
traceback of its own code, and there is nothing to mend: callers may leave."""
_KINDS_MAX = 64
"""Lines of these loggers told apart; the texts are a handful."""


class Repeats:
    """Which of many occurrences are told."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = -math.inf
        self._untold = 0

    def told(self) -> int | None:
        """One more occurrence: None where it is not to be told, else how many were not told
        before it."""
        now = self._clock()
        if now < self._next:
            self._untold += 1
            return None
        untold, self._untold = self._untold, 0
        self._next = now + LOG_INTERVAL_S
        return untold


class QuietLog:
    """Logs the first of many lines and counts the others."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._repeats = Repeats(clock)

    def warning(self, text: str, *args: object) -> None:
        """Log now, or count for the next line."""
        untold = self._repeats.told()
        if untold is not None:
            self._logger.warning(text + _more(untold), *args)


class QuietServers(logging.Filter):
    """On a handler: of each kind of line of the servers' own loggers, the first of many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], Repeats] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See ``logging.Filter``."""
        if record.name not in _FROM_OUTSIDE:
            return True
        if str(record.msg).startswith(_UNREAD):
            record.msg = "an answer had no reader any more"
            record.args = record.exc_info = record.exc_text = None
        kind = (record.name, str(record.msg).partition("\n")[0])
        if kind not in self._kinds and len(self._kinds) >= _KINDS_MAX:
            kind = (record.name, "")
        untold = self._kinds.setdefault(kind, Repeats(self._clock)).told()
        if untold:
            record.msg = str(record.msg) + _more(untold)
        return untold is not None


def _more(untold: int) -> str:
    return f" ({untold} more before)" if untold else ""
