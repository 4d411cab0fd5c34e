"""What is asked of one worker without generating: whose answer it is, and what gets through."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import urllib.parse
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest
from proxy_kit import CHAT, SLOW, events, eventually, patient, running
from starlette.testclient import TestClient

from backhaul.proxy import app
from backhaul.proxy.fake_engine import Behaviour
from backhaul.proxy.settings import ProxySettings

COOKIE = Behaviour(status=200, error_body={"data": []}, headers={"set-cookie": "sid=one; Path=/"})


@pytest.mark.parametrize("path", ["/v1/models/m", "/v1/responses/r", "/v1/chat/completions"])
def test_a_workers_cookie_reaches_its_client_and_nobody_else(path: str) -> None:
    method = "POST" if path.endswith("completions") else "GET"
    body = CHAT if method == "POST" else None
    with running() as setup:
        for engine in (*setup.prefill, *setup.decode):
            engine.behave = lambda seen: COOKIE

        def ask(**headers: str) -> httpx.Response:
            # Each time a client that has kept nothing.
            return httpx.request(method, setup.url + path, json=body, headers=headers)

        assert ask().headers["set-cookie"] == "sid=one; Path=/"
        ask()
        ask(cookie="own=1")
        for engine in (*setup.prefill, *setup.decode):
            told = [seen.headers.get("cookie") for seen in engine.seen]
            assert told in ([None, None, "own=1"], [])  # prefill is asked only to generate
        assert len(setup.decode[0].seen) == 3


def _get(url: str, path: str) -> int:
    """Status of a path that no client library has put right."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../../server_info",
        "/v1/models/%2e%2e/%2E%2E/server_info",
        "/v1/models/..%2f..%2fserver_info",
        "/v1/models/m/../../../server_info",
        "/v1/models/./m",
        "/v1/models/..",
        "/v1/responses/..",
        "/v1/responses/%2e%2e",
    ],
)
def test_no_name_leads_to_another_path(path: str) -> None:
    with running() as setup:
        assert _get(setup.url, path) == 404
        assert not setup.decode[0].seen


def test_a_name_arrives_as_it_was_written() -> None:
    names = [
        "m", "org/m", "a?b=c", "a#b", "a%3Fb", "%2e%2e", "...", "ü €", "a&b=c;d", "a\\b", "a+b",
    ]  # fmt: skip
    with running() as setup:
        for name in names:
            _get(setup.url, f"/v1/models/{urllib.parse.quote(name)}?q=%2F1")
            seen = setup.decode[0].seen[-1]
            assert (seen.path, seen.query) == (f"/v1/models/{name}", "q=%2F1")


STORED = "/v1/responses/resp-1?stream=true"


def test_a_stored_response_is_streamed_as_it_comes() -> None:
    """Longer than any other answer may take, and before it has ended."""
    with patient(decode=2) as setup:
        setup.decode[0].behave = lambda seen: Behaviour(status=404)
        setup.decode[1].behave = setup.silent(SLOW, app.QUERY_TIMEOUT_S + 1)
        answer = setup.http.get(STORED)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-engine"] == "fake"
        kinds = [json.loads(event)["type"] for event in events(answer)]
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        setup.decode[1].behave = lambda seen: Behaviour(stall_after=2)
        with setup.http.stream("GET", STORED) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            assert json.loads(next(lines)[6:])["type"] == "response.created"
            assert json.loads(next(lines)[6:])["delta"] == "w0 "
        # Then the client left, and so did the proxy.
        eventually(setup.decode[1].seen[-1].disconnected.is_set)


@pytest.mark.parametrize(
    ("behaviour", "silence_s", "words"),
    [
        (Behaviour(die_after=2), 0, "the decode worker failed"),
        (Behaviour(stall_after=2), 101, "silent for 100 s"),
        (SLOW, 90, "longer than 250 s"),
    ],
)
def test_a_stored_stream_that_breaks_cannot_pass_for_complete(
    behaviour: Behaviour, silence_s: float, words: str
) -> None:
    stall_s = 100 if behaviour.stall_after else 10_000  # several silences may count as one
    with patient(stall_timeout_s=stall_s, request_timeout_s=250) as setup:
        setup.decode[0].behave = setup.silent(behaviour, silence_s)
        found = [json.loads(event) for event in events(setup.http.get(STORED))]
        assert found[0]["type"] == "response.created"
        assert found[-1]["type"] == "error" and words in found[-1]["message"]
        assert "response.completed" not in [event["type"] for event in found]


def test_a_worker_that_never_answered_is_told_to_be_down() -> None:
    with socket.socket() as taken:  # bound and not listening: refused, and nobody else's
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        settings = ProxySettings(prefill=(url,), decode=(url,), health_interval_s=0.05)
        with TestClient(app.make_app(settings)) as http:
            down = {"status": "no decode worker", "prefill": {url: False}, "decode": {url: False}}
            eventually(lambda: http.get("/health").json() == down)


def test_the_bare_address_and_a_wrong_path_say_where_things_are() -> None:
    with running() as setup:
        paths = setup.http.get("/").json()["backhaul proxy"]
        assert {paths["models"], paths["health"], paths["metrics"]} == {
            "/v1/models", "/health", "/metrics",
        }  # fmt: skip
        for path in (paths["models"], paths["health"], paths["metrics"]):
            assert setup.http.get(path).status_code == 200
        for path in ("/v2/models", "/v1", "/docs"):
            answer = setup.http.get(path)
            assert answer.status_code == 404
            message = answer.json()["error"]["message"]
            assert "/v1" in message and "/health" in message


ALLOWED = {"access-control-allow-origin": "https://chat.example", "vary": "Origin"}
ASKED = {"origin": "https://chat.example", "access-control-request-method": "POST"}


@pytest.mark.parametrize("path", app._PASSED_ON)
def test_whether_a_page_of_another_origin_may_ask_is_the_engines_word(path: str) -> None:
    path = path.replace("{name:path}", "org/m").replace("{response_id}", "r")
    with running() as setup:
        for status, headers in ((200, ALLOWED), (400, {})):
            told = Behaviour(status=status, error_body={}, headers=headers)
            setup.decode[0].behave = lambda seen, told=told: told  # type: ignore[misc]
            answer = setup.http.options(path, headers=ASKED)
            assert answer.status_code == status
            assert headers.items() <= dict(answer.headers).items()
            allowed = answer.headers.get("access-control-allow-origin")
            assert allowed == headers.get("access-control-allow-origin")
            seen = setup.decode[0].seen[-1]
            assert seen.path == path and ASKED.items() <= seen.headers.items()
        assert not setup.prefill[0].seen and not setup.outcomes()


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/version"])
def test_what_needs_no_cache_is_asked_of_a_decode_worker(path: str) -> None:
    with running() as setup:
        setup.decode[0].behave = lambda seen: Behaviour(status=200, error_body={"count": 1})
        body = None if path == "/version" else {"prompt": "a"}
        answer = setup.http.request("POST" if body else "GET", path, json=body)
        assert answer.json() == {"count": 1}
        seen = setup.decode[0].seen[-1]
        assert seen.path == path and json.loads(seen.raw or b"null") == body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/health"])
def test_a_method_that_a_path_does_not_take_is_an_error_in_json(path: str) -> None:
    with running() as setup:
        answer = setup.http.put(path)
        assert answer.status_code == 405 and answer.headers["allow"]
        error = answer.json()["error"]
        assert error["code"] == 405 and path in error["message"] and "PUT" in error["message"]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/r/cancel"])
def test_a_body_that_is_too_long_is_not_kept(path: str, chunked: bool) -> None:
    with running(body_bytes_max=1000) as setup:
        assert setup.http.post(path, content=b"x" * 1000).status_code != 413
        content = (b"x" * 100 for _ in range(20)) if chunked else b"x" * 2000
        answer = setup.http.post(path, content=content)
        assert answer.status_code == 413
        assert "longer than 1000 bytes" in answer.text
        assert answer.json().get("type") == ("error" if "messages" in path else None)


def test_a_client_that_leaves_within_its_query_is_no_fault() -> None:
    """What the application raises is a traceback in the log."""
    made = app.make_app(ProxySettings(prefill=("http://p",), decode=("http://d",)))
    messages = iter([
        {"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"},
    ])  # fmt: skip

    async def receive() -> MutableMapping[str, Any]:
        return next(messages)

    async def send(message: MutableMapping[str, Any]) -> None:
        pass

    scope = {
        "type": "http", "method": "POST", "path": "/v1/messages/count_tokens", "headers": [],
        "query_string": b"",
    }  # fmt: skip
    asyncio.run(made(scope, receive, send))
