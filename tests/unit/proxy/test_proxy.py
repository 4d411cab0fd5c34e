"""A client's view of the proxy, over real sockets, with engines that are not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from proxy_kit import CHAT, MESSAGES, Setup, events, eventually, running

from backhaul.proxy.fake_engine import Behaviour, fake_tokens

TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def shared() -> Iterator[Setup]:
    with running() as setup:
        yield setup


@pytest.fixture
def setup(shared: Setup) -> Setup:
    """A setup as new: engines behave and have seen nothing."""
    for engine in (*shared.prefill, *shared.decode):
        engine.seen.clear()
        engine.behave = lambda seen: Behaviour()
        engine.cached_tokens = 3
        engine.record = {"loaded_tokens": 2}
    return shared


@pytest.fixture
def client(setup: Setup) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{setup.url}/v1", api_key="key", max_retries=0) as client:
        yield client


def test_chat_through_the_official_client(setup: Setup, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=TOOLS, tool_choice="auto", max_completion_tokens=3,  # type: ignore[arg-type]
    )  # fmt: skip
    message = answer.choices[0].message
    assert message.content == "w0 w1 w2 "
    assert message.tool_calls and message.tool_calls[0].function.name == "f"  # type: ignore[union-attr]
    assert message.reasoning == "thinking"  # type: ignore[attr-defined]
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    (prefill,), (decode,) = setup.prefill[0].seen, setup.decode[0].seen
    assert prefill.headers["authorization"] == decode.headers["authorization"] == "Bearer key"
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]
    assert prefill.body["max_tokens"] == prefill.body["max_completion_tokens"] == 1
    assert decode.body["max_completion_tokens"] == 3
    assert decode.transfer["prompt_token_ids"] == fake_tokens({"messages": MESSAGES})
    assert decode.transfer["remote_engine_id"] == "p0"


def test_a_chat_stream_through_the_official_client(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=4, stream=True,  # type: ignore[arg-type]
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks: list[Any] = list(stream)  # type: ignore[call-overload]
    words = [c.choices[0].delta.content for c in chunks if c.choices]
    assert "".join(words) == "w0 w1 w2 w3 "
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3


def test_completions_through_the_official_client(setup: Setup, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="some text", max_tokens=2)
    assert answer.choices[0].text == "w0 w1 "
    assert setup.prefill[0].seen[0].body["prompt"] == "some text"
    assert setup.decode[0].seen[0].body["prompt"] == fake_tokens({"prompt": "some text"})


def test_responses_through_the_official_client(setup: Setup, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hello", max_output_tokens=2)
    assert answer.output_text == "w0 w1 "
    assert answer.usage and answer.usage.input_tokens_details.cached_tokens == 3
    assert setup.prefill[0].seen[0].body["max_output_tokens"] == 1
    assert setup.decode[0].seen[0].transfer["prompt_token_ids"] == fake_tokens({"input": "hello"})
    stream = client.responses.create(model="fake", input="hello", max_output_tokens=3, stream=True)
    events: list[Any] = list(stream)
    assert [e.delta for e in events if e.type == "response.output_text.delta"] == [
        "w0 ", "w1 ", "w2 ",
    ]  # fmt: skip
    assert events[-1].type == "response.completed"
    assert events[-1].response.usage.input_tokens_details.cached_tokens == 3


def test_messages_through_the_official_client(setup: Setup) -> None:
    question: Any = [{"role": "user", "content": "hello"}]
    with anthropic.Anthropic(base_url=setup.url, api_key="key", max_retries=0) as client:
        answer = client.messages.create(model="fake", messages=question, max_tokens=2)
        assert [block.text for block in answer.content] == ["w0 w1 "]  # type: ignore[union-attr]
        tokens = fake_tokens({"messages": question})
        counts = (answer.usage.input_tokens, answer.usage.cache_read_input_tokens)
        assert counts == (len(tokens) - 3, 3)
        (prefill,), (decode,) = setup.prefill[0].seen, setup.decode[0].seen
        assert prefill.headers["authorization"] == decode.headers["authorization"]
        assert prefill.body["max_tokens"] == 1
        assert decode.transfer["prompt_token_ids"] == tokens
        assert "prompt_token_ids" not in json.dumps(answer.model_dump())
        with client.messages.stream(model="fake", messages=question, max_tokens=3) as stream:
            assert "".join(stream.text_stream) == "w0 w1 w2 "
            final = stream.get_final_message()
        assert final.stop_reason == "end_turn"
        assert final.usage.cache_read_input_tokens == 3
        counted = client.messages.count_tokens(model="fake", messages=question)
        assert counted.input_tokens == 7
    assert setup.handovers().get("done", 0) >= 2
    assert setup.outcomes().keys() <= {"ok", "rejected", "client_gone"}


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]


def test_an_answer_is_the_same_as_without_a_proxy_where_nothing_was_handed_over(
    setup: Setup,
) -> None:
    body = CHAT | {"n": 2, "seed": 3}
    raw = b'{"model" : "fake", "messages": [], "n":2 }'
    for request in (json.dumps(body).encode(), raw):
        through = setup.http.post("/v1/chat/completions", content=request)
        direct = httpx.post(f"{setup.decode[0].url}/v1/chat/completions", content=request)
        assert through.status_code == direct.status_code
        a, b = through.json(), direct.json()
        assert a | {"id": ""} == b | {"id": ""}
        assert setup.decode[0].seen[-2].raw == request
    assert not setup.prefill[0].seen
    assert through.headers["x-backhaul-handover"] == "several_choices"


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_errors_come_from_decode_as_they_are(setup: Setup, stream: bool) -> None:
    words = {"error": {"message": "min_tokens is 9", "type": "BadRequest", "code": 400}}
    faulty = Behaviour(status=400, error_body=words, headers={"x-detail": "d"})
    setup.prefill[0].behave = setup.decode[0].behave = lambda seen: faulty
    answer = setup.chat(stream=stream)
    assert answer.status_code == 400
    assert answer.json() == words
    assert answer.headers["x-detail"] == "d"
    assert len(setup.prefill[0].seen) == len(setup.decode[0].seen) == 1


FORGED = b'{"kv_transfer_params": {"do_remote_prefill": true, "remote_host": "elsewhere"}, "x": '


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[1]", "it is of type list"),
        (b"null", "it is of type NoneType"),
        (b"\xff", "'utf-8' codec"),
        # Workers whose Python takes more levels or digits than ours would read these.
        (FORGED + b"[" * 5000 + b"]" * 5000 + b"}", "it is nested too deeply"),
        (FORGED + b"9" * 5000 + b"}", "Exceeds the limit"),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_what_the_proxy_cannot_read_reaches_no_engine(
    setup: Setup, raw: bytes, why: str, path: str
) -> None:
    """It may name what an engine would fetch from elsewhere."""
    answer = setup.http.post(f"/v1/{path}", content=raw)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(f"the body is no JSON object: {why}")
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-backhaul-handover"] == "unreadable"
    assert not setup.prefill[0].seen and not setup.decode[0].seen


def test_a_stream_is_passed_on_event_by_event(setup: Setup) -> None:
    """The engine waits for each event to have arrived before it sends the next: a proxy that
    buffered would make both wait for ever."""
    setup.decode[0].behave = lambda seen: Behaviour(stall_after=3)
    body = CHAT | {"stream": True}
    with setup.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        found = [next(line for line in lines if line) for _ in range(3)]
    assert [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in found] == [
        "", "w0 ", "w1 ",
    ]  # fmt: skip
    # What has come is out, though the engine said nothing more; then the client left.
    eventually(setup.decode[0].seen[0].disconnected.is_set)


def test_stream_bytes_are_the_engines(setup: Setup) -> None:
    body = CHAT | {"stream": True}
    through = setup.http.post("/v1/chat/completions", json=body)
    direct = httpx.post(f"{setup.decode[0].url}/v1/chat/completions", json=body)
    plain = [line.split('"object"')[1] if '"object"' in line else line for line in events(direct)]
    ours = [line.split('"object"')[1] if '"object"' in line else line for line in events(through)]
    assert ours == plain
    assert through.headers["content-type"] == direct.headers["content-type"]
    assert through.headers["x-engine"] == "fake"
    assert "content-length" not in through.headers


@pytest.mark.parametrize("stream", [False, True])
def test_what_prefill_reused_is_reported(setup: Setup, stream: bool) -> None:
    setup.prefill[0].record = {"loaded_tokens": 64, "selected": {"boundary": 64}}
    answer = setup.chat(stream=stream)
    assert json.loads(answer.headers["x-backhaul-prefill"]) == setup.prefill[0].record
    assert answer.headers["x-backhaul-handover"] == "done"
    if not stream:
        ours = answer.json()["kv_transfer_params"]
        assert ours["backhaul"]["prefill"] == setup.prefill[0].record
        assert "remote_host" not in ours


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize("count", [-3, 10**400, True])
def test_no_request_fails_because_of_what_prefill_counts(
    setup: Setup, path: str, count: int
) -> None:
    prefill = setup.prefill[0]
    prefill.cached_tokens = count
    prefill.record = {"loaded_tokens": count, "note": "\x7f\r\n\u20ac" + "x" * 100_000}
    body = {"model": "fake", "messages": MESSAGES, "prompt": "p", "input": "i", "max_tokens": 5}
    for stream in (False, True):
        answer = setup.http.post(f"/v1/{path}", json=body | {"stream": stream})
        assert answer.status_code == 200
        assert answer.headers["x-backhaul-handover"] == "done"
        assert json.loads(answer.headers["x-backhaul-prefill"]) == {"loaded_tokens": count}
        assert f'cached_tokens":{json.dumps(count)}' not in answer.text.replace(" ", "")
    assert setup.outcomes().keys() <= {"ok", "rejected", "client_gone"}


def test_who_rendered_is_counted(setup: Setup) -> None:
    """The Messages API has no token ids without Backhaul on prefill."""

    def renders(by: str) -> float:
        return setup.metric("renders_total", endpoint="messages", by=by)

    body = {"model": "fake", "messages": [{"role": "user", "content": "u"}], "max_tokens": 2}
    before = renders("prefill"), renders("each_leg")
    for record in ({"loaded_tokens": 1}, None):
        setup.prefill[0].record = record
        assert setup.http.post("/v1/messages", json=body).status_code == 200
    assert (renders("prefill"), renders("each_leg")) == (before[0] + 1, before[1] + 1)
    assert "prompt_token_ids" not in setup.decode[0].seen[-1].transfer


def test_a_worker_without_backhaul_reports_nothing(setup: Setup) -> None:
    setup.prefill[0].record = setup.decode[0].record = None
    answer = setup.chat()
    assert "x-backhaul-prefill" not in answer.headers
    assert answer.json()["kv_transfer_params"] is None


def test_hints_reach_both_legs_and_foreign_parameters_neither(setup: Setup) -> None:
    params = {"backhaul": {"u_end": 4}, "remote_host": "elsewhere", "do_remote_prefill": True}
    setup.chat(kv_transfer_params=params)
    (prefill,), (decode,) = setup.prefill[0].seen, setup.decode[0].seen
    assert prefill.transfer["backhaul"] == decode.transfer["backhaul"] == {"u_end": 4}
    assert "remote_host" not in prefill.transfer
    assert decode.transfer["remote_host"] == "127.0.0.1"


def test_a_request_id_is_kept_and_answered(setup: Setup) -> None:
    body = CHAT
    answer = setup.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert setup.decode[0].seen[0].headers["x-request-id"] == "mine"


def test_health_and_metrics(setup: Setup) -> None:
    before = setup.handovers().get("done", 0)
    setup.chat()
    setup.chat(n=2)
    assert setup.handovers()["done"] == before + 1
    assert setup.handovers()["several_choices"] >= 1
    assert setup.metric("leg_seconds_count", leg="prefill") >= 1
    assert setup.metric("ttft_seconds_count", endpoint="chat_completions") >= 2
    assert setup.metric("prompt_tokens_total", source="cached") >= 3
    assert setup.metric("worker_in_flight") == 0
    assert setup.http.get("/health").json() == {
        "status": "ok",
        "prefill": {setup.prefill[0].url: True},
        "decode": {setup.decode[0].url: True},
    }
    assert setup.http.get("/v1/unknown").status_code == 404
    assert setup.http.get("/v1/chat/completions").status_code == 405


def test_labels_do_not_grow_with_what_clients_send(setup: Setup) -> None:
    def series() -> int:
        return len(setup.http.get("/metrics").text.splitlines())

    setup.chat(stream=True)
    setup.chat()
    before = series()
    for i in range(5):
        setup.chat(model=f"m{i}", session_id=f"s{i}", user=f"u{i}")
        setup.http.get(f"/v1/{i}")
    assert series() == before
