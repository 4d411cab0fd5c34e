"""`backhaul up` as a user runs it, and the official client through the proxy."""

from __future__ import annotations

import json
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from e2e_kit import B
from openai import OpenAI

START_S = 420.0
MODEL = "tiny-hybrid"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "strict": True,  # else any JSON passes for arguments
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "enum": ["left", "right"]}},
            "required": ["key"],
            "additionalProperties": False,
        },
    },
}


def sentence(length: int) -> dict[str, Any]:
    """Structured output that makes a random model speak text of ``length`` characters (tokens)."""
    return {"structured_outputs": {"regex": f"[a-z ]{{{length - 1}}}[a-z]"}}


@dataclass
class Up:
    """A running cluster: its proxy and its engines' addresses."""

    url: str
    engines: dict[str, str]

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def forget(self) -> None:
        """The next turn meets a prefill worker that has not seen the conversation."""
        deadline = time.monotonic() + 30
        url = self.engines["prefill-0"]
        while not httpx.post(f"{url}/reset_prefix_cache", timeout=30).json()["success"]:
            assert time.monotonic() < deadline
            # An idle engine learns of what decode has read only when it runs a step.
            body = {"model": MODEL, "prompt": [97], "max_tokens": 1}
            httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
            time.sleep(0.2)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    logs = tmp_path_factory.mktemp("up")
    command = [sys.executable, "-m", "backhaul.deploy.cli", "up", "--listen", "127.0.0.1:0"]
    command += ["--log-dir", str(logs), "--proxy-arg=--prefill-timeout=15"]
    command += ["--engine-arg=--enable-auto-tool-choice", "--engine-arg=--tool-call-parser=hermes"]
    process = subprocess.Popen(
        ["env", "VLLM_SERVER_DEV_MODE=1", "COLUMNS=200", *command],
        stdout=subprocess.PIPE,
        text=True,
    )
    children: list[psutil.Process] = []
    try:
        said = _read_until(process, "Ready after", START_S)
        children = psutil.Process(process.pid).children(recursive=True)
        engines = dict(re.findall(r"^((?:prefill|decode)-\d)\s+(http://\S+)", said, re.MULTILINE))
        found = re.search(r"OPENAI_BASE_URL=(http://\S+)/v1", said)
        assert found and set(engines) == {"prefill-0", "decode-0"}, said
        yield Up(found[1], engines)
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


def _read_until(process: subprocess.Popen[str], word: str, seconds: float) -> str:
    assert process.stdout is not None
    said, deadline = "", time.monotonic() + seconds
    while word not in said:
        ready, _, _ = select.select([process.stdout], [], [], 1.0)
        line = process.stdout.readline() if ready else None
        assert line != "" and time.monotonic() < deadline, f"`backhaul up` did not come up:\n{said}"
        said += line or ""
    return said


@dataclass
class Turn:
    """One answer: text, what prefill said of it, and the counts that the client was told."""

    text: str
    handover: str
    record: dict[str, Any]
    prompt: int
    cached: int
    output: int

    @property
    def decode_end(self) -> int:
        """Boundary of this turn's D_end."""
        return (self.prompt + self.output - 1) // B * B


def ask(up: Up, messages: list[Any], *, stream: bool = False, **more: Any) -> Turn:
    more.setdefault("extra_body", sentence(70))
    options: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 200, **more}
    chat = up.client.chat.completions.with_raw_response
    if stream:
        raw = chat.create(stream=True, stream_options={"include_usage": True}, **options)
        text, usage = "", None
        for chunk in raw.parse():
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
    else:
        raw = chat.create(**options)
        answer: Any = raw.parse()
        text, usage = answer.choices[0].message.content or "", answer.usage
    assert usage is not None
    details = usage.prompt_tokens_details
    return Turn(
        text=text,
        handover=raw.headers["x-backhaul-handover"],
        record=json.loads(raw.headers.get("x-backhaul-prefill", "{}")),
        prompt=usage.prompt_tokens,
        cached=details.cached_tokens if details and details.cached_tokens else 0,
        output=usage.completion_tokens,
    )


def settle() -> None:
    """A client's pause; publications end meanwhile."""
    time.sleep(1.5)


def test_five_turns_with_the_full_history_resume_at_decode_end(up: Up) -> None:
    messages: list[Any] = [{"role": "system", "content": "words " * 40}]
    before: Turn | None = None
    for number in range(5):
        messages.append({"role": "user", "content": f"question {number} " + "and so on " * 8})
        turn = ask(up, messages, stream=number % 2 == 1)
        assert turn.handover == "done" and len(turn.text) == 70
        if before is not None:
            assert turn.record["selected"]["kind"] == "decode_end"
            assert turn.record["local_tokens"] + turn.record["loaded_tokens"] == before.decode_end
            assert turn.cached == before.decode_end
        messages.append({"role": "assistant", "content": turn.text})
        before = turn
        settle()


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
    first = ask(up, messages)
    settle()
    up.forget()
    messages += [
        {"role": "assistant", "content": change(first.text)},
        {"role": "user", "content": "go on"},
    ]
    second = ask(up, messages)
    selected = second.record["selected"]
    assert selected["kind"] == "input_end"
    # U_end lies before the assistant header, which is not part of the input.
    assert first.prompt - 64 < selected["boundary"] <= first.prompt
    assert second.cached == selected["boundary"] < first.decode_end


def test_a_tool_loop_resumes_at_what_was_put_in(up: Up) -> None:
    messages: list[Any] = [{"role": "user", "content": "use the tool " + "now " * 60}]
    call = {"type": "function", "function": {"name": "look"}}
    answer = up.client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[TOOL],
        tool_choice=call,
        max_tokens=300,
        extra_body={"seed": 1},
    )
    message = answer.choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.name == "look"
    settle()
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"},
    ]
    turn = ask(up, messages, tools=[TOOL])
    # The call is rendered in other words than the model's, so that the reply is not replayed; what
    # was put in is.
    assert turn.handover == "done"
    assert turn.record["local_tokens"] + turn.record["loaded_tokens"] > 0


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
        )
        assert turn.handover != "done" and len(turn.text) == 70
    finally:
        psutil.Process(owner).resume()
        for child in psutil.Process(owner).children(recursive=True):
            child.resume()
