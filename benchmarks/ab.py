"""One dialogue with an OpenAI-compatible server, replayed in full at every turn: what was reused?

The A/B measurement of prefix caching that needs nothing but a URL. Measured per request, one at a
time, at temperature 0: prompt, cached and generated tokens as the server counts them, time to first
token, lengths of reasoning and content, and a digest of the reply. The whole reply goes back at the
next turn, reasoning and tool calls included: checkpoints at the end of decode match nothing less.

The share of cached tokens is taken over all requests, the first included, of which nothing can be
cached: cached tokens of all / prompt tokens of all.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from backhaul.protocols.errors import BackhaulError
from backhaul.proxy.sse import EventSplitter, data_of

REPLY_BYTES_MAX = 256 << 20
"""Of one streamed reply; a server that never ends must not fill memory."""

RESET_TIMEOUT_S = 30.0

SYSTEM = "You advise a small town that moves its public library. Be concrete and complete."

QUESTIONS = (
    "The library has sixty thousand books, two reading rooms and an archive that must stay dry. "
    "Compare moving everything in one closed week with moving floor by floor while it stays open: "
    "cost, risk, staff, readers. Then recommend one and give a plan by weeks.",
    "Take that plan and write what to do when the lift fails on the second day: who decides, who "
    "is told, in which order, what waits, and how the lost time is made up.",
    "Now list the ten risks of the plan that worry you most. For each: how likely, how bad, what "
    "shows it early, who owns it, and what has been prepared.",
    "The council cut the budget by a fifth. Say which parts of the plan you change, which you keep "
    "against pressure, and what the town will notice.",
    "Summarise everything above for readers of the town's paper, in plain words, with the dates "
    "and the three things that they have to do themselves.",
)
"""Five requests for long answers that build on each other; further turns begin anew."""

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a figure of the library, e.g. number of shelves.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string"}},
            "required": ["what"],
        },
    },
}
TOOL_RESULT = "shelves 2400, metres of books 1900, lorries for hire in town 3, lift load 800 kg"


class AbError(BackhaulError):
    """A server could not be asked, or its answer is of no use. One line that names its URL."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of the comparison.

    Attributes:
        name: for reports.
        url: base URL of the API, with ``/v1`` or without.
        reset: engines whose prefix cache is emptied before each turn, as if the turn met another
            worker; they run with ``VLLM_SERVER_DEV_MODE=1``.
    """

    name: str
    url: str
    reset: Sequence[str] = ()

    @property
    def base(self) -> str:
        """The URL that ends in ``/v1``."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"


@dataclass(frozen=True, kw_only=True)
class AbPlan:
    """What both arms are asked.

    Attributes:
        model: its name; empty: the first that the server lists.
        turns: number of requests.
        max_tokens: most tokens of a reply. One that ends there was cut, and decode checkpoints are
            by default kept only of replies that end by themselves.
        questions: what the user says, in turn.
        tools: offer a tool. A reply that calls it is followed by its result instead of a question.
        salt: send a random ``cache_salt`` (vLLM) per arm, so that nothing from before is found.
        extra: further members of each request's body.
        pause_s: between a reply and the next request.
        timeout_s: longest wait for the next byte.
    """

    model: str = ""
    turns: int = 5
    max_tokens: int = 4096
    system: str = SYSTEM
    questions: Sequence[str] = QUESTIONS
    tools: bool = False
    salt: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    pause_s: float = 1.0
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class RequestReport:
    """One request. Lengths of text in characters; ``cached_tokens``: None where the server does
    not say (vLLM: ``--enable-prompt-tokens-details``)."""

    turn: int
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    reasoning_characters: int
    content_characters: int
    tool_calls: int
    finish_reason: str
    digest: str
    ttft_s: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ArmReport:
    """All requests of one arm."""

    name: str
    url: str
    model: str
    requests: Sequence[RequestReport]

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def cached_tokens(self) -> int:
        """Of all requests; those that do not say count as none."""
        return sum(request.cached_tokens or 0 for request in self.requests)

    @property
    def cached_share(self) -> float:
        """Cached / prompt tokens over all requests, the first included."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    @property
    def later_cached_share(self) -> float:
        """The same from the second request on."""
        prompt = sum(request.prompt_tokens for request in self.requests[1:])
        return sum(request.cached_tokens or 0 for request in self.requests[1:]) / max(prompt, 1)


@dataclass
class Reply:
    """A reply as it comes in.

    Attributes:
        reasoning_key: the name under which the server sends reasoning, and gets it back.
    """

    content: str = ""
    reasoning: str = ""
    reasoning_key: str = "reasoning"
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str = ""
    usage: Mapping[str, Any] | None = None
    first_s: float | None = None

    def message(self) -> dict[str, Any]:
        """The assistant message that the next request replays."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message[self.reasoning_key] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [self.calls[i] for i in sorted(self.calls)]
        return message

    def digest(self) -> str:
        """Twelve digits that differ where replies do. Ids of calls are random and left out."""
        calls = [self.calls[i]["function"] for i in sorted(self.calls)]
        text = json.dumps([self.reasoning, self.content, calls])
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]

    def take(self, event: Mapping[str, Any], elapsed_s: float) -> None:
        """Add one event. Raises ``TypeError``, ``AttributeError``, ``KeyError`` or ``ValueError``
        for what is no chunk of a chat completion."""
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            before = (len(self.content), len(self.reasoning), len(self.calls))
            self.content += delta.get("content") or ""
            for key in ("reasoning", "reasoning_content"):
                if delta.get(key):
                    self.reasoning += delta[key]
                    self.reasoning_key = key
                    break
            for call in delta.get("tool_calls") or ():
                self._take_call(call)
            after = (len(self.content), len(self.reasoning), len(self.calls))
            if self.first_s is None and after != before:
                self.first_s = elapsed_s

    def _take_call(self, call: Mapping[str, Any]) -> None:
        known = self.calls.setdefault(
            int(call.get("index") or 0),
            {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
        )
        known["id"] = call.get("id") or known["id"]
        function = call.get("function") or {}
        known["function"]["name"] += function.get("name") or ""
        known["function"]["arguments"] += function.get("arguments") or ""


def run_arm(
    arm: Arm,
    plan: AbPlan,
    on_request: Callable[[Arm, RequestReport], None] = lambda arm, report: None,
) -> ArmReport:
    """Hold the dialogue. ``on_request`` is told of each request. Raises ``AbError``."""
    # A proxy from the environment would stand between the clock and the server.
    with httpx.Client(timeout=plan.timeout_s, trust_env=False) as client:
        model = plan.model or _first_model(client, arm)
        body = _body(arm, plan, model)
        messages: list[dict[str, Any]] = [{"role": "system", "content": plan.system}]
        reports: list[RequestReport] = []
        results: list[dict[str, Any]] = []
        asked = 0
        for turn in range(1, plan.turns + 1):
            if results:
                messages += results
            else:
                question = plan.questions[asked % len(plan.questions)]
                messages.append({"role": "user", "content": question})
                asked += 1
            for url in arm.reset:
                _reset(client, url, model)
            reply, seconds = _ask(client, arm, {**body, "messages": messages})
            reports.append(_report(arm, turn, reply, seconds))
            on_request(arm, reports[-1])
            messages.append(reply.message())
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": TOOL_RESULT}
                for call in messages[-1].get("tool_calls", ())
            ]
            if turn < plan.turns:
                time.sleep(plan.pause_s)
    return ArmReport(name=arm.name, url=arm.base, model=model, requests=tuple(reports))


def _body(arm: Arm, plan: AbPlan, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "max_tokens": plan.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if plan.tools:
        body["tools"] = [TOOL]
    if plan.salt:
        body["cache_salt"] = uuid.uuid4().hex
    return {**body, **plan.extra}


def _first_model(client: httpx.Client, arm: Arm) -> str:
    url = f"{arm.base}/models"
    response = _request(client, "GET", url)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise AbError(f"{url} lists no model: give --model") from None


def _ask(client: httpx.Client, arm: Arm, body: Mapping[str, Any]) -> tuple[Reply, float]:
    """The reply and the seconds that it took."""
    url = f"{arm.base}/chat/completions"
    reply = Reply()
    started = time.monotonic()
    try:
        with client.stream("POST", url, json=body) as response:
            if not response.is_success:
                response.read()
            _check(response)
            for data in _events(response, url):
                reply.take(_event(data, url), time.monotonic() - started)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unreachable(url, error) from None
    except (TypeError, AttributeError, KeyError, ValueError, RecursionError) as error:
        raise AbError(f"{url} sent no chat completion: {_short(error)}") from None
    return reply, time.monotonic() - started


def _events(response: httpx.Response, url: str) -> Iterator[bytes]:
    splitter, size = EventSplitter(), 0
    for piece in response.iter_bytes():
        size += len(piece)
        if size > REPLY_BYTES_MAX:
            raise AbError(f"{url} sent more than {REPLY_BYTES_MAX:,} bytes for one reply")
        for event in splitter.feed(piece):
            data = data_of(event)
            if data == b"[DONE]":
                return
            if data:
                yield data


def _event(data: bytes, url: str) -> Mapping[str, Any]:
    event = json.loads(data)
    if not isinstance(event, dict):
        raise TypeError(f"{_short(data)!r} is no object")
    if error := event.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise AbError(f"{url} failed while it answered: {_short(message)}")
    return event


def _report(arm: Arm, turn: int, reply: Reply, seconds: float) -> RequestReport:
    url = f"{arm.base}/chat/completions"
    usage = reply.usage
    if usage is None:
        raise AbError(
            f"{url} ended the reply to request {turn} without its token counts: the server must "
            "support stream_options.include_usage"
        )
    try:
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return RequestReport(
            turn=turn,
            prompt_tokens=int(usage["prompt_tokens"]),
            cached_tokens=None if cached is None else int(cached),
            completion_tokens=int(usage["completion_tokens"]),
            reasoning_characters=len(reply.reasoning),
            content_characters=len(reply.content),
            tool_calls=len(reply.calls),
            finish_reason=reply.finish_reason,
            digest=reply.digest(),
            ttft_s=seconds if reply.first_s is None else reply.first_s,  # nothing was said
            seconds=seconds,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise AbError(f"{url} sent no token counts that can be read: {_short(usage)}") from None


def _reset(client: httpx.Client, url: str, model: str) -> None:
    """Empty an engine's prefix cache. It refuses while a block is referenced, and when idle learns
    of what others have read only in a step, so it is given one."""
    url = url.rstrip("/")
    deadline = time.monotonic() + RESET_TIMEOUT_S
    while True:
        response = _request(client, "POST", f"{url}/reset_prefix_cache")
        try:
            if response.json()["success"]:
                return
        except (ValueError, LookupError, TypeError):
            return  # older servers answer without a body once it is done
        if time.monotonic() > deadline:
            raise AbError(f"{url} still uses cached blocks after {RESET_TIMEOUT_S:g} s")
        one = {"model": model, "prompt": "a", "max_tokens": 1}
        _request(client, "POST", f"{url}/v1/completions", json=one)
        time.sleep(0.2)


def _request(client: httpx.Client, method: str, url: str, **more: Any) -> httpx.Response:
    try:
        response = client.request(method, url, **more)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unreachable(url, error) from None
    _check(response)
    return response


def _check(response: httpx.Response) -> None:
    """Raises ``AbError`` for what is no success."""
    url = response.request.url
    if response.is_success:
        return
    if url.path.endswith("/reset_prefix_cache") and response.status_code == 404:
        raise AbError(f"{url} does not exist: start the engine with VLLM_SERVER_DEV_MODE=1")
    try:
        error = response.json()["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError):
        message = response.text
    if to := response.headers.get("location"):  # not followed: what is measured is this address
        message = f"it names {to}"
    raise AbError(f"{url} answered {response.status_code}: {_short(message)}")


def _unreachable(url: str, error: Exception) -> AbError:
    what = _short(error) if str(error) else type(error).__name__
    return AbError(f"{url} cannot be asked: {what}")


def _short(value: object) -> str:
    """One line, cut."""
    return " ".join(str(value).split())[:200]
