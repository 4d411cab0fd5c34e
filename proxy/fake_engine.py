"""An engine's HTTP face without an engine: real sockets, vLLM's shapes, faults on demand.

For tests and measurements of what stands in front of engines. What it generates is determined by
the request; it keeps what it was asked and whether its clients stayed to the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import uvicorn

START_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How an engine treats a request.

    Attributes:
        status: an error to answer instead, with ``error_body``.
        hang: never answer.
        drop: close the connection without an answer.
        error_after: an error event after so many events, as vLLM does where generating fails. It
            comes after the event with the role where the first step fails.
        die_after: close the connection after so many events.
        stall_after: send nothing more after so many events.
        token_delay_s: pause before each token.
        on_silence: called wherever it hangs, stalls or pauses.
    """

    status: int | None = None
    error_body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    hang: bool = False
    drop: bool = False
    error_after: int | None = None
    die_after: int | None = None
    stall_after: int | None = None
    token_delay_s: float = 0.0
    on_silence: Callable[[], None] = lambda: None


@dataclass
class Seen:
    """One request as it arrived. ``disconnected``: its client left before the end."""

    path: str
    headers: dict[str, str]
    raw: bytes
    query: str = ""
    disconnected: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        body = json.loads(self.raw)
        assert isinstance(body, dict)
        return body

    @property
    def transfer(self) -> dict[str, Any]:
        """Its transfer parameters."""
        return dict(self.body.get("kv_transfer_params") or {})


class FakeEngine:
    """Serves in a thread for the length of a ``with`` block.

    ``behave`` is asked per request and may be replaced at any time. ``record`` is what prefill
    reports as Backhaul's; ``cached_tokens`` what it found in its cache; None hides the details.
    """

    def __init__(self, name: str = "engine", *, port: int = 0) -> None:
        self.name = name
        self.behave: Callable[[Seen], Behaviour] = lambda seen: Behaviour()
        self.healthy = True
        self.record: Mapping[str, Any] | None = {"loaded_tokens": 2, "local_tokens": 1}
        self.cached_tokens: int | None = 3
        self.seen: list[Seen] = []
        self._ids = itertools.count(1)
        self.server = AppServer(self._app, port=port)

    @property
    def url(self) -> str:
        """Base URL."""
        return self.server.url

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.__exit__(*error)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/health":
            await _respond(send, 200 if self.healthy else 503, b"")
            return
        preflight = scope["method"] == "OPTIONS"
        if path == "/v1/messages/count_tokens" and not preflight:
            await _respond(send, 200, b'{"input_tokens": 7}')
            return
        if path == "/v1/models" and not preflight:
            models = {"object": "list", "data": [{"id": "fake", "object": "model", "root": path}]}
            await _respond(send, 200, json.dumps(models).encode())
            return
        raw = b""
        more = True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        seen = Seen(path, headers, raw, scope["query_string"].decode())
        self.seen.append(seen)
        answering = asyncio.create_task(self._answer(seen, send))
        leaving = asyncio.create_task(_left(receive))
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            seen.disconnected.set()
        answering.cancel()
        leaving.cancel()
        results = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]
        if not seen.disconnected.is_set():
            seen.answered.set()

    async def _answer(self, seen: Seen, send: Any) -> None:
        behaviour = self.behave(seen)
        if behaviour.hang:
            behaviour.on_silence()
            await asyncio.Event().wait()
        if behaviour.drop:
            raise _Died
        if behaviour.status is not None:
            body = behaviour.error_body or _error(behaviour.status, f"{self.name} cannot")
            headers = {"content-type": "application/json", **behaviour.headers}
            await _respond(send, behaviour.status, json.dumps(body).encode(), headers)
            return
        if seen.path.startswith("/v1/responses/") and "stream=true" in seen.query:
            stored = _Reply(self, Seen("/v1/responses", seen.headers, b"{}"), {})
            await _stream(send, stored, behaviour)
            return
        try:
            body = seen.body
        except (ValueError, AssertionError):
            await _respond(send, 400, json.dumps(_error(400, "not a JSON object")).encode())
            return
        reply = _Reply(self, seen, body)
        if reply.wants_prefill_only:
            await _respond(send, 200, json.dumps(reply.whole()).encode())
        elif body.get("stream"):
            await _stream(send, reply, behaviour)
        else:
            if behaviour.token_delay_s:
                behaviour.on_silence()
                await asyncio.sleep(behaviour.token_delay_s * reply.length)
            if behaviour.die_after is not None:
                raise _Died
            await _respond(send, 200, json.dumps(reply.whole()).encode())

    def next_id(self) -> int:
        """A number that was not given before."""
        return next(self._ids)


class _Died(Exception):
    """Makes the server drop the connection."""


class _Reply:
    """What the fake model says to one request."""

    def __init__(self, engine: FakeEngine, seen: Seen, body: Mapping[str, Any]) -> None:
        self._engine = engine
        self._kind = seen.path.removeprefix("/v1/")
        self._body = body
        transfer = seen.transfer
        self._ids = transfer.get("prompt_token_ids") or fake_tokens(body)
        self.wants_prefill_only = bool(transfer.get("do_remote_decode"))
        self._transferred = bool(transfer.get("do_remote_prefill"))
        hints = transfer.get("backhaul") or {}
        self._asks_for_ids = bool(hints.get("return_prompt_token_ids"))
        limit = next(
            (body[name] for name in ("max_completion_tokens", "max_output_tokens", "max_tokens")
             if body.get(name) is not None), 4,
        )  # fmt: skip
        self.length = int(limit)
        self._words = [f"w{i} " for i in range(self.length)]
        self._id = f"{engine.name}-{engine.next_id()}"

    def whole(self) -> dict[str, Any]:
        text = "".join(self._words)
        params: dict[str, Any] | None = None
        if self.wants_prefill_only:
            params = self._parameters()
        elif self._engine.record is not None:
            params = {"backhaul": {"loaded_tokens": 0}}
        common = {"id": self._id, "model": self._body.get("model"), "kv_transfer_params": params}
        if self._kind == "responses":
            messages = None
            if self._body.get("enable_response_messages"):
                messages = [{"message": "rendered", "tokens": self._ids}]
            return common | self._response(text) | {"input_messages": messages}
        if self._kind == "messages":
            if self._asks_for_ids and params and "backhaul" in params:
                params["backhaul"]["prompt_token_ids"] = self._ids
            return common | self._message(text)
        asked = self._body.get("return_token_ids")
        ids = {"prompt_token_ids": self._ids} if asked else {}
        if self._kind == "completions":
            choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None, **ids}
            return common | {
                "object": "text_completion", "created": 1, "choices": [choice],
                "usage": self._usage(),
            }  # fmt: skip
        message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning": "thinking"}
        if self._body.get("tools"):
            message["tool_calls"] = [_tool_call(self._body["tools"][0])]
        choices = [
            {"index": i, "message": message, "finish_reason": "stop"}
            for i in range(self._body.get("n") or 1)
        ]
        return common | {
            "object": "chat.completion", "created": 1, "choices": choices,
            "usage": self._usage(), **ids,
        }  # fmt: skip

    def events(self) -> Iterator[bytes]:
        """Server-sent events: a head, one per word, a tail."""
        if self._kind == "responses":
            created = {"type": "response.created", "response": self._response("", "in_progress")}
            yield _typed(created)
            for word in self._words:
                yield _typed({"type": "response.output_text.delta", "delta": word})
            done = self._response("".join(self._words))
            yield _typed({"type": "response.completed", "response": done})
            return
        if self._kind == "messages":
            yield from self._message_events()
            return
        chat = self._kind == "chat/completions"
        kind = "chat.completion.chunk" if chat else "text_completion"
        common = {"id": self._id, "object": kind, "created": 1, "model": "fake"}
        if chat:
            delta = {"role": "assistant", "content": ""}
            yield _data(common | {"choices": [{"index": 0, "delta": delta}]})
        for i, word in enumerate(self._words):
            last = i == len(self._words) - 1
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
            choice |= {"delta": {"content": word}} if chat else {"text": word}
            yield _data(common | {"choices": [choice]})
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield _data(common | {"choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def failure(self) -> Iterator[bytes]:
        """What ends a stream in place of the rest."""
        words = "EngineCore failed"
        if self._kind == "messages":
            error = {"type": "api_error", "message": words}
            yield _typed({"type": "error", "error": error})
            return
        yield _data(_error(500, words))
        yield b"data: [DONE]\n\n"

    def _message(self, text: str | None) -> dict[str, Any]:
        """Of the Messages API; without ``text``, as a stream announces it."""
        cached = self._cached()
        details = {} if cached is None else {"cache_read_input_tokens": cached}
        usage = {"input_tokens": len(self._ids) - (cached or 0), "output_tokens": 0, **details}
        message = {"id": self._id, "type": "message", "role": "assistant", "model": "fake"}
        if text is None:
            return message | {"content": [], "stop_reason": None, "usage": usage}
        content = [{"type": "text", "text": text}]
        usage["output_tokens"] = self.length
        return message | {"content": content, "stop_reason": "end_turn", "usage": usage}

    def _message_events(self) -> Iterator[bytes]:
        yield _typed({"type": "message_start", "message": self._message(None)})
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        yield _typed({"type": "content_block_start", **block})
        for word in self._words:
            delta = {"type": "text_delta", "text": word}
            yield _typed({"type": "content_block_delta", "index": 0, "delta": delta})
        yield _typed({"type": "content_block_stop", "index": 0})
        ending = {"stop_reason": "end_turn", "stop_sequence": None}
        usage = self._message("")["usage"]
        yield _typed({"type": "message_delta", "delta": ending, "usage": usage})
        yield _typed({"type": "message_stop"})

    def _usage(self) -> dict[str, Any]:
        prompt = len(self._ids)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": self.length,
            "total_tokens": prompt + self.length,
        }
        if (cached := self._cached()) is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def _cached(self) -> int | None:
        # A handed-over prompt counts as cached, all but its last token.
        return len(self._ids) - 1 if self._transferred else self._engine.cached_tokens

    def _response(self, text: str, status: str = "completed") -> dict[str, Any]:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        item = {
            "id": f"msg-{self._id}", "type": "message", "role": "assistant", "status": status,
            "content": content,
        }  # fmt: skip
        usage = {
            "input_tokens": len(self._ids),
            "output_tokens": self.length,
            "total_tokens": len(self._ids) + self.length,
            "input_tokens_details": {"cached_tokens": self._cached() or 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {
            "id": f"resp-{self._id}", "object": "response", "created_at": 1, "model": "fake",
            "status": status, "output": [item], "usage": usage if status == "completed" else None,
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        }  # fmt: skip

    def _parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2], [3]],
            "remote_engine_id": self._engine.name,
            "remote_request_id": self._id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
        }
        if self._engine.record is not None:
            parameters["backhaul"] = dict(self._engine.record)
        return parameters


def fake_tokens(body: Mapping[str, Any]) -> list[int]:
    """Token ids of a prompt: its own, or one per character of what would be rendered."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    text = (
        prompt if isinstance(prompt, str) else json.dumps(body.get("messages", body.get("input")))
    )
    return [ord(letter) % 256 for letter in text]


def _tool_call(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["function"]["name"], "arguments": "{}"}
    return {"id": "call-1", "type": "function", "function": function}


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "Error", "param": None, "code": status}}


def _data(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _typed(body: Mapping[str, Any]) -> bytes:
    return b"event: " + str(body["type"]).encode() + b"\n" + _data(body)


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _respond(
    send: Any, status: int, body: bytes, headers: Mapping[str, str] | None = None
) -> None:
    fields = {"content-type": "application/json", **(headers or {})}
    fields["content-length"] = str(len(body))
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def _stream(send: Any, reply: _Reply, behaviour: Behaviour) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-engine", b"fake")]
    # vLLM sends the status before it generates.
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    events = reply.events()
    if behaviour.error_after is not None:
        events = itertools.chain(itertools.islice(events, behaviour.error_after), reply.failure())
    for number, event in enumerate(events):
        if number == behaviour.die_after:
            raise _Died
        if number == behaviour.stall_after:
            behaviour.on_silence()
            await asyncio.Event().wait()
        if behaviour.token_delay_s:
            behaviour.on_silence()
            await asyncio.sleep(behaviour.token_delay_s)
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class AppServer:
    """An ASGI application on a real socket, served from a thread for the length of a block."""

    def __init__(
        self, app: Any, *, port: int = 0, lifespan: bool = False, grace_s: int = 1
    ) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        # Known before it serves, and refused until then.
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level=logging.CRITICAL,
            interface="asgi3",
            access_log=False,
            lifespan="on" if lifespan else "off",
            timeout_graceful_shutdown=grace_s,
        )
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = threading.Event()
        for _ in range(int(START_TIMEOUT_S / 0.01)):
            if self.server.started:
                return self
            deadline.wait(0.01)
        raise TimeoutError(f"{self.url} did not start")

    def stop_soon(self) -> None:
        """Begin to stop, so that several can stop side by side."""
        self.server.should_exit = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.server.should_exit = True
        self._thread.join()
        with contextlib.suppress(OSError):
            self._socket.close()


def main() -> None:
    """``python -m backhaul.proxy.fake_engine PORT``: serve until killed."""
    with FakeEngine(f"engine-{sys.argv[1]}", port=int(sys.argv[1])):
        threading.Event().wait()


if __name__ == "__main__":
    main()
