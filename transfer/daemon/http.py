"""/healthz and /metrics, in the daemon's own event loop."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from backhaul.protocols.errors import ConfigError
from backhaul.transfer.daemon.settings import Address


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


def bind(address: Address) -> socket.socket:
    """A listening socket. Raises ``ConfigError`` where the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server(tuple(address), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on http address {address}: {error.strerror or error}; give another "
            "--http"
        ) from None


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
