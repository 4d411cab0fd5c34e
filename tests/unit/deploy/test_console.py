"""Whatever a name from outside looks like, it is shown as it is: nothing is read as markup."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_kit import chain
from rich.progress import Progress, TextColumn
from rich.rule import Rule
from rich.table import Table
from store_kit import RunningStore, backhaul

from backhaul.deploy.console import Console
from backhaul.deploy.progress import StartProgress
from backhaul.proxy.fake_engine import FakeEngine

HOSTILE = ("[bold]x[/bold]", "[/]", "[/x]", "[link=a]b", "[red", ":smile:", "\\[x]", "[[1]]")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def printed(renderable: Any) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(renderable)
    return text.getvalue()


def in_a_cell(text: str) -> Any:
    table = Table(title=text, caption=text)
    table.add_column(text, footer=text)
    table.add_row(text)
    return table


def in_a_start(text: str) -> Any:
    progress = StartProgress()
    progress.update(text, 1.0, True)
    return progress.table()


def in_a_progress(text: str) -> Any:
    progress = Progress(TextColumn("{task.description}", markup=False), console=Console())
    progress.add_task(text)
    return progress.get_renderable()


@pytest.mark.parametrize("place", [str, in_a_cell, in_a_start, in_a_progress, Rule])
@given(
    st.lists(st.sampled_from([*HOSTILE, "a", "[", "]", "/", "\\", ":"]), max_size=8).map("".join)
)
def test_text_is_shown_as_it_is(place: Callable[[str], Any], text: str) -> None:
    assert text in printed(place(text))


def test_names_in_a_store_are_shown_as_they_are(live_store: RunningStore) -> None:
    one = live_store.open("[/m]", "[bold]prefill[/bold]:worker")
    two = live_store.open("[/m]", "[/x]:worker", kv_dtype="[link=a]fp8")
    live_store.publish_hashes(one, chain("m"), producer="[/]")
    code, out, err = backhaul("checkpoints", f"--store={live_store.uri}", f"--domain={one}")
    assert (code, err) == (0, "") and "[/]" in out
    compared = ("--compare", one, two, "--no-probe", f"--store-http=http://{live_store.http}")
    code, out, err = backhaul("doctor", f"--store={live_store.uri}", *compared)
    assert err == "" and "[link=a]fp8" in out and "[bold]prefill[/bold]" in out and "[/x]" in out


@pytest.mark.parametrize("name", HOSTILE)
def test_a_logs_words_are_shown_as_they_are(tmp_path: Path, name: str) -> None:
    log = tmp_path / "requests.jsonl"
    candidate = {"kinds": [name], "reason": name, "field": name}
    log.write_text(json.dumps({"request_id": "r", "candidates": [candidate]}) + "\n")
    code, out, err = backhaul("explain", "--request=r", f"--request-log={log}", "--no-lookup")
    assert (code, err) == (0, "") and f"{name} ({name})" in out


@pytest.mark.parametrize("name", ["[bold]x[-bold]", "[link=a]b", ":smile:"])
def test_file_names_are_shown_as_they_are(tmp_path: Path, name: str) -> None:
    trace = tmp_path / name
    line = {"request": "a", "prompt": [["s", 0, 500]], "output": [["a", 0, 90]]}
    trace.write_text(json.dumps(line) + "\n")
    out_file = tmp_path / f"out{name}"
    code, out, err = backhaul("trace", str(trace), "--format=backhaul", f"--out={out_file}")
    assert (code, err) == (0, "") and f"{name} (backhaul)" in out and f"Wrote {out_file}" in out
    code, out, _ = backhaul(
        "simulate", str(trace), "--format=backhaul", "--model=tiny-hybrid", "--policy=none"
    )
    assert code == 0 and f"{name}, requests: 1" in out


@pytest.mark.parametrize("name", HOSTILE)
def test_a_servers_words_are_shown_as_they_are(name: str) -> None:
    with FakeEngine(name) as engine:
        code, out, err = backhaul(
            *("ab", f"--a={engine.url}", f"--b={engine.url}", f"--model={name}"),
            *("--turns=2", "--max-tokens=3", "--pause=0"),
        )
    assert (code, err) == (0, "") and f"({name})" in out
