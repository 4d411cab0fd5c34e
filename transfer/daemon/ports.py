"""Listening sockets, and what to tell the user where there can be none."""

from __future__ import annotations

import os
import socket

from backhaul.protocols.errors import ConfigError
from backhaul.transfer.daemon.settings import Address


def listen_on(address: Address, option: str) -> socket.socket:
    """A listening socket. Raises ``ConfigError``, naming ``option``, where the address is taken
    or not ours."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server(tuple(address), family=family)
    except OSError as error:
        # The standard library adds the address to the system's words; resolvers have their own.
        words = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"cannot listen on {address}: {words}; give another {option}") from None
