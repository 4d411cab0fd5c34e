"""The only package that imports vLLM: BackhaulConnector and its two halves.

``BackhaulConnector`` is resolved on first use, so that the pure modules here (endpoints, jobs,
regions) can be imported where vLLM is absent.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BackhaulConnector"]


def __getattr__(name: str) -> Any:
    if name == "BackhaulConnector":
        from backhaul.connector.connector import BackhaulConnector

        return BackhaulConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
