"""What fails behind the proxy, and what the client sees of it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable

import anthropic
import httpx
import openai
import pytest
from proxy_kit import CHAT, MESSAGES, SLOW, events, eventually, patient, running

from backhaul.proxy.fake_engine import Behaviour, FakeEngine, Seen
from backhaul.proxy.settings import Policy

HANG = Behaviour(hang=True)


def always(behaviour: Behaviour) -> Callable[[Seen], Behaviour]:
    return lambda seen: behaviour


def shut(engine: FakeEngine) -> None:
    """Nothing listens there any more."""
    engine.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("behaviour", "result"),
    [
        (Behaviour(status=500), "prefill_failed"),
        (Behaviour(status=503), "prefill_failed"),
        (Behaviour(status=400), "prefill_rejected"),
        (Behaviour(drop=True), "prefill_failed"),
        (HANG, "prefill_timeout"),
    ],
)
def test_a_request_does_not_fail_because_of_prefill(behaviour: Behaviour, result: str) -> None:
    with patient(prefill=2, prefill_timeout_s=500, first_token_timeout_s=500) as setup:
        for engine in setup.prefill:
            engine.behave = setup.silent(behaviour, 501 if behaviour.hang else 0)
        answer = setup.chat()
        assert answer.status_code == 200
        assert answer.headers["x-backhaul-handover"] == result
        assert setup.handovers() == {result: 1}
        assert setup.outcomes() == {"ok": 1}
        # Decode was given the client's own bytes: it computes everything itself.
        assert setup.decode[0].seen[0].body == CHAT
        tried = sum(len(engine.seen) for engine in setup.prefill)
        assert tried == (2 if result == "prefill_failed" else 1)


def test_prefill_workers_that_are_gone() -> None:
    with running(prefill=2) as setup:
        for engine in setup.prefill:
            shut(engine)
        assert setup.chat().status_code == 200
        assert setup.handovers() == {"prefill_unreachable": 1}
        eventually(lambda: setup.metric("worker_healthy", role="prefill") == 0)
        assert setup.chat(stream=True).status_code == 200


def test_prefill_without_a_connector_that_hands_over() -> None:
    with running() as setup:
        engine = setup.prefill[0]
        engine.behave = always(Behaviour(status=200, error_body={"kv_transfer_params": None}))
        assert setup.chat().status_code == 200
        assert setup.handovers() == {"no_parameters": 1}


def test_prefill_that_hands_over_through_the_store() -> None:
    with running() as setup:
        body = {"kv_transfer_params": {"backhaul": {"loaded_tokens": 1}}, "prompt_token_ids": [1]}
        setup.prefill[0].behave = always(Behaviour(status=200, error_body=body))
        assert setup.chat().json()["kv_transfer_params"]["backhaul"]["prefill"]
        assert setup.handovers() == {"store": 1}
        assert setup.decode[0].seen[0].transfer == {"prompt_token_ids": [1]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "behaviour",
    [Behaviour(status=503), Behaviour(status=500), Behaviour(drop=True), Behaviour(status=429)],
)
def test_another_decode_worker_is_tried(behaviour: Behaviour, stream: bool) -> None:
    with running(decode=2, decode_policy=Policy.ROUND_ROBIN) as setup:
        setup.decode[0].behave = always(behaviour)
        answer = setup.chat(stream=stream)
        assert answer.status_code == 200
        assert len(setup.decode[0].seen) == len(setup.decode[1].seen) == 1
        assert setup.metric("retries_total", leg="decode") == 1
        offered = setup.transfers_offered()
        # What one worker may have read is not offered to another.
        assert len(offered) == len(set(offered)) >= 1


def test_a_refused_connection_keeps_the_hand_over() -> None:
    with running(decode=2, decode_policy=Policy.ROUND_ROBIN, health_interval_s=60) as setup:
        eventually(lambda: setup.metric("worker_healthy", role="decode") == 2)
        shut(setup.decode[0])
        assert setup.chat().status_code == 200
        assert setup.chat().status_code == 200
        assert len(setup.prefill[0].seen) == 2  # one per request
        assert len(setup.transfers_offered()) == 2
        assert setup.metric("retries_total", reason="connect") <= 1
        assert setup.metric("worker_healthy", role="decode") == 1


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(error_after=0), "status"),
        (Behaviour(error_after=1), "status"),
        (Behaviour(die_after=0), "lost"),
        (Behaviour(die_after=1), "lost"),
    ],
)
def test_a_stream_that_fails_before_its_first_token_is_retried(
    behaviour: Behaviour, reason: str
) -> None:
    with running(decode=2, decode_policy=Policy.ROUND_ROBIN) as setup:
        setup.decode[0].behave = always(behaviour)
        answer = setup.chat(stream=True)
        assert '"error"' not in answer.text
        assert events(answer)[-1] == "[DONE]"
        assert setup.metric("retries_total", leg="decode", reason=reason) == 1


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize(
    ("failure", "stream"),
    [
        (Behaviour(status=500), False),
        (Behaviour(drop=True), False),
        (Behaviour(error_after=0), True),
        (Behaviour(die_after=0), True),
    ],
)
@pytest.mark.parametrize("retries", [0, 1])
def test_a_transfer_that_fails_is_done_without(
    failure: Behaviour, stream: bool, retries: int, path: str
) -> None:
    """The decode worker cannot read what prefill kept, say because prefill has died since. It is
    the only one, and it can still compute the prompt."""

    def behave(seen: Seen) -> Behaviour:
        if not seen.transfer.get("do_remote_prefill"):
            return Behaviour()
        # A chat's role and the announcement of a response come before the error.
        first = 0 if path == "completions" else 1
        if failure.error_after is not None:
            return Behaviour(error_after=first)
        return Behaviour(die_after=first) if failure.die_after is not None else failure

    with running(retries=retries) as setup:
        setup.decode[0].behave = behave
        body = CHAT | {"stream": stream, "prompt": "p", "input": "i"}
        answer = setup.http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200
        assert '"error"' not in answer.text
        assert "w4 " in answer.text
        assert answer.headers["x-backhaul-handover"] == "transfer_failed"
        assert setup.handovers() == {"transfer_failed": 1}
        assert setup.outcomes() == {"ok": 1}


def test_the_engines_last_words_are_passed_on() -> None:
    words = {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 503}}
    with running(decode=2) as setup:
        for engine in setup.decode:
            engine.behave = always(
                Behaviour(status=503, error_body=words, headers={"retry-after": "7"})
            )
        answer = setup.chat()
        assert (answer.status_code, answer.json()) == (503, words)
        assert answer.headers["retry-after"] == "7"
        assert setup.outcomes() == {"failed": 1}


def test_a_stream_that_only_fails_is_passed_on() -> None:
    with running(decode=2) as setup:
        for engine in setup.decode:
            engine.behave = always(Behaviour(error_after=0))
        answer = setup.chat(stream=True)
        assert answer.status_code == 200
        assert json.loads(events(answer)[0])["error"]["message"] == "EngineCore failed"
        assert setup.outcomes() == {"failed": 1}


def test_no_decode_worker_left() -> None:
    with running(decode=2) as setup:
        for engine in setup.decode:
            shut(engine)
        answer = setup.chat()
        assert answer.status_code == 503
        assert "no decode worker can be reached" in answer.json()["error"]["message"]
        assert setup.outcomes() == {"unreachable": 1}
        eventually(lambda: setup.http.get("/health").status_code == 503)
        assert setup.http.get("/v1/models").status_code == 503


def test_a_stream_that_has_begun_is_never_begun_again() -> None:
    with running(decode=2, decode_policy=Policy.ROUND_ROBIN) as setup:
        for engine in setup.decode:
            engine.behave = always(Behaviour(die_after=3))
        answer = setup.chat(stream=True)
        found = events(answer)
        assert [json.loads(e)["choices"][0]["delta"]["content"] for e in found[:3]] == [
            "", "w0 ", "w1 ",
        ]  # fmt: skip
        # An error ends it, so that it cannot pass for a whole answer.
        assert json.loads(found[3])["error"]["code"] == 502
        assert "[DONE]" not in found
        assert sum(len(engine.seen) for engine in setup.decode) == 1
        assert setup.outcomes() == {"broken": 1}
        with openai.OpenAI(base_url=f"{setup.url}/v1", api_key="k", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="fake",
                messages=MESSAGES,
                stream=True,  # type: ignore[arg-type]
            )
            with pytest.raises(openai.APIError, match="decode worker failed"):
                list(stream)


def test_a_prefill_worker_that_accepts_and_says_nothing_is_left() -> None:
    with patient(prefill=2, prefill_policy=Policy.ROUND_ROBIN) as setup:
        setup.prefill[0].behave = setup.silent(HANG, 121)
        answer = setup.chat()
        assert answer.headers["x-backhaul-handover"] == "done"
        assert setup.decode[0].seen[0].transfer["remote_engine_id"] == "p1"
        assert setup.metric("retries_total", leg="prefill", reason="timeout") == 1
        eventually(setup.prefill[0].seen[0].disconnected.is_set)


@pytest.mark.parametrize("silent", [HANG, Behaviour(stall_after=0), Behaviour(stall_after=1)])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_decode_worker_that_accepts_and_says_nothing_is_left(
    silent: Behaviour, path: str
) -> None:
    """Even where it has announced its answer: the client has not got a byte of it yet."""
    with patient(decode=2, decode_policy=Policy.ROUND_ROBIN) as setup:
        setup.decode[0].behave = setup.silent(silent, 121)
        answer = setup.http.post(f"/v1/{path}", json=CHAT | {"stream": True, "input": "i"})
        assert "w4 " in answer.text and '"error"' not in answer.text
        assert answer.headers["x-backhaul-handover"] == "done"
        assert setup.metric("retries_total", leg="decode", reason="timeout") == 1
        offered = setup.transfers_offered()
        assert len(offered) == len(set(offered)) == 2
        eventually(setup.decode[0].seen[0].disconnected.is_set)


def test_the_only_decode_worker_is_asked_again_without_the_hand_over() -> None:
    """It may be the transfer that hangs; after that, waiting is all there is."""
    with patient(retries=0, first_token_timeout_s=60, stall_timeout_s=10_000) as setup:
        hang, slow = (setup.silent(one, 61) for one in (HANG, SLOW))
        setup.decode[0].behave = lambda seen: (
            hang(seen) if seen.transfer.get("do_remote_prefill") else slow(seen)
        )
        answer = setup.chat(stream=True, max_tokens=1)
        assert events(answer)[-1] == "[DONE]"
        assert answer.headers["x-backhaul-handover"] == "transfer_failed"


def test_every_decode_worker_is_silent() -> None:
    """The last one is given the time that the request has."""
    with running(decode=2, first_token_timeout_s=0.2, request_timeout_s=1.5) as setup:
        for engine in (*setup.prefill, *setup.decode):
            engine.behave = always(HANG)
        answer = setup.chat(stream=True)
        assert answer.status_code == 504
        assert "longer than 1.5 s" in answer.json()["error"]["message"]
        assert setup.outcomes() == {"deadline": 1}


def test_a_whole_answer_has_no_first_token_to_wait_for() -> None:
    with patient(decode=2) as setup:
        for engine in setup.decode:
            engine.behave = setup.silent(SLOW, 121)
        assert setup.chat(max_tokens=5).status_code == 200
        assert setup.metric("retries_total") == 0


def test_errors_of_the_proxy_to_a_client_of_the_messages_api() -> None:
    """Its clients choose what to do by the type of the error."""
    question = [{"role": "user", "content": "hello"}]
    with (
        running(body_bytes_max=1000) as setup,
        anthropic.Anthropic(base_url=setup.url, api_key="k", max_retries=0) as client,
    ):

        def ask(text: str = "") -> None:
            client.messages.create(
                model="fake",
                messages=question,
                max_tokens=9,
                system=text,  # type: ignore[arg-type]
            )

        with pytest.raises(anthropic.RequestTooLargeError):
            ask("x" * 2000)
        setup.decode[0].behave = always(Behaviour(die_after=3))
        with (
            client.messages.stream(
                model="fake",
                messages=question,
                max_tokens=9,  # type: ignore[arg-type]
            ) as stream,
            pytest.raises(anthropic.APIStatusError, match="decode worker failed"),
        ):
            stream.until_done()
        shut(setup.decode[0])
        with pytest.raises(anthropic.APIStatusError) as failure:
            ask()
        assert failure.value.status_code == 503
        assert failure.value.type == "overloaded_error"


def test_silence_inside_a_stream() -> None:
    with running(stall_timeout_s=0.3) as setup:
        setup.decode[0].behave = always(Behaviour(stall_after=2))
        found = events(setup.chat(stream=True))
        assert "silent for 0.3 s" in json.loads(found[-1])["error"]["message"]
        eventually(setup.decode[0].seen[0].disconnected.is_set)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline(stream: bool) -> None:
    with patient(request_timeout_s=100) as setup:
        setup.decode[0].behave = setup.silent(HANG, 101)
        answer = setup.chat(stream=stream)
        assert answer.status_code == 504
        assert "longer than 100 s" in answer.json()["error"]["message"]
        assert setup.outcomes() == {"deadline": 1}
        eventually(setup.decode[0].seen[0].disconnected.is_set)


def test_a_deadline_inside_a_stream() -> None:
    with patient(request_timeout_s=100) as setup:
        setup.decode[0].behave = setup.silent(Behaviour(stall_after=2), 101)
        found = events(setup.chat(stream=True))
        assert json.loads(found[-1])["error"]["code"] == 504
        eventually(setup.decode[0].seen[0].disconnected.is_set)


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens"])
def test_a_body_that_never_comes_to_its_end_is_not_waited_for(path: str) -> None:
    with patient(request_timeout_s=100) as setup:
        host, port = httpx.URL(setup.url).host, httpx.URL(setup.url).port
        head = (
            f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nexpect: 100-continue\r\n"
        )
        with (
            socket.create_connection((host, port), timeout=300) as client,
            client.makefile("rb") as answer,
        ):
            client.sendall(f"{head}\r\n".encode())
            assert answer.readline().startswith(b"HTTP/1.1 100 ")  # it reads the body
            client.sendall(b'{"a"')
            setup.app.skip(101)
            told = answer.read()  # to the connection's end
        assert b"HTTP/1.1 408 " in told and b"the body did not come within 100 s" in told
        assert not setup.decode[0].seen and not setup.prefill[0].seen
        assert setup.outcomes() == ({} if "count" in path else {"deadline": 1})


def _leave(url: str, path: str, body: dict[str, object], ready: Callable[[], bool]) -> None:
    """Send a request, wait until it is somewhere, and close the connection."""
    leave = threading.Event()

    def trace(name: str, info: object) -> None:
        if name == "http11.receive_response_headers.started":
            eventually(ready)
            leave.set()
            raise ConnectionAbortedError

    with httpx.Client(timeout=300) as client, pytest.raises(ConnectionAbortedError):
        client.post(url + path, json=body, extensions={"trace": trace})
    assert leave.is_set()


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_client_that_leaves_stops_the_engine(leg: str, stream: bool, path: str) -> None:
    body = CHAT | {"stream": stream, "input": "i", "prompt": "p"}
    with running() as setup:
        engine = setup.prefill[0] if leg == "prefill" else setup.decode[0]
        engine.behave = always(HANG)
        _leave(setup.url, f"/v1/{path}", body, lambda: bool(engine.seen))
        eventually(engine.seen[0].disconnected.is_set)
        eventually(lambda: setup.outcomes() == {"client_gone": 1})
        assert setup.metric("worker_in_flight") == 0
        if leg == "prefill":
            assert not setup.decode[0].seen


def test_a_client_that_leaves_inside_a_stream_stops_the_engine() -> None:
    with running() as setup:
        setup.decode[0].behave = always(Behaviour(token_delay_s=0.02))
        body = CHAT | {"stream": True, "max_tokens": 100_000}
        with setup.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
        eventually(setup.decode[0].seen[0].disconnected.is_set)
        eventually(lambda: setup.outcomes() == {"client_gone": 1})


def test_a_worker_that_comes_back_is_used_again() -> None:
    with running() as setup:
        setup.decode[0].healthy = False
        eventually(lambda: setup.http.get("/health").status_code == 503)
        setup.decode[0].healthy = True
        eventually(lambda: setup.http.get("/health").status_code == 200)


def test_a_long_body_is_refused() -> None:
    with running(body_bytes_max=1000) as setup:
        answer = setup.chat(user="x" * 2000)
        assert answer.status_code == 413
        assert not setup.decode[0].seen
        assert setup.chat().status_code == 200


@pytest.mark.parametrize("policy", [Policy.ROUND_ROBIN, Policy.LEAST_LOADED])
def test_idle_decode_workers_take_turns(policy: Policy) -> None:
    """One request is one turn, however many workers a failure of it could go to."""
    with running(decode=2, decode_policy=policy) as setup:
        for stream in (False, True, False, True):
            assert setup.chat(stream=stream).status_code == 200
        assert [len(engine.seen) for engine in setup.decode] == [2, 2]


def test_the_turns_of_a_conversation_go_to_one_prefill_worker() -> None:
    with running(prefill=4) as setup:
        history = list(MESSAGES)
        for turn in range(5):
            setup.chat(messages=history)
            history += [
                {"role": "assistant", "content": f"a{turn}"},
                {"role": "user", "content": f"u{turn}"},
            ]
        assert sorted(len(engine.seen) for engine in setup.prefill) == [0, 0, 0, 5]


def test_a_stored_response_is_found_on_its_worker() -> None:
    with running(decode=3, decode_policy=Policy.ROUND_ROBIN) as setup:
        first = setup.http.post("/v1/responses", json={"input": "i"}).json()["id"]
        keeper = next(engine for engine in setup.decode if engine.seen)
        for stream in (False, True):
            body = {"input": "j", "previous_response_id": first, "stream": stream}
            answer = setup.http.post("/v1/responses", json=body)
            assert answer.headers["x-backhaul-handover"] == "stored_history"
        assert len(keeper.seen) == 3
        setup.http.get(f"/v1/responses/{first}")
        assert keeper.seen[-1].path == f"/v1/responses/{first}"
        assert sum(len(engine.seen) for engine in setup.decode) == 4


def test_many_at_once() -> None:
    """Every hand-over goes to exactly one decode request, and nothing is left behind."""
    with running(prefill=2, decode=2) as setup:
        answers: list[int] = []

        def ask(number: int) -> None:
            with httpx.Client(timeout=300) as http:
                for stream in (False, True):
                    body = CHAT | {"stream": stream, "user": str(number), "max_tokens": 20}
                    url = f"{setup.url}/v1/chat/completions"
                    answers.append(http.post(url, json=body).status_code)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [200] * 24
        offered = setup.transfers_offered()
        assert len(offered) == len(set(offered)) == 24
        assert setup.metric("worker_in_flight") == 0


def test_a_request_that_runs_may_end_while_the_proxy_stops() -> None:
    with running() as setup:
        setup.decode[0].behave = always(Behaviour(token_delay_s=0.05))
        setup.server.server.config.timeout_graceful_shutdown = 60
        body = CHAT | {"stream": True, "max_tokens": 10}
        with setup.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            setup.server.server.should_exit = True
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
