"""What operators look at, with real engines behind it: doctor, and a real Prometheus."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_kit import Session, boundary, tokens

sys.path.insert(0, str(Path(__file__).parents[1] / "prometheus"))
from prometheus_kit import running_prometheus

READ = {
    "",
    "prefix caching",
    "mamba-cache-mode",
    "prompt lengths",
    "retention",
    "policy",
    "kv_load_failure_policy",
}
"""What doctor says of each engine that it could read, "" being the engine itself."""
COMMAND = [sys.executable, "-m", "backhaul.deploy.cli"]


def test_doctor_sees_one_domain_and_both_engines(pair: Session) -> None:
    pair.turn(pair.tokens(100), 40)
    pair.settle()
    urls = [engine.url for engine in pair.pair.engines.values()]
    engines = [f"--engine={url}" for url in urls]
    store = [f"--store={pair.pair.store.uri}"]
    done = subprocess.run(
        # vLLM looks at the whole machine before it first shows its settings.
        [*COMMAND, "doctor", *store, *engines, "--json", "--timeout=60"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    document = json.loads(done.stdout)
    problems = [one for one in document["findings"] if one["level"] == "problem"]
    assert done.returncode == 0 and not problems, problems
    assert document["differences"] == []
    (domain,) = {one["id"] for one in document["domains"]}
    assert domain
    assert [(one["url"], one["domain"]) for one in document["engines"]] == [
        (url, domain) for url in urls
    ]
    assert all(one["known_here"] and one["policy"] for one in document["engines"])
    # Nothing that could not be read passes for healthy: every check is there, with what it read.
    says = {one["check"]: one["says"] for one in document["findings"]}
    assert domain in says["engines side by side"]
    for url in urls:
        of_engine = {
            check.removeprefix(f"engine {url}").removeprefix(": "): text
            for check, text in says.items()
            if check.startswith(f"engine {url}")
        }
        assert of_engine.keys() == READ, of_engine
        assert of_engine["prefix caching"] == "on"
        assert of_engine["mamba-cache-mode"] == "align"
        assert "prompts end before" in of_engine["prompt lengths"], "a turn has been served"
        assert of_engine["kv_load_failure_policy"].partition(":")[0] in ("fail", "recompute")


@pytest.fixture(scope="module")
def prometheus(_pair: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    targets = [engine.url.removeprefix("http://") for engine in _pair.pair.engines.values()]
    folder = tmp_path_factory.mktemp("prometheus")
    with running_prometheus(folder, {"vllm": targets}) as client:
        yield client


def value_of(client: httpx.Client, expression: str) -> float:
    """An instant query's only value; 0 while there is none."""
    try:
        reply: Any = client.get("/api/v1/query", params={"query": expression}).json()
        return sum(float(one["value"][1]) for one in reply["data"]["result"])
    except (httpx.HTTPError, KeyError, ValueError):  # it is still starting
        return 0.0


def test_a_real_prometheus_sees_what_a_turn_did(
    pair: Session, prometheus: httpx.Client, rng: random.Random
) -> None:
    loaded = 'sum(backhaul:loaded_tokens_total{kind="decode_end"})'
    selected = 'sum(backhaul:requests_total{selected="decode_end"})'
    deadline = time.monotonic() + 60
    while value_of(prometheus, "sum(up)") < 2:
        assert time.monotonic() < deadline, "both engines are scraped"
        time.sleep(0.5)
    source = 'sum(vllm:prompt_tokens_cached_by_source_total{source="host"})'
    before = {name: value_of(prometheus, name) for name in (loaded, selected, source)}
    first = pair.tokens(300)
    turn = pair.turn(first, 70)
    pair.settle()
    pair.forget_locally()
    leg = pair.prefill([*first, *turn.decode.tokens, *tokens(rng, 24)])
    assert leg.cached_tokens == boundary(300, 70)
    # The three are counted at different moments of one request, so a scrape may fall between them.
    expected = {
        loaded: leg.cached_tokens,
        selected: 1,
        source: leg.cached_tokens,
    }  # vLLM's own last
    while not all(value_of(prometheus, name) - before[name] >= n for name, n in expected.items()):
        assert time.monotonic() < deadline, "the turn is scraped"
        pair.nudge(pair.pair.prefill)
        time.sleep(1)
    assert {name: value_of(prometheus, name) - before[name] for name in expected} == expected
