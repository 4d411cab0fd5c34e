"""What a check of the doctor answers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Level(enum.StrEnum):
    """How bad."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """One check's answer. ``todo``: the one thing to do, "" where nothing is."""

    check: str
    level: Level
    says: str
    todo: str = ""


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level of all."""
    order = list(Level)
    return max((one.level for one in findings), key=order.index, default=Level.OK)
