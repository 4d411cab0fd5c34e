"""Looks into a running embedded store without taking part: catalog calls, no NIXL, no lease."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from backhaul.protocols import store_pb2
from backhaul.protocols.checkpoint import DomainId
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import ConfigError, StoreRejected, StoreUnavailable
from backhaul.transfer.backends import wire
from backhaul.transfer.backends.rpc import PROTOCOL_VERSION, CatalogChannel
from backhaul.transfer.base import CheckpointInfo, DomainInfo, LookupResult, StoreStats
from backhaul.transfer.daemon.settings import PORT_MAX
from backhaul.transfer.listing import LISTING_MAX, ListPage, ListQuery


class StoreInspector:
    """One daemon, seen from outside. Every call raises ``StoreError`` where it gets no answer."""

    def __init__(self, uri: str, *, timeout_s: float) -> None:
        """Does not contact the store. Raises ``ConfigError`` for an address of another form."""
        self.target = catalog_target(uri)
        self._timeout_s = timeout_s
        self._channel = CatalogChannel(self.target)

    def hello(self) -> str:
        """Where the daemon's HTTP listens, as ``host:port``; see store.proto. Raises
        ``StoreRejected`` for another protocol."""
        request = store_pb2.HelloRequest(
            protocol_version=PROTOCOL_VERSION, client_name=f"inspector-{os.getpid()}"
        )
        return str(self._call("Hello", request).http_address)

    def stats(self) -> StoreStats:
        """Occupancy and counters."""
        return wire.store_stats(self._call("Stats", store_pb2.StatsRequest()))

    def domains(self) -> list[DomainInfo]:
        """Every known domain, the one used last first."""
        reply = self._call("ListDomains", store_pb2.ListDomainsRequest())
        return [wire.domain_info(message) for message in reply.domains]

    def page(self, query: ListQuery) -> ListPage:
        """One page, of at most ``LISTING_MAX`` checkpoints also where the limit is larger or 0."""
        request = store_pb2.ListCheckpointsRequest(
            domain_id=query.domain or "",
            domain_prefix=query.domain_prefix,
            kinds=[kind.value for kind in query.kinds],
            age_min_s=query.age_min_s,
            # On the wire 0 is "no upper end", so that the smallest positive number stands for 0.
            age_max_s=0.0 if query.age_max_s == float("inf") else query.age_max_s or 5e-324,
            visibilities=[visibility.value for visibility in query.visibilities],
            prefix_hashes=query.prefix_hashes,
            hits_min=query.hits_min,
            limit=query.limit,
            cursor=query.cursor,
        )
        reply = self._call("ListCheckpoints", request)
        infos = tuple(wire.checkpoint_info(message) for message in reply.checkpoints)
        return ListPage(infos, reply.next_cursor)

    def lookup(
        self,
        domain: DomainId,
        boundary_hashes: Sequence[bytes],
        *,
        above_tokens: int = 0,
        lease_s: float = 0.0,
        follow_up: bool = False,
        timeout_s: float = math.inf,
    ) -> LookupResult:
        """What a request's lookup would be answered now. Counts as no lookup and as no use; never
        a lease, whatever ``lease_s`` and ``follow_up`` say."""
        request = store_pb2.LookupRequest(
            domain_id=domain, boundary_hashes=boundary_hashes, above_tokens=above_tokens, peek=True
        )
        return wire.lookup_result(self._call("Lookup", request, timeout_s))

    def domain_record(self, domain: DomainId, *, timeout_s: float = math.inf) -> DomainRecord:
        """The record of a known domain. Raises ``StoreRejected`` for an unknown one."""
        for info in self.domains():
            if info.id == domain:
                return info.record
        raise StoreRejected(f"domain {domain} is unknown at {self.target}")

    def all(self, query: ListQuery) -> Iterator[CheckpointInfo]:
        """Every checkpoint that ``query`` selects, page by page; its limit is the page's size."""
        fields = {name: getattr(query, name) for name in query.__dataclass_fields__}
        fields["limit"] = query.limit or LISTING_MAX
        while True:
            page = self.page(ListQuery(**fields))
            yield from page.checkpoints
            if not page.next_cursor:
                return
            fields["cursor"] = page.next_cursor

    def close(self) -> None:
        """End the connection. Safe to call twice."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, method: str, request: Any, timeout_s: float = math.inf) -> Any:
        try:
            return self._channel.call(method, request, min(timeout_s, self._timeout_s))
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"no store answers at {self.target} ({_cause(error)}): is `backhaul store` running "
                "there, and is this its --listen address?"
            ) from None


def catalog_target(uri: str) -> str:
    """``host:port`` of ``backhaul://host:port``. Raises ``ConfigError``."""
    number = re.search(r":(\d+)/?$", uri.strip(), re.ASCII)
    if number and (len(number[1]) > 5 or int(number[1]) > PORT_MAX):
        raise ConfigError(f"store address {uri!r}: port {number[1][:20]} is above {PORT_MAX}")
    try:
        parts = urlsplit(uri.strip())
        port = parts.port
    except ValueError:
        port, parts = None, urlsplit("")
    plain = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
    if parts.scheme != "backhaul" or not parts.hostname or not port or not plain:
        raise ConfigError(f"store address {uri!r} is no use: write backhaul://HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}"


def _cause(error: StoreUnavailable) -> str:
    return str(error).rpartition(": ")[2] or "no answer"
