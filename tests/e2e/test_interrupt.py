"""The demonstration leaves no process behind when it is interrupted while engines start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from e2e_kit import wait_until


def marked(mark: str) -> list[psutil.Process]:
    """Processes whose command line names this test's model directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demonstration_stops_everything(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    mark = str(tmp_path)
    command = [sys.executable, "-m", "backhaul.deploy.cli", "demo", "--cache-dir", mark]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        engines = "vllm.entrypoints"
        wait_until(
            lambda: sum(engines in " ".join(p.cmdline()) for p in marked(mark)) >= 2,
            "two engines start",
            seconds=60,
        )
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=60)
        assert demo.returncode == code, output
        assert not marked(mark)
    finally:
        for process in marked(mark):
            process.kill()
