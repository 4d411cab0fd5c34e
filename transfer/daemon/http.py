"""/healthz, /metrics and the status page, in the daemon's own event loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from importlib import resources
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

BACKLOG = 64
"""Connections that may wait to be accepted. Also how often asyncio tries in vain, one log line
each, where no file is left for them."""

_PAGE = {
    "/": ("status.html", "text/html"),
    "/status.css": ("status.css", "text/css"),
    "/status.js": ("status.js", "text/javascript"),
}
_PAGE_HEADERS = {
    # Names that clients chose are shown: nothing but the page's own files may run or be asked.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class HttpServer(uvicorn.Server):
    """Leaves signals to the daemon, which has a gRPC server to stop as well."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def make_app(
    registry: CollectorRegistry,
    healthy: Callable[[], bool],
    status: Callable[[], dict[str, Any]],
) -> Starlette:
    """/healthz answers 200 or 503, /metrics the registry in Prometheus' text format, / a page for
    people and /status.json what it shows."""

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n") if healthy() else PlainTextResponse("stopping\n", 503)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def status_json(request: Request) -> Response:
        return JSONResponse(status(), headers={"Cache-Control": "no-store"})

    routes = [
        Route("/healthz", healthz),
        Route("/metrics", metrics),
        Route("/status.json", status_json),
    ]
    routes += [Route(path, _page_file(*file)) for path, file in _PAGE.items()]
    return Starlette(routes=routes)


def _page_file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = (resources.files("backhaul.transfer.daemon") / "page" / name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_PAGE_HEADERS)

    return answer


def make_server(app: Any) -> HttpServer:
    """A quiet server; run it with ``serve(sockets=[...])``, end it with ``should_exit``."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        timeout_graceful_shutdown=1,
    )
    return HttpServer(config)
