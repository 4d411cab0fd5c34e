"""A client that leaves at every moment of a request: nothing stays behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from proxy_kit import CHAT
from starlette.applications import Starlette

from backhaul.proxy import app as app_module
from backhaul.proxy.fake_engine import FakeEngine
from backhaul.proxy.legs import Endpoint
from backhaul.proxy.settings import ProxySettings

MOMENTS_MAX = 400
"""More than a request of any kind here has; a bound, so that a request without end is seen."""


class _Watched:
    """An awaitable that calls ``at`` while it waits for the n-th time. ``waits``: how often it
    has."""

    def __init__(self, inner: Awaitable[None], moment: int, at: Callable[[], None]) -> None:
        self._inner = inner
        self._moment = moment
        self._at = at
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, None]:
        inner = self._inner.__await__()
        try:
            waited_for = next(inner)
            while True:
                self.waits += 1
                if self.waits == self._moment:
                    self._at()
                try:
                    value = yield waited_for
                except BaseException as error:
                    waited_for = inner.throw(error)
                else:
                    waited_for = inner.send(value)
        except StopIteration:
            return


class _Client:
    """Asks an application in this process, and leaves at a moment of its choice."""

    def __init__(self, app: Starlette, path: str, body: bytes) -> None:
        self._app = app
        self._path = path
        self._body = body
        self._moment = 0
        self._gone = asyncio.Event()
        self.waits = 0
        """How often the last request waited for something."""

    async def answering(self, answering: Coroutine[Any, Any, None]) -> None:
        """Around the work for one request."""
        watched = _Watched(answering, self._moment, self._gone.set)
        try:
            await watched
        finally:
            self.waits = watched.waits

    async def ask(self, moment: int) -> None:
        """One request; 0 stays to the end."""
        self._moment = moment
        self._gone.clear()
        messages = iter([{"type": "http.request", "body": self._body}])

        async def receive() -> MutableMapping[str, Any]:
            for message in messages:
                return message
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            pass

        scope = {
            "type": "http", "method": "POST", "path": self._path, "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await self._app(scope, receive, send)


def _pool(app: Starlette) -> Any:
    """httpcore's: what it counts as in use is on no other side to be seen."""
    return app.state.cluster.client._transport._pool


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.MESSAGES])
def test_no_connection_stays_behind(
    endpoint: Endpoint, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where a connection is just being given back, which happens after the last byte."""
    body = json.dumps(CHAT | {"stream": stream, "max_tokens": 1}).encode()
    while_connected = app_module._while_connected

    async def at_every_moment(settings: ProxySettings) -> int:
        app = app_module.make_app(settings)
        client = _Client(app, endpoint.path, body)
        monkeypatch.setattr(
            app_module,
            "_while_connected",
            lambda answering, receive: while_connected(client.answering(answering), receive),
        )
        async with app.router.lifespan_context(app):
            await client.ask(0)  # connections are there then, as they mostly are
            for moment in range(1, MOMENTS_MAX):
                await client.ask(moment)
                assert not _pool(app)._requests, f"left at moment {moment}"
                busy = [one for one in _pool(app).connections if not one.is_idle()]
                assert not busy, f"left at moment {moment}: {busy}"
                if client.waits < moment:
                    return moment
        return MOMENTS_MAX

    with FakeEngine("p") as prefill, FakeEngine("d") as decode:
        settings = ProxySettings(
            prefill=(prefill.url,), decode=(decode.url,), health_interval_s=3600
        )
        moments = asyncio.run(at_every_moment(settings))
        assert 10 < moments < MOMENTS_MAX


def test_time_limits_are_scopes_as_well() -> None:
    """They end a request in the same places, which no test can aim a clock at."""
    folder = Path(app_module.__file__).parent
    sources = {path.name: path.read_text() for path in folder.glob("*.py")}
    assert [name for name, text in sources.items() if "asyncio.timeout" in text] == []
    assert "anyio.fail_after" in sources["exchange.py"]
