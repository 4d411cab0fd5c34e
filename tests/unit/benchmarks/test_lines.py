"""Files of JSON lines whose writer was killed: nothing but the torn line is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.benchmarks.reuse import lines
from backhaul.benchmarks.reuse.lines import appending, whole_lines
from backhaul.protocols.errors import ConfigError

WHOLE = b'{"a":{"b":"\xc3\xa9"}}\n{"c":[1,2]}\n'


def read(path: Path) -> list[bytes]:
    return [line.rstrip(b"\n") for _, line in whole_lines(path)]


@pytest.mark.parametrize("block_bytes", [1, 3, 1 << 20])
@given(st.integers(0, len(WHOLE)))
def test_a_file_cut_anywhere_loses_the_torn_line_only(
    tmp_path_factory: pytest.TempPathFactory, block_bytes: int, length: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "lines.jsonl"
    path.write_bytes(WHOLE[:length])
    # An object that lacks nothing but the line's end is whole.
    whole = [line for line in WHOLE.splitlines() if line in WHOLE[:length]]
    assert read(path) == whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_BLOCK_BYTES", block_bytes)
        with appending(path) as file:
            file.write(b'{"new":0}\n')
    assert read(path) == [*whole, b'{"new":0}']
    assert path.read_bytes().endswith(b"\n")


@pytest.mark.parametrize("torn", [b"1", b"nul", b'"text"', b"[{}]", b"{", b'{"a":"\xc3', b"\0" * 9])
def test_a_torn_line_is_said_once(
    tmp_path: Path, torn: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(WHOLE + torn)
    assert read(path) == WHOLE.splitlines()
    assert capsys.readouterr().err == (
        f"backhaul: {path}:3 was not written to its end, and is passed over\n"
    )
    assert len(list(whole_lines(path, say_torn=False))) == 2
    with appending(path):
        pass
    assert path.read_bytes() == WHOLE
    assert capsys.readouterr().err == (
        f"backhaul: {path}: its last line was not written to its end, and is cut off\n"
    )
    with appending(path):
        assert read(path) == WHOLE.splitlines()
    assert capsys.readouterr().err == ""


def test_one_at_a_time_appends(tmp_path: Path) -> None:
    """What another one has written so far would look torn."""
    path = tmp_path / "lines.jsonl"
    with appending(path) as file:
        file.write(b'{"half":')
        file.flush()
        with (
            pytest.raises(ConfigError, match="is being written by another"),
            appending(path),
        ):
            pass
        file.write(b"1}\n")
    assert read(path) == [b'{"half":1}']
    with appending(path):
        pass


def test_a_writer_that_was_killed_leaves_the_file_to_others(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    script = (
        "import os, pathlib, signal, sys\n"
        "from backhaul.benchmarks.reuse.lines import appending\n"
        "with appending(pathlib.Path(sys.argv[1])) as file:\n"
        '    file.write(b\'{"a":1}\\n{"torn\')\n'
        "    file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=300)
    assert ended.returncode < 0
    with appending(path) as file:
        file.write(b'{"b":2}\n')
    assert read(path) == [b'{"a":1}', b'{"b":2}']


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with appending(path) as file:
            file.write(b"{}\n")
        assert os.read(reader, 9) == b"{}\n"
    finally:
        os.close(reader)
