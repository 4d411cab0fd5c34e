"""What operators look at, with real engines behind it: doctor, and a real Prometheus."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from e2e_kit import Session, boundary, tokens

from backhaul.deploy.processes import free_port

COMMAND = [sys.executable, "-m", "backhaul.deploy.cli"]


def test_doctor_sees_one_domain_and_both_engines(pair: Session) -> None:
    pair.turn(pair.tokens(100), 40)
    pair.settle()
    engines = [f"--engine={engine.url}" for engine in pair.pair.engines.values()]
    store = [f"--store={pair.pair.store.uri}", f"--store-http={pair.pair.store.http_url}"]
    done = subprocess.run(
        [*COMMAND, "doctor", *store, *engines, "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    document = json.loads(done.stdout)
    problems = [one for one in document["findings"] if one["level"] == "problem"]
    assert done.returncode == 0 and not problems, problems
    assert document["differences"] == []
    (domain,) = {one["id"] for one in document["domains"]}
    assert domain


@pytest.fixture(scope="module")
def prometheus(_pair: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.fail("prometheus is missing: run scripts/setup, or apt-get install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    targets = [engine.url.removeprefix("http://") for engine in _pair.pair.engines.values()]
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


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
    before = value_of(prometheus, loaded), value_of(prometheus, selected)
    first = pair.tokens(300)
    turn = pair.turn(first, 70)
    pair.settle()
    pair.forget_locally()
    leg = pair.prefill([*first, *turn.decode.tokens, *tokens(rng, 24)])
    assert leg.cached_tokens == boundary(300, 70)
    while value_of(prometheus, loaded) - before[0] < leg.cached_tokens:
        assert time.monotonic() < deadline, "the load is scraped"
        pair.nudge(pair.pair.prefill)
        time.sleep(1)
    assert value_of(prometheus, loaded) - before[0] == leg.cached_tokens
    assert value_of(prometheus, selected) - before[1] == 1
    source = value_of(prometheus, "sum(vllm:prompt_tokens_cached_by_source_total)")
    assert source >= leg.cached_tokens, "vLLM's own count knows of them, too"
