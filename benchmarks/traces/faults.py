"""What a malformed trace raises, or is counted under where malformed lines are skipped."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from pathlib import Path

from backhaul.protocols.errors import ConfigError

VALUE_CHARACTERS_MAX = 40
"""Of a wrong value in an error: the message stays one line whatever the file holds."""


class Reason(StrEnum):
    """Why a line, or a document's element, is no turn of a trace."""

    TOO_LONG = "too_long"
    NOT_JSON = "not_json"
    WRONG_TYPE = "wrong_type"
    MISSING = "missing"
    OUT_OF_RANGE = "out_of_range"
    INCONSISTENT = "inconsistent"
    UNKNOWN_REQUEST = "unknown_request"


class TraceError(ConfigError):
    """A trace cannot be read: the file, or a line of it. One line that says which."""


class LineFault(Exception):
    """What is wrong with one line. Readers hand it to ``Skips``; it never leaves them."""

    def __init__(self, reason: Reason, field: str, value: object, problem: str) -> None:
        super().__init__(f"{field or 'line'} {shown(value)}: {problem}")
        self.reason = reason


class Skips:
    """Decides what a fault means: the end, or one more line that was skipped.

    Attributes:
        strict: whether the first fault ends the reading.
        counts: lines skipped so far, by reason.
    """

    def __init__(self, path: Path, *, strict: bool) -> None:
        self.path = path
        self.strict = strict
        self.counts: Counter[Reason] = Counter()

    def take(self, line: int, fault: LineFault) -> None:
        """Count the fault. Raises ``TraceError`` where reading is strict."""
        if self.strict:
            raise TraceError(f"{self.path}:{line}: {fault}") from None
        self.counts[fault.reason] += 1


def shown(value: object) -> str:
    """A value on one line, cut."""
    if isinstance(value, str | bytes):
        value = value[: 2 * VALUE_CHARACTERS_MAX]
    elif isinstance(value, dict | list):
        return f"<{len(value)} {'members' if isinstance(value, dict) else 'elements'}>"
    elif isinstance(value, int) and value.bit_length() > 128:
        return f"<integer of {value.bit_length()} bits>"
    text = repr(value)
    return text if len(text) <= VALUE_CHARACTERS_MAX else text[: VALUE_CHARACTERS_MAX - 3] + "..."
