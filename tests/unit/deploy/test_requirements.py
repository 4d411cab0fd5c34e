"""Commands that need vLLM, in an environment without it: one line, before anything is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "torch", "safetensors", "tokenizers", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import importlib.util
real = importlib.util.find_spec
def find_spec(name, package=None):
    try:
        return real(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_spec
from backhaul.deploy.cli import main
main()
"""


def run(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "HOME": str(tmp_path),
             "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("up",),
        ("up", "--model", "."),
        ("demo",),
        ("bench", "reuse", "results"),
    ],
    ids=" ".join,
)
def test_one_line_says_where_to_install(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_text("{}")
    code, err = run(tmp_path, *arguments)
    assert (code, err.count("\n")) == (2, 1), err
    assert f"`backhaul {arguments[0]}` needs vllm" in err
    assert "install Backhaul into vLLM's environment" in err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_what_needs_no_engine_runs(tmp_path: Path) -> None:
    code, err = run(tmp_path, "simulate", "--workload=tool_loop", "--output=results.jsonl")
    assert code == 0, err
