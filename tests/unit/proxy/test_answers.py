"""What the client is told: decode's words, but prefill's count of what was cached."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.proxy.answers import (
    RECORD_HEADER_BYTES_MAX,
    error_event,
    error_status_of,
    is_preamble,
    record_header,
    rewrite_answer,
    rewrite_event,
)
from backhaul.proxy.legs import Endpoint, PrefillAnswer
from backhaul.proxy.sse import data_of

DETAILS = {"cached_tokens": 3}
PREFILL = PrefillAnswer(params={}, record={"loaded_tokens": 2}, details=DETAILS)


def rewritten(answer: dict[str, Any], prefill: PrefillAnswer = PREFILL) -> Any:
    return json.loads(rewrite_answer(Endpoint.CHAT, json.dumps(answer).encode(), prefill))


def test_cached_tokens_are_prefills() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    answer = rewritten({"id": "x", "usage": usage, "choices": [{"logprobs": {"a": -9999.0}}]})
    assert answer["usage"] == {"prompt_tokens": 9, "prompt_tokens_details": DETAILS}
    assert answer["id"] == "x"
    assert answer["choices"] == [{"logprobs": {"a": -9999.0}}]


def test_what_prefill_did_not_tell_is_not_told() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 8}}
    silent = PrefillAnswer(params={})
    assert rewritten({"usage": usage}, silent) == {"usage": {"prompt_tokens_details": None}}


def test_details_are_not_invented() -> None:
    assert rewritten({"usage": {"prompt_tokens": 9}})["usage"] == {"prompt_tokens": 9}


def test_the_responses_api_keeps_its_other_details() -> None:
    details = {"cached_tokens": 8, "cached_tokens_per_turn": [8]}
    answer = rewritten({"usage": {"input_tokens_details": details}})
    assert answer["usage"]["input_tokens_details"] == details | DETAILS


def test_an_unknown_count_leaves_no_trace_of_decodes_own() -> None:
    partly = PrefillAnswer(params={}, details={"audio_tokens": 1})
    for name in ("prompt_tokens_details", "input_tokens_details"):
        usage = rewritten({"usage": {name: {"cached_tokens": 8}}}, partly)["usage"]
        assert usage[name].get("cached_tokens", 0) == 0
        assert usage[name]["audio_tokens"] == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2_000),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=40), VALUES, max_size=12))
def test_any_record_makes_a_header_that_servers_take(record: dict[str, Any]) -> None:
    header = record_header(record)
    whole = json.dumps(record, separators=(",", ":"))
    if header is None:
        assert not record or len(whole) > RECORD_HEADER_BYTES_MAX / 2
        return
    assert len(header) <= RECORD_HEADER_BYTES_MAX
    assert all(0x20 <= byte < 0x7F for byte in header)
    told = json.loads(header)
    assert {name: repr(value) for name, value in told.items()} == {
        name: repr(value) for name, value in record.items() if name in told
    }
    if len(whole) + whole.count("\x7f") * 5 < RECORD_HEADER_BYTES_MAX:
        assert told.keys() == record.keys()


def test_a_record_that_is_too_long_loses_its_longest_members() -> None:
    record = {"candidates": ["x" * 500] * 8, "loaded_tokens": 2, "selected": {"boundary": 64}}
    assert json.loads(record_header(record) or b"") == {
        "loaded_tokens": 2, "selected": {"boundary": 64},
    }  # fmt: skip
    deep: Any = []
    for _ in range(2_000):
        deep = [deep]
    assert record_header({"deep": deep, "n": 10**5000}) is None


def test_prefills_record_comes_beside_decodes() -> None:
    own = {"backhaul": {"loaded_tokens": 0}, "remote_host": "h"}
    answer = rewritten({"kv_transfer_params": own})
    assert answer["kv_transfer_params"] == {
        "backhaul": {"loaded_tokens": 0, "prefill": {"loaded_tokens": 2}}, "remote_host": "h",
    }  # fmt: skip
    assert rewritten({"kv_transfer_params": None})["kv_transfer_params"] == {
        "backhaul": {"prefill": {"loaded_tokens": 2}}
    }


@pytest.mark.parametrize("answer", [b"", b"no json", b"[1]"])
def test_what_is_no_object_is_passed_on(answer: bytes) -> None:
    assert rewrite_answer(Endpoint.CHAT, answer, PREFILL) == answer


def test_events_without_usage_are_passed_on_byte_for_byte() -> None:
    text = json.dumps({"choices": [{"delta": {"content": 'x "prompt_tokens_details" y'}}]})
    event = b"data:   " + text.encode() + b"\r\n\r\n"
    assert rewrite_event(event, PREFILL) is event


def test_usage_in_events() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 8}}
    event = rewrite_event(b"data: " + json.dumps({"usage": usage}).encode() + b"\n\n", PREFILL)
    assert json.loads(data_of(event)) == {"usage": {"prompt_tokens_details": DETAILS}}
    nested = {"response": {"usage": {"input_tokens_details": {"cached_tokens": 8}}}}
    raw = b"event: e\ndata: " + json.dumps(nested).encode() + b"\n\n"
    event = rewrite_event(raw, PREFILL)
    assert event.startswith(b"event: e\n")
    assert json.loads(data_of(event))["response"]["usage"]["input_tokens_details"] == DETAILS


def test_transfer_parameters_in_events() -> None:
    last = {"choices": [], "kv_transfer_params": {"backhaul": {"loaded_tokens": 0}}}
    event = rewrite_event(b"data: " + json.dumps(last).encode() + b"\n\n", PREFILL)
    assert json.loads(data_of(event))["kv_transfer_params"]["backhaul"]["prefill"] == PREFILL.record
    none = b'data: {"kv_transfer_params":null}\n\n'
    assert rewrite_event(none, PREFILL) == none


@pytest.mark.parametrize(
    ("data", "status"),
    [
        ({"error": {"code": 503, "message": "m"}}, 503),
        ({"error": {"message": "m"}}, 500),
        ({"error": None}, None),
        ({"type": "error", "message": "m"}, 500),
        ({"type": "response.failed", "response": {"error": {"code": "server_error"}}}, 500),
        ({"type": "response.created", "response": {"error": None}}, None),
        ({"choices": [{"delta": {"content": '"error"'}}]}, None),
    ],
)
def test_errors_in_events(data: dict[str, Any], status: int | None) -> None:
    assert error_status_of(b"data: " + json.dumps(data).encode() + b"\n\n") == status


@pytest.mark.parametrize(
    ("endpoint", "data", "expected"),
    [
        ("chat_completions", {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, True),
        ("chat_completions", {"choices": [{"delta": {"content": "w"}}]}, False),
        ("chat_completions", {"choices": [{"delta": {"role": "a", "reasoning": "w"}}]}, False),
        ("chat_completions", {"choices": [{"delta": {"tool_calls": [{}]}}]}, False),
        ("chat_completions", {"choices": [{"delta": {}, "finish_reason": "stop"}]}, False),
        ("chat_completions", {"choices": [], "usage": {}}, False),
        ("chat_completions", {"error": {"code": 500}}, False),
        ("completions", {"choices": [{"text": ""}]}, False),
        ("responses", {"type": "response.created"}, True),
        ("responses", {"type": "response.in_progress"}, True),
        ("responses", {"type": "response.output_item.added"}, False),
        ("responses", {"type": "error"}, False),
    ],
)
def test_what_comes_before_the_first_token(endpoint: str, data: Any, expected: bool) -> None:
    event = b"data: " + json.dumps(data).encode() + b"\n\n"
    assert is_preamble(Endpoint(endpoint), event) is expected


def test_comments_come_before_and_what_is_no_json_does_not() -> None:
    assert is_preamble(Endpoint.CHAT, b": ping\n\n")
    assert not is_preamble(Endpoint.CHAT, b"data: [DONE]\n\n")


@pytest.mark.parametrize("endpoint", Endpoint)
def test_our_own_error_events_read_like_the_engines(endpoint: Endpoint) -> None:
    assert error_status_of(error_event(endpoint, 500, "m", "k")) == 500


ENDED = {"input_tokens": 1, "cache_read_input_tokens": 8, "output_tokens": 4}


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        (3, {"input_tokens": 6, "cache_read_input_tokens": 3, "output_tokens": 4}),
        (None, {"input_tokens": 9, "output_tokens": 4}),
    ],
)
def test_the_messages_api_counts_cached_tokens_apart(
    cached: int | None, expected: dict[str, int]
) -> None:
    prefill = PrefillAnswer(params={}, cached_tokens=cached)
    answer = json.dumps({"usage": ENDED}).encode()
    assert json.loads(rewrite_answer(Endpoint.MESSAGES, answer, prefill))["usage"] == expected
    for body in ({"type": "message_delta", "usage": ENDED}, {"message": {"usage": ENDED}}):
        event = b"event: e\ndata: " + json.dumps(body).encode() + b"\n\n"
        told = json.loads(data_of(rewrite_event(event, prefill)))
        assert told.get("message", told)["usage"] == expected
    # A usage without a count of cached tokens is about the whole prompt already.
    plain = b'data: {"usage": {"input_tokens": 9}}\n\n'
    assert rewrite_event(plain, prefill) == plain


@pytest.mark.parametrize(
    ("kind", "status"),
    [("overloaded_error", 503), ("invalid_request_error", 400), ("api_error", 500), ("new", 500)],
)
def test_the_status_of_an_error_inside_a_message(kind: str, status: int) -> None:
    body = {"type": "error", "error": {"type": kind, "message": "m"}}
    event = b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"
    assert error_status_of(event) == status
    assert not is_preamble(Endpoint.MESSAGES, event)
    assert is_preamble(Endpoint.MESSAGES, b'data: {"type": "message_start"}\n\n')
    assert not is_preamble(Endpoint.MESSAGES, b'data: {"type": "content_block_start"}\n\n')
