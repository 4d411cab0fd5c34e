"""What some commands need that is no dependency of Backhaul's: it comes with vLLM."""

from __future__ import annotations

import importlib.util
import sys

from backhaul.protocols.errors import ConfigError

ENGINE = ("vllm",)
"""What a process that becomes an engine imports."""
TINY_MODEL = ("torch", "safetensors", "tokenizers")
"""What building the tiny model imports."""


def need(what: str, *packages: str) -> None:
    """Imports nothing. Raises ``ConfigError`` where a package is not there; ``what`` is what
    cannot be done without."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what} needs {', '.join(missing)}, which {sys.executable} lacks: install Backhaul "
            "into vLLM's environment (with its pip) and run it from there"
        )
