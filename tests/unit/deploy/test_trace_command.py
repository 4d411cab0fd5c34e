"""`backhaul trace`: the table, the conversion, and one line for what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from store_kit import backhaul

from backhaul.benchmarks.traces import open_trace

LINES = (
    {"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [1, 2, 3]},
    {"timestamp": 9, "input_length": 2000, "output_length": 40, "hash_ids": [1, 2, 4, 5]},
)


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    return backhaul("trace", *map(str, arguments))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


def test_the_table_says_what_could_be_reused(path: Path) -> None:
    code, out, err = run(path)
    assert (code, err) == (0, "")
    assert "trace.jsonl (mooncake)" in out
    assert "1,600 (51.6%)" in out


def test_conversion_keeps_every_turn_and_may_replace_its_source(path: Path) -> None:
    before = list(open_trace(path))
    _, first, _ = run("--json", path)
    code, out, _ = run(path, "--out", path)
    assert code == 0
    assert "Wrote" in out
    assert list(open_trace(path, "backhaul")) == before
    _, second, _ = run("--json", path)
    assert json.loads(second) | {"format": "mooncake"} == json.loads(first)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_malformed_lines_stop_it_or_are_counted(path: Path) -> None:
    path.write_text(path.read_text() + '{"timestamp": 1}\n')
    target = path.with_name("out.jsonl")
    code, out, err = run(path, "--out", target)
    assert (code, out) == (2, "")
    assert err == f"backhaul: error: {path}:3: input_length None: the field is missing\n"
    assert not target.exists()
    code, out, _ = run(path, "--skip-malformed", "--out", target)
    assert code == 0
    assert "Skipped 1 malformed: missing 1" in out
    assert len(list(open_trace(target))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "parquet"), "format 'parquet' is not known: give auto, backhaul, mooncake"),
        (("--out", "/dev/null/x"), "--out '/dev/null/x': not a directory"),
        (("--tokenizer", "/dev/null"), "--tokenizer '/dev/null' is a device or a pipe"),
    ],
)
def test_wrong_options_are_one_line(path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(path, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"backhaul: error: {message}")
    assert err.count("\n") == 1
