"""Opens a store by its address. The scheme chooses the backend, which is imported only then."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qs, urlsplit

from backhaul.protocols.errors import ConfigError
from backhaul.transfer.base import Store
from backhaul.transfer.checksum import ChecksumFunction

if TYPE_CHECKING:
    from backhaul.transfer.backends.inprocess import InProcessPool

SCHEMES = {
    "backhaul": "backhaul://HOST:PORT",
    "inprocess": "inprocess://NAME?capacity=64MiB",
}
"""Scheme -> its form."""

_pools: dict[str, InProcessPool] = {}
_pools_lock = threading.Lock()


def open_store(
    uri: str, *, client_name: str = "", device_checksum: ChecksumFunction | None = None
) -> Store:
    """The store behind ``uri``. Does not contact it. Raises ``ConfigError``.

    ``device_checksum``: checksum of objects in device memory, where there are any."""
    try:
        parts = urlsplit(uri.strip())
        port = parts.port
    except ValueError as error:
        raise _malformed(uri, str(error)) from None
    if parts.scheme not in SCHEMES:
        raise _malformed(uri, f"unknown scheme {parts.scheme!r}")
    if not parts.hostname or parts.path.strip("/") or parts.fragment or parts.username:
        raise _malformed(uri, "it has another form")
    if parts.scheme == "inprocess":
        return _inprocess(uri, parts)
    if port is None or not port or parts.query:
        raise _malformed(uri, "it needs a host and a port, and no more")

    from backhaul.transfer.backends.embedded import EmbeddedStore

    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return EmbeddedStore(f"{host}:{port}", client_name=client_name, device_checksum=device_checksum)


def _inprocess(uri: str, parts: SplitResult) -> Store:
    """One pool per name and process: whoever opens it again shares it."""
    from backhaul.transfer.backends.inprocess import InProcessPool, InProcessStore
    from backhaul.transfer.daemon.settings import parse_bytes

    query = parse_qs(parts.query, keep_blank_values=True)
    if parts.port is not None or query.keys() - {"capacity"}:
        raise _malformed(uri, "the only parameter is capacity")
    capacity = parse_bytes(query.get("capacity", ["64MiB"])[-1])
    with _pools_lock:
        pool = _pools.get(parts.netloc)
        if pool is None:
            try:
                pool = _pools[parts.netloc] = InProcessPool(capacity)
            except (ValueError, MemoryError) as error:
                raise _malformed(uri, str(error)) from None
    if len(pool.memory) != capacity:
        raise _malformed(uri, f"{parts.netloc} is open with {len(pool.memory)} bytes")
    return InProcessStore(pool)


def _malformed(uri: str, why: str) -> ConfigError:
    return ConfigError(
        f"store address {uri!r} is no use: {why}; valid forms: " + ", ".join(SCHEMES.values())
    )
