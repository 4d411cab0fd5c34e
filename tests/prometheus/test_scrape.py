"""A real Prometheus scrapes a real store, with the alert rules loaded."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_kit import running_prometheus
from promql_kit import RULES, exposed

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "deploy"))
from store_kit import RunningStore, running_store

WAIT_S = 300.0


@pytest.fixture(scope="module")
def store() -> Iterator[RunningStore]:
    with running_store() as store:
        domain = store.open("scraped")
        store.publish(domain, "ab")
        store.lookup(domain, "abc")
        yield store


@pytest.fixture(scope="module")
def prometheus(
    store: RunningStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("prometheus")
    with running_prometheus(folder, {"backhaul-store": [store.http]}, [RULES]) as client:
        yield client


def ask(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """The query's series, as soon as there are any."""
    deadline = time.monotonic() + WAIT_S
    last: object = None
    while time.monotonic() < deadline:
        try:
            reply = client.get("/api/v1/query", params={"query": expression}).json()
            if reply["status"] == "success" and reply["data"]["result"]:
                result: list[dict[str, Any]] = reply["data"]["result"]
                return result
            last = reply
        except (httpx.HTTPError, ValueError) as error:  # it is still starting
            last = error
        time.sleep(0.3)
    pytest.fail(f"{expression}: {last}")


def test_the_store_is_scraped(prometheus: httpx.Client, store: RunningStore) -> None:
    (up,) = ask(prometheus, 'up{job="backhaul-store"} == 1')
    assert up["metric"]["instance"] == store.http
    (checkpoints,) = ask(prometheus, "backhaul:store_checkpoints")
    assert checkpoints["value"][1] == "1"
    (hits,) = ask(prometheus, "backhaul:store_hits_total")
    assert hits["value"][1] == "1"


def test_every_metric_of_the_store_arrives_under_its_name(prometheus: httpx.Client) -> None:
    ask(prometheus, "backhaul:store_checkpoints")
    names = set(prometheus.get("/api/v1/label/__name__/values").json()["data"])
    known = {name for name in exposed() if name.startswith("backhaul:store_")}
    created = {name for name in names if name.endswith("_created")}
    assert known == {name for name in names - created if name.startswith("backhaul:")}


def test_the_rules_are_loaded_and_healthy(prometheus: httpx.Client) -> None:
    ask(prometheus, "up")
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
        health = {rule["health"] for group in groups for rule in group["rules"]}
        if "unknown" not in health:
            break
        time.sleep(0.3)
    assert health == {"ok"}
