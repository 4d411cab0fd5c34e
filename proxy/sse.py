"""Framing of server-sent events, byte for byte."""

from __future__ import annotations

import re

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventSplitter:
    """Cuts a byte stream into events. What goes in comes out, in order and unchanged."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Complete events, each with its terminating blank line."""
        buffered = self._rest + data
        events, start = [], 0
        # A terminator may have begun in the last three bytes of what was buffered.
        search_from = max(0, len(self._rest) - 3)
        while end := _EVENT_END.search(buffered, max(search_from, start)):
            events.append(buffered[start : end.end()])
            start = end.end()
        self._rest = buffered[start:]
        return events

    def rest(self) -> bytes:
        """What is left at the end of the stream: an event that was never terminated."""
        rest, self._rest = self._rest, b""
        return rest


def data_of(event: bytes) -> bytes:
    """The event's data, its lines joined by newlines; empty where it has none."""
    lines = []
    for line in _LINE_END.split(event):
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
    return b"\n".join(lines)


def with_data(event: bytes, data: bytes) -> bytes:
    """The same event with other data, which must be one line; its other fields are kept."""
    kept = [
        line
        for line in _LINE_END.split(event)
        if line and not line.startswith(b"data:")
    ]  # fmt: skip
    return b"\n".join([*kept, b"data: " + data]) + b"\n\n"
