"""Which daemon a client talks to: Hello, the pool's peer, known domains, restarts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from backhaul.protocols import store_pb2
from backhaul.protocols.checkpoint import DomainId
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreRejected, StoreUnavailable
from backhaul.transfer.backends.rpc import PROTOCOL_VERSION, CatalogChannel, StoreTimeout
from backhaul.transfer.base import Member
from backhaul.transfer.entries import NotKnown
from backhaul.transfer.nixl_agent import NixlAgent


class Session(NamedTuple):
    """One life of the daemon, as it introduced itself."""

    instance_id: str
    agent_name: str
    agent_metadata: bytes
    pool_address: int


class SessionKeeper:
    """Keeps the session current. Thread-safe.

    ``doubt`` costs one Hello before the next call, so it is raised on any sign of a restart.
    """

    def __init__(self, channel: CatalogChannel, client_name: str) -> None:
        self._channel = channel
        self._client_name = client_name
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._doubted = False
        self._agent: NixlAgent | None = None
        self._peer: str | None = None
        """NIXL's name of the daemon that is loaded into the agent; another one after a restart."""
        self._domains: dict[DomainId, DomainRecord] = {}
        self._opened: dict[DomainId, str] = {}
        """Domain -> instance id of the daemon that knows it."""

    def attach(self, agent: NixlAgent) -> None:
        """From now on sessions come with a peer."""
        with self._lock:
            self._agent = agent

    @property
    def connected(self) -> str | None:
        """NIXL's name of the pool that is loaded into the agent now."""
        return self._peer

    @property
    def instance_id(self) -> str:
        """Of the daemon that was called last; empty before the first Hello."""
        session = self._session
        return session.instance_id if session is not None else ""

    def doubt(self, *, peer: bool = False) -> None:
        """The daemon may be another one by now; ``peer``: and its memory cannot be reached."""
        with self._lock:
            self._doubted = True
            if peer:
                self._drop_peer()

    def current(self, deadline: float) -> Session:
        """The session, after a Hello where that is due. Raises ``StoreError``."""
        with self._locked(deadline):
            if self._session is None or self._doubted:
                request = store_pb2.HelloRequest(
                    protocol_version=PROTOCOL_VERSION, client_name=self._client_name
                )
                reply = self._channel.call("Hello", request, remaining(deadline))
                self._session = Session(
                    reply.instance_id, reply.agent_name, reply.agent_metadata, reply.pool_address
                )
                self._doubted = False
            return self._session

    def peer(self, session: Session, deadline: float) -> str:
        """NIXL's name of the session's pool. Raises ``StoreUnavailable``."""
        with self._locked(deadline):
            if self._agent is None:
                raise StoreRejected("no memory is attached: call attach() before read or write")
            if self._peer != session.agent_name:
                self._drop_peer()
                self._agent.add_peer(session.agent_name, session.agent_metadata)
                self._peer = session.agent_name
            return self._peer

    def open_domain(self, record: DomainRecord, deadline: float) -> DomainId:
        """Make a domain known now, and remember it for every later daemon, also on failure."""
        with self._lock:
            self._domains[record.domain_id] = record
        self.call("OpenDomain", self._open_request(record), deadline)
        return record.domain_id

    def join(
        self, record: DomainRecord, member: Member, deadline: float
    ) -> store_pb2.OpenDomainReply:
        """As ``open_domain``, and say who uses it; the daemon's answer."""
        with self._lock:
            self._domains[record.domain_id] = record
        request = store_pb2.OpenDomainRequest(
            record=record.canonical(),
            member=member.name,
            loads=member.loads,
            decodes_only=member.decodes_only,
            converts=member.converts,
            publishes=member.publishes,
        )
        reply: store_pb2.OpenDomainReply = self.call("OpenDomain", request, deadline)
        return reply

    def call(
        self,
        method: str,
        request: Any,
        deadline: float,
        domain: DomainId | None = None,
        *,
        trips: bool = True,
    ) -> Any:
        """Call the catalog; with ``domain``, open it first where this daemon does not know it.
        ``trips``: see ``CatalogChannel.call``."""
        session = self.current(deadline)
        if domain is not None:
            self._ensure_open(domain, session, deadline)
        try:
            return self._channel.call(method, request, remaining(deadline), trips=trips)
        except NotKnown:
            self.doubt()
            if domain is None or domain not in self._domains:
                raise
        except StoreUnavailable as error:
            if trips or not isinstance(error, StoreTimeout):
                self.doubt()
            raise
        session = self.current(deadline)
        with self._lock:
            self._opened.pop(domain, None)
        self._ensure_open(domain, session, deadline)
        return self._channel.call(method, request, remaining(deadline))

    def _ensure_open(self, domain: DomainId, session: Session, deadline: float) -> None:
        with self._lock:
            record = self._domains.get(domain)
            if record is None or self._opened.get(domain) == session.instance_id:
                return
        self._channel.call("OpenDomain", self._open_request(record), remaining(deadline))
        with self._lock:
            self._opened[domain] = session.instance_id

    def _open_request(self, record: DomainRecord) -> store_pb2.OpenDomainRequest:
        return store_pb2.OpenDomainRequest(record=record.canonical(), client_name=self._client_name)

    def _drop_peer(self) -> None:
        if self._peer is not None and self._agent is not None:
            self._agent.remove_peer(self._peer)
        self._peer = None

    @contextlib.contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        """The lock, for as long as the deadline allows: another thread may be inside Hello."""
        if not self._lock.acquire(timeout=remaining(deadline)):
            raise StoreTimeout("another call still waits for the store's Hello")
        try:
            yield
        finally:
            self._lock.release()


def remaining(deadline: float) -> float:
    """Seconds left to ``deadline`` (``time.monotonic``); at least a millisecond, so that a call
    that is late fails by its own deadline."""
    return max(deadline - time.monotonic(), 0.001)
