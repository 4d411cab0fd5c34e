"""`backhaul proxy` as a process."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from proxy_kit import CHAT

from backhaul.proxy.fake_engine import Behaviour, FakeEngine
from backhaul.proxy.run import make_config
from backhaul.proxy.settings import ProxySettings

COMMAND = [sys.executable, "-m", "backhaul.deploy.cli", "proxy"]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Both legs."""
    with FakeEngine() as engine:
        yield engine


def start(engine: FakeEngine, *args: str) -> tuple[subprocess.Popen[str], str]:
    command = [*COMMAND, "--prefill", engine.url, "--decode", engine.url, *args]
    command += ["--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.match(r"backhaul proxy ready: (http://127\.0\.0\.1:\d+), ", line)
    assert match, line
    return process, match[1]


def test_idle_connections_outlast_those_that_clients_keep() -> None:
    """Else some of their requests meet a connection that is being closed."""
    ours = make_config(ProxySettings(prefill=("http://p",), decode=("http://d",)))
    theirs = httpx.Limits().keepalive_expiry
    assert theirs is not None and ours.timeout_keep_alive > 3 * theirs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_is_and_ends_what_runs_when_told_to_stop(
    engine: FakeEngine, number: signal.Signals
) -> None:
    engine.behave = lambda seen: Behaviour(token_delay_s=0.05)
    process, url = start(engine)
    body = CHAT | {"stream": True, "max_tokens": 10}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(number)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_what_does_not_end_is_ended(engine: FakeEngine) -> None:
    engine.behave = lambda seen: Behaviour(stall_after=2)
    process, url = start(engine, "--grace", "1")
    body = CHAT | {"stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as response:
        next(response.iter_lines())
        process.terminate()
        process.communicate(timeout=300)
    assert process.returncode == 0
    assert engine.seen[-1].disconnected.wait(300)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prefill", "p:1", "--decode", "http://d"], "--prefill 'p:1' is no address"),
        (["--prefill", "http://p", "--decode", "http://d,http://d"], "given twice"),
        (["--prefill", "http://p", "--decode", "http://d", "--retries", "99"], "retries is 99"),
        (["--prefill", "http://p", "--decode", "http://d", "--listen", "x"], "address 'x'"),
    ],
)
def test_a_wrong_command_line_is_one_line(args: list[str], words: str) -> None:
    done = subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        args = ["--prefill", "http://p", "--decode", "http://d", "--listen", listen]
        done = subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert f"cannot listen on {listen}" in done.stderr
