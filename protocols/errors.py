"""The errors of Backhaul.

BackhaulError
├── ConfigError            a bad option or command line; raised at start, never later
├── UnsupportedError       this engine cannot take part (layout, vLLM version); raised at start
└── StoreError             operational: costs a cache miss, never a request
    ├── StoreUnavailable   not reachable, restarted, or too slow for the caller's deadline
    │   └── LookupUnanswered  as this, of a lookup that may have been granted a lease all the same
    ├── StoreRejected      the store understood and refused (bad argument, unknown lease)
    │   └── StoreDenied    this client may not: refused by what guards the store
    └── StoreFull          no space could be freed for a reservation
"""

from __future__ import annotations


class BackhaulError(Exception):
    """Base of everything Backhaul raises on purpose."""


class ConfigError(BackhaulError):
    """An option is unknown or has a wrong value; the message names it and the valid ones."""


class UnsupportedError(BackhaulError):
    """The engine's layout or vLLM's version lacks something that Backhaul needs; the message
    names it."""


class StoreError(BackhaulError):
    """The store could not do what was asked. Callers turn it into a cache miss and count it."""


class StoreUnavailable(StoreError):
    """The store is down, was restarted, or did not answer within the caller's deadline."""


class LookupUnanswered(StoreUnavailable):
    """A lookup's caller gave up; the answer may have been on its way. ``lease``: the id of what it
    may have been granted, to be released: nobody else knows of it."""

    def __init__(self, message: str, lease: str = "") -> None:
        super().__init__(message, lease)
        self.lease = lease

    def __str__(self) -> str:
        return str(self.args[0])


class StoreRejected(StoreError):
    """The store refused: unknown domain, expired lease or publication, malformed argument."""


class StoreDenied(StoreRejected):
    """This client has no permission, or did not prove who it is."""


class StoreFull(StoreError):
    """A reservation does not fit even after evicting everything that may be evicted."""
