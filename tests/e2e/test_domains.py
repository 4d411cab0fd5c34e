"""Engines whose bytes do not fit never exchange one, and somebody is told which field differs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_kit import AlonePair, B, assert_idle, tokens

from backhaul.deploy.engines import Engine, EngineSpec, backhaul_config
from backhaul.deploy.pair import EngineClient
from backhaul.deploy.processes import Cluster
from backhaul.protocols.comparison import compare
from backhaul.transfer.backends.inspector import StoreInspector

SMALL = ("--num-gpu-blocks-override=160", "--max-model-len=2048")
STRANGERS = {
    "conv_layout": EngineSpec(
        "conv", Path(), cores="0", args=SMALL, env={"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}
    ),
    "hash_function": EngineSpec(
        "hash", Path(), cores="1", args=(*SMALL, "--prefix-caching-hash-algo=sha256_cbor")
    ),
    "layout.groups[0].block_tokens": EngineSpec(
        "block", Path(), cores="0", args=(*SMALL, "--block-size=64", "--mamba-block-size=64")
    ),
}
"""Field of the cache domain -> an engine that differs from the others in it."""


@pytest.fixture(scope="module")
def strangers(
    _alone: AlonePair, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, EngineClient]]:
    """Engines at the store of ``alone``, each with one difference."""
    log_dir = tmp_path_factory.mktemp("strangers")
    engines = {
        field: Engine(
            EngineSpec(
                name=spec.name,
                model=model,
                cores=spec.cores,
                kv_transfer_config=backhaul_config(_alone.store.uri, "kv_both"),
                args=spec.args,
                env=spec.env,
            ),
            log_dir,
        )
        for field, spec in STRANGERS.items()
    }
    with Cluster(list(engines.values())):
        yield {field: EngineClient(engine) for field, engine in engines.items()}


@pytest.mark.parametrize("field", STRANGERS)
def test_engines_of_two_domains_share_nothing(
    alone: AlonePair, strangers: dict[str, EngineClient], rng: random.Random, field: str
) -> None:
    stranger = strangers[field]
    prompt = tokens(rng, 6 * B + 5)
    alone.producer.complete(prompt, max_tokens=1)
    alone.assert_idle()
    own = alone.both.complete(prompt, max_tokens=1)
    assert own.cached_tokens == 6 * B, "the checkpoint is there for those whose domain it is"

    leg = stranger.complete(prompt, max_tokens=1)
    assert leg.cached_tokens == 0 and leg.backhaul is not None
    candidates = leg.backhaul["candidates"]
    if field != "conv_layout":  # other hashes: to the stranger, nothing there is of its tokens
        assert candidates == [] and leg.backhaul["matched"]["exact_hash"] == 0
        assert leg.backhaul["reason"] is None
    else:
        assert not any(one["consumable"] for one in candidates)
        assert candidates[0]["retained"] and candidates[0]["hash_matched"]
        assert candidates[0]["reason"] == "domain_mismatch" and candidates[0]["field"] == field
    assert_idle(stranger, lambda: stranger.complete([97], max_tokens=1))

    with StoreInspector(alone.store.uri, timeout_s=5) as inspector:
        records = [domain.record for domain in inspector.domains()]
    pairs = [compare(a, b) for a in records for b in records if a != b]
    assert {_general(field)} in [{_general(cause.path) for cause in pair.causes} for pair in pairs]


def _general(path: str) -> str:
    """Without the groups' indices."""
    return re.sub(r"\[\d+\]", "", path)


def test_the_stranger_still_answers_right_and_uses_its_own(
    strangers: dict[str, EngineClient], rng: random.Random
) -> None:
    for client in strangers.values():
        prompt = tokens(rng, 300)
        first = client.complete(prompt, max_tokens=4, logprobs=5)
        assert_idle(client, lambda c=client: c.complete([97], max_tokens=1))
        client.complete([98], max_tokens=1)
        again = client.complete(prompt, max_tokens=4, logprobs=5)
        assert again.tokens == first.tokens and again.cached_tokens > 0
