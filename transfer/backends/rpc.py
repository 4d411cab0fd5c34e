"""Calls of the catalog: deadlines, errors, and a breaker for a daemon that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from backhaul.protocols import store_pb2_grpc
from backhaul.protocols.errors import (
    StoreDenied,
    StoreError,
    StoreFull,
    StoreRejected,
    StoreUnavailable,
)
from backhaul.transfer.entries import NotKnown

PROTOCOL_VERSION = 1
"""Version of store.proto's meaning that this client speaks."""
MESSAGE_BYTES_MAX = 64 << 20
"""As the daemon's own limit."""
BACKOFF_S = (0.2, 5.0)
"""First and longest time without calls after one ran out of time."""
TRIP_TIMEOUT_MIN_S = 0.05
"""A call that was given less says more about its caller than about the daemon."""
RECONNECT_MS = (100, 2_000)
"""First and longest pause between connection attempts: a restarted daemon is soon back in use,
which gRPC's own two minutes would not allow."""


class StoreTimeout(StoreUnavailable):
    """No answer within the deadline, or none is expected (see ``Breaker``)."""


class StoreUnanswered(StoreTimeout):
    """The call was sent and given up: it may have been, or be, carried out."""


ERRORS: dict[grpc.StatusCode, type[StoreError]] = {
    grpc.StatusCode.CANCELLED: StoreUnavailable,
    grpc.StatusCode.UNKNOWN: StoreUnavailable,
    grpc.StatusCode.INVALID_ARGUMENT: StoreRejected,
    grpc.StatusCode.DEADLINE_EXCEEDED: StoreUnanswered,
    grpc.StatusCode.NOT_FOUND: NotKnown,
    grpc.StatusCode.ALREADY_EXISTS: StoreRejected,
    grpc.StatusCode.PERMISSION_DENIED: StoreDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: StoreFull,
    grpc.StatusCode.FAILED_PRECONDITION: StoreRejected,
    grpc.StatusCode.ABORTED: StoreRejected,
    grpc.StatusCode.OUT_OF_RANGE: StoreRejected,
    grpc.StatusCode.UNIMPLEMENTED: StoreRejected,
    grpc.StatusCode.INTERNAL: StoreUnavailable,
    grpc.StatusCode.UNAVAILABLE: StoreUnavailable,
    grpc.StatusCode.DATA_LOSS: StoreUnavailable,
    grpc.StatusCode.UNAUTHENTICATED: StoreDenied,
}
"""What gRPC reports -> what callers see. Total over the codes of a failed call."""


class Breaker:
    """Fails calls at once while the daemon is known not to answer.

    A call that runs out of time opens it for a while; then one call may try, and the others still
    fail at once. Success closes it, another time-out opens it for twice as long. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._backoff_s = 0.0
        self._closed_until = 0.0
        self._probing_until = 0.0

    def enter(self, timeout_s: float) -> None:
        """Ask to call. Raises ``StoreTimeout`` if none may now."""
        with self._lock:
            if not self._backoff_s:
                return
            now = self._clock()
            wait = max(self._closed_until, self._probing_until) - now
            if wait > 0:
                raise StoreTimeout(f"the store did not answer; next attempt in {wait:.1f} s")
            self._probing_until = now + timeout_s

    def succeeded(self) -> None:
        """The daemon answered, be it with an error."""
        with self._lock:
            self._backoff_s = self._probing_until = 0.0

    def timed_out(self, started: float) -> None:
        """A call begun at ``started`` ran out of time."""
        with self._lock:
            self._probing_until = 0.0
            if started < self._closed_until and self._backoff_s:
                return  # begun before it opened: says nothing new
            self._backoff_s = min(max(self._backoff_s * 2, BACKOFF_S[0]), BACKOFF_S[1])
            self._closed_until = self._clock() + self._backoff_s


class CatalogChannel:
    """The connection to one daemon, made at the first call and remade by gRPC."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.breaker = Breaker()
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stub: Any = None
        self._closed = False

    def call(self, method: str, request: Any, timeout_s: float, *, trips: bool = True) -> Any:
        """The reply. Blocks at most ``timeout_s`` seconds. Raises ``StoreError``.

        ``trips``: a time-out opens the breaker; not of a call that is slow by its nature.
        """
        stub = self._connected()
        self.breaker.enter(timeout_s)
        started = time.monotonic()
        try:
            reply = getattr(stub, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._error(method, error, started, timeout_s, trips=trips) from None
        except ValueError as error:  # the channel was closed meanwhile
            raise StoreUnavailable(f"{method}: {error}") from None
        self.breaker.succeeded()
        return reply

    def close(self) -> None:
        """End running calls and refuse new ones. Safe to call twice."""
        with self._lock:
            channel, self._channel, self._stub, self._closed = self._channel, None, None, True
        if channel is not None:
            channel.close()

    def _connected(self) -> Any:
        with self._lock:
            if self._closed:
                raise StoreUnavailable("this store was closed")
            if self._channel is None:
                self._channel = grpc.insecure_channel(self.target, options=_OPTIONS)
                stub: Any = store_pb2_grpc.CatalogStub  # generated without types
                self._stub = stub(self._channel)
            return self._stub

    def _error(
        self, method: str, error: Any, started: float, timeout_s: float, *, trips: bool
    ) -> StoreError:
        kind = ERRORS.get(error.code(), StoreUnavailable)
        if kind is not StoreUnanswered:
            self.breaker.succeeded()  # refused at once: gRPC's own back-off bounds the cost
        elif trips and timeout_s >= TRIP_TIMEOUT_MIN_S:
            self.breaker.timed_out(started)
        details = (error.details() or error.code().name).partition("\n")[0]
        return kind(f"{self.target}: {method}: {details}")


_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
    ("grpc.min_reconnect_backoff_ms", RECONNECT_MS[1]),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
    # A catalog on the local network is never behind a proxy, whatever the environment says.
    ("grpc.enable_http_proxy", 0),
)
