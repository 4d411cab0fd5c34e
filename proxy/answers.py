"""What the client is told: the decode worker's answer, with prefill's share of it put right.

After a hand-over the decode worker counts the whole prompt as cached, since it computed none of it.
The client's question is what the *cluster* did not compute, so the details of the prompt in
``usage`` are prefill's; where prefill reported none, there are none. Prefill's Backhaul record is
added under ``kv_transfer_params["backhaul"]["prefill"]``. All else is left as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from backhaul.proxy.legs import (
    CACHE_COUNTS,
    Endpoint,
    PrefillAnswer,
    encode_body,
    messages_prompt_tokens,
)
from backhaul.proxy.sse import data_of, with_data

_DETAILS = ("prompt_tokens_details", "input_tokens_details")
_MARKS = tuple(f'"{name}"'.encode() for name in (*_DETAILS, *CACHE_COUNTS, "kv_transfer_params"))
"""Text of a reply cannot look like this: its quotes are escaped."""


def rewrite_answer(endpoint: Endpoint, answer: bytes, prefill: PrefillAnswer) -> bytes:
    """A whole answer; returned as it is where it is no JSON object."""
    body = _object(answer)
    if body is None:
        return answer
    _put_usage_right(body.get("usage"), prefill)
    _put_record(body, prefill)
    return encode_body(body)


RECORD_HEADER_BYTES_MAX = 3072
"""Reverse proxies commonly take 4 KiB for all headers of an answer together."""


def record_header(record: Mapping[str, Any]) -> bytes | None:
    """Prefill's record as a header's value: JSON in ASCII. What is too long goes without its
    longest members; None where nothing of it fits."""
    members: list[str] = []
    for name, value in record.items():
        try:
            member = f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}"
        except (ValueError, RecursionError):
            continue
        members.append(member.replace("\x7f", "\\u007f"))  # which no header may hold
    left = RECORD_HEADER_BYTES_MAX - len("{}")
    kept: set[int] = set()
    for index in sorted(range(len(members)), key=lambda i: len(members[i])):
        left -= len(members[index]) + len(",")
        if left < 0:
            break
        kept.add(index)
    text = ",".join(members[index] for index in sorted(kept))
    return f"{{{text}}}".encode("ascii") if text else None


def rewrite_event(event: bytes, prefill: PrefillAnswer) -> bytes:
    """One event of a stream; only those with details of the prompt or transfer parameters (vLLM
    0.33 puts them beside the finish reason) change."""
    if not any(mark in event for mark in _MARKS):
        return event
    body = _object(data_of(event))
    if body is None:
        return event
    _put_usage_right(body.get("usage"), prefill)
    for inner in ("response", "message"):
        if isinstance(whole := body.get(inner), dict):
            _put_usage_right(whole.get("usage"), prefill)
    if isinstance(body.get("kv_transfer_params"), dict):
        _put_record(body, prefill)
    return with_data(event, encode_body(body))


def _put_record(body: dict[str, Any], prefill: PrefillAnswer) -> None:
    if prefill.record is None:
        return
    params = body.get("kv_transfer_params")
    params = dict(params) if isinstance(params, dict) else {}
    own = params.get("backhaul")
    own = dict(own) if isinstance(own, dict) else {}
    body["kv_transfer_params"] = params | {"backhaul": own | {"prefill": dict(prefill.record)}}


def _put_usage_right(usage: Any, prefill: PrefillAnswer) -> None:
    if not isinstance(usage, dict):
        return
    if any(name in usage for name in CACHE_COUNTS):
        _put_messages_usage_right(usage, prefill)
    for name in _DETAILS:
        if name not in usage:
            continue
        if name == "prompt_tokens_details":
            usage[name] = dict(prefill.details) if prefill.details else None
        elif isinstance(usage[name], dict):
            # Required by the Responses API, so what is unknown is 0.
            usage[name] = usage[name] | {"cached_tokens": 0} | (prefill.details or {})


def _put_messages_usage_right(usage: dict[str, Any], prefill: PrefillAnswer) -> None:
    """There, cached tokens are no part of ``input_tokens``; where none are known, no field."""
    total = messages_prompt_tokens(usage)
    for name in CACHE_COUNTS:
        usage.pop(name, None)
    if prefill.cached_tokens is not None:
        usage[CACHE_COUNTS[0]] = prefill.cached_tokens
    usage["input_tokens"] = max(total - (prefill.cached_tokens or 0), 0)


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


_BEFORE_TOKENS = frozenset(
    {"response.created", "response.queued", "response.in_progress", "message_start", "ping"}
)


def is_preamble(endpoint: Endpoint, event: bytes) -> bool:
    """Whether an event comes before the first token: a comment, a chat's role, the announcement of
    a response or message. vLLM sends these even where its first step failed, and then the error."""
    data = data_of(event)
    if not data:
        return True
    body = _object(data)
    if body is None:
        return False
    if endpoint in (Endpoint.RESPONSES, Endpoint.MESSAGES):
        return body.get("type") in _BEFORE_TOKENS
    choices = body.get("choices")
    if endpoint is not Endpoint.CHAT or not isinstance(choices, list) or not choices:
        return False
    return all(isinstance(choice, dict) and _says_nothing(choice) for choice in choices)


def _says_nothing(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    if choice.get("finish_reason") is not None or not isinstance(delta, dict):
        return False
    return not any(value for name, value in delta.items() if name != "role")


def error_status_of(event: bytes) -> int | None:
    """The status inside an event that reports an error instead of a token; None for others.

    Workers answer 200 before they generate; what fails after that comes as an event.
    """
    if b'"error"' not in event:
        return None
    body = _object(data_of(event))
    if body is None:
        return None
    error = body.get("error")
    if body.get("type") == "error" and isinstance(error, dict):  # the Messages API
        return _STATUS_OF_TYPE.get(str(error.get("type")), 500)
    if body.get("type") in ("error", "response.failed"):  # the Responses API
        return 500
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    return code if isinstance(code, int) else 500


_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The Messages API's words; its clients choose by them."""
_STATUS_OF_TYPE = {kind: status for status, kind in _TYPE_OF_STATUS.items()}


def error_body(endpoint: Endpoint | None, status: int, message: str, kind: str) -> dict[str, Any]:
    """An error of the proxy itself, in the shape of vLLM's and OpenAI's or of Anthropic's."""
    if endpoint is Endpoint.MESSAGES:
        kind = _TYPE_OF_STATUS.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_event(endpoint: Endpoint, status: int, message: str, kind: str) -> bytes:
    """What ends a stream that broke: no further event follows, so it cannot pass for complete."""
    if endpoint is Endpoint.RESPONSES:
        data: Mapping[str, Any] = {"type": "error", "code": kind, "message": message, "param": None}
        return b"event: error\ndata: " + encode_body(data) + b"\n\n"
    name = b"event: error\n" if endpoint is Endpoint.MESSAGES else b""
    return name + b"data: " + encode_body(error_body(endpoint, status, message, kind)) + b"\n\n"
