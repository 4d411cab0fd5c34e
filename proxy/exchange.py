"""One request of a client: prefill, hand-over, decode; retries and deadlines around them.

A hand-over is used once. Prefill frees its blocks when the first reader is done with them, so a
decode worker that may have got the request may have read them, and another one that is given the
same parameters would read whatever lies there by then. A decode leg that is tried again therefore
gets a prefill leg of its own, unless the first one's connection was refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from backhaul.proxy import legs
from backhaul.proxy.answers import (
    error_body,
    error_event,
    error_status_of,
    is_preamble,
    record_header,
    rewrite_answer,
    rewrite_event,
)
from backhaul.proxy.legs import Endpoint, Handover, PrefillAnswer, encode_body, parse_body
from backhaul.proxy.metrics import LegFault, Metrics, Outcome
from backhaul.proxy.pool import Pool, Worker
from backhaul.proxy.routing import sticky_key
from backhaul.proxy.settings import ProxySettings
from backhaul.proxy.sse import EventSplitter, data_of
from backhaul.proxy.upstream import (
    RETRIED_STATUSES,
    Answer,
    Headers,
    LegError,
    call,
    forwarded_request_headers,
    forwarded_response_headers,
    is_stream,
    opened,
    raise_if_retriable,
    whole,
)

logger = logging.getLogger(__name__)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

STORED_RESPONSES_MAX = 10_000
"""Whose worker is remembered; older ones are asked for everywhere."""

_PREFILL_RESULTS = {
    LegFault.CONNECT: Handover.PREFILL_UNREACHABLE,
    LegFault.LOST: Handover.PREFILL_FAILED,
    LegFault.STATUS: Handover.PREFILL_FAILED,
    LegFault.TIMEOUT: Handover.PREFILL_TIMEOUT,
}


class StoredResponses:
    """Which decode worker keeps which response of the Responses API; the latest ones only."""

    def __init__(self) -> None:
        self._workers: OrderedDict[str, Worker] = OrderedDict()

    def remember(self, response_id: str, worker: Worker) -> None:
        """Forgets the oldest beyond ``STORED_RESPONSES_MAX``."""
        self._workers[response_id] = worker
        self._workers.move_to_end(response_id)
        while len(self._workers) > STORED_RESPONSES_MAX:
            self._workers.popitem(last=False)

    def worker_of(self, response_id: Any) -> Worker | None:
        """None where it is not known."""
        return self._workers.get(response_id) if isinstance(response_id, str) else None


@dataclass
class Cluster:
    """What all requests share."""

    settings: ProxySettings
    client: httpx.AsyncClient
    metrics: Metrics
    prefill: Pool
    decode: Pool
    stored: StoredResponses = field(default_factory=StoredResponses)


class Exchange:
    """One request. ``send`` takes ASGI events; :meth:`run` sends one whole response through it."""

    def __init__(
        self, cluster: Cluster, endpoint: Endpoint, raw: bytes, headers: Headers, send: Send
    ) -> None:
        self._cluster = cluster
        self._settings = cluster.settings
        self._metrics = cluster.metrics
        self._endpoint = endpoint
        self._raw = raw
        self._send = send
        self._started = time.monotonic()
        self._body = parse_body(raw)
        given = {name.lower(): value for name, value in headers}
        self._request_id = given.get(b"x-request-id", b"").decode("latin-1") or uuid.uuid4().hex
        self._headers = forwarded_request_headers(headers, self._request_id)
        session = given.get(b"x-session-id", b"").decode("latin-1")
        self._key = sticky_key(self._body or {}, session)
        self._streamed = bool(self._body and self._body.get("stream"))
        self._handover: Handover | None = None
        self._begun = False  # whether the client got the status, after which nothing is retried

    async def run(self) -> None:
        """Answer the client, whatever happens. Cancelling it gives up both legs."""
        outcome = Outcome.INTERNAL
        try:
            with anyio.fail_after(self._settings.request_timeout_s):
                outcome = await self._answer()
        except TimeoutError:
            outcome = Outcome.DEADLINE
            limit = self._settings.request_timeout_s
            await self._fail(504, f"the request took longer than {limit:g} s", "timeout")
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_GONE
            raise
        except Exception:
            logger.exception("request %s failed inside the proxy", self._request_id)
            await self._fail(500, "the proxy failed; its log says why", "internal_error")
        finally:
            self._metrics.requests.labels(self._endpoint, outcome).inc()
            if self._handover is not None:
                self._metrics.handovers.labels(self._handover).inc()

    async def _answer(self) -> Outcome:
        if self._body is None:
            # A worker may read what we cannot: transfer parameters, for one.
            self._handover = Handover.UNREADABLE
            words = f"the body is no JSON object: {legs.why_unreadable(self._raw)}"
            await self._fail(400, words, "invalid_request_error")
            return Outcome.REJECTED
        self._handover = legs.obstacle(self._endpoint, self._body)
        prefill: PrefillAnswer | None = None
        tried: set[Worker] = set()
        once_more: Worker | None = None  # may be asked again, without a hand-over
        error: LegError | None = None
        attempts = self._settings.retries + 1
        while attempts > 0:
            attempts -= 1
            if self._handover is None:
                prefill, self._handover = await self._prefill()
            worker = self._decode_worker(tried) or once_more
            if worker is None:
                break
            if error is not None:
                self._metrics.retries.labels("decode", error.fault).inc()
            # Without another way to get an answer, waiting is better than giving up.
            others = attempts > 0 and self._cluster.decode.has_other({*tried, worker})
            patience_s = None
            if others or prefill is not None:
                patience_s = self._settings.first_token_timeout_s
            try:
                return await self._decode(worker, prefill, patience_s)
            except LegError as failure:
                logger.warning("request %s: %s", self._request_id, failure)
                if self._begun:
                    await self._break_off(f"the decode worker failed: {failure}")
                    return Outcome.BROKEN
                error, once_more = failure, None
                tried.add(worker)
                if prefill is None or not failure.delivered:
                    continue
                prefill, self._handover = None, None
                silent = failure.fault in (LegFault.LOST, LegFault.TIMEOUT)
                if failure.worker_erred or (silent and not others):
                    # It may be the transfer that failed, and no request fails because of prefill.
                    self._handover = Handover.TRANSFER_FAILED
                    once_more, attempts = worker, max(attempts, 1)
        # The last failure may have used up a hand-over.
        self._handover = self._handover or Handover.DONE
        return await self._give_up(error)

    def _decode_worker(self, tried: set[Worker]) -> Worker | None:
        keeper = self._cluster.stored.worker_of((self._body or {}).get("previous_response_id"))
        if keeper is not None and keeper not in tried:
            return keeper
        return self._cluster.decode.choose(self._key, tried)

    async def _prefill(self) -> tuple[PrefillAnswer | None, Handover]:
        assert self._body is not None
        payload = encode_body(legs.prefill_body(self._endpoint, self._body))
        started = time.monotonic()
        try:
            with anyio.fail_after(self._settings.prefill_timeout_s):
                answer = await self._prefill_answer(payload)
        except TimeoutError:
            return None, Handover.PREFILL_TIMEOUT
        except LegError as error:
            return None, _PREFILL_RESULTS[error.fault]
        if answer.status != 200:
            # The decode worker will find the same fault, and name it in the client's own terms.
            return None, Handover.PREFILL_REJECTED
        prefill = legs.read_prefill(self._endpoint, parse_body(answer.body))
        if prefill is None:
            return None, Handover.NO_PARAMETERS
        self._metrics.leg_seconds.labels("prefill").observe(time.monotonic() - started)
        by = legs.rendered_by(self._endpoint, self._body, prefill)
        self._metrics.renders.labels(self._endpoint, by).inc()
        if prefill.cached_tokens is not None:
            computed = max(prefill.prompt_tokens - prefill.cached_tokens, 0)
            self._metrics.prompt_tokens.labels("cached").inc(prefill.cached_tokens)
            self._metrics.prompt_tokens.labels("computed").inc(computed)
        return prefill, Handover.DONE if prefill.params else Handover.STORE

    async def _prefill_answer(self, payload: bytes) -> Answer:
        """Raises :class:`LegError` once no worker is left to try."""
        tried: set[Worker] = set()
        error = LegError(LegFault.CONNECT, "no prefill worker is healthy", delivered=False)
        for attempt in range(self._settings.retries + 1):
            worker = self._cluster.prefill.choose(self._key, tried)
            # Decode can do without prefill: waiting for a host that is not there is worse.
            if worker is None or not worker.health.healthy:
                break
            if attempt:
                self._metrics.retries.labels("prefill", error.fault).inc()
            try:
                with worker.busy():
                    return await self._call_prefill(worker, payload)
            except LegError as failure:
                logger.warning("request %s: %s", self._request_id, failure)
                error = failure
                tried.add(worker)
        raise error

    async def _call_prefill(self, worker: Worker, payload: bytes) -> Answer:
        """One token: its answer is its first token."""
        limit_s = self._settings.first_token_timeout_s
        client, path = self._cluster.client, self._endpoint.path
        try:
            with anyio.fail_after(limit_s):
                return await call(client, worker, "POST", path, self._headers, payload)
        except TimeoutError:
            raise _no_first_token(worker, limit_s) from None

    def _decode_payload(self, prefill: PrefillAnswer | None) -> bytes:
        assert self._body is not None
        if prefill is None and not legs.names_transfer(self._body):
            return self._raw
        return encode_body(legs.decode_body(self._endpoint, self._body, prefill))

    async def _decode(
        self, worker: Worker, prefill: PrefillAnswer | None, patience_s: float | None
    ) -> Outcome:
        """``patience_s``: longest wait for a stream's first token; None: no limit of its own.

        Raises :class:`LegError`; before anything was sent, another worker may be tried.
        """
        started = time.monotonic()
        payload = self._decode_payload(prefill)
        client, path, headers = self._cluster.client, self._endpoint.path, self._headers
        patience_s = patience_s if self._streamed else None
        with worker.busy():
            try:
                with anyio.fail_after(patience_s) as patience:
                    async with opened(client, worker, "POST", path, headers, payload) as response:
                        if response.status_code == 200 and is_stream(response):
                            outcome = await self._stream(response, worker, prefill, patience)
                        else:
                            patience.deadline = math.inf
                            outcome = await self._pass_on(await whole(response), worker, prefill)
            except TimeoutError:
                raise _no_first_token(worker, patience_s or 0.0) from None
        if outcome is Outcome.OK:
            self._metrics.leg_seconds.labels("decode").observe(time.monotonic() - started)
        return outcome

    async def _pass_on(
        self, answer: Answer, worker: Worker, prefill: PrefillAnswer | None
    ) -> Outcome:
        raise_if_retriable(worker, answer)
        if answer.status == 200:
            self._observe_ttft()
            if self._endpoint is Endpoint.RESPONSES:
                self._remember(parse_body(answer.body), worker)
            if prefill is not None:
                body = rewrite_answer(self._endpoint, answer.body, prefill)
                answer = Answer(answer.status, answer.headers, body)
        await self._respond(answer, prefill)
        return Outcome.OK if answer.status < 400 else Outcome.REJECTED

    async def _stream(
        self,
        response: httpx.Response,
        worker: Worker,
        prefill: PrefillAnswer | None,
        patience: anyio.CancelScope,
    ) -> Outcome:
        splitter = EventSplitter()
        chunks = response.aiter_bytes()
        events: list[bytes] = []
        first: bytes | None = None
        looked_at = 0
        async for chunk in chunks:
            events += splitter.feed(chunk)
            # What comes before the first token is held back with it: vLLM sends it in one go, and
            # until then another worker can be tried.
            while first is None and len(events) > looked_at:
                if not is_preamble(self._endpoint, events[looked_at]):
                    first = events[looked_at]
                looked_at += 1
            if first is not None:
                break
        if first is None:
            raise LegError(LegFault.LOST, f"{worker.url} ended a stream unbegun", delivered=True)
        if error_status_of(first) in RETRIED_STATUSES:
            seen = b"".join(events) + splitter.rest()
            rest = b"".join([chunk async for chunk in chunks])
            answer = Answer(200, response.headers.raw, seen + rest)
            raise LegError(
                LegFault.STATUS, f"{worker.url} failed at once", delivered=True, answer=answer
            )
        patience.deadline = math.inf
        if self._endpoint is Endpoint.RESPONSES:
            event = parse_body(data_of(events[0]))
            self._remember(event.get("response") if event else None, worker)
        await self._begin(200, response.headers.raw, prefill)
        outcome = _Ending(self._endpoint)
        await self._send_events(events, prefill, outcome)
        self._observe_ttft()
        stall_s = self._settings.stall_timeout_s
        try:
            with anyio.fail_after(stall_s) as silence:
                async for chunk in chunks:
                    # A client that reads slowly is not the worker's silence.
                    silence.deadline = math.inf
                    await self._send_events(splitter.feed(chunk), prefill, outcome)
                    silence.deadline = anyio.current_time() + stall_s
        except TimeoutError:
            message = f"{worker.url} was silent for {stall_s:g} s in a stream"
            raise LegError(LegFault.TIMEOUT, message, delivered=True) from None
        if rest := splitter.rest():
            outcome.saw([rest])  # the mark may lack the blank line behind it
        ended = outcome.value()
        if ended is Outcome.BROKEN:
            message = f"{worker.url} ended a stream in the middle"
            raise LegError(LegFault.LOST, message, delivered=True)
        await self._send_body(rest, more=False)
        return ended

    async def _send_events(
        self, events: list[bytes], prefill: PrefillAnswer | None, outcome: _Ending
    ) -> None:
        if not events:
            return
        outcome.saw(events)
        if prefill is not None:
            events = [rewrite_event(event, prefill) for event in events]
        await self._send_body(b"".join(events), more=True)

    def _remember(self, response: Any, worker: Worker) -> None:
        response_id = response.get("id") if isinstance(response, dict) else None
        if isinstance(response_id, str):
            self._cluster.stored.remember(response_id, worker)

    def _observe_ttft(self) -> None:
        seconds = time.monotonic() - self._started
        stream = "true" if self._streamed else "false"
        self._metrics.ttft_seconds.labels(self._endpoint, stream).observe(seconds)

    async def _give_up(self, error: LegError | None) -> Outcome:
        """No decode worker is left: its own words where it had any, else ours."""
        if error is None:
            await self._fail(503, "there is no decode worker", "service_unavailable")
            return Outcome.UNREACHABLE
        if error.answer is not None:
            await self._respond(error.answer, None)
            return Outcome.REJECTED if 400 <= error.answer.status < 500 else Outcome.FAILED
        if error.fault is LegFault.CONNECT:
            await self._fail(503, f"no decode worker can be reached: {error}", "unreachable")
            return Outcome.UNREACHABLE
        status, kind = (502, "bad_gateway")
        if error.fault is LegFault.TIMEOUT:
            status, kind = (504, "timeout")
        await self._fail(status, f"the decode worker failed: {error}", kind)
        return Outcome.FAILED

    async def _fail(self, status: int, message: str, kind: str) -> None:
        if self._begun:
            await self._break_off(message, status, kind)
            return
        body = encode_body(error_body(self._endpoint, status, message, kind))
        await self._respond(Answer(status, [(b"content-type", b"application/json")], body), None)

    async def _break_off(self, message: str, status: int = 502, kind: str = "bad_gateway") -> None:
        await self._send_body(error_event(self._endpoint, status, message, kind), more=False)

    async def _respond(self, answer: Answer, prefill: PrefillAnswer | None) -> None:
        length = (b"content-length", str(len(answer.body)).encode())
        await self._begin(answer.status, [*answer.headers], prefill, length)
        await self._send_body(answer.body, more=False)

    async def _begin(
        self,
        status: int,
        headers: Headers,
        prefill: PrefillAnswer | None,
        *more: tuple[bytes, bytes],
    ) -> None:
        kept = [*forwarded_response_headers(headers), *more]
        if not any(name == b"x-request-id" for name, _ in kept):
            kept.append((b"x-request-id", self._request_id.encode("latin-1")))
        if self._handover is not None:
            kept.append((b"x-backhaul-handover", str(self._handover).encode()))
        if prefill is not None and prefill.record is not None:
            told = record_header(prefill.record)
            if told is not None:
                kept.append((b"x-backhaul-prefill", told))
        self._begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class _Ending:
    """How a stream ended, as far as its events tell."""

    def __init__(self, endpoint: Endpoint) -> None:
        # The Responses API has no such mark.
        self._complete = endpoint is Endpoint.RESPONSES
        self._messages = endpoint is Endpoint.MESSAGES
        self._failed = False

    def saw(self, events: list[bytes]) -> None:
        """Look at some more events; there is at least one."""
        for event in events:
            if error_status_of(event) is not None:
                self._failed = True
            elif self._messages and b'"message_stop"' in event:
                self._complete = True
        if b"[DONE]" in events[-1] and data_of(events[-1]) == b"[DONE]":
            self._complete = True

    def value(self) -> Outcome:
        """After the last event."""
        if self._failed:
            return Outcome.FAILED
        return Outcome.OK if self._complete else Outcome.BROKEN


def _no_first_token(worker: Worker, limit_s: float) -> LegError:
    message = f"{worker.url} gave no first token in {limit_s:g} s"
    return LegError(LegFault.TIMEOUT, message, delivered=True)
