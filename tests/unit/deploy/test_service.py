"""Commands whose surroundings are short of something, or odd."""

from __future__ import annotations

import resource
import select
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from backhaul.deploy import cli
from backhaul.transfer.daemon.ports import listen_on
from backhaul.transfer.daemon.settings import Address

FULL = Path("/dev/full")
PROXY = ["proxy", "--prefill=http://127.0.0.1:9", "--decode=http://127.0.0.1:9"]
SOFT = 64


def _few_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, most))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def test_a_service_without_room_for_its_ready_line_and_with_few_files() -> None:
    """Its log lies on a full disk, and its shell allows 64 files."""
    port = free_port()
    with FULL.open("w") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "backhaul.deploy.cli", *PROXY, f"--listen=127.0.0.1:{port}"],
            stdout=full, stderr=subprocess.PIPE, text=True, preexec_fn=_few_files,
        )  # fmt: skip
    try:
        assert process.stderr is not None
        assert "ready: " in (line := process.stderr.readline()), line
        assert line.endswith("(standard output takes nothing: No space left on device)\n")
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * SOFT)]
        answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=300)
        assert answer.status_code == 503  # it has no worker
        assert psutil.Process(process.pid).num_fds() > SOFT
        for client in clients:
            client.close()
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "Traceback" not in errors and "Exception ignored" not in errors


@pytest.mark.parametrize("words", [["--version"], ["store", "--help"]])
def test_output_on_a_full_disk_is_one_line_and_exit_code_1(words: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "backhaul.deploy.cli", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.stderr == "backhaul: error: cannot write the output: No space left on device\n"
    assert done.returncode == 1


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Exit code; a byte of an argument that is no UTF-8 is half a character, as from a shell."""
    monkeypatch.setattr(sys, "argv", ["backhaul", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "--workload", "full_replay", "--size", "conversations=\udcff"],
        ["explain", "--no-lookup", "--request", "\udcff", "--request-log", "/dev/null"],
        ["trace", "x" * 5000],
        ["report", "x" * 5000],
        ["lint-template", "x" * 5000],
        ["up", "--proxy-arg", "\udcff\x1b[31m\n"],
        ["simulate", "--workload", "x" * 100_000],
    ],
)
def test_arguments_of_any_bytes_and_length_are_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words) in (1, 2)
    errors = capsys.readouterr().err
    assert errors.startswith("backhaul: error: ") and errors.count("\n") == 1
    assert errors.rstrip("\n").isprintable() and len(errors) < 1000


def test_output_that_cannot_be_written_as_text_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "é.jinja"
    template.write_text("{{ messages }}")
    monkeypatch.setattr(cli, "silence_stdout", lambda: None)  # pytest's own would be silent
    with (tmp_path / "output").open("w", encoding="ascii") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert run(monkeypatch, "lint-template", str(template)) == 2
        monkeypatch.undo()
    assert capsys.readouterr().err == (
        "backhaul: error: the output cannot be written as ascii: set PYTHONIOENCODING=utf-8\n"
    )


def test_connections_whose_other_end_is_gone_are_noticed() -> None:
    """Nobody sends anything any more, so only the system can tell."""
    with (
        listen_on(Address("127.0.0.1", 0), "--listen") as listener,
        socket.create_connection(listener.getsockname()),
    ):
        assert select.select([listener], [], [], 300)[0]
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle, pause, tries = (accepted.getsockopt(socket.IPPROTO_TCP, name) for name in names)
            assert idle + pause * tries <= 120
