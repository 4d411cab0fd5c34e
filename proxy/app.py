"""The proxy's HTTP face: a Starlette application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import quote

import anyio
import httpx
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from backhaul.proxy.answers import error_body, error_event
from backhaul.proxy.exchange import Cluster, Exchange, Send
from backhaul.proxy.legs import Endpoint
from backhaul.proxy.metrics import LegFault, Metrics, Outcome
from backhaul.proxy.pool import Pool, Worker
from backhaul.proxy.settings import ProxySettings
from backhaul.proxy.upstream import (
    Headers,
    LegError,
    forwarded_request_headers,
    forwarded_response_headers,
    is_stream,
    opened,
    raise_if_retriable,
    whole,
)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

KEEPALIVE_S = 4.0
"""Below the 5 s after which workers close idle connections: one that is reused in the moment in
which its other end closes it would look like a worker that died."""
QUERY_TIMEOUT_S = 10.0
"""For what needs no generation: models, stored responses. Of a stream, for its headers."""
_PATH_SAFE = "/:@!$&'()*+,;=~"
"""What a path may hold as it is (RFC 3986, ``pchar``); all else goes on percent-encoded."""


_ADDRESSES = {"api": "/v1", "models": "/v1/models", "health": "/health", "metrics": "/metrics"}
"""What ``/`` answers, for whoever opens the proxy's address itself."""
_ANYWHERE = {
    "/v1/messages/count_tokens": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/version": "GET",
    "/v1/models": "GET",
    "/v1/models/{name:path}": "GET",
}
"""Path -> method of what any decode worker can say."""
_STORED = {
    "/v1/responses/{response_id}": "GET",
    "/v1/responses/{response_id}/cancel": "POST",
}
"""The same of what only the worker knows that answered before."""
_PASSED_ON = (*(endpoint.path for endpoint in Endpoint), *_ANYWHERE, *_STORED)
_NO_SUCH_PATH = "there is no such path: the API is under /v1, the workers' state at /health"


def make_app(settings: ProxySettings) -> Starlette:
    """The application; ``app.state.cluster`` is what its requests share."""
    timeout = httpx.Timeout(
        None, connect=settings.connect_timeout_s, pool=settings.connect_timeout_s
    )
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S
    )
    cluster = Cluster(
        settings=settings,
        # No environment: a proxy variable of the shell must not stand between the workers and us.
        client=httpx.AsyncClient(
            timeout=timeout, limits=limits, trust_env=False, cookies=_no_cookies()
        ),
        metrics=Metrics(),
        prefill=Pool("prefill", settings.prefill, settings.prefill_policy),
        decode=Pool("decode", settings.decode, settings.decode_policy),
    )
    cluster.metrics.watch(cluster.prefill, cluster.decode)
    queries = _Queries(cluster)
    app = Starlette(
        routes=[
            *(Route(e.path, _Generation(cluster, e), methods=["POST"]) for e in Endpoint),
            *(Route(p, queries.anywhere, methods=[m]) for p, m in _ANYWHERE.items()),
            *(Route(p, queries.stored, methods=[m]) for p, m in _STORED.items()),
            # Whether a page of another origin may ask is in the engines' own settings.
            *(Route(path, queries.anywhere, methods=["OPTIONS"]) for path in _PASSED_ON),
            Route("/", queries.addresses),
            Route("/health", queries.health),
            Route("/metrics", queries.metrics),
        ],
        exception_handlers={404: _no_such_path, 405: _no_such_method},
        lifespan=_lifespan(cluster),
    )
    app.state.cluster = cluster
    return app


def _no_such_path(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(None, 404, _NO_SUCH_PATH, "not_found"), 404)


def _no_such_method(request: Request, error: Exception) -> Response:
    words = f"{request.url.path} takes no {request.method}"
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(error_body(None, 405, words, "method_not_allowed"), 405, headers)


def _no_cookies() -> CookieJar:
    """Keeps nothing: cookies are between one client and a worker, and all clients share ours. They
    pass as headers, in both directions."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=()))


def _lifespan(cluster: Cluster) -> Callable[[Starlette], Any]:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        settings = cluster.settings
        watchers = [
            asyncio.create_task(
                pool.watch(cluster.client, settings.health_interval_s, settings.health_timeout_s),
                name=f"health of {pool.role}",
            )
            for pool in (cluster.prefill, cluster.decode)
        ]
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await cluster.client.aclose()

    return lifespan


class _Generation:
    """ASGI application of one endpoint that generates."""

    def __init__(self, cluster: Cluster, endpoint: Endpoint) -> None:
        self._cluster = cluster
        self._endpoint = endpoint

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        requests = self._cluster.metrics.requests
        settings = self._cluster.settings
        limit = settings.body_bytes_max
        try:
            raw = await _read(receive, settings)
        except TimeoutError:
            requests.labels(self._endpoint, Outcome.DEADLINE).inc()
            await _too_slow(self._endpoint, settings)(scope, receive, send)
            return
        if raw is None:
            requests.labels(self._endpoint, Outcome.CLIENT_GONE).inc()
        elif len(raw) > limit:
            requests.labels(self._endpoint, Outcome.REJECTED).inc()
            await _too_large(self._endpoint, limit)(scope, receive, send)
        else:
            exchange = Exchange(self._cluster, self._endpoint, raw, scope["headers"], send)
            await _while_connected(exchange.run(), receive)


async def _read(receive: Receive, settings: ProxySettings) -> bytes | None:
    """A request's body, at most one message more than ``body_bytes_max``; None where the client
    left. Raises ``TimeoutError`` where it does not come within ``request_timeout_s``."""
    parts: list[bytes] = []
    length = 0
    with anyio.fail_after(settings.request_timeout_s):
        while length <= settings.body_bytes_max:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            length += len(parts[-1])
            if not message.get("more_body", False):
                break
    return b"".join(parts)


def _too_slow(endpoint: Endpoint | None, settings: ProxySettings) -> Response:
    words = f"the body did not come within {settings.request_timeout_s:g} s"
    # What is still to come would be waited for.
    headers = {"connection": "close"}
    return JSONResponse(error_body(endpoint, 408, words, "timeout"), 408, headers)


def _too_large(endpoint: Endpoint | None, limit: int) -> Response:
    words = f"the body is longer than {limit} bytes"
    return JSONResponse(error_body(endpoint, 413, words, "too_large"), 413)


async def _while_connected(answering: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run ``answering`` until it ends or the client leaves, whichever is first."""
    # Cancelling it closes its connection to a worker, which then stops generating. Scopes, here and
    # for every time limit: httpcore shields itself from them while it gives a connection back, and
    # not from the cancelling of its task, after which that connection is never closed.
    with anyio.CancelScope() as scope:
        watching = asyncio.create_task(_watch(receive, scope), name="disconnect")
        try:
            await answering
        finally:
            watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def _watch(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel ``scope`` when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


class _Queries:
    """What is answered at once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def anywhere(self, request: Request) -> Response:
        """Ask the decode workers in turn until one answers."""
        return await self._ask(request, self._decode_workers())

    async def stored(self, request: Request) -> Response:
        """Ask the worker that keeps the response; where it is not known, each until one has it."""
        keeper = self._cluster.stored.worker_of(request.path_params["response_id"])
        return await self._ask(
            request, [keeper] if keeper else self._decode_workers(), skip_missing=True
        )

    def _decode_workers(self) -> list[Worker]:
        workers = self._cluster.decode.workers
        return sorted(workers, key=lambda worker: not worker.health.healthy)

    async def _ask(
        self, request: Request, workers: list[Worker], *, skip_missing: bool = False
    ) -> Response:
        path = _path(request)
        if path is None:
            return JSONResponse(error_body(None, 404, _NO_SUCH_PATH, "not_found"), 404)
        headers = forwarded_request_headers(request.headers.raw, "")
        headers = [(name, value) for name, value in headers if name != b"x-request-id"]
        endpoint = Endpoint.MESSAGES if path.startswith(Endpoint.MESSAGES.path) else None
        settings = self._cluster.settings
        limit = settings.body_bytes_max
        try:
            body = await _read(request.receive, settings)
        except TimeoutError:
            return _too_slow(endpoint, settings)
        if body is None:
            return Response(status_code=499)  # nobody reads it
        if len(body) > limit:
            return _too_large(endpoint, limit)
        missing: Response | None = None
        words = "there is no decode worker"
        for worker in workers:
            try:
                with anyio.fail_after(QUERY_TIMEOUT_S):
                    response = await self._answer(worker, request.method, path, headers, body)
            except (LegError, TimeoutError) as error:
                words = str(error) or f"{worker.url} did not answer in {QUERY_TIMEOUT_S:g} s"
                continue
            if response.status_code != 404 or not skip_missing:
                return response
            missing = response
        return missing or JSONResponse(error_body(endpoint, 503, words, "unreachable"), 503)

    async def _answer(
        self, worker: Worker, method: str, path: str, headers: Headers, body: bytes
    ) -> Response:
        """Raises :class:`LegError` where another worker may do better."""
        async with contextlib.AsyncExitStack() as stack:
            asked = opened(self._cluster.client, worker, method, path, headers, body)
            upstream = await stack.enter_async_context(asked)
            if upstream.status_code == 200 and is_stream(upstream):
                return _PassedStream(self._cluster.settings, worker, upstream, stack.pop_all())
            answer = await whole(upstream)
        raise_if_retriable(worker, answer)
        response = Response(answer.body, answer.status)
        response.raw_headers += forwarded_response_headers(answer.headers)
        return response

    async def addresses(self, request: Request) -> Response:
        """Where everything else is."""
        return JSONResponse({"backhaul proxy": _ADDRESSES})

    async def health(self, request: Request) -> Response:
        """200 while a decode worker is healthy: without prefill, requests are still answered."""
        cluster = self._cluster
        ok = any(worker.health.known_healthy for worker in cluster.decode.workers)
        state = {
            pool.role: {worker.url: worker.health.known_healthy for worker in pool.workers}
            for pool in (cluster.prefill, cluster.decode)
        }
        return JSONResponse(
            {"status": "ok" if ok else "no decode worker", **state}, 200 if ok else 503
        )

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        return Response(
            generate_latest(self._cluster.metrics.registry), media_type=CONTENT_TYPE_LATEST
        )


def _path(request: Request) -> str | None:
    """What a worker is asked for, percent-encoded anew: it was decoded to find the route. None for
    a path that leads elsewhere: with ``..`` in a name it would become another one on the way."""
    path: str = request.scope["path"]
    if {".", ".."} & set(path.split("/")):
        return None
    query = request.scope["query_string"].decode("latin-1")
    return quote(path, safe=_PATH_SAFE) + (f"?{query}" if query else "")


class _PassedStream(Response):
    """A stream of a stored response as its worker sends it.

    ``held`` closes the connection to the worker. A stream that breaks ends with an error event.
    """

    def __init__(
        self,
        settings: ProxySettings,
        worker: Worker,
        upstream: httpx.Response,
        held: contextlib.AsyncExitStack,
    ) -> None:
        self.status_code = upstream.status_code
        self.background = None
        self.raw_headers = forwarded_response_headers(upstream.headers.raw)
        self._settings = settings
        self._worker = worker
        self._upstream = upstream
        self._held = held

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """See ``starlette.responses.Response``."""
        try:
            await _while_connected(self._pass_on(send), receive)
        finally:
            await self._held.aclose()

    async def _pass_on(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        ending = b""
        try:
            with anyio.fail_after(self._settings.request_timeout_s):
                async with self._held:
                    await self._pass_events(send)
        except LegError as error:
            words = f"the decode worker failed: {error}"
            ending = error_event(Endpoint.RESPONSES, 502, words, "bad_gateway")
        except TimeoutError:
            words = f"the request took longer than {self._settings.request_timeout_s:g} s"
            ending = error_event(Endpoint.RESPONSES, 504, words, "timeout")
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _pass_events(self, send: Send) -> None:
        """Raises :class:`LegError` for a silence that is too long."""
        chunks = self._upstream.aiter_bytes()
        stall_s = self._settings.stall_timeout_s
        while True:
            try:
                with anyio.fail_after(stall_s):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                message = f"{self._worker.url} was silent for {stall_s:g} s in a stream"
                raise LegError(LegFault.TIMEOUT, message, delivered=True) from None
            if chunk is None:
                return
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
