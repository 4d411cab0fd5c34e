"""The daemon's settings, and how people write sizes and addresses. Imports nothing heavy: the
command line reads the defaults from here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from backhaul.protocols.errors import ConfigError
from backhaul.transfer.strategies import DEFAULT, Strategies

MIB = 1 << 20
CAPACITY_MIN_BYTES = MIB
"""Below this not even one state of a toy model fits; most likely a unit was forgotten."""

_UNITS = {"": 1, "B": 1} | {
    unit: 1024**power
    for power, letter in enumerate("KMGT", start=1)
    for unit in (letter, f"{letter}IB")
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", re.ASCII)
SIZE_MAX_BYTES = 1 << 60
"""More is a slip of the keyboard."""
PORT_MAX = 65_535
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that stand for every address of a machine, and where it reaches itself then."""


class Address(NamedTuple):
    """Where to listen. Port 0 lets the system choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def seen_from(self, host: str) -> Address:
        """Where a client that reaches this machine as ``host`` finds it: who listens everywhere is
        there, too."""
        return Address(host, self.port) if self.host in EVERYWHERE else self

    @property
    def from_here(self) -> Address:
        """Where a client on this machine finds it."""
        return self.seen_from(EVERYWHERE.get(self.host, ""))


_LISTEN = Address("127.0.0.1", 7400)
_HTTP = Address("127.0.0.1", 7401)


@dataclass(frozen=True, kw_only=True)
class DaemonSettings:
    """How one store daemon runs.

    Attributes:
        listen: address of the catalog (gRPC).
        http: address of /healthz and /metrics.
        capacity_bytes: size of the pool.
        publication_ttl_s: life of a publication without a sign of its writer, seconds.
        lease_max_s: longest lease, seconds.
        strategies: how it evicts and admits.
        prefault: touch the whole pool at start, so that memory that is not there shows at start.
        grace_s: how long running calls may take to end at shutdown, seconds.
    """

    listen: Address = _LISTEN
    http: Address = _HTTP
    capacity_bytes: int = 4 << 30
    publication_ttl_s: float = 60.0
    lease_max_s: float = 300.0
    strategies: Strategies = DEFAULT
    prefault: bool = False
    grace_s: float = 2.0

    def __post_init__(self) -> None:
        if self.capacity_bytes < CAPACITY_MIN_BYTES:
            raise ConfigError(
                f"capacity is {self.capacity_bytes} bytes: at least "
                f"{format_bytes(CAPACITY_MIN_BYTES)} is needed"
            )
        for name in ("publication_ttl_s", "lease_max_s"):
            value = getattr(self, name)
            if not 0 < value <= 86_400:
                raise ConfigError(f"{name} is {value}: give seconds above 0 and up to 86400")


def parse_bytes(text: str) -> int:
    """Bytes of e.g. `512MiB`, `8GiB`, `8G` (the same) or `1048576`."""
    return int(parse_byte_rate(text))


def parse_byte_rate(text: str) -> float:
    """As ``parse_bytes``, of bytes per something: parts of a byte count."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"size {text!r} is unreadable: write e.g. 512MiB, 8GiB or plain bytes")
    nbytes: float = (float if "." in match[1] else int)(match[1]) * factor
    if nbytes > SIZE_MAX_BYTES:
        raise ConfigError(f"size {text!r} is unreadable: it is more than any machine has")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """The shortest exact or one-decimal form in binary units."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1024)):
        if nbytes >= size:
            return f"{nbytes / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes} bytes"


def parse_address(text: str) -> Address:
    """An address of the form `host:port`, IPv6 hosts in brackets."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = colon and port.isascii() and port.isdigit()
    if number and (len(port) > 5 or int(port) > PORT_MAX):
        raise ConfigError(f"address {text!r}: port {port[:20]} is above {PORT_MAX}")
    if not number or not host:
        raise ConfigError(f"address {text!r} is unreadable: write host:port, e.g. 127.0.0.1:7400")
    return Address(host, int(port))
