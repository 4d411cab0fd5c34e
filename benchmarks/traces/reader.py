"""Opens a trace of any known format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from backhaul.benchmarks.reuse.trace import Turn
from backhaul.benchmarks.traces.dialogue import TextRules
from backhaul.benchmarks.traces.faults import Reason, Skips, TraceError
from backhaul.benchmarks.traces.lmcache import read_lmcache
from backhaul.benchmarks.traces.messages import read_messages
from backhaul.benchmarks.traces.mooncake import read_mooncake
from backhaul.benchmarks.traces.native import read_native
from backhaul.benchmarks.traces.records import (
    document_elements,
    elements,
    is_document,
    members,
    read_lines,
)
from backhaul.benchmarks.traces.swe_agent import read_swe_agent
from backhaul.benchmarks.traces.text import CharacterEstimate

_READERS: dict[str, Callable[[Path, Skips, TextRules], Iterator[Turn]]] = {
    "backhaul": lambda path, skips, rules: read_native(path, skips),
    "mooncake": lambda path, skips, rules: read_mooncake(path, skips),
    "lmcache": read_lmcache,
    "messages": read_messages,
    "swe-agent": read_swe_agent,
}

_MARKS = (
    ("mooncake", {"hash_ids", "input_length"}),
    ("backhaul", {"request", "prompt", "output"}),
    ("lmcache", {"session_id", "input", "output"}),
    ("swe-agent", {"history"}),
    ("messages", {"messages"}),
    ("messages", {"traj"}),
    ("messages", {"role"}),
)
"""Format -> members that its first line or element has and no format before it. ``role``: the
element is a message of an array that is one dialogue."""

FORMATS = ("auto", *_READERS)


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


def open_trace(
    path: Path, format: str = "auto", *, strict: bool = True, rules: TextRules | None = None
) -> Trace:
    """Open a trace for one reading.

    ``format``: one of ``FORMATS``; "auto" tells it from the first line or element. ``strict``: the
    first malformed line ends the reading; otherwise it is skipped and counted. ``rules``: how text
    becomes prompts, for formats that hold text; default: four characters a token. Raises
    ``TraceError`` where the file cannot be read or its format is not known.
    """
    if format not in FORMATS:
        raise TraceError(f"format {format!r} is not known: give {', '.join(FORMATS)}")
    found = detect(path) if format == "auto" else format
    skips = Skips(path, strict=strict)
    rules = rules or TextRules(tokens=CharacterEstimate())
    return Trace(found, _READERS[found](path, skips, rules), skips)


def detect(path: Path) -> str:
    """The format of a file. Raises ``TraceError``."""
    found = _first_members(path)
    for name, marks in _MARKS:
        if marks <= found:
            return name
    some = ", ".join(sorted(found)[:8]) or "none"
    raise TraceError(
        f"{path}: the format cannot be told from the first element (members: {some:.200}): "
        f"give --format with one of {', '.join(_READERS)}"
    )


def _first_members(path: Path) -> set[str]:
    if is_document(path):
        first = next(document_elements(path), None)
    else:
        first = next(read_lines(path, Skips(path, strict=True)), None)
    for _depth in range(2):  # an array of dialogues, each of which may be an array of messages
        if first is None:
            return set()
        if found := members(first):
            return found
        first = next(iter(elements(first)), None)
    return members(first) if first else set()
