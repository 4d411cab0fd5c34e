"""`backhaul up` as a user runs it, and the official client through the proxy."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import psutil
import pytest
from e2e_kit import B
from up_kit import MODEL, SPELLED, Ends, Template, Turn, Up, ask, predicted

from backhaul.deploy.tiny_model import TOKEN_IDS

START_S = 420.0
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
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
"""For the model's own template: without it the parser takes all output for reasoning."""


def sentence(length: int) -> dict[str, Any]:
    """Structured output that makes a random model speak text of ``length`` characters (tokens)."""
    return PLAIN | {"structured_outputs": {"regex": f"[a-z ]{{{length - 1}}}[a-z]"}}


def template_source(name: str) -> str:
    """A vendor's template: ``trl/x`` or one of scripts/fetch_templates."""
    package, _, stem = name.partition("/")
    folder = Path(sys.prefix) / "share" / "backhaul-templates" / package
    if package == "trl":
        spec = importlib.util.find_spec("trl")
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent / "chat_templates"
    return (folder / f"{stem}.jinja").read_text()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    logs = tmp_path_factory.mktemp("up")
    command = [sys.executable, "-m", "backhaul.deploy.cli", "up", "--listen", "127.0.0.1:0"]
    command += ["--store-listen", "127.0.0.1:0", "--store-http", "127.0.0.1:0"]
    command += ["--log-dir", str(logs), "--proxy-arg=--prefill-timeout=25"]
    # A busy machine.
    command += ["--connector-option=lookup_timeout_s=5", "--connector-option=publication_wait_s=2"]
    command += [
        "--engine-arg=--enable-auto-tool-choice",
        "--engine-arg=--trust-request-chat-template",
    ]
    command += [
        "--engine-arg=--tool-call-parser=qwen3_xml",
        "--engine-arg=--reasoning-parser=qwen3",
    ]
    # A grammar for the whole reply is how a random model is made to think and to answer.
    command += ["--engine-arg=--structured-outputs-config.enable_in_reasoning=true"]
    process = subprocess.Popen(
        ["env", "VLLM_SERVER_DEV_MODE=1", "COLUMNS=200", *command],
        stdout=subprocess.PIPE,
    )
    children: list[psutil.Process] = []
    try:
        said = _read_until(process, "Ready after", START_S)
        children = psutil.Process(process.pid).children(recursive=True)
        engines = dict(re.findall(r"^((?:prefill|decode)-\d)\s+(http://\S+)", said, re.MULTILINE))
        found = re.search(r"OPENAI_BASE_URL=(http://\S+)/v1", said)
        model = re.search(r"Model (\S+), logs in", said)
        assert found and model and set(engines) == {"prefill-0", "decode-0"}, said
        yield Up(found[1], engines, Path(model[1]))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        assert not [child for child in children if _runs(child)]
    finally:
        for child in children:
            if _runs(child):
                child.kill()
        process.kill()
        process.wait(timeout=30)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _read_until(process: subprocess.Popen[bytes], word: str, seconds: float) -> str:
    assert process.stdout is not None
    said, deadline = b"", time.monotonic() + seconds
    while word not in said.decode(errors="replace"):
        # Not readline: what it has buffered, select does not see.
        ready, _, _ = select.select([process.stdout], [], [], 1.0)
        some = os.read(process.stdout.fileno(), 65536) if ready else None
        assert some != b"" and time.monotonic() < deadline, (
            f"`up` did not come up:\n{said.decode(errors='replace')}"
        )
        said += some or b""
    return said.decode(errors="replace")


def test_five_turns_with_the_full_history_resume_at_decode_end(up: Up) -> None:
    messages: list[Any] = [{"role": "system", "content": "words " * 40}]
    before: Turn | None = None
    for number in range(5):
        messages.append({"role": "user", "content": f"question {number} " + "and so on " * 8})
        turn = ask(up, messages, stream=number % 2 == 1, extra_body=sentence(70))
        assert turn.handover == "done" and len(turn.text) == 70
        if before is not None:
            assert turn.record["selected"]["kind"] == "decode_end"
            assert turn.record["local_tokens"] + turn.record["loaded_tokens"] == before.decode_end
            assert turn.cached == before.decode_end
        messages.append({"role": "assistant", "content": turn.text})
        before = turn
        up.settle()


CALL = (
    "<tool_call>\n<function=look>\n<parameter=key>\nleft or right, whichever it is"
    "\n</parameter>\n</function>\n</tool_call>"
)
THOUGHT, ANSWER = "[a-z][a-z ]{40}[a-z]\n</think>\n\n", "[a-z][a-z ]{40}[a-z]"
DIALOGUE = [
    ({"role": "user", "content": "good morning " * 4}, ANSWER),
    ({"role": "user", "content": "use the tool " * 4}, CALL),
    ({"role": "tool", "content": "what was found " * 4}, ANSWER),
    ({"role": "user", "content": "thank you " * 4}, ANSWER),
    ({"role": "user", "content": "and another " * 4}, ANSWER),
]
"""What comes in, and what is answered after a thought."""


@pytest.mark.parametrize(
    ("arguments", "keep", "kinds"),
    [
        # Qwen3.6 drops the thoughts of everything before the last user message.
        ({}, True, "input_end decode_end input_end input_end"),
        ({}, False, "input_end input_end input_end input_end"),
        # Asked to, it keeps them; then it is up to the client.
        ({"preserve_thinking": True}, True, "decode_end decode_end decode_end decode_end"),
    ],
    ids=["template drops, client returns", "both drop", "template keeps, client returns"],
)
def test_five_turns_of_a_reasoning_model(
    up: Up, arguments: dict[str, Any], keep: bool, kinds: str
) -> None:
    """Each turn resumes at the deepest end that the template writes back as it was."""
    template = Template(template_source("trl/qwen3_6"), up.model)
    system = {"role": "system", "content": f"{sorted(arguments)} {keep} " + "words " * 10}
    messages: list[Any] = [system]
    ends: list[Ends] = []
    seen = []
    for number, (given, answer) in enumerate(DIALOGUE):
        if given["role"] == "tool":
            given = given | {"tool_call_id": messages[-1]["tool_calls"][0]["id"]}
        messages.append(given)
        values = {"tools": [TOOL], **arguments}
        turn = ask(
            up,
            messages,
            stream=number == 3,
            tools=[TOOL],
            extra_body={
                "chat_template": template.source,
                "chat_template_kwargs": arguments,
                "structured_outputs": {"regex": THOUGHT + answer},
                "logit_bias": SPELLED,
            },
        )
        assert turn.handover == "done"
        assert turn.input_ids == template.tokens(messages, add_generation_prompt=True, **values)
        assert len(turn.message["reasoning"].strip()) >= 32
        assert bool(turn.message.get("tool_calls")) is (number == 1)
        kind, boundary = predicted(ends, turn.input_ids)
        check(turn, kind, boundary)
        seen.append(kind)
        ends.append(Ends.of(turn, template.tokens(messages, **values)))
        kept = turn.message if keep else {**turn.message, "reasoning": None}
        messages.append({k: v for k, v in kept.items() if v is not None})
        up.forget()
    assert seen == ["none", *kinds.split()]


def check(turn: Turn, kind: str, boundary: int) -> None:
    """A turn on an empty prefill worker resumed there, and everyone was told so."""
    selected = turn.record["selected"]
    if kind == "none":
        assert selected is None
    else:
        assert (selected["kind"], selected["boundary"]) == (kind, boundary)
    assert turn.record["local_tokens"] == 0
    assert turn.record["loaded_tokens"] == turn.cached == boundary


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


@pytest.mark.parametrize(("loss", "kind"), CASES.values(), ids=CASES)
def test_what_is_lost_when_a_reply_is_written_again(up: Up, loss: Loss, kind: str) -> None:
    """U_end takes over where a template or a client changes tokens of the reply, and only there."""
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
    second = ask(up, messages, tools=[TOOL], extra_body=extra, max_tokens=4)
    assert second.input_ids == template.tokens(messages, add_generation_prompt=True, **values)
    check(second, *predicted([ends], second.input_ids))
    assert second.record["selected"]["kind"] == kind


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text: " " + text, id="whitespace"),
        pytest.param(lambda text: "something else", id="rewritten"),
        pytest.param(lambda text: text[:3], id="cut"),
    ],
)
def test_a_reply_that_comes_back_changed_falls_back_to_input_end(up: Up, change: Any) -> None:
    messages: list[Any] = [
        {"role": "user", "content": f"tell me {change('x' * 30)} " + "a b " * 60}
    ]
    first = ask(up, messages, extra_body=sentence(70))
    up.forget()
    messages += [
        {"role": "assistant", "content": change(first.text)},
        {"role": "user", "content": "go on"},
    ]
    second = ask(up, messages, extra_body=sentence(70))
    selected = second.record["selected"]
    assert selected["kind"] == "input_end"
    # U_end lies before the assistant header, which is not part of the input.
    assert first.prompt - 64 < selected["boundary"] <= first.prompt
    assert second.cached == selected["boundary"] < first.decode_end


def test_a_forced_call_resumes_at_what_was_put_in(up: Up) -> None:
    """``strict`` keeps the arguments to the schema; the reply is JSON, which history is not."""
    messages: list[Any] = [{"role": "user", "content": "use the tool " + "now " * 60}]
    function = TOOL["function"] | {"strict": True}  # type: ignore[operator]
    tools = [TOOL | {"function": function}]
    first = ask(
        up,
        messages,
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "look"}},
        extra_body=PLAIN | {"seed": 1},
    )
    (call,) = first.message["tool_calls"]
    assert call["function"]["name"] == "look"
    up.settle()
    messages += [first.message, {"role": "tool", "tool_call_id": call["id"], "content": "42"}]
    turn = ask(up, messages, tools=tools, extra_body=sentence(70))
    assert turn.handover == "done"
    assert turn.record["local_tokens"] + turn.record["loaded_tokens"] > 0


def test_the_messages_api_resumes_at_what_was_said_before(up: Up) -> None:
    """Anthropic's official client. The API has no field for token ids, and yet one render serves
    both legs: ids come by way of prefill's record."""
    said = {"type": "string", "pattern": "^[a-z ]{70}$"}
    messages: list[Any] = []
    with anthropic.Anthropic(base_url=up.url, api_key="none", max_retries=0) as client:
        for number in range(3):
            messages.append({"role": "user", "content": f"message {number} " + "and so on " * 8})
            body = {
                "model": MODEL,
                "max_tokens": 200,
                "system": "words " * 20,
                "messages": messages,
                "output_config": {"format": {"type": "json_schema", "schema": said}},
                "extra_body": PLAIN,
            }
            if number == 1:
                with client.messages.stream(**body) as stream:
                    stream.until_done()
                    answer, headers = stream.get_final_message(), stream.response.headers
            else:
                raw = client.messages.with_raw_response.create(**body)
                answer, headers = raw.parse(), raw.headers
            assert headers["x-backhaul-handover"] == "done"
            assert "prompt_token_ids" not in headers["x-backhaul-prefill"]
            record = json.loads(headers["x-backhaul-prefill"])
            cached = answer.usage.cache_read_input_tokens or 0
            assert cached == record["local_tokens"] + record["loaded_tokens"]
            assert answer.usage.input_tokens + cached == record["prompt_tokens"]
            assert bool(cached) is (number > 0)
            assert answer.stop_reason == "end_turn"
            messages.append({"role": "assistant", "content": answer.content[0].text})
            up.settle()


def test_the_responses_api_resumes_at_decode_end(up: Up) -> None:
    items: list[Any] = []
    before = 0
    for number in range(3):
        items.append({"role": "user", "content": f"item {number} " + "and so on " * 8})
        body: dict[str, Any] = {
            "model": MODEL, "input": items, "instructions": "words " * 20,
            "max_output_tokens": 200, "extra_body": sentence(70),
        }  # fmt: skip
        if number == 1:
            raw = up.client.responses.with_raw_response.create(stream=True, **body)
            answer = list(raw.parse())[-1].response
        else:
            raw = up.client.responses.with_raw_response.create(**body)
            answer = raw.parse()
        assert raw.headers["x-backhaul-handover"] == "done"
        assert len(answer.output_text) == 70
        assert answer.usage.input_tokens_details.cached_tokens == before
        before = (answer.usage.input_tokens + answer.usage.output_tokens - 1) // B * B
        items.append({"role": "assistant", "content": answer.output_text})
        up.settle()


def test_a_client_that_leaves_stops_both_engines(up: Up) -> None:
    """Some minutes of decoding, were it not for the client."""
    stream = up.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "for ever " * 10}],
        max_tokens=8000,
        stream=True,
        extra_body=PLAIN | {"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    up.settle()


def test_errors_are_the_engines_own(up: Up) -> None:
    direct = httpx.post(
        f"{up.engines['decode-0']}/v1/chat/completions", json={"model": "none", "messages": []}
    )
    through = httpx.post(
        f"{up.url}/v1/chat/completions", json={"model": "none", "messages": []}, timeout=60
    )
    assert through.status_code == direct.status_code >= 400
    assert through.json()["error"]["type"] == direct.json()["error"]["type"]


def test_a_prefill_worker_that_dies_fails_no_request(up: Up) -> None:
    """Last in this file: the cluster stays without prefill."""
    prefill = int(up.engines["prefill-0"].rpartition(":")[2])
    owner = next(
        c.pid for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == prefill and c.pid
    )  # fmt: skip
    for child in psutil.Process(owner).children(recursive=True):
        child.suspend()
    psutil.Process(owner).suspend()
    try:
        turn = ask(
            up,
            [{"role": "user", "content": "still there? " + "x " * 40}],
            timeout=120,
            extra_body=sentence(70),
        )
        assert turn.handover != "done" and len(turn.text) == 70
    finally:
        psutil.Process(owner).resume()
        for child in psutil.Process(owner).children(recursive=True):
            child.resume()
