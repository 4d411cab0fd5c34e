"""`backhaul up` as a user runs it, and the official client through the proxy."""

from __future__ import annotations

import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import psutil
import pytest
from e2e_kit import COLD_TOLERANCE, B, agree, wait_until
from loss_kit import CASES, TOOL, Resumed, as_leg, lose, template_source
from openai import OpenAI
from typer.testing import CliRunner
from up_kit import MODEL, SPELLED, Ends, Template, Turn, Up, ask, by_token, predicted

from backhaul.benchmarks.reuse.record import EndFate, RequestResult
from backhaul.benchmarks.reuse.served import read_logs, served_results
from backhaul.deploy.cli import app
from backhaul.deploy.pair import Leg

START_S = 420.0
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
"""For the model's own template: without it the parser takes all output for reasoning."""


def sentence(length: int) -> dict[str, Any]:
    """Structured output that makes a random model speak text of ``length`` characters (tokens)."""
    return PLAIN | {"structured_outputs": {"regex": f"[a-z ]{{{length - 1}}}[a-z]"}}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    logs = tmp_path_factory.mktemp("up")
    command = [sys.executable, "-m", "backhaul.deploy.cli", "up", "--listen", "127.0.0.1:0"]
    command += ["--store-listen", "127.0.0.1:0", "--store-http", "127.0.0.1:0"]
    command += ["--log-dir", str(logs), "--proxy-arg=--prefill-timeout=25"]
    request_log = logs / "requests.jsonl"
    command += [f"--connector-option=request_log={request_log}"]
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
        yield Up(found[1], engines, Path(model[1]), request_log)
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
THOUGHT, ANSWER = "[a-z][a-z ]{22}[a-z]\n</think>\n\n", "[a-z][a-z ]{22}[a-z]"
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
        ({"preserve_thinking": True}, False, "input_end input_end input_end input_end"),
    ],
    ids=[
        "template drops, client returns",
        "both drop",
        "template keeps, client returns",
        "template keeps, client drops",
    ],
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
        assert len(turn.message["reasoning"].strip()) == 24
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


@pytest.fixture(scope="module")
def resumed(up: Up) -> Callable[[str], Resumed]:
    """Two turns of each case, held once."""
    return functools.cache(lambda name: lose(up, CASES[name][0]))


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, (_, kind) in CASES.items()])
def test_what_is_lost_when_a_reply_is_written_again(
    resumed: Callable[[str], Resumed], name: str, kind: str
) -> None:
    """U_end takes over where a template or a client changes tokens of the reply, and only there."""
    turns = resumed(name)
    check(turns.second, *predicted([turns.ends], turns.second.input_ids))
    assert turns.second.record["selected"]["kind"] == kind
    if kind == "input_end":
        cold = turns.again(cache_salt=uuid.uuid4().hex)
        assert cold.cached == 0 and len(cold.output_ids) == 4
        assert agree(as_leg(turns.second), as_leg(cold), COLD_TOLERANCE)


PAIRS = (
    ("booleans", "booleans as JSON"),
    ("JSON spacing", "JSON as the template"),
    ("trimmed white space", "nothing to trim"),
    ("renamed call ids", "call ids kept"),
    ("token spelled in bytes", "token as itself"),
    ("no end token", "nothing to trim"),
)


@pytest.mark.parametrize(("lost", "kept"), PAIRS, ids=[lost for lost, _ in PAIRS])
def test_what_was_lost_is_in_the_report(
    up: Up, resumed: Callable[[str], Resumed], lost: str, kept: str, tmp_path: Path
) -> None:
    """Two dialogues as the engines logged them, one of which came back as it was said."""
    dialogues = [resumed(name) for name in (lost, kept)]
    ids = [turn.request_id.encode() for one in dialogues for turn in (one.first, one.second)]
    log, report = tmp_path / "requests.jsonl", tmp_path / "report"

    def logged() -> int:
        lines = up.request_log.read_bytes().splitlines(keepends=True)
        mine = [line for line in lines if any(name in line for name in ids)]
        log.write_bytes(b"".join(mine))
        return len(mine)

    wait_until(lambda: logged() == 8, "both legs of four requests are logged")
    lines = [line for line in served_results(read_logs([log])) if isinstance(line, RequestResult)]
    by_id = {name: line for name in ids for line in lines if name.decode() in line.request}
    of_lost, of_kept = by_id[ids[1]], by_id[ids[3]]
    assert of_lost.relation.continuation == of_kept.relation.continuation == 1
    cut = lost == "no end token"
    gone = EndFate.NOT_KEPT if cut else EndFate.REWRITTEN
    assert (of_lost.decode_end, of_lost.input_end) == (gone, EndFate.SELECTED)
    assert (of_kept.decode_end, of_kept.selected) == (EndFate.SELECTED, "decode_end")
    said = CliRunner().invoke(app, ["report", str(log), "--output", str(report)])
    assert said.exit_code == 0, said.output
    page = (report / "report.md").read_text()
    table = re.search(r"^(\|.*input_end_fallback_rate.*)\n.*\n(.*)$", page, re.MULTILINE)
    assert table is not None
    heads, row = ([cell.strip() for cell in line.split("|")] for line in table.groups())
    answers = dict(zip(heads, row, strict=True))
    assert answers["input_end_fallback_rate"] == "100.0%"
    assert answers["D_end missed"].startswith("50.0%")
    assert answers["of which rewritten"] == ("0.0%" if cut else "100.0%")


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


FORCED = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look left or right.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "enum": ["left", "right"]}},
            "required": ["key"],
            "additionalProperties": False,
        },
    },
}


def test_a_forced_call_resumes_at_what_was_put_in(up: Up) -> None:
    """``strict`` keeps the arguments to the schema; the reply is JSON, which history is not."""
    messages: list[Any] = [{"role": "user", "content": "use the tool " + "now " * 60}]
    first = ask(
        up,
        messages,
        tools=[FORCED],
        tool_choice={"type": "function", "function": {"name": "look"}},
        extra_body=PLAIN,
    )
    (call,) = first.message["tool_calls"]
    assert call["function"]["name"] == "look"
    up.settle()
    messages += [first.message, {"role": "tool", "tool_call_id": call["id"], "content": "42"}]
    turn = ask(up, messages, tools=[FORCED], extra_body=sentence(70))
    assert turn.handover == "done"
    assert turn.record["local_tokens"] + turn.record["loaded_tokens"] > 0


def shape(value: Any) -> Any:
    """What an answer looks like, whatever it says; bytes of a text are one thing."""
    if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
        return "bytes"
    if isinstance(value, Mapping):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shape(one) for one in value]
    return type(value).__name__


def as_answer(logprobs: Sequence[Any]) -> Leg:
    """Tokens and log-probabilities of an answer, or of a stream's chunks in order."""
    chosen = [int(one.token.rpartition(":")[2]) for some in logprobs for one in some.content]
    return Leg(
        tokens=tuple(chosen),
        finish_reason="length",
        prompt_tokens=0,
        cached_tokens=0,
        backhaul=None,
        kv_transfer_params=None,
        seconds=0.0,
        first_token_s=0.0,
        logprobs=tuple(best for some in logprobs for best in by_token(some)),
    )


def test_log_probabilities_are_those_of_a_direct_call(up: Up) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "how likely? " + "and so on " * 8}],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": PLAIN | {"ignore_eos": True, "return_tokens_as_token_ids": True},
    }
    direct = OpenAI(base_url=f"{up.engines['decode-0']}/v1", api_key="none", max_retries=0)
    found, said = [], []
    for client, handover in ((up.client, "done"), (direct, None)):
        raw = client.chat.completions.with_raw_response.create(**body)
        assert raw.headers.get("x-backhaul-handover") == handover
        whole = raw.parse().choices[0].logprobs
        chunks = client.chat.completions.create(stream=True, **body)
        streamed = [one.logprobs for c in chunks for one in c.choices if one.logprobs]
        found.append([shape(some.model_dump()) for some in (whole, *streamed)])
        said += [as_answer([whole]), as_answer(streamed)]
    assert found[0] == found[1]
    for answer in said:
        assert len(answer.tokens) == 6 and all(len(best) == 3 for best in answer.logprobs)
        assert agree(answer, said[-1], COLD_TOLERANCE)


def test_two_choices(up: Up) -> None:
    """Not handed over, since the second choice would read what prefill has freed; answered."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "say it twice " * 8}],
        "max_tokens": 60,
        "n": 2,
        "temperature": 1.0,
        "extra_body": sentence(20),
    }
    raw = up.client.chat.completions.with_raw_response.create(**body)
    assert raw.headers["x-backhaul-handover"] == "several_choices"
    answer = raw.parse()
    said = {choice.index: choice.message.content for choice in answer.choices}
    streamed = {0: "", 1: ""}
    ended = set()
    for chunk in up.client.chat.completions.create(stream=True, **body):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ended.add((choice.index, choice.finish_reason))
    assert ended == {(0, "stop"), (1, "stop")}
    for texts in (said, streamed):
        assert {n: len(text) for n, text in texts.items()} == {0: 20, 1: 20}
        assert texts[0] != texts[1]
    assert answer.usage.completion_tokens == 2 * 21


def test_a_forced_call_streams(up: Up) -> None:
    """The official client puts the pieces of the call together."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "use the tool as a stream " + "now " * 40}],
        "tools": [FORCED],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "max_tokens": 400,
        "extra_body": PLAIN,
    }
    with up.client.chat.completions.stream(**body) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = choice.message.tool_calls
    assert call.function.name == "look" and call.id
    whole = up.client.chat.completions.create(**body).choices[0]
    assert whole.finish_reason == choice.finish_reason
    # Both are sampled, and the grammar lets white space stand around a parameter.
    for made in (call, *whole.message.tool_calls):
        assert json.loads(made.function.arguments)["key"].strip() in ("left", "right")


def test_a_batch_has_an_end_of_input_for_each_of_its_conversations(up: Up) -> None:
    """vLLM's batch route, which proxies do not serve; asked of the prefill engine twice, the second
    time with an empty prefix cache and longer histories."""
    url = f"{up.engines['prefill-0']}/v1/chat/completions/batch"
    first = [[{"role": "user", "content": f"{name} of a batch " * 8}] for name in ("one", "two")]
    body = {"model": MODEL, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    engine = up.engine("prefill-0")
    before = engine.metrics()
    httpx.post(url, json={**body, "messages": first}, timeout=60).raise_for_status()
    up.forget()
    more = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    later = [[*messages, *more] for messages in first]
    httpx.post(url, json={**body, "messages": later}, timeout=60).raise_for_status()
    up.settle()
    after = engine.metrics()

    def counted(sample: str) -> float:
        return after[sample] - before.get(sample, 0.0)

    assert counted("backhaul:u_end_total{outcome=filled}") == 4
    assert counted("backhaul:requests_total{selected=none}") == 2
    assert counted("backhaul:requests_total{selected=input_end}") == 2


def test_the_messages_api_resumes_at_decode_end(up: Up) -> None:
    """Anthropic's official client. The API has no field for token ids, and yet one render serves
    both legs: ids come by way of prefill's record."""
    said = {"type": "string", "pattern": "^[a-z ]{70}$"}
    messages: list[Any] = []
    before = 0
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
            # Without the last token, which a hand-over leaves to decode.
            assert answer.usage.input_tokens + cached == record["prompt_tokens"] + 1
            assert cached == before
            assert answer.stop_reason == "end_turn"
            before = (record["prompt_tokens"] + answer.usage.output_tokens) // B * B
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
