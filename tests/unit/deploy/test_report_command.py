"""`backhaul report`: files and folders of results, and one line for what is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_kit import backhaul


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of a small simulation."""
    output = tmp_path_factory.mktemp("simulated") / "results.jsonl"
    code, _, _ = backhaul(
        *("simulate", "--workload=full_replay", "--model=tiny-hybrid", f"--output={output}"),
        *("--size=conversations=2", "--size=turns=2", "--routing=forget"),
    )
    assert code == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_file_or_the_folder_that_bench_writes(tmp_path: Path, lines: list[Any]) -> None:
    target = tmp_path / "report"
    file = write(tmp_path / "results.jsonl", lines)
    code, of_file, err = backhaul("report", str(file), f"--output={target}")
    assert (code, err) == (0, "") and of_file.count("wrote") == 2
    page = (target / "report.md").read_text()
    shutil.rmtree(target)
    assert backhaul("report", str(tmp_path), f"--output={target}")[:2] == (0, of_file)
    assert (target / "report.md").read_text() == page
    code, out, err = backhaul("report", str(target), f"--output={target}")
    assert (code, out) == (2, "") and "report/results.jsonl cannot be read" in err


@pytest.mark.parametrize("folder", ["/proc", "/proc/x/y", "/dev/null/x"])
def test_where_nothing_can_be_written(tmp_path: Path, lines: list[Any], folder: str) -> None:
    file = write(tmp_path / "results.jsonl", lines)
    code, out, err = backhaul("report", str(file), f"--output={folder}")
    assert (code, out) == (2, "") and err.startswith("backhaul: error: --output '/")
    assert err.count("\n") == 1
    (tmp_path / "report.html").mkdir()
    code, out, err = backhaul("report", str(file), f"--output={tmp_path}")
    assert (code, out) == (2, "") and "cannot be written" in err and err.count("\n") == 1


def test_an_arm_that_is_there_twice_is_named_with_its_file(
    tmp_path: Path, lines: list[Any]
) -> None:
    once = write(tmp_path / "once.jsonl", lines)
    other = write(tmp_path / "other.jsonl", lines)
    twice = write(tmp_path / "twice.jsonl", lines * 2)
    target = f"--output={tmp_path / 'report'}"
    assert backhaul("report", str(once), str(once), target)[0] == 0
    code, out, err = backhaul("report", str(twice), target)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{twice} holds an arm twice (full_replay, " in err and "remove it" in err
    code, out, err = backhaul("report", str(once), str(other), target)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{other} holds an arm that {once} holds too" in err and "only one of these" in err


ODD = st.sampled_from(
    [-1, 0, 1, 2**40, -0.5, 1e-3, 1e30, float("nan"), float("inf"), True, None, "", "[/]", "\x00",
     "\ud800", "|", [], {}, "real", "both"]
)  # fmt: skip


@settings(
    max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data())
def test_any_results_make_a_report_or_one_line(
    tmp_path: Path, lines: list[dict[str, Any]], data: st.DataObject
) -> None:
    changed = json.loads(json.dumps(lines))
    for line in data.draw(st.lists(st.sampled_from(changed), min_size=1, max_size=3)):
        part = data.draw(
            st.sampled_from([line, *(v for v in line.values() if isinstance(v, dict) and v)])
        )
        part[data.draw(st.sampled_from(sorted(part)))] = data.draw(ODD)
    file = write(tmp_path / "results.jsonl", changed)
    code, out, err = backhaul("report", str(file), f"--output={tmp_path / 'report'}")
    assert (code, err) == (0, "") or (code == 2 and out == "" and err.count("\n") == 1)
