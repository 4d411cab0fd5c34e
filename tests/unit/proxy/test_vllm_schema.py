"""The legs against vLLM's own request models: a field that a new version adds must be looked at."""

from __future__ import annotations

from typing import Any

import pytest

from backhaul.proxy import legs
from backhaul.proxy.legs import Endpoint, PrefillAnswer, decode_body, prefill_body

pytest.importorskip("vllm")

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

MODELS: dict[Endpoint, Any] = {
    Endpoint.CHAT: ChatCompletionRequest,
    Endpoint.COMPLETIONS: CompletionRequest,
    Endpoint.RESPONSES: ResponsesRequest,
    Endpoint.MESSAGES: AnthropicMessagesRequest,
}


def validated(endpoint: Endpoint, body: dict[str, Any]) -> Any:
    """The request as vLLM's engine side knows it: a message becomes a chat."""
    request = MODELS[endpoint].model_validate(body)
    if endpoint is Endpoint.MESSAGES:
        return AnthropicServingMessages.to_chat_completion_request(request)
    return request


REPLACED = {"stream", "ignore_eos", "return_token_ids", "enable_response_messages"}
PROMPT = {
    *("messages", "prompt", "input", "instructions", "prompt_embeds", "suffix", "documents"),
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "reasoning", "text"),
    *("response_format", "include_reasoning", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs"),
    *("truncate_prompt_tokens", "truncation_side", "truncation"),
    *("previous_input_messages", "previous_response_id", "cache_salt", "model"),
    *("system", "thinking", "output_config"),
}
CALLER = {
    *("request_id", "session_id", "priority", "user", "metadata", "service_tier"),
    *("prompt_cache_key", "vllm_xargs"),
    # Since 0.33.
    *("prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
}
WITHOUT_EFFECT = {
    *("skip_special_tokens", "spaces_between_special_tokens", "return_token_offsets"),
    *("routed_experts_prompt_start", "return_weight_versions"),
}


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_field_of_a_request_was_considered(endpoint: Endpoint) -> None:
    """A field about the reply that reached the prefill leg could make it fail or take long."""
    considered = {*legs._REPLY_ONLY, *legs._NOT_OF_CLIENTS}
    considered |= REPLACED | PROMPT | CALLER | WITHOUT_EFFECT
    assert not set(MODELS[endpoint].model_fields) - considered


def test_nothing_is_taken_away_that_does_not_exist() -> None:
    known = {name for model in MODELS.values() for name in model.model_fields}
    assert legs._REPLY_ONLY - known == {"best_of"}  # of the OpenAI API, not of vLLM


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
REQUESTS: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {
        "model": "m", "messages": [{"role": "user", "content": "u"}], "tools": [TOOL],
        "tool_choice": "required", "max_completion_tokens": 900, "min_tokens": 300,
        "stop": ["x"], "logprobs": True, "top_logprobs": 5, "stream": True,
        "stream_options": {"include_usage": True}, "logit_bias": {"7": 100},
    },
    Endpoint.COMPLETIONS: {
        "model": "m", "prompt": "text", "max_tokens": 900, "min_tokens": 300, "logprobs": 3,
        "stream": True, "stream_options": {"include_usage": True}, "stop": "x",
    },
    Endpoint.RESPONSES: {
        "model": "m", "input": "text", "max_output_tokens": 900, "tools": [FLAT_TOOL],
        "stream": True, "reasoning": {"effort": "low"}, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    },
    Endpoint.MESSAGES: {
        "model": "m", "messages": [{"role": "user", "content": "u"}], "max_tokens": 900,
        "system": "s", "stop_sequences": ["x"], "stream": True, "tool_choice": {"type": "any"},
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "top_k": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("endpoint", Endpoint)
def test_vllm_accepts_both_legs(endpoint: Endpoint) -> None:
    body = REQUESTS[endpoint] | {"kv_transfer_params": {"backhaul": {"u_end": 2}}}
    first = validated(endpoint, prefill_body(endpoint, body))
    params = first.to_sampling_params(1, {})
    assert (params.max_tokens, params.min_tokens, params.n, params.stop) == (1, 0, 1, [])
    assert params.logprobs is None
    assert params.extra_args["kv_transfer_params"]["do_remote_decode"] is True
    prefill = PrefillAnswer(params={"do_remote_prefill": True}, token_ids=(1, 2, 3))
    second = validated(endpoint, decode_body(endpoint, body, prefill))
    limit = next(v for k, v in REQUESTS[endpoint].items() if k.startswith("max_"))
    params = second.to_sampling_params(limit, {})
    assert params.max_tokens == 900
    assert params.extra_args["kv_transfer_params"]["do_remote_prefill"] is True
    if endpoint is Endpoint.COMPLETIONS:
        assert second.prompt == [1, 2, 3]
    else:
        assert second.kv_transfer_params["prompt_token_ids"] == [1, 2, 3]


class _AnyVocabulary:
    def validate_token_ids(self, ids: list[int], parameter: str) -> None:
        pass


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_vllm_takes_the_tokens_instead_of_rendering(endpoint: Endpoint) -> None:
    from vllm.renderers.online_renderer import _reused_prompt_token_ids

    prefill = PrefillAnswer(params={"do_remote_prefill": True}, token_ids=(1, 2, 3))
    body = decode_body(endpoint, REQUESTS[endpoint], prefill)
    request = validated(endpoint, body)
    messages = [{"role": "user", "content": "u"}]
    renderer: Any = _AnyVocabulary()
    assert _reused_prompt_token_ids(request, renderer, messages) == [1, 2, 3]


def test_the_text_of_the_prompt_is_told_by_a_leg_that_rendered_it() -> None:
    """vLLM has none for token ids, and no other API of it has the field."""
    has = {e for e, kind in MODELS.items() if "return_prompt_text" in kind.model_fields}
    assert has <= {Endpoint.CHAT}
    body = REQUESTS[Endpoint.CHAT] | {"return_prompt_text": True}
    leg = decode_body(Endpoint.CHAT, body, PrefillAnswer(params={"a": 1}, token_ids=(1, 2)))
    assert leg["kv_transfer_params"] == {"a": 1} and leg["return_prompt_text"] is True


def test_a_budget_for_thoughts_that_the_prefill_leg_cannot_have_is_no_fault() -> None:
    """Of one token, but the client's budget is at least 1,024."""
    budget = {"thinking": {"type": "enabled", "budget_tokens": 2048}, "max_tokens": 4096}
    leg = prefill_body(Endpoint.MESSAGES, REQUESTS[Endpoint.MESSAGES] | budget)
    assert validated(Endpoint.MESSAGES, leg).max_completion_tokens == 1


def test_media_are_what_vllm_renders_the_messages_for() -> None:
    """It ignores token ids then, see ``has_non_text_content``."""
    from vllm.renderers.chat_utils import MM_PARSER_MAP, TEXT_PART_TYPES

    assert set(MM_PARSER_MAP) - TEXT_PART_TYPES - {"tool_reference"} <= legs.MEDIA
