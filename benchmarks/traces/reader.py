"""Opens a trace of any known format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from backhaul.benchmarks.reuse.trace import Turn
from backhaul.benchmarks.traces.faults import Reason, Skips, TraceError
from backhaul.benchmarks.traces.mooncake import read_mooncake
from backhaul.benchmarks.traces.native import read_native
from backhaul.benchmarks.traces.records import Record, elements, read_document, read_lines

_READERS: dict[str, Callable[[Path, Skips], Iterator[Turn]]] = {
    "backhaul": read_native,
    "mooncake": read_mooncake,
}

_MARKS = (
    ("mooncake", {"hash_ids", "input_length"}),
    ("backhaul", {"request", "prompt", "output"}),
)
"""Format -> members that its first line or element has and no format after it."""

FORMATS = ("auto", *_READERS)

_HEAD_BYTES = 1 << 16
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Trace(Iterator[Turn]):
    """The turns of a trace, read while they are asked for.

    Attributes:
        format: the format that is read.
        skipped: lines or elements skipped so far, by reason.
    """

    def __init__(self, format: str, turns: Iterator[Turn], skips: Skips) -> None:
        self.format = format
        self._turns = turns
        self._skips = skips

    def __next__(self) -> Turn:
        """The next turn. Raises ``TraceError``, nothing else, for what the file holds."""
        return next(self._turns)

    @property
    def skipped(self) -> Counter[Reason]:
        return self._skips.counts


def open_trace(path: Path, format: str = "auto", *, strict: bool = True) -> Trace:
    """Open a trace for one reading.

    ``format``: one of ``FORMATS``; "auto" tells it from the first line or element. ``strict``: the
    first malformed line ends the reading; otherwise it is skipped and counted. Raises
    ``TraceError`` where the file cannot be read or its format is not known.
    """
    if format not in FORMATS:
        raise TraceError(f"format {format!r} is not known: give {', '.join(FORMATS)}")
    found = detect(path) if format == "auto" else format
    skips = Skips(path, strict=strict)
    return Trace(found, _READERS[found](path, skips), skips)


def detect(path: Path) -> str:
    """The format of a file. Raises ``TraceError``."""
    members = _first_members(path)
    for name, marks in _MARKS:
        if marks <= members:
            return name
    some = ", ".join(sorted(members)[:8]) or "none"
    raise TraceError(
        f"{path}: the format cannot be told from the first element (members: {some:.200}): "
        f"give --format with one of {', '.join(_READERS)}"
    )


def _first_members(path: Path) -> set[str]:
    first = next(read_lines(path, Skips(path, strict=True)), None)
    if first is None:
        raise TraceError(f"{path}: the file is empty")
    members = _members(first)
    if members is None:
        # No line of its own: the file may be one document over many lines.
        record = next(elements(path, read_document(path)), None)
        members = _members(record) if record else None
    return members or set()


def _members(record: Record) -> set[str] | None:
    try:
        return set(_MEMBERS.decode(record.data))
    except (msgspec.DecodeError, RecursionError):
        return None
