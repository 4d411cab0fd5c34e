"""What each leg of a request is asked, and what the prefill leg's answer means.

The prefill leg is the client's request with everything that shapes the prompt kept and everything
that shapes the reply taken away; its one token is thrown away, decode computes it again from the
handed-over cache. It returns the prompt's token ids, and decode is given these: the template is
rendered once, and both legs see the same tokens even where a template holds a clock. Decode still
gets the whole chat request, so that it parses reasoning and tools of the reply.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec


class Endpoint(enum.StrEnum):
    """What a client may ask for; the values are label values of metrics."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"

    @property
    def path(self) -> str:
        """The path on the proxy and on every worker."""
        return f"/v1/{self.value.replace('_', '/')}"


class Handover(enum.StrEnum):
    """Whether prefill's cache was handed over, and if not, why. Decode then computed the prompt."""

    DONE = "done"
    STORE = "store"  # prefill holds nothing for decode, which finds it in Backhaul's store
    # Not tried: the request could not be answered right from a handed-over cache.
    SEVERAL_PROMPTS = "several_prompts"  # one set of transfer parameters is for one prompt
    SEVERAL_CHOICES = "several_choices"  # prefill frees its blocks after the first reader
    PROMPT_SCORES = "prompt_scores"  # log-probabilities of the prompt exist only where computed
    PROMPT_EMBEDDINGS = "prompt_embeddings"
    TRUNCATION = "truncation"  # "to what fits" depends on the reply's length, which prefill lacks
    SERVER_TOOLS = "server_tools"  # several generations in one request would read freed blocks
    STORED_HISTORY = "stored_history"  # only the worker that answered before knows it
    UNREADABLE = "unreadable"  # no JSON object that we can read: no worker gets it
    # Tried in vain.
    PREFILL_UNREACHABLE = "prefill_unreachable"
    PREFILL_FAILED = "prefill_failed"
    PREFILL_REJECTED = "prefill_rejected"
    PREFILL_TIMEOUT = "prefill_timeout"
    NO_PARAMETERS = "no_parameters"  # prefill runs without a connector that hands over
    TRANSFER_FAILED = "transfer_failed"  # decode failed with the hand-over, and was asked without


class RenderedBy(enum.StrEnum):
    """Who turned the prompt of a hand-over into tokens."""

    PREFILL = "prefill"  # for both legs: decode was given the token ids
    EACH_LEG = "each_leg"  # decode rendered the same request once more, for itself


_REPLY_ONLY = frozenset(
    [
        # How tokens are chosen.
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "use_beam_search"),
        *("length_penalty", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("repetition_detection", "logit_bias", "allowed_token_ids", "bad_words"),
        *("structured_outputs", "thinking_token_budget", "watermarking"),
        # Where the reply ends.
        *("stop", "stop_token_ids", "min_tokens", "include_stop_str_in_output"),
        "stop_sequences",
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_tool_calls"),
        # What is told about it, and how.
        *("logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "echo"),
        *("return_tokens_as_token_ids", "return_prompt_text", "include"),
        *("stream_options", "stream_interval", "background", "store"),
        "kv_transfer_params",
    ]
)
"""Left out of the prefill leg. ``response_format``, ``tools``, ``tool_choice``,
``reasoning_effort``, ``thinking``, ``output_config`` and ``text`` stay: templates may render
them."""


_TRANSFER = "kv_transfer_params"
_NOT_OF_CLIENTS = (_TRANSFER, "ec_transfer_params")
"""Nobody but the cluster itself may say these; the second is the encoder cache's. They name hosts,
ports and blocks that a worker would read from."""


@dataclass(frozen=True, kw_only=True)
class PrefillAnswer:
    """What the prefill leg gave.

    Attributes:
        params: ``kv_transfer_params`` for decode, without ``backhaul``; empty where prefill holds
            nothing for decode.
        record: Backhaul's record of what prefill reused; None where it does not run there.
        token_ids: the prompt as rendered; None where the worker did not tell.
        cached_tokens: prompt tokens that prefill did not compute; None where not told.
        details: the usage's details of the prompt, as sent, without a count that is none.
    """

    params: Mapping[str, Any]
    record: Mapping[str, Any] | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    details: Mapping[str, Any] | None = None


def parse_body(raw: bytes) -> dict[str, Any] | None:
    """The request's JSON object; None where it is none.

    Accepts what workers accept: what msgspec refuses (NaN, UTF-16) goes to the standard library,
    as nothing that a worker understands may pass by ``hints``.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return None
    except RecursionError:
        return None
    return body if isinstance(body, dict) else None


def why_unreadable(raw: bytes) -> str:
    """What is wrong with what :func:`parse_body` could not read, in a few words."""
    try:
        return f"it is of type {type(json.loads(raw)).__name__}"
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return str(error)[:200]


def encode_body(body: Any) -> bytes:
    """JSON bytes of what :func:`parse_body` gave."""
    try:
        return msgspec.json.encode(body)
    except (ValueError, OverflowError, UnicodeEncodeError):
        return json.dumps(body).encode()


def hints(body: Mapping[str, Any]) -> dict[str, Any]:
    """The client's ``kv_transfer_params["backhaul"]``; all else there is dropped."""
    params = body.get(_TRANSFER)
    given = params.get("backhaul") if isinstance(params, dict) else None
    return dict(given) if isinstance(given, dict) else {}


def names_transfer(body: Mapping[str, Any]) -> bool:
    """Whether a worker would take transfer parameters out of the client's request as it is."""
    extra = _extra(body)
    return any(name in body or name in extra for name in _NOT_OF_CLIENTS)


def _without_transfer(body: Mapping[str, Any]) -> dict[str, Any]:
    leg = _without(body)
    extra = _extra(body)
    if any(name in extra for name in _NOT_OF_CLIENTS):
        # vLLM makes the two one, and reads members of it that only a request's own field may have.
        leg["vllm_xargs"] = _without(extra)
    return leg


def _without(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if name not in _NOT_OF_CLIENTS}


def _extra(body: Mapping[str, Any]) -> dict[str, Any]:
    extra = body.get("vllm_xargs")
    return extra if isinstance(extra, dict) else {}


def obstacle(endpoint: Endpoint, body: Mapping[str, Any]) -> Handover | None:
    """Why the request must be computed by decode alone; None where it can be handed over."""
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            return Handover.SEVERAL_CHOICES
    if body.get("use_beam_search"):
        return Handover.SEVERAL_CHOICES
    if body.get("echo") or body.get("prompt_logprobs") is not None:
        return Handover.PROMPT_SCORES
    # None and positive numbers do not depend on the reply's length.
    truncate = body.get("truncate_prompt_tokens")
    if body.get("truncation", "disabled") not in (None, "disabled") or (
        isinstance(truncate, int) and truncate < 0
    ):
        return Handover.TRUNCATION
    if endpoint is Endpoint.COMPLETIONS:
        if body.get("prompt_embeds") is not None:
            return Handover.PROMPT_EMBEDDINGS
        return None if _is_one_prompt(body.get("prompt")) else Handover.SEVERAL_PROMPTS
    if endpoint is Endpoint.RESPONSES:
        if body.get("previous_response_id") is not None:
            return Handover.STORED_HISTORY
        tools = body.get("tools")
        if isinstance(tools, list) and any(not _is_clients_tool(tool) for tool in tools):
            return Handover.SERVER_TOOLS
    return None


def _is_one_prompt(prompt: Any) -> bool:
    if isinstance(prompt, list):
        if len(prompt) == 1 and isinstance(prompt[0], str | list):
            return _is_one_prompt(prompt[0])
        return bool(prompt) and all(type(token) is int for token in prompt)
    return isinstance(prompt, str)


def _is_clients_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") in ("function", "custom")


def prefill_body(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the prefill leg is asked: render, compute, keep the blocks for decode."""
    leg = {
        name: value for name, value in _without_transfer(body).items() if name not in _REPLY_ONLY
    }
    transfer: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if endpoint is Endpoint.MESSAGES:
        # That API has no field for token ids: Backhaul's connector tells them.
        transfer["backhaul"] = hints(body) | {"return_prompt_token_ids": True}
    elif given := hints(body):
        transfer["backhaul"] = given
    leg |= {
        "stream": False,
        "temperature": 0,
        "ignore_eos": True,
        "kv_transfer_params": transfer,
    }
    if endpoint is Endpoint.RESPONSES:
        # The only way to have token ids back; there is no return_token_ids.
        return leg | {"max_output_tokens": 1, "store": False, "enable_response_messages": True}
    if endpoint is Endpoint.CHAT:
        leg["max_completion_tokens"] = 1
    # Also for chat: engines differ in which of the two wins.
    return leg | {"max_tokens": 1, "return_token_ids": True}


COUNT_MAX = 2**53
"""Above it, JSON readers and metrics hold no whole numbers; no prompt is so long."""
TOKEN_ID_MAX = 2**31 - 1
LEVELS_MAX = 16
"""How deep transfer parameters may nest; vLLM's take three levels, Backhaul's record three more."""


def count_of(value: Any) -> int | None:
    """A number of tokens as a worker told it; None for what is none."""
    return value if type(value) is int and 0 <= value <= COUNT_MAX else None


def _nests_within(value: Any, levels: int) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return True
    return levels > 0 and all(
        _nests_within(one, levels - 1) for one in value if isinstance(one, dict | list)
    )


def read_prefill(endpoint: Endpoint, answer: Any) -> PrefillAnswer | None:
    """Read the prefill leg's JSON; None where prefill neither holds its blocks for decode nor runs
    Backhaul. Counts and token ids that cannot be any are as if they were not told."""
    if not isinstance(answer, dict) or not isinstance(answer.get("kv_transfer_params"), dict):
        return None
    params = dict(answer["kv_transfer_params"])
    if not _nests_within(params, LEVELS_MAX):
        return None
    record = params.pop("backhaul", None)
    told = record.pop("prompt_token_ids", None) if isinstance(record, dict) else None
    if not params.get("do_remote_prefill"):
        params = {}
    if not params and not isinstance(record, dict):
        return None
    length, details = _prompt_usage(endpoint, answer.get("usage"))
    return PrefillAnswer(
        params=params,
        record=record if isinstance(record, dict) else None,
        token_ids=_ids(told) if endpoint is Endpoint.MESSAGES else _token_ids(endpoint, answer),
        prompt_tokens=length,
        cached_tokens=count_of(details.get("cached_tokens")) if details else None,
        details=details,
    )


CACHE_COUNTS = ("cache_read_input_tokens", "cache_creation_input_tokens")
"""Of the Messages API, where they are no part of ``input_tokens``."""


def _prompt_usage(endpoint: Endpoint, usage: Any) -> tuple[int, dict[str, Any] | None]:
    """Tokens of the prompt, and its details in the form of the chat API."""
    if not isinstance(usage, dict):
        return 0, None
    if endpoint is Endpoint.MESSAGES:
        cached = {"cached_tokens": usage.get(CACHE_COUNTS[0])}
        return messages_prompt_tokens(usage), _told_details(cached)
    prefix = "input" if endpoint is Endpoint.RESPONSES else "prompt"
    length = count_of(usage.get(f"{prefix}_tokens")) or 0
    return length, _told_details(usage.get(f"{prefix}_tokens_details"))


def _told_details(details: Any) -> dict[str, Any] | None:
    if not isinstance(details, dict) or not _nests_within(details, LEVELS_MAX):
        return None
    if count_of(details.get("cached_tokens")) is None:
        details = {name: value for name, value in details.items() if name != "cached_tokens"}
    return details or None


def messages_prompt_tokens(usage: Mapping[str, Any]) -> int:
    """All tokens of the prompt in a usage of the Messages API."""
    return sum(count_of(usage.get(name)) or 0 for name in ("input_tokens", *CACHE_COUNTS))


def _input_end(record: Mapping[str, Any] | None) -> int | None:
    """U_end as the connector's record tells it (see ``protocols.record.InputEnd``)."""
    told = record.get("input_end") if record else None
    given = told.get("given") if isinstance(told, dict) else None
    return count_of(given)


def _chosen_ends(record: Mapping[str, Any] | None) -> list[str] | None:
    """What prefill's policy chose to publish (see ``protocols.record.Chosen``), so that decode does
    the other half of the same choice."""
    told = record.get("chosen") if record else None
    ends = told.get("ends") if isinstance(told, dict) else None
    if not isinstance(ends, list) or any(not isinstance(end, str) for end in ends):
        return None
    return ends


def _token_ids(endpoint: Endpoint, answer: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids: Any = None
    if endpoint is Endpoint.CHAT:
        ids = answer.get("prompt_token_ids")
    elif endpoint is Endpoint.COMPLETIONS:
        choices = answer.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            ids = choices[0].get("prompt_token_ids")
    else:
        messages = answer.get("input_messages")
        if isinstance(messages, list) and messages and isinstance(messages[0], dict):
            ids = messages[0].get("tokens")
    return _ids(ids)


def _ids(ids: Any) -> tuple[int, ...] | None:
    if not isinstance(ids, list) or not ids:
        return None
    if any(type(token) is not int or not 0 <= token <= TOKEN_ID_MAX for token in ids):
        return None
    return tuple(ids)


MEDIA = frozenset(
    [
        *("image", "image_url", "input_image", "image_pil", "image_embeds"),
        *("audio_url", "input_audio", "audio_embeds", "video_url", "video_embeds"),
        *("document", "input_file", "prompt_embeds"),
    ]
)
"""Types and members of content parts for which workers render the messages whatever ids they are
given."""


def rendered_by(endpoint: Endpoint, body: Mapping[str, Any], prefill: PrefillAnswer) -> RenderedBy:
    """Whose render decode's prompt is, after prefill handed over."""
    if prefill.token_ids is None or _tells_text(endpoint, body):
        return RenderedBy.EACH_LEG
    # A plain prompt has no messages, but whatever a client adds is not looked at.
    if endpoint is not Endpoint.COMPLETIONS:
        for name in ("messages", "input"):
            items = body.get(name)
            if isinstance(items, list) and any(_holds_media(item) for item in items):
                return RenderedBy.EACH_LEG
    return RenderedBy.PREFILL


def _tells_text(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    """Whether the answer has the text of the prompt, which a worker knows that rendered it."""
    return endpoint is Endpoint.CHAT and bool(body.get("return_prompt_text"))


def _holds_media(item: Any, levels: int = 3) -> bool:
    """Of a message or content part; results of tools have parts of their own."""
    if not isinstance(item, dict) or not levels:
        return False
    kind = item.get("type")
    if MEDIA & item.keys() or (isinstance(kind, str) and kind in MEDIA):
        return True
    parts = [item.get(name) for name in ("content", "output")]
    return any(
        _holds_media(part, levels - 1)
        for inner in parts
        if isinstance(inner, list)
        for part in inner
    )


def decode_body(
    endpoint: Endpoint, body: Mapping[str, Any], prefill: PrefillAnswer | None
) -> dict[str, Any]:
    """What decode is asked: the client's request, and where the prompt's cache and tokens are."""
    leg = _without_transfer(body)
    given = hints(body)
    if prefill is None:
        return leg | ({"kv_transfer_params": {"backhaul": given}} if given else {})
    transfer = dict(prefill.params)
    if (offset := _input_end(prefill.record)) is not None:
        # The client's own offset is for its own render, which is not the one that was used.
        given = given | {"u_end": offset}
    if (ends := _chosen_ends(prefill.record)) is not None:
        given = given | {"ends": ends}
    if given:
        transfer["backhaul"] = given
    if prefill.token_ids is not None and not _tells_text(endpoint, body):
        if endpoint is Endpoint.COMPLETIONS:
            leg["prompt"] = list(prefill.token_ids)
        else:
            # Ignored by the worker for messages with media, which it renders itself.
            transfer["prompt_token_ids"] = list(prefill.token_ids)
    return leg | {"kv_transfer_params": transfer}
