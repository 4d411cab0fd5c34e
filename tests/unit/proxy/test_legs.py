"""What each leg is asked: the prompt stays the client's, the reply is decode's alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.policy import Why
from backhaul.protocols.record import Chosen, InputEnd, InputEndOutcome, RequestRecord, to_params
from backhaul.proxy.legs import (
    Endpoint,
    Handover,
    PrefillAnswer,
    RenderedBy,
    decode_body,
    encode_body,
    hints,
    names_transfer,
    obstacle,
    parse_body,
    prefill_body,
    read_prefill,
    rendered_by,
)

MESSAGES = [{"role": "user", "content": "u"}]
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES}
PARAMS = {"do_remote_prefill": True, "remote_host": "h", "remote_block_ids": [[1]]}


@pytest.mark.parametrize(
    ("endpoint", "change", "expected"),
    [
        ("chat_completions", {"n": 1}, None),
        ("chat_completions", {"n": 2}, Handover.SEVERAL_CHOICES),
        ("chat_completions", {"use_beam_search": True}, Handover.SEVERAL_CHOICES),
        ("chat_completions", {"echo": True}, Handover.PROMPT_SCORES),
        ("chat_completions", {"prompt_logprobs": 0}, Handover.PROMPT_SCORES),
        ("chat_completions", {"logprobs": True, "top_logprobs": 3}, None),
        ("chat_completions", {"truncate_prompt_tokens": -1}, Handover.TRUNCATION),
        ("chat_completions", {"truncate_prompt_tokens": 10}, None),
        ("chat_completions", {"tools": [{"type": "function"}]}, None),
        ("completions", {"prompt": "p"}, None),
        ("completions", {"prompt": ["p"]}, None),
        ("completions", {"prompt": [1, 2]}, None),
        ("completions", {"prompt": [[1, 2]]}, None),
        ("completions", {"prompt": ["p", "q"]}, Handover.SEVERAL_PROMPTS),
        ("completions", {"prompt": [[1], [2]]}, Handover.SEVERAL_PROMPTS),
        ("completions", {"prompt": []}, Handover.SEVERAL_PROMPTS),
        ("completions", {"prompt": "p", "best_of": 2}, Handover.SEVERAL_CHOICES),
        ("completions", {"prompt_embeds": "x"}, Handover.PROMPT_EMBEDDINGS),
        ("responses", {"input": "i"}, None),
        ("responses", {"input": "i", "truncation": "disabled"}, None),
        ("responses", {"input": "i", "truncation": "auto"}, Handover.TRUNCATION),
        ("responses", {"previous_response_id": "r"}, Handover.STORED_HISTORY),
        ("responses", {"tools": [{"type": "function"}, {"type": "custom"}]}, None),
        ("responses", {"tools": [{"type": "web_search"}]}, Handover.SERVER_TOOLS),
        ("responses", {"tools": [{"type": "mcp"}]}, Handover.SERVER_TOOLS),
        ("messages", {"tools": [{"name": "f", "input_schema": {}}]}, None),
    ],
)
def test_what_cannot_be_handed_over(
    endpoint: str, change: dict[str, Any], expected: Handover | None
) -> None:
    assert obstacle(Endpoint(endpoint), change) is expected


REPLY: dict[str, Any] = {
    "n": 1, "stop": ["x"], "stop_token_ids": [1], "min_tokens": 9, "max_tokens": 99,
    "max_completion_tokens": 98, "logit_bias": {"5": 100}, "allowed_token_ids": [1],
    "temperature": 0.7, "seed": 3, "logprobs": True, "top_logprobs": 4, "stream": True,
    "stream_options": {"include_usage": True}, "structured_outputs": {"regex": "a"},
}  # fmt: skip
RENDERED: dict[str, Any] = {
    "tools": [{"type": "function"}], "tool_choice": "required", "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False}, "response_format": {"type": "json_object"},
    "cache_salt": "s", "documents": [], "add_generation_prompt": True, "model": "m",
}  # fmt: skip


@pytest.mark.parametrize("endpoint", Endpoint)
def test_prefill_gets_the_prompt_and_nothing_of_the_reply(endpoint: Endpoint) -> None:
    leg = prefill_body(endpoint, REPLY | RENDERED | {"messages": MESSAGES})
    assert RENDERED.items() <= leg.items()
    assert leg["messages"] == MESSAGES
    limits = {
        name: leg[name]
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")
        if name in leg
    }
    assert set(limits.values()) == {1}
    for name in ("stop", "stop_token_ids", "min_tokens", "logit_bias", "allowed_token_ids", "n",
                 "logprobs", "top_logprobs", "stream_options", "structured_outputs"):  # fmt: skip
        assert name not in leg
    assert leg["stream"] is False
    transfer = {"do_remote_decode": True, "do_remote_prefill": False}
    if endpoint is Endpoint.MESSAGES:
        transfer |= {"backhaul": {"return_prompt_token_ids": True}}  # type: ignore[dict-item]
    assert leg["kv_transfer_params"] == transfer


def test_of_the_clients_parameters_only_ours_get_through() -> None:
    forged = {"do_remote_prefill": True, "remote_host": "elsewhere", "prompt_token_ids": [1]}
    body = CHAT | {"kv_transfer_params": forged | {"backhaul": {"u_end": 7}}}
    assert hints(body) == {"u_end": 7}
    assert prefill_body(Endpoint.CHAT, body)["kv_transfer_params"] == {
        "do_remote_decode": True, "do_remote_prefill": False, "backhaul": {"u_end": 7},
    }  # fmt: skip
    assert decode_body(Endpoint.CHAT, body, None) == CHAT | {
        "kv_transfer_params": {"backhaul": {"u_end": 7}}
    }
    assert decode_body(Endpoint.CHAT, CHAT | {"kv_transfer_params": forged}, None) == CHAT
    handed = decode_body(Endpoint.CHAT, body, PrefillAnswer(params=PARAMS))["kv_transfer_params"]
    assert handed == PARAMS | {"backhaul": {"u_end": 7}}


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("given", [{"f00d": {"peer_host": "elsewhere", "peer_port": 1}}, {}, None])
def test_a_client_names_no_encoders(endpoint: Endpoint, given: Any) -> None:
    """vLLM's encoder-cache connectors would connect to the host that they are told."""
    plain = {"model": "m", "messages": []}
    body = plain | {"ec_transfer_params": given}
    assert names_transfer(body)
    assert decode_body(endpoint, body, None) == plain
    for prefill in (None, PrefillAnswer(params=PARAMS)):
        assert "ec_transfer_params" not in decode_body(endpoint, body, prefill)
    assert "ec_transfer_params" not in prefill_body(endpoint, body)


@pytest.mark.parametrize("params", [None, 3, [], "x", {"backhaul": 3}, {"backhaul": None}])
def test_malformed_parameters_are_dropped(params: Any) -> None:
    assert hints({"kv_transfer_params": params}) == {}


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("smuggled", ["", "text", 0, 5, ["do_remote_prefill"]])
def test_no_transfer_parameters_come_by_another_way(smuggled: Any, name: str) -> None:
    """vLLM makes ``vllm_xargs`` one with a request's transfer parameters; connectors expect an
    object there."""
    body = CHAT | {"vllm_xargs": {name: smuggled, "x": 1}}
    assert names_transfer(body)
    for leg in (
        prefill_body(Endpoint.CHAT, body),
        decode_body(Endpoint.CHAT, body, None),
        decode_body(Endpoint.CHAT, body, PrefillAnswer(params={})),
    ):
        assert leg["vllm_xargs"] == {"x": 1}
    for odd in (None, [], name, {}):
        assert not names_transfer(CHAT | {"vllm_xargs": odd})
        assert decode_body(Endpoint.CHAT, CHAT | {"vllm_xargs": odd}, None)["vllm_xargs"] == odd


def test_decode_gets_the_whole_request_and_the_tokens_of_the_one_render() -> None:
    prefill = PrefillAnswer(params=PARAMS, token_ids=(5, 6, 7))
    leg = decode_body(Endpoint.CHAT, CHAT | REPLY | RENDERED, prefill)
    assert (CHAT | REPLY | RENDERED).items() <= leg.items()
    assert leg["kv_transfer_params"] == PARAMS | {"prompt_token_ids": [5, 6, 7]}


def test_a_plain_prompt_is_replaced_by_its_tokens() -> None:
    prefill = PrefillAnswer(params=PARAMS, token_ids=(5, 6))
    leg = decode_body(Endpoint.COMPLETIONS, {"prompt": "text"}, prefill)
    assert leg == {"prompt": [5, 6], "kv_transfer_params": PARAMS}


OF_PREFILL = InputEnd(outcome=InputEndOutcome.PUBLISHED, given=40, boundary=32)


def test_u_end_of_the_render_that_was_used_wins() -> None:
    prefill = PrefillAnswer(params=PARAMS, record=to_params(RequestRecord(input_end=OF_PREFILL)))
    body = CHAT | {"kv_transfer_params": {"backhaul": {"u_end": 9, "publish": False}}}
    leg = decode_body(Endpoint.CHAT, body, prefill)
    assert leg["kv_transfer_params"]["backhaul"] == {"u_end": 40, "publish": False, "ends": []}


def test_decode_is_told_what_prefills_policy_chose() -> None:
    chosen = Chosen(ends=(CheckpointKind.INPUT_END,), why=Why.REASONING_DROPPED)
    record = to_params(RequestRecord(chosen=chosen))
    leg = decode_body(Endpoint.CHAT, CHAT, PrefillAnswer(params=PARAMS, record=record))
    assert leg["kv_transfer_params"]["backhaul"] == {"ends": ["input_end"]}
    for wrong in ({"chosen": 3}, {"chosen": {"ends": "x"}}, {"chosen": {"ends": [3]}}, {}):
        leg = decode_body(Endpoint.CHAT, CHAT, PrefillAnswer(params=PARAMS, record=wrong))
        assert "backhaul" not in leg["kv_transfer_params"]


@pytest.mark.parametrize(
    ("endpoint", "ids"),
    [
        (Endpoint.CHAT, {"prompt_token_ids": [1, 2]}),
        (Endpoint.COMPLETIONS, {"choices": [{"prompt_token_ids": [1, 2]}]}),
        (Endpoint.RESPONSES, {"input_messages": [{"tokens": [1, 2]}]}),
    ],
)
def test_prefills_answer(endpoint: Endpoint, ids: dict[str, Any]) -> None:
    kind = "input" if endpoint is Endpoint.RESPONSES else "prompt"
    details = {"cached_tokens": 8}
    answer = read_prefill(
        endpoint,
        ids
        | {
            "kv_transfer_params": PARAMS | {"backhaul": {"loaded_tokens": 8}},
            "usage": {f"{kind}_tokens": 10, f"{kind}_tokens_details": details},
        },
    )
    assert answer == PrefillAnswer(
        params=PARAMS, record={"loaded_tokens": 8}, token_ids=(1, 2), prompt_tokens=10,
        cached_tokens=8, details=details,
    )  # fmt: skip


NO_COUNTS = (
    st.sampled_from([True, False, None, 10**400, -(10**400), 2**53 + 1, -1, 1.0, "3", [3], {}])
    | st.integers(max_value=-1)
    | st.integers(min_value=2**53 + 1)
    | st.floats()
)


@given(st.sampled_from(Endpoint), NO_COUNTS, NO_COUNTS)
def test_counts_that_cannot_be_any_are_as_if_not_told(
    endpoint: Endpoint, cached: Any, length: Any
) -> None:
    kind = "prompt" if endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS) else "input"
    usage = {
        f"{kind}_tokens": length,
        f"{kind}_tokens_details": {"cached_tokens": cached, "audio_tokens": 1},
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": length,
    }
    answer = read_prefill(endpoint, {"kv_transfer_params": PARAMS, "usage": usage})
    told = None if endpoint is Endpoint.MESSAGES else {"audio_tokens": 1}
    assert answer == PrefillAnswer(params=PARAMS, prompt_tokens=0, cached_tokens=None, details=told)


@given(NO_COUNTS)
def test_token_ids_that_cannot_be_any_are_not_handed_on(odd: Any) -> None:
    answer = {"kv_transfer_params": PARAMS, "prompt_token_ids": [1, odd, 2]}
    prefill = read_prefill(Endpoint.CHAT, answer)
    assert prefill == PrefillAnswer(params=PARAMS, token_ids=None)
    ended = {"input_end": {"given": odd}}
    leg = decode_body(Endpoint.CHAT, CHAT, PrefillAnswer(params=PARAMS, record=ended))
    assert leg["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize("levels", [20, 960, 100_000])
def test_parameters_that_nest_without_end_are_none(levels: int) -> None:
    deep: Any = {}
    for _ in range(levels):
        deep = {"backhaul": deep}
    answer = {"kv_transfer_params": PARAMS | deep, "usage": {"prompt_tokens_details": deep}}
    assert read_prefill(Endpoint.CHAT, answer) is None
    told = read_prefill(Endpoint.CHAT, answer | {"kv_transfer_params": PARAMS})
    assert told == PrefillAnswer(params=PARAMS)


def test_prefill_that_holds_nothing_hands_over_through_the_store() -> None:
    record = {"loaded_tokens": 0}
    idle = {"do_remote_prefill": False, "remote_host": "h"}
    answer = {"kv_transfer_params": idle | {"backhaul": record}, "prompt_token_ids": [1, 2]}
    prefill = read_prefill(Endpoint.CHAT, answer)
    assert prefill == PrefillAnswer(params={}, record=record, token_ids=(1, 2))
    leg = decode_body(Endpoint.CHAT, CHAT, prefill)
    assert leg["kv_transfer_params"] == {"prompt_token_ids": [1, 2]}
    assert read_prefill(Endpoint.CHAT, {"kv_transfer_params": idle}) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["kv_transfer_params", "usage", "choices", "input_messages", "prompt_token_ids", "prompt", "n",
     "tools", "truncation", "messages", "input"]
)  # fmt: skip


@given(st.sampled_from(Endpoint), JSON | st.dictionaries(FIELDS, JSON))
def test_any_answer_can_be_read(endpoint: Endpoint, answer: Any) -> None:
    assert read_prefill(endpoint, answer) is None or isinstance(answer, dict)


@given(st.sampled_from(Endpoint), st.dictionaries(FIELDS, JSON))
def test_any_request_can_be_made_into_legs(endpoint: Endpoint, body: dict[str, Any]) -> None:
    obstacle(endpoint, body)
    assert prefill_body(endpoint, body)["kv_transfer_params"]["do_remote_decode"] is True
    alone = decode_body(endpoint, body, None)
    assert {k: v for k, v in alone.items() if k != "kv_transfer_params"} == {
        k: v for k, v in body.items() if k != "kv_transfer_params"
    }
    assert not alone.get("kv_transfer_params", {}).keys() - {"backhaul"}


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_no_object_is_no_body(raw: bytes) -> None:
    assert parse_body(raw) is None


@pytest.mark.parametrize(
    "raw",
    [b'{"temperature": NaN, "n": 2}', '{"n": 2}'.encode("utf-16"), b'{"n": 2, "m": "\\ud800"}',
     b'{"n": 2, "seed": 99999999999999999999999999}'],
)  # fmt: skip
def test_what_a_worker_can_read_is_read(raw: bytes) -> None:
    """Else a worker would act on parameters that were not looked at."""
    body = parse_body(raw)
    assert body is not None
    assert body["n"] == 2
    assert parse_body(encode_body(body)) is not None


@given(st.dictionaries(FIELDS, JSON))
def test_bodies_survive_encoding(body: dict[str, Any]) -> None:
    assert parse_body(encode_body(body)) == body


def test_token_ids_of_a_message_come_in_the_record_and_go_no_further() -> None:
    usage = {"input_tokens": 2, "cache_read_input_tokens": 5, "output_tokens": 1}
    record = {"loaded_tokens": 4, "prompt_token_ids": [1, 2, 3]}
    answer = {"kv_transfer_params": PARAMS | {"backhaul": record}, "usage": usage}
    prefill = read_prefill(Endpoint.MESSAGES, answer)
    assert prefill is not None
    assert (prefill.token_ids, prefill.record) == ((1, 2, 3), {"loaded_tokens": 4})
    assert (prefill.prompt_tokens, prefill.cached_tokens) == (7, 5)
    leg = decode_body(Endpoint.MESSAGES, CHAT, prefill)
    assert leg["kv_transfer_params"] == PARAMS | {"prompt_token_ids": [1, 2, 3]}


IMAGE = {"type": "image_url", "image_url": {"url": "http://i"}}


@pytest.mark.parametrize(
    ("endpoint", "body", "ids", "expected"),
    [
        ("chat_completions", CHAT, (1,), "prefill"),
        ("chat_completions", CHAT, None, "each_leg"),
        ("chat_completions", CHAT | {"return_prompt_text": True}, (1,), "each_leg"),
        ("chat_completions", CHAT | {"return_prompt_text": None}, (1,), "prefill"),
        ("responses", {"input": "i", "return_prompt_text": True}, (1,), "prefill"),
        (
            "chat_completions",
            {"messages": [{"content": [{"type": "text"}, IMAGE]}]},
            (1,),
            "each_leg",
        ),
        ("chat_completions", {"messages": [{"content": [{"image_url": {}}]}]}, (1,), "each_leg"),
        ("chat_completions", {"messages": [{"content": [{"type": "text"}]}]}, (1,), "prefill"),
        ("chat_completions", {"messages": [3, {"content": [None, {"type": []}]}]}, (1,), "prefill"),
        ("completions", {"prompt": "p", "messages": [{"content": [IMAGE]}]}, (1,), "prefill"),
        ("responses", {"input": "image_url"}, (1,), "prefill"),
        ("responses", {"input": [{"content": [{"type": "input_image"}]}]}, (1,), "each_leg"),
        (
            "responses",
            {"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]},
            (1,),
            "each_leg",
        ),
        ("messages", {"messages": [{"content": [{"type": "image"}]}]}, (1,), "each_leg"),
        (
            "messages",
            {"messages": [{"content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            (1,),
            "each_leg",
        ),
        (
            "messages",
            {"messages": [{"content": [{"type": "tool_use", "input": {"image": "x"}}]}]},
            (1,),
            "prefill",
        ),
    ],
)
def test_whose_render_decode_uses(
    endpoint: str, body: dict[str, Any], ids: tuple[int, ...] | None, expected: str
) -> None:
    prefill = PrefillAnswer(params=PARAMS, token_ids=ids)
    assert rendered_by(Endpoint(endpoint), body, prefill) is RenderedBy(expected)
