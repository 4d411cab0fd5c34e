"""Workers that speak HTTP, and not as an engine does."""

from __future__ import annotations

import gzip

import pytest
from proxy_kit import CHAT, RawEngine, in_front_of

TOKEN = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = (b"Content-Type: text/event-stream",)


def made(status: bytes, body: bytes = b"{}", headers: tuple[bytes, ...] = ()) -> bytes:
    fields = (*headers, b"Content-Length: %d" % len(body), b"Connection: close")
    return b"HTTP/1.1 " + status + b"\r\n" + b"".join(b + b"\r\n" for b in fields) + b"\r\n" + body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [300, 301, 304, 307, 399, 600, 999])
def test_a_status_that_no_engine_has(status: int, stream: bool) -> None:
    """A redirection names an address inside the cluster, and a number that the server knows no
    words for would end the connection without an answer."""
    answer = made(b"%d X" % status, b"", (b"Location: http://inside/v1",))
    with RawEngine(answer) as worker, in_front_of(worker.url) as http:
        told = http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert told.status_code == 502
        assert f"answered {status} http://inside/v1, as no engine does" in told.text
        assert "location" not in told.headers
        assert http.get("/v1/models").status_code == 503
        assert 'outcome="failed"} 1.0' in http.get("/metrics").text


@pytest.mark.parametrize("control", [b"\x01", b"\x08", b"\x0e", b"\x1f", b"\x7f"])
def test_a_header_that_cannot_be_passed_on(control: bytes) -> None:
    headers = (b"X-Odd: a" + control + b"b", b"X-Tab: a\tb", b"X-Far: \xe9")
    with RawEngine(made(b"200 OK", headers=headers)) as worker, in_front_of(worker.url) as http:
        for told in (http.post("/v1/chat/completions", json=CHAT), http.get("/v1/models")):
            assert told.status_code == 200
            assert "x-odd" not in told.headers
            assert told.headers["x-tab"] == "a\tb"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses/resp-1?stream=true"])
def test_what_comes_compressed_is_passed_on_readable(path: str) -> None:
    """It was not asked for, and the header that says so is not passed on."""
    answer = made(b"200 OK", gzip.compress(TOKEN + DONE), (*STREAM, b"Content-Encoding: gzip"))
    with RawEngine(answer) as worker, in_front_of(worker.url) as http:
        stored = path.startswith("/v1/responses/")
        told = http.get(path) if stored else http.post(path, json=CHAT | {"stream": True})
        assert told.content == TOKEN + DONE
        assert "content-encoding" not in told.headers


@pytest.mark.parametrize("rest", [b"", b"data: {", b"data: [DONE"])
def test_a_stream_that_stops_short_does_not_pass_for_complete(rest: bytes) -> None:
    """Its connection was closed in order: with no length given, a crash looks like that."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    with RawEngine(head + TOKEN + rest) as worker, in_front_of(worker.url) as http:
        told = http.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert told.content.startswith(TOKEN + b'data: {"error":')
        assert "ended a stream in the middle" in told.text
        assert "[DONE" not in told.text
        assert 'outcome="broken"} 1.0' in http.get("/metrics").text


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_mark_without_its_blank_line_is_one(end: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    with RawEngine(head + TOKEN + DONE.rstrip() + end) as worker, in_front_of(worker.url) as http:
        told = http.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert told.content == TOKEN + DONE.rstrip() + end
        assert 'outcome="ok"} 1.0' in http.get("/metrics").text
