"""vLLM plugin: makes ``BackhaulConnector`` known by name, which MultiConnector needs.

Runs in every vLLM process and may run several times, so it is light and idempotent.
"""

from __future__ import annotations

NAME = "BackhaulConnector"


def register() -> None:
    """Register the connector with vLLM's factory unless that was done already."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "backhaul.connector.connector", NAME)
