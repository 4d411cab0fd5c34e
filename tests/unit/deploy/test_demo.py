"""`backhaul demo` that fails or is interrupted: what is said, and that nothing stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

STUB = Path(__file__).with_name("demo_stub.py")
WAIT_S = 300.0


class Demo:
    """`backhaul demo` as a process, with temporary files of its own."""

    def __init__(self, tmp_path: Path, model: Path, limit: int, *args: str) -> None:
        self.output = tmp_path / "output"
        self.tmp = tmp_path / "tmp"
        self.tmp.mkdir()
        self._mark = str(self.tmp)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(STUB), str(limit), "demo", f"--cache-dir={model}", *args],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"TMPDIR": self._mark, "COLUMNS": "200"},
            )  # fmt: skip

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not re.search(pattern, self.text(), re.DOTALL):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def wait_end(self) -> int:
        code = self.process.wait(WAIT_S)
        assert not self.left()
        return code

    def left(self) -> list[psutil.Process]:
        """Whatever was started for this demonstration and still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("TMPDIR") == self._mark
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        for process in demo.left():
            process.kill()
        demo.process.wait(WAIT_S)


def test_interrupted_late_it_leaves_nothing(tmp_path: Path, model: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(tmp_path, model, 0))
    demo.wait_for(r"turn 5.*without Backhaul.*turn 2")
    assert len(demo.left()) >= 3
    demo.process.send_signal(signal.SIGINT)
    assert demo.wait_end() == 130
    assert list(demo.tmp.iterdir()) == []
    said = demo.text()
    assert "Traceback" not in said
    assert said.endswith(
        "backhaul: stopping ...\nbackhaul: interrupted; every engine was stopped\n"
    )
    # Not on a terminal everything has a line of its own.
    for line in ("  decode ready after", "engines healthy after", "  turn 1 "):
        assert re.search(rf"^{line}", said, re.MULTILINE), said


def test_an_engine_that_fails_meanwhile_is_named(
    tmp_path: Path, model: Path, demos: list[Demo]
) -> None:
    demos.append(demo := Demo(tmp_path, model, 4))
    assert demo.wait_end() == 1
    said = demo.text()
    assert "turn 2" in said and "turn 3" not in said
    assert "decode exited with code 7" in said and "the core fell over" in said
    assert "Traceback" not in said
    kept = re.search(r"logs are kept in (\S+)", said)
    assert kept and (Path(kept[1]) / "with" / "decode.log").is_file()
