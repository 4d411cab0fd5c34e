"""What a template does with earlier reasoning, against what rendering it shows."""

from __future__ import annotations

from typing import Any

import pytest
from real_templates import load, template_path

from backhaul.render.reasoning import ReasoningRules, ReasoningUse
from backhaul.render.template import environment

NEVER, BY_POSITION, ALWAYS = ReasoningUse
LOOP = "{% for m in messages %}BODY{% endfor %}"


def use(body: str, **variables: Any) -> ReasoningUse:
    return ReasoningRules(environment().parse(LOOP.replace("BODY", body))).use(variables)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ m.content }}", NEVER),
        ("{{ m.reasoning_content }}{{ m.content }}", ALWAYS),
        ("{{ m['reasoning'] }}", ALWAYS),
        ("{{ m.get('reasoning_content', '') }}", ALWAYS),
        ("{% if m.role == 'assistant' %}{{ m.reasoning }}{% endif %}", ALWAYS),
        ("{% if loop.index0 > ns.last %}{{ m.reasoning }}{% endif %}", BY_POSITION),
        ("{% set r = m.reasoning %}{% if loop.last %}{{ r }}{% endif %}", BY_POSITION),
        ("{% if loop.last %}{% set r = m.reasoning %}{% endif %}{{ r }}", BY_POSITION),
        ("{% if loop.last %}x{% else %}{{ m.reasoning }}{% endif %}", BY_POSITION),
        ("{% if loop.last %}{{ m.content }}{% endif %}{{ m.reasoning }}", ALWAYS),
        ("{% if m.reasoning and loop.index0 > ns.q %}{{ m.reasoning }}{% endif %}", BY_POSITION),
        ("{% if false and loop.last %}{{ m.reasoning }}{% endif %}", ALWAYS),
    ],
)
def test_branches_decide(body: str, expected: ReasoningUse) -> None:
    assert use(body) is expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, BY_POSITION), ({"keep": True}, ALWAYS), ({"keep": False}, BY_POSITION)],
)
@pytest.mark.parametrize(
    "test",
    [
        "keep is defined and keep or loop.index0 > ns.q",
        "(keep is defined and keep is true) or (loop.index0 > ns.q)",
        "keep|default(false) or loop.last",
    ],
)
def test_settings_decide_where_they_are_given(
    test: str, given: dict[str, Any], expected: ReasoningUse
) -> None:
    assert use("{% if " + test + " %}{{ m.reasoning }}{% endif %}", **given) is expected


def test_a_template_that_splits_the_messages_writes_by_position() -> None:
    body = "{% for m in ns.LIST %}{{ m.content }}{{ m.reasoning }}{% endfor %}"
    parts = [body.replace("LIST", name) for name in ("hist_msgs", "last_msgs")]
    assert ReasoningRules(environment().parse("".join(parts))).use({}) is BY_POSITION
    assert ReasoningRules(environment().parse(parts[0])).use({}) is ALWAYS


def test_a_setting_with_a_default_at_the_top() -> None:
    source = (
        "{% set keep = keep if keep is defined else true %}"
        + LOOP.replace("BODY", "{% if keep or loop.last %}{{ m.reasoning }}{% endif %}")
    )  # fmt: skip
    rules = ReasoningRules(environment().parse(source))
    assert rules.use({}) is ALWAYS
    assert rules.use({"keep": False}) is BY_POSITION


@pytest.mark.parametrize(
    ("name", "variables", "expected"),
    [
        ("trl/qwen3", {}, BY_POSITION),
        ("trl/qwen3_5_think", {}, BY_POSITION),
        ("trl/qwen3_6", {}, BY_POSITION),
        ("trl/qwen3_6", {"preserve_thinking": True}, ALWAYS),
        ("trl/qwen3_8", {}, ALWAYS),
        ("trl/qwen3_8", {"preserve_thinking": False}, BY_POSITION),
        ("trl/qwen3_instruct_2507", {}, NEVER),
        ("trl/nemotron_3_nano", {}, BY_POSITION),
        ("llama_cpp/NVIDIA-Nemotron-Nano-v2", {}, NEVER),
        ("llama_cpp/GLM-4.7-Flash", {}, BY_POSITION),
        ("llama_cpp/GLM-4.7-Flash", {"clear_thinking": False}, ALWAYS),
        ("trl/glm4moe", {}, BY_POSITION),
        ("llama_cpp/Kimi-K3", {}, ALWAYS),
        ("llama_cpp/MiniMax-M1", {}, NEVER),
        ("llama_cpp/MiniMax-M2", {}, BY_POSITION),
        ("llama_cpp/MiniMax-M3", {}, ALWAYS),
        ("llama_cpp/inclusionai-ling-3.0-flash", {}, ALWAYS),
        ("llama_cpp/ByteDance-Seed-OSS", {}, ALWAYS),
        ("llama_cpp/StepFun3.5-Flash", {}, BY_POSITION),
        ("llama_cpp/LFM2.5-8B-A1B", {}, NEVER),
    ],
)
def test_real_templates(name: str, variables: dict[str, Any], expected: ReasoningUse) -> None:
    tree = environment().parse(template_path(name).read_text())
    assert ReasoningRules(tree).use(variables) is expected
    plain, _ = load(name)
    if expected is NEVER:
        assert "REASON" not in render(plain, variables, turns=2)
        return
    in_turn, next_turn = (render(plain, variables, turns) for turns in (1, 2))
    assert "REASON" in in_turn, "within a tool loop"
    assert ("REASON" in next_turn) is (expected is ALWAYS), "once a user message follows"


def render(template: Any, variables: dict[str, Any], turns: int) -> str:
    """A user's message, a reply with reasoning that calls a tool, its result; and, with a second
    turn, an answer and one more user message."""
    call = {"type": "function", "id": "functions.f:0", "function": {"name": "f", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant", "content": "c", "tool_calls": [call],
            "reasoning_content": "REASON", "reasoning": "REASON",
        },
        {"role": "tool", "content": "r", "tool_call_id": "functions.f:0", "name": "f"},
    ]  # fmt: skip
    if turns == 2:
        messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]
    text: str = template.render(
        messages=messages, add_generation_prompt=True, bos_token="", eos_token="", **variables
    )
    return text
