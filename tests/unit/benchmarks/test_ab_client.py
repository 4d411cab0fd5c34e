"""The dialogue with a real HTTP server: what is replayed, what is counted, how it fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from backhaul.benchmarks.ab import TOOL_RESULT, AbError, AbPlan, Arm, run_arm
from backhaul.proxy.fake_engine import AppServer, Behaviour, FakeEngine

QUICK = AbPlan(turns=3, max_tokens=4, pause_s=0.0, timeout_s=5.0, model="m")


class Server:
    """Answers each path with what ``reply`` says: a status and a body, or events."""

    def __init__(self, reply: Callable[[str, dict[str, Any]], tuple[int, bytes]]) -> None:
        self.reply = reply
        self.seen: list[tuple[str, dict[str, Any]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw, more = b"", True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        body = json.loads(raw or b"{}")
        self.seen.append((scope["path"], body))
        status, answer = self.reply(scope["path"], body)
        headers = [(b"location", b"http://elsewhere/")] if status in (307, 308) else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Bodies of the chat requests."""
        return [body for path, body in self.seen if path == "/v1/chat/completions"]


@contextmanager
def serve(
    reply: Callable[[str, dict[str, Any]], tuple[int, bytes]],
) -> Iterator[tuple[str, Server]]:
    app = Server(reply)
    with AppServer(app) as server:
        yield server.url, app


def events(*deltas: dict[str, Any], usage: Any = None, finish: str = "stop") -> bytes:
    """A streamed reply as vLLM sends it: the role first, then deltas, then the counts."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta}]}
        for delta in ({"role": "assistant", "content": ""}, *deltas)
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    chunks.append({"choices": [], "usage": usage or counts()})
    return b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks) + (
        b"data: [DONE]\n\n"
    )


def counts(prompt: int = 10, cached: int | None = 4, output: int = 3) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    return usage | ({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}})


def test_every_turn_replays_the_whole_history() -> None:
    with FakeEngine() as engine:
        report = run_arm(Arm(name="A", url=engine.url), QUICK)
    bodies = [seen.body for seen in engine.seen]
    assert [len(body["messages"]) for body in bodies] == [2, 4, 6]
    for earlier, later in pairwise(bodies):
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]
        said = later["messages"][len(earlier["messages"])]
        assert said == {"role": "assistant", "content": "w0 w1 w2 w3 "}
    assert {body["temperature"] for body in bodies} == {0}
    assert [r.completion_tokens for r in report.requests] == [4, 4, 4]
    assert len({r.digest for r in report.requests}) == 1
    assert all(0 < r.ttft_s <= r.seconds for r in report.requests)


def test_the_share_counts_all_requests_and_later_ones_apart() -> None:
    replies = iter([counts(100, 0), counts(300, 90), counts(400, 310)])
    with serve(lambda path, body: (200, events({"content": "x"}, usage=next(replies)))) as (url, _):
        report = run_arm(Arm(name="A", url=f"{url}/v1/"), QUICK)
    assert (report.prompt_tokens, report.cached_tokens) == (800, 400)
    assert report.cached_share == 0.5
    assert report.later_cached_share == 400 / 700


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_and_tool_calls_go_back_as_they_came(key: str) -> None:
    """Under the server's own name; a call is answered by its result instead of a question."""
    call = {"index": 0, "id": "c1", "type": "function"}
    reply = events(
        {key: "let me "},
        {key: "see"},
        {"tool_calls": [call | {"function": {"name": "look_up", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"what":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"lift"}'}}]},
        finish="tool_calls",
    )
    plan = AbPlan(turns=2, pause_s=0.0, model="m", tools=True)
    with serve(lambda path, body: (200, reply)) as (url, app):
        report = run_arm(Arm(name="A", url=url), plan)
    _, _, said, result = app.asked[1]["messages"]
    assert said == {
        "role": "assistant",
        "content": None,
        key: "let me see",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"what":"lift"}'},
            }
        ],
    }
    assert result == {"role": "tool", "tool_call_id": "c1", "content": TOOL_RESULT}
    one = report.requests[0]
    assert (one.reasoning_characters, one.content_characters, one.tool_calls) == (10, 0, 1)
    assert one.finish_reason == "tool_calls"
    assert app.asked[0]["tools"]


def test_digests_differ_where_replies_do_and_not_by_random_ids() -> None:
    def reply(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        turn = len(body["messages"])
        function = {"name": "f", "arguments": "{}" if turn < 6 else '{"a": 1}'}
        return 200, events({"tool_calls": [{"index": 0, "id": f"c{turn}", "function": function}]})

    with serve(reply) as (url, _):
        report = run_arm(Arm(name="A", url=url), QUICK)
    digests = [r.digest for r in report.requests]
    assert digests[0] == digests[1] != digests[2]


def test_the_model_is_asked_for_and_further_members_are_sent() -> None:
    plan = AbPlan(turns=1, salt=True, extra={"min_tokens": 7, "temperature": 0.5})
    with FakeEngine() as engine:
        one = run_arm(Arm(name="A", url=engine.url), plan)
        run_arm(Arm(name="B", url=engine.url), plan)
    assert one.model == "fake"
    first, second = (seen.body for seen in engine.seen)
    assert (first["min_tokens"], first["temperature"]) == (7, 0.5)
    assert first["cache_salt"] != second["cache_salt"]


def test_what_the_server_does_not_count_is_not_taken_for_zero() -> None:
    with FakeEngine() as engine:
        engine.cached_tokens = None
        report = run_arm(Arm(name="A", url=engine.url), QUICK)
    assert [r.cached_tokens for r in report.requests] == [None] * 3
    assert report.cached_share == 0.0


def test_engines_forget_before_each_turn_and_are_given_a_step_to() -> None:
    refusals = iter([False, True, True, True])

    def reply(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/reset_prefix_cache":
            return 200, json.dumps({"success": next(refusals)}).encode()
        return 200, events({"content": "x"}) if path == "/v1/chat/completions" else b"{}"

    with serve(reply) as (url, app):
        run_arm(Arm(name="A", url=url, reset=[url]), QUICK)
    paths = [path.removeprefix("/v1") for path, _ in app.seen]
    turn = ["/reset_prefix_cache", "/chat/completions"]
    assert paths == ["/reset_prefix_cache", "/completions", *turn * 3]


def _fails(url: str, plan: AbPlan = QUICK, **arm: Any) -> str:
    with pytest.raises(AbError) as error:
        run_arm(Arm(name="A", url=url, **arm), plan)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    return str(error.value)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "no such\\nmodel"}}', "answered 400: no such model"),
        (502, b"<html>bad gateway</html>", "answered 502: <html>bad gateway</html>"),
        (200, b'data: {"error": {"message": "it died"}}\n\n', "failed while it answered: it died"),
        (200, b"data: [1]\n\n", "sent no chat completion: \"b'[1]'\" is no object"),
        (200, b"data: {\n\n", "sent no chat completion: Expecting property name"),
        (200, b'data: {"choices": [3]}\n\n', "sent no chat completion: 'int' object has no"),
        (200, b'data: {"choices": []}\n\n', "without its token counts: the server must support"),
        (200, b'data: {"usage": {"prompt_tokens": Infinity}}\n\n', "sent no token counts"),
        (200, b'data: {"usage": {"prompt_tokens": 1}}\n\n', "sent no token counts"),
        (200, b"hello", "without its token counts"),
    ],
)
def test_a_server_that_fails_is_one_line(status: int, body: bytes, message: str) -> None:
    with serve(lambda path, asked: (status, body)) as (url, _):
        said = _fails(url)
    assert said.startswith(f"{url}/v1/chat/completions ")
    assert message in said


def test_servers_that_cannot_be_reached_are_one_line() -> None:
    assert "cannot be asked" in _fails("http://127.0.0.1:1")
    assert "cannot be asked" in _fails("no url at all")
    with FakeEngine() as engine:
        engine.behave = lambda seen: Behaviour(die_after=2)
        assert "cannot be asked" in _fails(engine.url)
        engine.behave = lambda seen: Behaviour(hang=True)
        assert "cannot be asked: timed out" in _fails(
            engine.url, AbPlan(turns=1, model="m", timeout_s=0.2)
        )


def test_a_server_without_models_or_resets_says_what_to_do() -> None:
    with serve(lambda path, body: (200, b'{"data": []}')) as (url, _):
        assert _fails(url, AbPlan(turns=1)) == f"{url}/v1/models lists no model: give --model"
    with serve(lambda path, body: (404, b"")) as (url, _):
        assert "start the engine with VLLM_SERVER_DEV_MODE=1" in _fails(url, reset=[url])


def test_a_reply_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul.benchmarks.ab.REPLY_BYTES_MAX", 1000)
    with serve(lambda path, body: (200, b"x" * 2000)) as (url, _):
        assert "more than 1,000 bytes for one reply" in _fails(url)


@pytest.mark.parametrize("status", [300, 304, 307, 308, 400, 404, 429, 500, 503])
@pytest.mark.parametrize("model", ["m", None])
def test_every_status_but_success_is_one_line(status: int, model: str | None) -> None:
    """The reply is a stream, whose text nobody has read yet."""
    plan = replace(QUICK, model=model)
    with (
        serve(lambda path, body: (status, b"" if status == 304 else b"words")) as (url, _),
        pytest.raises(AbError, match=f"answered {status}: ") as caught,
    ):
        run_arm(Arm(name="A", url=url), plan)
    assert str(caught.value).isprintable()
    assert ("it names http://elsewhere/" in str(caught.value)) is (status in (307, 308))
