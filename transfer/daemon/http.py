"""/healthz and /metrics, in the daemon's own event loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route


class HttpServer(uvicorn.Server):
    """Leaves signals to the daemon, which has a gRPC server to stop as well."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def make_app(registry: CollectorRegistry, healthy: Callable[[], bool]) -> Starlette:
    """/healthz answers 200 or 503, /metrics the registry in Prometheus' text format."""

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n") if healthy() else PlainTextResponse("stopping\n", 503)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/healthz", healthz), Route("/metrics", metrics)])


def make_server(app: Any) -> HttpServer:
    """A quiet server; run it with ``serve(sockets=[...])``, end it with ``should_exit``."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    return HttpServer(config)
