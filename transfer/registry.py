"""Opens a store by its address."""

from __future__ import annotations

from urllib.parse import urlsplit

from backhaul.protocols.errors import ConfigError
from backhaul.transfer.base import Store


def open_store(uri: str, *, client_name: str = "") -> Store:
    """The store behind ``uri``. Does not contact it. Raises ``ConfigError`` for a bad address."""
    parts = urlsplit(uri)
    if parts.scheme == "backhaul" and parts.hostname and parts.port:
        from backhaul.transfer.backends.embedded import EmbeddedStore

        return EmbeddedStore(f"{parts.hostname}:{parts.port}", client_name=client_name)
    raise ConfigError(f"store address {uri!r} is malformed; valid: backhaul://HOST:PORT")
