"""A running `backhaul up`, turns of the official client, and what a template predicts of them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e_kit import GAUGES, B, wait_until
from openai import OpenAI
from tokenizers import Tokenizer
from transformers.utils import chat_template_utils

from backhaul.deploy.engines import Engine, EngineSpec
from backhaul.deploy.pair import EngineClient
from backhaul.deploy.tiny_model import TOKEN_IDS

MODEL = "tiny-hybrid"
END = TOKEN_IDS["<|im_end|>"]
SPELLED = {str(TOKEN_IDS[text]): 100 for text in ("<tool_call>", "</tool_call>", "</think>")}
"""Where the grammar allows one of these tokens it is taken, and not spelled in letters."""


@dataclass
class Up:
    """A running cluster: its proxy, its engines' addresses and its model."""

    url: str
    engines: dict[str, str]
    model: Path
    request_log: Path
    _clients: dict[str, EngineClient] = field(default_factory=dict)

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def engine(self, name: str) -> EngineClient:
        """A client of one of the engines."""
        if name not in self._clients:
            port = int(self.engines[name].rpartition(":")[2])
            spec = EngineSpec(name, self.model, port=port)
            self._clients[name] = EngineClient(Engine(spec, self.model))
        return self._clients[name]

    def settle(self) -> None:
        """What was to be published is published."""
        time.sleep(0.1)  # the front end enters a step's gauges just after it answered
        for name in self.engines:
            client = self.engine(name)
            wait_until(lambda c=client: not any(_gauges(c)), f"{name} is idle")

    def forget(self) -> None:
        """The next turn meets a prefill worker that has not seen the conversation."""
        self.settle()
        self.engine("prefill-0").reset_prefix_cache()


def _gauges(client: EngineClient) -> list[float]:
    metrics = client.metrics()
    return [metrics.get(f"backhaul:{name}", 0.0) for name in GAUGES]


@dataclass
class Turn:
    """One answer: the message, what prefill said of it, and the counts that the client was told.

    ``input_ids`` and ``output_ids`` are what the engine saw and sampled, the end token included;
    streams tell them as well. ``logprobs``: of every token, where they were asked for, token id ->
    log-probability of the best ones.
    """

    message: dict[str, Any]
    request_id: str
    handover: str
    record: dict[str, Any]
    prompt: int
    cached: int
    output: int
    finish: str
    input_ids: list[int]
    output_ids: list[int]
    logprobs: tuple[dict[int, float], ...] = ()

    @property
    def text(self) -> str:
        return str(self.message.get("content") or "")

    @property
    def decode_end(self) -> int:
        """Boundary of this turn's D_end."""
        return (self.prompt + self.output - 1) // B * B


def ask(up: Up, messages: Sequence[Any], *, stream: bool = False, **more: Any) -> Turn:
    """One request through the proxy, by the official client."""
    extra = {
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **more.pop("extra_body", {}),
    }
    options: dict[str, Any] = {
        "model": MODEL, "messages": messages, "max_tokens": 400, "extra_body": extra, **more,
    }  # fmt: skip
    chat = up.client.chat.completions.with_raw_response
    if stream:
        raw = chat.create(stream=True, stream_options={"include_usage": True}, **options)
        parts = _collected(raw.parse())
    else:
        raw = chat.create(**options)
        answer: Any = raw.parse()
        choice = answer.choices[0]
        parts = {
            "message": choice.message.model_dump(exclude_none=True),
            "finish": choice.finish_reason,
            "usage": answer.usage,
            "input_ids": answer.prompt_token_ids,
            "output_ids": choice.token_ids,
            "logprobs": by_token(choice.logprobs),
        }
    usage = parts.pop("usage")
    details = usage.prompt_tokens_details
    return Turn(
        request_id=raw.headers["x-request-id"],
        handover=raw.headers["x-backhaul-handover"],
        record=json.loads(raw.headers.get("x-backhaul-prefill", "{}")),
        prompt=usage.prompt_tokens,
        cached=details.cached_tokens if details and details.cached_tokens else 0,
        output=usage.completion_tokens,
        **parts,
    )


def by_token(logprobs: Any) -> tuple[dict[int, float], ...]:
    """Tokens are named ``token_id:N``."""
    content = logprobs.content if logprobs is not None and logprobs.content else ()
    return tuple(
        {int(best.token.rpartition(":")[2]): best.logprob for best in token.top_logprobs}
        for token in content
    )


def _collected(chunks: Any) -> dict[str, Any]:
    """The whole of a stream without tool calls."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    found: dict[str, Any] = {"message": message, "finish": "", "input_ids": [], "output_ids": []}
    for chunk in chunks:
        found["usage"] = chunk.usage or found.get("usage")
        found["input_ids"] += getattr(chunk, "prompt_token_ids", None) or []
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            if reasoning := getattr(choice.delta, "reasoning", None):
                message["reasoning"] = message.get("reasoning", "") + reasoning
            found["output_ids"] += getattr(choice, "token_ids", None) or []
            found["finish"] = choice.finish_reason or found["finish"]
    return found


@dataclass(frozen=True)
class Template:
    """A chat template, rendered here as often as a prediction needs it."""

    source: str
    model: Path

    def tokens(self, messages: Sequence[Any], **variables: Any) -> list[int]:
        """The prompt as the engine should see it."""
        made = chat_template_utils._compile_jinja_template(self.source)
        text = made.render(messages=[_for_template(m) for m in messages], **variables)
        ids: list[int] = Tokenizer.from_file(str(self.model / "tokenizer.json")).encode(text).ids
        return ids


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """As vLLM hands a message over: arguments parsed, reasoning under both of its names."""
    given = dict(message)
    if "reasoning" in given:
        given["reasoning_content"] = given["reasoning"]
    if "tool_calls" in given:
        given["tool_calls"] = [
            call | {"function": call["function"] | {
                "arguments": json.loads(call["function"]["arguments"])}}
            for call in given["tool_calls"]
        ]  # fmt: skip
    return given


@dataclass(frozen=True)
class Ends:
    """The ends that one turn leaves behind, as the tokens that lie before each of them."""

    input_end: list[int]
    decode_end: list[int] | None

    @classmethod
    def of(cls, turn: Turn, without_header: list[int]) -> Ends:
        """``without_header``: the turn's prompt as far as it is input."""
        stopped = turn.finish in ("stop", "tool_calls")
        said = turn.output_ids[:-1] if turn.output_ids[-1] == END else turn.output_ids
        return cls(without_header, [*turn.input_ids, *said] if stopped else None)


def predicted(earlier: Sequence[Ends], prompt: Sequence[int]) -> tuple[str, int]:
    """Kind and boundary of the deepest end whose materialised tokens the prompt begins with."""
    best = ("none", 0)
    for ends in earlier:
        for kind, tokens in (("input_end", ends.input_end), ("decode_end", ends.decode_end)):
            if tokens is None:
                continue
            boundary = len(tokens) // B * B
            fits = boundary < len(prompt) and list(prompt[:boundary]) == tokens[:boundary]
            if fits and boundary > best[1]:
                best = (kind, boundary)
    return best
