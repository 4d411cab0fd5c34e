"""One call to one worker, with what can go wrong sorted by what may be done about it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import httpx

from backhaul.proxy.metrics import LegFault
from backhaul.proxy.pool import Worker

RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
"""Another worker may do better. All other errors are the request's own and would come again."""

Headers = Sequence[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
_OWN_REQUEST = _HOP_BY_HOP | {
    b"host", b"content-length", b"content-encoding", b"expect",
    b"accept-encoding",  # streams must come as written, event by event
    b"x-data-parallel-rank",  # names a rank of a worker that the client did not choose
}  # fmt: skip
_OWN_RESPONSE = _HOP_BY_HOP | {b"content-length", b"content-encoding", b"date", b"server"}


@dataclass(frozen=True)
class Answer:
    """A worker's whole answer."""

    status: int
    headers: Headers
    body: bytes


class LegError(Exception):
    """A call that gave nothing to pass on.

    Attributes:
        fault: what happened.
        delivered: whether the worker may have got the request, and so may have read handed-over
            blocks: they must not be offered a second time.
        answer: the worker's own words, where it had any.
    """

    def __init__(
        self, fault: LegFault, message: str, *, delivered: bool, answer: Answer | None = None
    ) -> None:
        super().__init__(message)
        self.fault = fault
        self.delivered = delivered
        self.answer = answer

    @property
    def worker_erred(self) -> bool:
        """Whether the worker is there and says that it could not; 200: inside a stream."""
        return self.answer is not None and self.answer.status in (200, 500)


def forwarded_request_headers(headers: Headers, request_id: str) -> list[tuple[bytes, bytes]]:
    """What of the client's headers a worker gets: all but those of this connection."""
    kept = [
        (name, value)
        for name, value in headers
        if name.lower() not in _OWN_REQUEST and name.lower() != b"x-request-id"
    ]
    return [*kept, (b"accept-encoding", b"identity"), (b"x-request-id", request_id.encode())]


_CONTROLS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def forwarded_response_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """What of a worker's headers the client gets: nothing that our own server would refuse to
    send, for the answer would be lost with it."""
    return [
        (name.lower(), value)
        for name, value in headers
        if name.lower() not in _OWN_RESPONSE and not _CONTROLS.search(value)
    ]


@contextlib.asynccontextmanager
async def opened(
    client: httpx.AsyncClient, worker: Worker, method: str, path: str, headers: Headers, body: bytes
) -> AsyncIterator[httpx.Response]:
    """Send a request; the block has the answer's status and headers, its body is still to come.

    Leaving the block early, by whatever way, closes the connection, which is how a worker learns
    that nobody waits any more. Raises :class:`LegError`, also for what goes wrong in the block.
    """
    try:
        async with client.stream(
            method, f"{worker.url}{path}", headers=list(headers), content=body
        ) as response:
            yield response
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        worker.update(worker.health.refused())
        raise LegError(LegFault.CONNECT, _words(worker, error), delivered=False) from None
    except httpx.PoolTimeout as error:
        raise LegError(LegFault.CONNECT, _words(worker, error), delivered=False) from None
    except httpx.TimeoutException as error:
        raise LegError(LegFault.TIMEOUT, _words(worker, error), delivered=True) from None
    except (httpx.HTTPError, httpx.StreamError) as error:
        # Whether the request got out is not known: count it as delivered.
        raise LegError(LegFault.LOST, _words(worker, error), delivered=True) from None


def is_stream(response: httpx.Response) -> bool:
    """Whether the answer comes as server-sent events."""
    return str(response.headers.get("content-type", "")).startswith("text/event-stream")


async def whole(response: httpx.Response) -> Answer:
    """Read the rest of an answer."""
    return Answer(response.status_code, response.headers.raw, await response.aread())


async def call(
    client: httpx.AsyncClient, worker: Worker, method: str, path: str, headers: Headers, body: bytes
) -> Answer:
    """Send a request and read its whole answer.

    Raises :class:`LegError` where there is none, or one that another worker may better.
    """
    async with opened(client, worker, method, path, headers, body) as response:
        answer = await whole(response)
    raise_if_retriable(worker, answer)
    return answer


def raise_if_retriable(worker: Worker, answer: Answer) -> None:
    """Raise :class:`LegError` for an error that another worker may not have, and for what is no
    answer: a redirection is for whoever gave the worker's address, not for the client."""
    if not (200 <= answer.status < 300 or 400 <= answer.status < 600):
        to = next((value for name, value in answer.headers if name.lower() == b"location"), b"")
        words = f"{answer.status} {to.decode('latin-1')}".rstrip()
        message = f"{worker.url} answered {words}, as no engine does: is the address right?"
        raise LegError(LegFault.STATUS, message, delivered=True)
    if answer.status in RETRIED_STATUSES:
        raise LegError(
            LegFault.STATUS,
            f"{worker.url} answered {answer.status}",
            delivered=True,
            answer=answer,
        )


def _words(worker: Worker, error: Exception) -> str:
    return f"{worker.role} worker {worker.url}: {str(error) or type(error).__name__}"
