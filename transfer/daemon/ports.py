"""Listening sockets, and what to tell the user where there can be none."""

from __future__ import annotations

import os
import socket

from backhaul.protocols.errors import ConfigError
from backhaul.transfer.daemon.settings import Address

_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
"""Accepted connections inherit it. A client whose machine or network went away while nothing was on
its way to it is noticed within two minutes; servers of HTTP wait for the rest of a request for
ever. Bytes that it does not acknowledge are given up by the system after a quarter of an hour."""


def listen_on(address: Address, option: str) -> socket.socket:
    """A listening socket. Raises ``ConfigError``, naming ``option``, where the address is taken
    or not ours."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server(tuple(address), family=family)
    except OSError as error:
        # The standard library adds the address to the system's words, and to resolvers' own.
        words = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        words = (words or "").partition(" (while")[0]
        raise ConfigError(f"cannot listen on {address}: {words}; give another {option}") from None
    for level, name, value in _KEEPALIVE:
        listener.setsockopt(level, name, value)
    return listener
