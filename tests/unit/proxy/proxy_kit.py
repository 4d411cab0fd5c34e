"""A proxy and fake engines on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from backhaul.proxy.app import make_app
from backhaul.proxy.fake_engine import AppServer, Behaviour, FakeEngine, Seen
from backhaul.proxy.settings import ProxySettings

MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Say something."},
]
SLOW = Behaviour(token_delay_s=0.01)
CHAT = {"model": "fake", "messages": MESSAGES, "max_tokens": 5}


class Hasty:
    """An application for which time passes faster when a test says so: nothing that is in time is
    late on a busy machine, and what is never to come is not waited for."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ahead_s = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            self._loop = asyncio.get_running_loop()
            self._loop.time = lambda: time.monotonic() + self._ahead_s  # type: ignore[method-assign]
        await self._app(scope, receive, send)

    def skip(self, seconds: float) -> None:
        """Once it has dealt with what has reached it; from any thread."""

        async def skip() -> None:
            for _ in range(100):
                await asyncio.sleep(0)
            self._ahead_s += seconds

        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(skip(), self._loop)


@dataclass
class Setup:
    """What a test has: the proxy's client and the engines behind it."""

    http: httpx.Client
    url: str
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    server: AppServer
    app: Hasty

    def silent(self, behaviour: Behaviour, seconds: float) -> Callable[[Seen], Behaviour]:
        """As ``behaviour``, and at each of its silences so many seconds pass for the proxy."""
        return lambda seen: replace(behaviour, on_silence=lambda: self.app.skip(seconds))

    def chat(self, **changes: Any) -> httpx.Response:
        """One chat request."""
        return self.http.post("/v1/chat/completions", json=CHAT | changes)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of ``backhaul:proxy_<name>`` with these labels."""
        text = self.http.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"backhaul:proxy_{name}" and labels.items() <= sample.labels.items()
        )

    def handovers(self) -> dict[str, float]:
        """Result -> count, zeros left out."""
        text = self.http.get("/metrics").text
        return {
            sample.labels["result"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "backhaul:proxy_handovers_total" and sample.value
        }

    def outcomes(self) -> dict[str, float]:
        """Outcome -> count over all endpoints, zeros left out."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == "backhaul:proxy_requests_total" and sample.value:
                    outcome = sample.labels["outcome"]
                    found[outcome] = found.get(outcome, 0) + sample.value
        return found

    def transfers_offered(self) -> list[str]:
        """Every hand-over that a decode engine was given, in order."""
        return [
            seen.transfer["remote_request_id"]
            for engine in self.decode
            for seen in engine.seen
            if "remote_request_id" in seen.transfer
        ]


# A busy machine may let the proxy itself stand for longer than its usual limits of these.
_DEFAULTS: dict[str, Any] = {
    "health_interval_s": 0.05,
    "connect_timeout_s": 60.0,
    "health_timeout_s": 60.0,
}


@contextlib.contextmanager
def running(prefill: int = 1, decode: int = 1, **options: Any) -> Iterator[Setup]:
    """Engines, and a proxy in front of them."""
    with contextlib.ExitStack() as stack:
        p = [stack.enter_context(FakeEngine(f"p{i}")) for i in range(prefill)]
        d = [stack.enter_context(FakeEngine(f"d{i}")) for i in range(decode)]
        settings = ProxySettings(
            prefill=tuple(engine.url for engine in p),
            decode=tuple(engine.url for engine in d),
            **(_DEFAULTS | options),
        )
        app = Hasty(make_app(settings))
        server = AppServer(app, lifespan=True)
        server.server.config.loop = "asyncio"
        stack.enter_context(server)
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=300))
        yield Setup(http, server.url, p, d, server, app)
        for each in (server, *(engine.server for engine in (*p, *d))):
            each.stop_soon()


@contextlib.contextmanager
def patient(prefill: int = 1, decode: int = 1, **options: Any) -> Iterator[Setup]:
    """The same, where no look at the workers' health is under way when time is skipped."""
    with running(prefill, decode, health_interval_s=36_000, **options) as setup:
        eventually(lambda: setup.metric("worker_healthy") == prefill + decode)
        yield setup


class RawEngine(socketserver.ThreadingTCPServer):
    """Answers every request but ``/health`` with the same bytes, whatever they are, and closes."""

    daemon_threads = True

    def __init__(self, answer: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _RawHandler)
        self.answer = answer
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.shutdown()
        self.server_close()


class _RawHandler(socketserver.StreamRequestHandler):
    server: RawEngine

    def handle(self) -> None:
        request = self.rfile.readline()
        length = 0
        while (line := self.rfile.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        self.rfile.read(length)
        healthy = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        self.wfile.write(healthy if b" /health " in request else self.server.answer)


@contextlib.contextmanager
def in_front_of(*urls: str, **options: Any) -> Iterator[httpx.Client]:
    """A proxy whose workers of both roles are these."""
    settings = ProxySettings(prefill=urls, decode=urls, **options)
    with (
        AppServer(make_app(settings), lifespan=True) as server,
        httpx.Client(base_url=server.url, timeout=300) as http,
    ):
        yield http


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what happens elsewhere."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def events(response: httpx.Response) -> list[str]:
    """Data of all events of a stream that was read."""
    return [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
