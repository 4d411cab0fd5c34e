"""The benchmark of finding U_end runs through, both ways, and writes what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from backhaul.benchmarks.render import main

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def run(tmp_path: Path, source: str = TEMPLATE, *, whole: bool) -> dict[str, Any]:
    """What it writes."""
    template, output = tmp_path / "t.jinja", tmp_path / "render.json"
    template.write_text(source)
    main(
        [template], turns="0,1", chars=20, repeats=4, tokenizer=None, policy="both", whole=whole,
        output=output,
    )  # fmt: skip
    written = json.loads(output.read_text())
    assert isinstance(written, dict)
    return written


def test_the_marks_alone(tmp_path: Path) -> None:
    written = run(tmp_path, whole=False)
    assert written["settings"]["measured"] == "marks"
    assert [r["turns"] for r in written["results"]] == [0, 1]
    assert all(r["plain_ms"] > 0 and r["examine_ms"] > 0 for r in written["results"])


def test_the_whole_hook(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    written = run(tmp_path, whole=True)
    assert written["settings"]["measured"] == "whole hook"
    short, long = written["results"]
    assert 0 < short["tokens"] < long["tokens"]
    assert all(r["render_ms"] > 0 for r in written["results"])


@pytest.mark.parametrize("whole", [False, True])
def test_a_template_without_a_guard_is_not_measured(tmp_path: Path, whole: bool) -> None:
    if whole:
        pytest.importorskip("vllm")
    with pytest.raises(typer.BadParameter, match="U_end is not found"):
        run(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}", whole=whole)
