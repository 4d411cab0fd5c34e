"""vLLM plugin: makes ``BackhaulConnector`` known by name, which MultiConnector needs, and has U_end
recorded where vLLM renders.

Runs in every vLLM process and may run several times, so it is light and idempotent.
"""

from __future__ import annotations

import os
from typing import Any

from backhaul.connector import u_end_plugin

NAME = "BackhaulConnector"

PROGRESS_DELAY_ENV = "BACKHAUL_NIXL_PROGRESS_DELAY_US"
"""Opt-in for machines with few cores; see ``_calm_nixl``."""


def register() -> None:
    """Register the connector with vLLM's factory unless that was done already."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "backhaul.connector.connector", NAME)
    u_end_plugin.register()
    delay = os.environ.get(PROGRESS_DELAY_ENV, "")
    if delay.isdigit():
        _calm_nixl(int(delay))


def _calm_nixl(delay_us: int) -> None:
    """Let the progress threads of other connectors' NIXL agents sleep up to ``delay_us``
    microseconds between two looks (traffic wakes them earlier).

    NIXL's Python class fixes the delay at 0, so that every agent burns a core for as long as it
    lives: with an engine per core, half of what the engine should compute on.
    """
    try:
        import nixl._api as api
    except ImportError:
        return
    bindings: Any = api.nixlBind
    original = bindings.nixlAgent
    if getattr(original, "calmed", False):
        return

    def calmed(name: str, config: Any) -> Any:
        config.pthrDelay = max(int(config.pthrDelay), delay_us)
        return original(name, config)

    calmed.calmed = True  # type: ignore[attr-defined]
    bindings.nixlAgent = calmed
