"""The plugin in vLLM's own render application: every endpoint, every reason, no engine."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from render_app import RenderApp, params_of, u_end_of

pytest.importorskip("vllm")

from backhaul.connector import selfcheck, u_end, u_end_plugin
from backhaul.connector.hints import PROMPT_TAIL
from backhaul.deploy.tiny_model import CHAT_TEMPLATE, build_tiny_model
from backhaul.render.reasons import Reason
from backhaul.render.template import environment

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello\n"}]
HEADER = "<|im_start|>assistant\n"
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
GUARD = "{% if add_generation_prompt %}<|im_start|>{% endif %}"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RenderApp]:
    """Nothing here installs the plugin: vLLM loads it, as the package's entry point says."""
    model = build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    made = RenderApp(model, None, "--trust-request-chat-template")
    assert hasattr(type(made.online_renderer), "_backhaul_u_end")
    yield made
    made.close()


@pytest.fixture
def outcomes() -> Callable[[], dict[str, float]]:
    """Outcomes that were counted since the test began."""

    def read() -> dict[str, float]:
        counter = u_end_plugin._counter()
        return {name: counter.labels(name)._value.get() for name in u_end_plugin.OUTCOMES}

    before = read()
    return lambda: {k: n - before[k] for k, n in read().items() if n != before[k]}


def chat(app: RenderApp, messages: list[dict[str, Any]] = MESSAGES, **body: Any) -> dict[str, Any]:
    return app.post("/v1/chat/completions/render", messages=messages, **body)


def suffix(app: RenderApp, answer: dict[str, Any]) -> str:
    at = u_end_of(answer)
    assert isinstance(at, int)
    text = app.tokenizer.decode(answer["token_ids"][at:])
    assert isinstance(text, str)
    return text


def test_chat(app: RenderApp, outcomes: Callable[[], dict[str, float]]) -> None:
    answer = chat(app)
    assert suffix(app, answer) == HEADER
    plain = app.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert answer["token_ids"] == plain
    assert outcomes() == {"filled": 1}


def test_template_arguments_reach_the_template(app: RenderApp) -> None:
    answer = chat(app, chat_template_kwargs={"enable_thinking": True})
    assert suffix(app, answer) == HEADER + "<think>"


def test_tools_and_their_results(app: RenderApp) -> None:
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    answer = chat(app, [*MESSAGES, called, result], tools=[TOOL], tool_choice="none")
    assert suffix(app, answer) == HEADER
    assert app.tokenizer.decode(answer["token_ids"]).count("42</tool_response>") == 1


def test_the_end_of_a_users_message_is_told_from_that_of_a_tools_result(app: RenderApp) -> None:
    """Once a tool loop is over it is rewritten; what the user said before it is not."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    loop = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    hints = [
        params_of(chat(app, messages))["backhaul"]
        for messages in (MESSAGES, [*MESSAGES, *loop], [*MESSAGES, *loop, MESSAGES[1]])
    ]
    assert [one["user_turn"] for one in hints] == [True, False, True]
    for given in ("hello", [{"role": "user", "content": "hello"}]):
        answer = app.post("/v1/responses/render", input=given)
        assert params_of(answer)["backhaul"]["user_turn"] is True


def test_what_else_is_known_travels_with_the_offset(app: RenderApp) -> None:
    """The tiny template keeps reasoning within a tool loop only, unless it is told to."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    loop = [
        *MESSAGES,
        {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    again = [*loop, {"role": "assistant", "content": "a"}, {"role": "user", "content": "and?"}]
    known = [
        params_of(chat(app, messages, tools=[TOOL], tool_choice="none", **body))["backhaul"]
        for messages, body in (
            (MESSAGES, {}),
            (loop, {}),
            (again, {}),
            (again, {"chat_template_kwargs": {"keep_reasoning": True}}),
        )
    ]
    names = ("tool_continuation", "user_turn", "reasoning_kept", "tools", "rewrites")
    assert [tuple(one.get(name) for name in names) for one in known] == [
        (False, True, False, False, []),
        (True, False, True, False, []),
        (False, True, False, False, []),
        (False, True, True, False, []),
    ]
    assert len({one["template"] for one in known}) == 1
    assert all("suffix_start" not in one for one in known), "earlier replies have the same header"
    assert all("reasoning" not in one for one in known), "no parser says that replies reason"


def test_responses(app: RenderApp) -> None:
    answer = app.post("/v1/responses/render", input="hello", instructions="be brief")
    assert suffix(app, answer) == HEADER
    assert answer["kv_transfer_params"]["backhaul"]["u_end"] == u_end_of(answer)


def test_anthropic_messages(app: RenderApp) -> None:
    answer = app.post("/v1/messages/render", messages=MESSAGES[1:], max_tokens=5)
    assert suffix(app, answer) == HEADER


@pytest.mark.parametrize("harmony", [False, True])
def test_a_connector_that_tells_the_prompts_ids_knows_its_end(
    app: RenderApp, harmony: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another connector may cut the prompt first. What a client says of its end does not count."""
    monkeypatch.setattr(app.online_renderer, "use_harmony", harmony)
    asked = {"return_prompt_token_ids": True, "prompt_length": 3, "prompt_tail": [1]}
    answer = chat(app, kv_transfer_params={"backhaul": asked})
    hints = params_of(answer)["backhaul"]
    assert hints["prompt_length"] == len(answer["token_ids"])
    assert hints["prompt_tail"] == answer["token_ids"][-PROMPT_TAIL:]
    assert "prompt_tail" not in params_of(chat(app))["backhaul"]


def test_batch(app: RenderApp) -> None:
    """The conversations of a batch share what the client sent, but not their offsets."""
    from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest

    async def accepted(request: Any) -> None:
        return None

    serving = SimpleNamespace(
        online_renderer=app.online_renderer, _check_model=accepted, _preflight=lambda: None
    )
    request = BatchChatCompletionRequest(
        messages=[[{"role": "user", "content": "a" * n}] for n in (3, 30)],
        kv_transfer_params={"other": 1, "backhaul": {"publish": False}},
        vllm_xargs={"x": 1},
    )
    token = u_end_plugin._outbound.set(True)
    try:
        singles, _, prompts = app.run(
            OpenAIServingChatBatch.render_batch_chat_request(serving, request)
        )
    finally:
        u_end_plugin._outbound.reset(token)
    found = [
        single.to_sampling_params(5, {}).extra_args["kv_transfer_params"] for single in singles
    ]
    assert [p["other"] for p in found] == [1, 1]
    assert [p["backhaul"]["publish"] for p in found] == [False, False]
    ends = [p["backhaul"]["u_end"] for p in found]
    for end, prompt in zip(ends, prompts, strict=True):
        assert app.tokenizer.decode(prompt["prompt_token_ids"][end:]) == HEADER
    assert ends[1] - ends[0] == 27


def test_concurrent_requests_keep_their_own_offsets(app: RenderApp) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    requests = [
        ChatCompletionRequest(
            messages=[{"role": "user", "content": "a" * n}],
            chat_template=None if n % 3 else GUARD,
            chat_template_kwargs={"enable_thinking": bool(n % 2)},
        )
        for n in range(1, 25)
    ]

    async def render() -> list[Any]:
        return await asyncio.gather(
            *(app.online_renderer.render_chat(r, skip_mm_cache=True) for r in requests)
        )

    for request, (_, (prompt,)) in zip(requests, app.run(render()), strict=True):
        ids = prompt["prompt_token_ids"]
        if request.chat_template is not None:
            # Nothing but a suffix: no history.
            assert "u_end" not in request.kv_transfer_params["backhaul"]
            continue
        end = request.kv_transfer_params["backhaul"]["u_end"]
        thinking = "<think>" if request.chat_template_kwargs["enable_thinking"] else ""
        assert app.tokenizer.decode(ids[end:]) == HEADER + thinking


@pytest.mark.parametrize("given", [7, 0, None, "x"])
def test_what_the_client_says_wins(
    app: RenderApp, given: Any, outcomes: Callable[[], dict[str, float]]
) -> None:
    answer = chat(app, kv_transfer_params={"backhaul": {"u_end": given}})
    assert u_end_of(answer) == given
    assert outcomes() == {"supplied": 1}


def test_other_parameters_stay(app: RenderApp) -> None:
    answer = chat(app, kv_transfer_params={"do_remote_decode": True, "backhaul": {"load": False}})
    params = params_of(answer)
    assert params["do_remote_decode"] is True
    assert params["backhaul"]["load"] is False
    assert suffix(app, answer) == HEADER


@pytest.mark.parametrize("hints", [5, [1], "x", False])
def test_malformed_parameters_are_left_alone(
    app: RenderApp, hints: Any, outcomes: Callable[[], dict[str, float]]
) -> None:
    answer = chat(app, kv_transfer_params={"backhaul": hints})
    assert params_of(answer) == {"backhaul": hints}
    assert outcomes() == {"malformed_params": 1}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].content }}<|im_start|>", Reason.UNGUARDED),
        ("a{{ 'b' ~ add_generation_prompt }}", Reason.REFUSED),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}"
            "{% if tools is none %}be quick{% endif %}" + GUARD,
            Reason.MOVING_CONTROL_TEXT,
        ),
        (GUARD, Reason.TAIL_MISMATCH),
    ],
)
def test_unknown_has_its_reason(
    app: RenderApp, template: str, reason: Reason, outcomes: Callable[[], dict[str, float]]
) -> None:
    answer = chat(app, chat_template=template)
    assert answer["token_ids"]
    assert u_end_of(answer) is None
    assert outcomes() == {reason: 1}


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("", "", None),
        ("hello", "good evening", None),
        (HEADER, "<|im_start|>model\n", Reason.REWRITTEN),
        (HEADER, "", Reason.REWRITTEN),
    ],
)
def test_a_text_that_was_changed_after_its_render(
    app: RenderApp, before: str, after: str, reason: Reason | None
) -> None:
    """Only its end matters: that is what U_end is told by."""

    def apply(model_config: Any, tokenizer: Any, conversation: Any, **kwargs: Any) -> str:
        text = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False
        )
        assert before in text
        return str(text.replace(before, after) if before else text)

    recorder = u_end.Recorder()
    arguments = {u_end_plugin._ARGUMENT: recorder}
    text = u_end_plugin._applied(apply)(None, app.tokenizer, MESSAGES, **arguments)
    prompt = app.tokenizer.encode(text, add_special_tokens=False)
    found = recorder.u_end(prompt)
    assert found.reason is reason
    if reason is None:
        assert app.tokenizer.decode(prompt[found.tokens :]) == HEADER


def test_forwarded_token_ids_are_opaque(
    app: RenderApp, outcomes: Callable[[], dict[str, float]]
) -> None:
    answer = chat(app, kv_transfer_params={"prompt_token_ids": [65, 66, 67]})
    assert answer["token_ids"] == [65, 66, 67]
    assert u_end_of(answer) is None
    assert outcomes() == {"opaque_prompt": 1}


def test_a_prompt_cut_at_its_end_has_no_offset(
    app: RenderApp, outcomes: Callable[[], dict[str, float]]
) -> None:
    answer = chat(app, truncate_prompt_tokens=12, truncation_side="right")
    assert len(answer["token_ids"]) == 12
    assert u_end_of(answer) is None
    assert outcomes() == {"tail_mismatch": 1}


def test_a_message_to_be_continued_is_all_input(app: RenderApp) -> None:
    answer = chat(
        app,
        [*MESSAGES, {"role": "assistant", "content": "well, "}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert u_end_of(answer) == len(answer["token_ids"])
    assert app.tokenizer.decode(answer["token_ids"]).endswith("well, ")


def test_a_template_that_refuses_its_input_says_so_as_ever(app: RenderApp) -> None:
    with pytest.raises(AssertionError, match="no such thing"):
        chat(app, chat_template="{{ raise_exception('no such thing') }}" + GUARD)


@pytest.mark.parametrize(
    "where",
    [
        "u_end.Recorder.finish", "u_end.Recorder.u_end", "u_end.MarkedTemplate.render",
        "u_end.MarkedTemplate", "u_end_plugin._engine_input",
        "u_end_plugin._token_ids",
    ],
)  # fmt: skip
def test_a_fault_of_ours_costs_the_offset_only(
    app: RenderApp,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: Callable[[], dict[str, float]],
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(f"backhaul.connector.{where}", broken)
    # A template of its own, so that none compiled earlier is used.
    answer = chat(app, chat_template=CHAT_TEMPLATE + f"{{# {where} #}}")
    assert app.tokenizer.decode(answer["token_ids"]).endswith(HEADER)
    assert u_end_of(answer) is None
    assert outcomes() == {"error": 1}


@pytest.mark.parametrize(
    ("config", "switch", "filled"),
    [
        (None, "auto", False),
        (None, "on", True),
        ({"kv_connector": "NixlConnector"}, "auto", False),
        ({"kv_connector": "BackhaulConnector"}, "auto", True),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {
                    "connectors": [{"kv_connector": "BackhaulConnector"}]
                },
            },
            "auto",
            True,
        ),
    ],
)
def test_an_engine_gets_offsets_where_backhaul_is_configured(
    app: RenderApp,
    config: dict[str, Any] | None,
    switch: str,
    filled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM warns of kv_transfer_params for which there is no connector, once per request."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    monkeypatch.setattr(u_end_plugin, "_switch", lambda: switch)
    holder = app.online_renderer.renderer.config
    monkeypatch.setattr(
        holder, "kv_transfer_config", None if config is None else SimpleNamespace(**config)
    )
    request = ChatCompletionRequest(messages=MESSAGES)
    app.run(app.online_renderer.render_chat(request))
    assert (request.kv_transfer_params is not None) is filled


@pytest.mark.parametrize(
    ("options", "hints", "decides"),
    [
        ({}, None, False),
        ({"policy": "both"}, {"policy": "input_end"}, False),
        ({"policy": "both"}, {"policy": ["auto"]}, False),
        ({"policy": "auto"}, None, True),
        ({"policy": "auto"}, {"policy": "both"}, True),
        ({"policy": "both"}, {"policy": "boundaries"}, True),
        ({"connectors": [{"kv_connector_extra_config": {"policy": "boundaries"}}]}, None, True),
    ],
)
def test_what_else_is_known_is_found_for_policies_that_decide_by_it(
    app: RenderApp,
    options: dict[str, Any],
    hints: dict[str, Any] | None,
    decides: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others take the same ends whatever the request is like."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    config = SimpleNamespace(kv_connector="BackhaulConnector", kv_connector_extra_config=options)
    monkeypatch.setattr(app.online_renderer.renderer.config, "kv_transfer_config", config)
    params = None if hints is None else {"backhaul": hints}
    request = ChatCompletionRequest(messages=MESSAGES, kv_transfer_params=params)
    app.run(app.online_renderer.render_chat(request))
    assert request.kv_transfer_params is not None
    found = set(request.kv_transfer_params["backhaul"]) - set(hints or ())
    more = {"template", "tool_continuation", "tools", "reasoning_kept", "rewrites"}
    assert found == {"u_end", "user_turn"} | (more if decides else set())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/render", {"messages": MESSAGES}),
        ("/v1/responses/render", {"input": "hello"}),
    ],
)
def test_harmony(
    app: RenderApp,
    path: str,
    body: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    outcomes: Callable[[], dict[str, float]],
) -> None:
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    monkeypatch.setattr(app.online_renderer, "use_harmony", True)
    answer = app.post(path, **body)
    ids = answer["token_ids"]
    assert get_encoding().decode(ids[u_end_of(answer) :]) == "<|start|>assistant"
    assert outcomes() == {"filled": 1}


def test_harmony_does_not_claim_forwarded_ids(
    app: RenderApp, monkeypatch: pytest.MonkeyPatch, outcomes: Callable[[], dict[str, float]]
) -> None:
    monkeypatch.setattr(app.online_renderer, "use_harmony", True)
    answer = chat(app, kv_transfer_params={"prompt_token_ids": [65, 66]})
    assert answer["token_ids"] == [65, 66]
    assert outcomes() == {"opaque_prompt": 1}


def test_a_harmony_request_that_vllm_refuses_is_refused_as_ever(
    app: RenderApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.online_renderer, "use_harmony", True)
    with pytest.raises(AssertionError, match="reasoning_effort"):
        chat(app, reasoning_effort="none")


# -- switch, self-check ------------------------------------------------------------------------


def finders() -> list[Any]:
    return [f for f in sys.meta_path if isinstance(f, u_end_plugin._WhenImported)]


def test_every_surface_is_there() -> None:
    assert selfcheck.missing_surfaces(u_end_plugin.SURFACES) == []


@pytest.mark.parametrize("module", [u_end, u_end_plugin])
def test_every_name_of_vllm_that_is_used_is_among_the_surfaces(module: ModuleType) -> None:
    known = {(s.module, s.name.split(".")[0]) for s in u_end_plugin.SURFACES}
    modules = {name for name, _ in known}
    imports = [n for n in ast.walk(ast.parse(inspect.getsource(module))) if hasattr(n, "names")]
    for node in imports:
        origin = getattr(node, "module", None) or ""
        if origin.split(".")[0] in ("vllm", "transformers"):
            for name in (alias.name for alias in node.names):
                assert (origin, name) in known or f"{origin}.{name}" in modules


@pytest.mark.parametrize("surface", u_end_plugin.SURFACES, ids=lambda s: s.name)
def test_a_changed_surface_keeps_the_plugin_out(
    surface: selfcheck.Surface,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.renderers import hf
    from vllm.renderers.online_renderer import OnlineRenderer

    monkeypatch.setattr(OnlineRenderer, "_backhaul_u_end", False, raising=False)
    changed = surface._replace(test=lambda item: False)
    monkeypatch.setattr(u_end_plugin, "SURFACES", (changed,))
    before = (OnlineRenderer.preprocess_chat, hf.safe_apply_chat_template)
    lines: list[str] = []
    monkeypatch.setattr(
        u_end_plugin.logger, "warning", lambda line, *values: lines.append(line % values)
    )
    assert not u_end_plugin.install()
    assert (OnlineRenderer.preprocess_chat, hf.safe_apply_chat_template) == before
    assert len(lines) == 1
    assert f"{surface.name} ({surface.what}): changed" in lines[0]


@pytest.mark.parametrize("value", ["off", "OFF ", "of"])
def test_switched_off(
    value: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv(u_end_plugin.SWITCH_ENV, value)
    u_end_plugin._switch.cache_clear()
    request.addfinalizer(u_end_plugin._switch.cache_clear)
    monkeypatch.delitem(sys.modules, u_end_plugin._MODULE, raising=False)
    u_end_plugin.register()
    assert not finders()


def test_installed_when_vllm_imports_its_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that never render (engine core, workers) are left alone."""
    done: list[bool] = []
    monkeypatch.setattr(u_end_plugin, "_MODULE", "colorsys")
    monkeypatch.setattr(u_end_plugin, "install", lambda: done.append("colorsys" in sys.modules))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    u_end_plugin.register()
    u_end_plugin.register()
    assert len(finders()) == 1
    assert not done
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)
    assert done == [True]
    assert not finders()


@pytest.mark.parametrize("odd", ["\ud800", "\udfff\ud800", "\0"])
def test_a_template_of_any_text_is_rendered_and_recorded(odd: str) -> None:
    """JSON may hold half of a surrogate pair, and a request its own template."""
    made = environment()
    recorded, other = (
        u_end.RecordedTemplate(made.from_string(source), source)
        for source in (odd + GUARD, odd + odd + GUARD)
    )
    assert recorded.digest != other.digest
    with u_end.Recorder() as recorder:
        assert recorded.render(add_generation_prompt=True) == odd + "<|im_start|>"
    assert (recorder.reason, recorder.template) == (None, recorded.digest)


def test_outcomes_are_named_once() -> None:
    assert len(set(u_end_plugin.OUTCOMES)) == len(u_end_plugin.OUTCOMES) == len(Reason) + 2
    assert json.dumps(u_end_plugin.OUTCOMES)
    assert u_end.Recorder().reason is Reason.OPAQUE_PROMPT
