"""Real engines, started once per session and shared by every test.

``pair``: MultiConnector[Nixl, Backhaul] on both sides, found through the plugin entry point.
``alone``: Backhaul alone on both sides by module path, kv_producer and kv_both, few KV blocks.

vLLM's CPU platform switches asynchronous scheduling off; tests/sim covers it with vLLM's own
AsyncScheduler.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "sim"))

from e2e_kit import AlonePair, Session
from sim_record import check_tags

from backhaul.deploy.pair import EngineClient, Leg, Pair
from backhaul.deploy.tiny_model import build_tiny_model

HERE = Path(__file__).parent
PROBE_ENV = {
    "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "VLLM_SERVER_DEV_MODE": "1",
}
PROBE_ARGS = ("--worker-extension-cls=backhaul_probe.Probe",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.engine)
    # Its engines end with it. The others' stay to the end, and idle ones keep their cores busy.
    items.sort(key=lambda item: item.path.name != "test_families.py")


@pytest.fixture(scope="session", autouse=True)
def _every_answer_is_checked() -> Iterator[None]:
    """Whatever is asked of an engine: the tags of its record hold, and what the record says was
    reused is vLLM's own count of cached tokens."""
    complete = EngineClient.complete

    def checked(client: EngineClient, *args: Any, **options: Any) -> Leg:
        leg = complete(client, *args, **options)
        if leg.backhaul is not None:
            record = check_tags(leg.backhaul)
            reused = record.prompt_tokens - record.recomputed_tokens
            # Of a prompt that was handed over, vLLM tells what the prefill engine had cached.
            if "remote_prefill_cached_tokens" not in (options.get("transfer") or {}):
                assert reused == leg.cached_tokens, (client.engine.name, record)
        return leg

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineClient, "complete", checked)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny-hybrid")


@pytest.fixture(scope="session")
def _pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    pair = Pair(
        model,
        tmp_path_factory.mktemp("pair"),
        options={
            "stream_min_bytes": 1,
            "load_timeout_s": 5.0,
            "publish_timeout_s": 5.0,
            "lookup_timeout_s": 2.0,  # a busy machine, or one that just lost its store
            # What could not be released (the store hung) runs out before `assert_idle` gives up.
            "lease_s": 12.0,
        },
        engine_args=PROBE_ARGS,
        engine_env=PROBE_ENV,
        capacity="256MiB",
    )
    with pair:
        session = Session(pair)
        session.run(session.tokens(300), max_tokens=4)  # connections and first kernels
        yield session


@pytest.fixture
def pair(_pair: Session) -> Iterator[Session]:
    """The shared pair; whatever a test did, no state may be left behind."""
    _pair.ensure_store()
    yield _pair
    _pair.ensure_store()
    _pair.assert_idle()


@pytest.fixture(scope="session")
def _alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AlonePair]:
    with AlonePair(model, tmp_path_factory.mktemp("alone"), PROBE_ARGS, PROBE_ENV) as alone:
        yield alone


@pytest.fixture
def alone(_alone: AlonePair) -> Iterator[AlonePair]:
    """Two engines with Backhaul only."""
    yield _alone
    _alone.assert_idle()


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any], str], None]:
    """Polls a condition for up to 20 s."""

    def wait(condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < deadline, f"did not happen within 20 s: {what}"
            time.sleep(0.1)

    return wait


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Deterministic per test."""
    return random.Random(request.node.nodeid)
