"""The proxy's life: listen, say so in one line, stop at SIGTERM or SIGINT."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from backhaul.proxy.app import make_app
from backhaul.proxy.settings import ProxySettings

logger = logging.getLogger(__name__)

IDLE_S = 75
"""How long a used connection may wait for its next request: longer than clients' libraries keep one
(httpx, which OpenAI's and Anthropic's use, 5 s; aiohttp 15 s). Closed here first, it would now and
then be so in the very moment in which a client sends a request on it."""


class _Server(uvicorn.Server):
    """Calls ``on_started`` once it can be reached."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server``."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does, but without raising them again at the end: stopping when told to is
        success."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    settings: ProxySettings, listener: socket.socket, announce: Callable[[str], None]
) -> None:
    """Run until SIGTERM or SIGINT. Requests that run then may end within ``grace_s`` seconds; a
    second signal ends them at once. ``announce`` gets the one line that says where it listens, once
    it does."""
    for remark in settings.remarks():
        logger.warning("%s", remark)
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    announcement = (
        f"backhaul proxy ready: http://{host}:{port}, "
        f"prefill {', '.join(settings.prefill)}, decode {', '.join(settings.decode)}"
    )
    _Server(make_config(settings), lambda: announce(announcement)).run(sockets=[listener])


def make_config(settings: ProxySettings) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        make_app(settings),
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=max(int(settings.grace_s), 1),
    )
