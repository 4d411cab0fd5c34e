"""What operators look at, with real engines behind it: doctor, and a real Prometheus."""

from __future__ import annotations

import json
import random
import re
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
from promql_kit import RULES, dashboard_expressions, exposed, rules, uses

from backhaul.protocols.metrics import API_SERVER, STORE_PREFIX

READ = {
    "",
    "transports",
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
    pair.turn(pair.tokens(100), 40, u_end=64)  # so that both engines publish
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
        assert of_engine["transports"].startswith("its connection to the pool has lanes over ")
        assert of_engine["prefix caching"] == "on"
        assert of_engine["mamba-cache-mode"] == "align"
        assert re.search(r"of [1-9]\d* prompts", of_engine["prompt lengths"]), "a turn was served"
        assert of_engine["kv_load_failure_policy"].partition(":")[0] in ("fail", "recompute")


@pytest.fixture(scope="module")
def prometheus(_pair: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Scrapes both engines and the store, with the alert rules loaded, once all three are up."""
    engines = [engine.url.removeprefix("http://") for engine in _pair.pair.engines.values()]
    jobs = {"vllm": engines, "backhaul-store": [_pair.pair.store.http_url.removeprefix("http://")]}
    folder = tmp_path_factory.mktemp("prometheus")
    with running_prometheus(folder, jobs, [RULES]) as client:
        deadline = time.monotonic() + 60
        while value_of(client, "sum(up)") < 3:
            assert time.monotonic() < deadline, "both engines and the store are scraped"
            time.sleep(0.5)
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
    """And vLLM's own count of cached tokens by source agrees: what was loaded came from a host's
    memory, what the engine held from its device."""
    loaded = 'sum(backhaul:loaded_tokens_total{kind="decode_end"})'
    selected = 'sum(backhaul:requests_total{selected="decode_end"})'
    deadline = time.monotonic() + 60
    prefill = f'instance="{pair.pair.prefill.engine.url.removeprefix("http://")}"'
    by_source = "sum(vllm:prompt_tokens_cached_by_source_total{%s,source%s})"
    source, device = by_source % (prefill, '="host"'), by_source % (prefill, '="device"')
    other = by_source % (prefill, '!~"host|device"')
    names = (loaded, selected, source, device, other)
    before = {name: value_of(prometheus, name) for name in names}
    first = pair.tokens(300)
    turn = pair.turn(first, 70)
    pair.settle()
    pair.forget_locally()
    leg = pair.prefill([*first, *turn.decode.tokens, *tokens(rng, 24)])
    assert leg.cached_tokens == boundary(300, 70)
    again = pair.prefill([*first, *turn.decode.tokens, *tokens(rng, 24)])
    assert again.cached_tokens == again.backhaul["local_tokens"] > 0
    # They are counted at different moments of a request, so a scrape may fall between them.
    expected = {
        loaded: leg.cached_tokens,
        selected: 1,
        source: leg.cached_tokens,
        device: again.cached_tokens,
        other: 0,
    }
    while not all(value_of(prometheus, name) - before[name] >= n for name, n in expected.items()):
        assert time.monotonic() < deadline, "the turn is scraped"
        pair.nudge(pair.pair.prefill)
        time.sleep(1)
    assert {name: value_of(prometheus, name) - before[name] for name in expected} == expected


def series_of(client: httpx.Client) -> list[dict[str, str]]:
    """Labels of every series of ours that was scraped, the name among them."""
    query = {"match[]": '{__name__=~"backhaul:.*"}'}
    found: list[dict[str, str]] = client.get("/api/v1/series", params=query).json()["data"]
    return [one for one in found if not one["__name__"].endswith("_created")]


def test_the_whole_set_of_metrics_arrives_from_every_engine_and_the_store(
    pair: Session, prometheus: httpx.Client
) -> None:
    """Each name with its own labels and vLLM's, every value of each label, and nothing else."""
    engines = {engine.url.removeprefix("http://") for engine in pair.pair.engines.values()}
    store = pair.pair.store.http_url.removeprefix("http://")
    pair.nudge(pair.pair.prefill)  # `info` is there with an engine's first step
    pair.nudge(pair.pair.decode)
    wanted = {
        (instance, name)
        for name in exposed()
        for instance in ([store] if name.startswith(STORE_PREFIX) else engines)
    }
    deadline = time.monotonic() + 30
    while {(one["instance"], one["__name__"]) for one in series_of(prometheus)} != wanted:
        assert time.monotonic() < deadline, wanted ^ {
            (one["instance"], one["__name__"]) for one in series_of(prometheus)
        }
        time.sleep(1)
    values: dict[tuple[str, str, str], set[str]] = {}
    for one in series_of(prometheus):
        name, metric = one["__name__"], exposed()[one["__name__"]]
        own = {label.name for label in metric.labels} | ({"le"} & one.keys())
        theirs = {"__name__", "instance", "job"}
        if not name.startswith(STORE_PREFIX) and metric not in API_SERVER.values():
            theirs |= {"engine", "model_name"}
            assert one["engine"] == "0", "one engine, one series"
        assert one.keys() == own | theirs, one
        for label in own:
            values.setdefault((one["instance"], name, label), set()).add(one[label])
    for (_, name, label), found in values.items():
        known = {one.name: set(one.values) for one in exposed()[name].labels}.get(label)
        if known and name != "backhaul:info":
            assert found == known, (name, label)


@pytest.mark.parametrize("what", ["dashboard", "alerts"])
def test_what_operators_look_at_finds_its_series(
    pair: Session, prometheus: httpx.Client, what: str
) -> None:
    """Prometheus accepts every expression, and every selector in it meets a series of a running
    engine or store."""
    expressions = (
        dashboard_expressions()
        if what == "dashboard"
        else {rule["alert"]: rule["expr"] for rule in rules()}
    )
    pair.nudge(pair.pair.prefill)
    for title, expression in expressions.items():
        reply = prometheus.get("/api/v1/query", params={"query": expression}).json()
        assert reply["status"] == "success", (title, reply)
        for use in uses(expression):
            matchers = ",".join(f'{name}{sign}"{value}"' for name, sign, value in use.matchers)
            selector = f"{use.metric}{{{matchers}}}"
            found = prometheus.get("/api/v1/query", params={"query": f"count({selector})"}).json()
            assert found["data"]["result"], f"{title}: nothing is scraped as {selector}"
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    states = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert states.keys() == {rule["alert"] for rule in rules()}
    assert "err" not in states.values(), states
