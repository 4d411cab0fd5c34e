"""Replies that do not come back token for token: who changes what, and what a pair makes of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from up_kit import SPELLED, Ends, Template, Turn, Up, ask

from backhaul.deploy.pair import Leg
from backhaul.deploy.tiny_model import TOKEN_IDS

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "key": {"type": "string"},
                "exact": {"type": "boolean"},
                "near": {"type": "object"},
            },
            "required": ["key"],
        },
    },
}


def template_source(name: str) -> str:
    """A vendor's template: ``trl/x`` or one of scripts/fetch_templates."""
    package, _, stem = name.partition("/")
    folder = Path(sys.prefix) / "share" / "backhaul-templates" / package
    if package == "trl":
        spec = importlib.util.find_spec("trl")
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent / "chat_templates"
    return (folder / f"{stem}.jinja").read_text()


@dataclass(frozen=True)
class Loss:
    """A reply that does not come back token for token.

    Attributes:
        template: the vendor's, whose rewriting it is.
        says: what the model says after its thoughts.
        back: the client's message from the model's.
        more: further parameters of the first request.
    """

    template: str
    says: str
    back: Callable[[dict[str, Any]], dict[str, Any]] = lambda message: message
    more: Mapping[str, Any] = field(default_factory=dict)


def xml_call(**arguments: str) -> str:
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function=look>\n{body}</function>\n</tool_call>"


LONG = "somewhere down the road or in the house"
STOP = "X" * 40
QWEN35, QWEN36, QWEN38 = "trl/qwen3_5_think", "trl/qwen3_6", "trl/qwen3_8"
KIMI = "xinference/Kimi-K2.5"
KIMI_SAYS = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    f'{{"key": "{LONG}"}}<|tool_call_end|><|tool_calls_section_end|>'
)


def kimi_call(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The call that Kimi's text means, which the engine's parser does not know, with this id."""
    function = {"name": "look", "arguments": f'{{"key": "{LONG}"}}'}
    call = {"id": name, "type": "function", "function": function}
    return lambda message: message | {"content": "", "tool_calls": [call]}


RESPONSE = str(TOKEN_IDS["<tool_response>"])
SPELL, TOKEN = ({"logit_bias": SPELLED | {RESPONSE: bias}} for bias in (-100, 100))
CASES = {
    "booleans": (Loss(QWEN35, xml_call(exact="true", key=LONG)), "input_end"),
    "booleans as JSON": (Loss(QWEN36, xml_call(exact="true", key=LONG)), "decode_end"),
    "JSON spacing": (Loss(QWEN36, xml_call(near='{"a":"b"}', key=LONG)), "input_end"),
    "JSON as the template": (Loss(QWEN36, xml_call(near='{"a": "b"}', key=LONG)), "decode_end"),
    "trimmed white space": (Loss(QWEN38, f"  {LONG}"), "input_end"),
    "nothing to trim": (Loss(QWEN38, LONG), "decode_end"),
    "renamed call ids": (Loss(KIMI, KIMI_SAYS, kimi_call("call_1")), "input_end"),
    "call ids kept": (Loss(KIMI, KIMI_SAYS, kimi_call("functions.look:0")), "decode_end"),
    # The same text either way; only one of them is how it is tokenised when it comes back.
    "token spelled in bytes": (Loss(QWEN38, f"<tool_response>{LONG}", more=SPELL), "input_end"),
    "token as itself": (Loss(QWEN38, f"<tool_response>{LONG}", more=TOKEN), "decode_end"),
    "no end token": (Loss(QWEN38, LONG, more={"max_tokens": len(LONG) - 1}), "input_end"),
    "cut at a stop string": (Loss(QWEN38, LONG + STOP, more={"stop": [STOP]}), "input_end"),
}


@dataclass(frozen=True)
class Resumed:
    """A turn, and the one after it on a prefill worker that has not seen the conversation.

    Attributes:
        ends: what the first turn leaves behind.
        again: asks for the second turn once more, with further parameters.
    """

    first: Turn
    ends: Ends
    second: Turn
    again: Callable[..., Turn]


def as_leg(turn: Turn) -> Leg:
    """A turn as one engine would have answered it."""
    return Leg(
        tokens=tuple(turn.output_ids),
        finish_reason=turn.finish,
        prompt_tokens=turn.prompt,
        cached_tokens=turn.cached,
        backhaul=turn.record,
        kv_transfer_params=None,
        seconds=0.0,
        first_token_s=0.0,
        logprobs=turn.logprobs,
    )


def lose(up: Up, loss: Loss) -> Resumed:
    """The turn whose reply is lost, and the one after it."""
    template = Template(template_source(loss.template), up.model)
    arguments = {"enable_thinking": False, "thinking": False}
    values = {"tools": [TOOL], **arguments}
    messages: list[Any] = [
        {"role": "user", "content": f"case {loss.says}{dict(loss.more)} " + "and so on " * 4}
    ]
    more = dict(loss.more)
    extra = {"chat_template": template.source, "chat_template_kwargs": arguments}
    bias = {"logit_bias": more.pop("logit_bias", SPELLED)}
    said = {"structured_outputs": {"choice": [loss.says]}}
    first = ask(up, messages, tools=[TOOL], extra_body=extra | bias | said, **more)
    ends = Ends.of(first, template.tokens(messages, **values))
    messages.append(loss.back(first.message))
    if calls := messages[-1].get("tool_calls"):
        messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "found"})
    else:
        messages.append({"role": "user", "content": "go on"})
    up.forget()

    def again(**further: Any) -> Turn:
        turn = ask(
            up, messages, tools=[TOOL], extra_body=extra | further,
            max_tokens=4, temperature=0, logprobs=True, top_logprobs=10,
        )  # fmt: skip
        assert turn.input_ids == template.tokens(messages, add_generation_prompt=True, **values)
        return turn

    return Resumed(first, ends, again(), again)
