"""How one proxy runs. Imports nothing heavy: the command line reads the defaults from here."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from urllib.parse import urlsplit

from backhaul.protocols.errors import ConfigError


class Policy(enum.StrEnum):
    """How a worker is chosen; see ``routing``."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    PREFIX_STICKY = "prefix-sticky"


@dataclass(frozen=True, kw_only=True)
class ProxySettings:
    """Raises ``ConfigError`` for values that make no sense.

    Attributes:
        prefill: base URLs of the prefill workers.
        decode: base URLs of the decode workers.
        prefill_policy: sticky by default: the worker that computed a history has it locally.
        decode_policy: decode time is what varies most between requests.
        retries: how many further workers are tried per leg.
        connect_timeout_s: longest wait for a connection to a worker.
        prefill_timeout_s: longest prefill leg, all its attempts together; decode computes the
            prompt itself after that. Twice ``first_token_timeout_s``: with less than that, the
            retry after a silent worker has no time of its own.
        first_token_timeout_s: longest wait for the first token of an attempt: of the prefill leg's
            answer, and of a stream's first event with content. Then another worker is tried.
        request_timeout_s: longest request, from its arrival to its last byte.
        stall_timeout_s: longest silence inside a stream that has begun.
        health_interval_s: pause between two looks at a worker's ``/health``.
        health_timeout_s: longest wait for ``/health``.
        body_bytes_max: longest request body.
        grace_s: how long running requests may take to end at shutdown.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    prefill_policy: Policy = Policy.PREFIX_STICKY
    decode_policy: Policy = Policy.LEAST_LOADED
    retries: int = 1
    connect_timeout_s: float = 5.0
    prefill_timeout_s: float = 240.0
    first_token_timeout_s: float = 120.0
    request_timeout_s: float = 1800.0
    stall_timeout_s: float = 120.0
    health_interval_s: float = 2.0
    health_timeout_s: float = 5.0
    body_bytes_max: int = 64 << 20
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            if not urls:
                raise ConfigError(f"no {role} worker: give --{role} http://HOST:PORT")
            if len(set(urls)) != len(urls):
                raise ConfigError(f"a {role} worker is given twice in {', '.join(urls)}")
        if not 0 <= self.retries <= 16:
            raise ConfigError(f"retries is {self.retries}: give 0 ... 16")
        for name in ("connect", "prefill", "first_token", "request", "stall", "health"):
            value = getattr(self, f"{name}_timeout_s")
            if not 0 < value <= 86_400:
                name = name.replace("_", " ")
                raise ConfigError(f"{name} timeout is {value}: give seconds above 0 up to 86400")
        if not 0 < self.health_interval_s <= 86_400:
            raise ConfigError(
                f"health interval is {self.health_interval_s}: give seconds above 0 up to 86400"
            )
        if not 0 <= self.grace_s <= 86_400:
            raise ConfigError(f"grace is {self.grace_s}: give 0 ... 86400 seconds")

    def remarks(self) -> list[str]:
        """What is allowed and hardly meant; each one line."""
        silent, limit = self.first_token_timeout_s, self.prefill_timeout_s
        if self.retries and len(self.prefill) > 1 and limit <= silent:
            return [
                f"no other prefill worker is tried after a silent one: the prefill timeout "
                f"({limit:g} s) ends the leg before the first-token timeout ({silent:g} s); give "
                f"--first-token-timeout below --prefill-timeout"
            ]
        return []


def parse_urls(texts: list[str]) -> tuple[str, ...]:
    """Worker addresses, each item one or several with commas, without trailing slashes.

    Raises ``ConfigError`` for what is not ``http(s)://host[:port][/path]``.
    """
    urls = []
    for text in (part.strip() for item in texts for part in item.split(",")):
        try:
            parts = urlsplit(text)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment:
            raise ConfigError(
                f"worker address {text!r} is unreadable: write http://HOST:PORT, "
                "e.g. http://10.0.0.7:8000"
            )
        urls.append(text.rstrip("/"))
    return tuple(urls)
