"""How people write times on the command line, and how times and sizes are shown to them."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

from backhaul.protocols.errors import ConfigError

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AGE_MAX_S = 10_000 * 366 * 86400.0
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)(ms|s|m|h|d)?", re.ASCII)


def parse_duration(text: str, option: str) -> float:
    """Seconds of e.g. `90`, `1.5s`, `10m`, `2h30m`. Raises ``ConfigError``, naming ``option``."""
    parts = _PART.findall(text.strip().lower())
    whole = "".join(number + unit for number, unit in parts) == text.strip().lower()
    if not parts or not whole or (len(parts) > 1 and not all(unit for _, unit in parts)):
        raise ConfigError(f"{option} {text!r} is no time: write e.g. 90s, 10m, 2h30m or 1d")
    return sum(float(number) * _UNITS_S[unit or "s"] for number, unit in parts)


def format_age(seconds: float) -> str:
    """Two units at most: `0.4 s`, `12 s`, `3 m 20 s`, `2 h 5 m`, `3 d 4 h`; `-` for what is no
    time (not finite, or over ten thousand years)."""
    if not seconds < _AGE_MAX_S or math.isinf(seconds):
        return "-"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    for unit, below, size in (("d", "h", 86400), ("h", "m", 3600), ("m", "s", 60)):
        if whole >= size:
            first, rest = divmod(whole, size)
            second = rest // {"h": 3600, "m": 60, "s": 1}[below]
            return f"{first} {unit}" + (f" {second} {below}" if second else "")
    return f"{whole} s"


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
