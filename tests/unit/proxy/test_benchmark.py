"""The benchmark runs through and writes what it shows."""

from __future__ import annotations

import json
from pathlib import Path

from backhaul.benchmarks.proxy import difference, main


def test_differences_are_paired() -> None:
    # Noise that hits both calls of a pair alike does not count.
    baseline = [0.001 * (1 + 10 * (i % 2)) for i in range(20)]
    samples = [b + 0.002 for b in baseline]
    result = difference("m", 1, ("a", "b"), samples, baseline, 1e3)
    assert all(abs(x - 2.0) < 1e-6 for x in (result.added, result.added_p10, result.added_p90))


def test_it_runs(tmp_path: Path) -> None:
    output = tmp_path / "proxy.json"
    main(prompt_tokens=[50], reply_tokens=5, repeats=2, output=output)
    results = json.loads(output.read_text())["results"]
    assert {r["measure"] for r in results} == {"request ms", "first event ms", "per token us"}
