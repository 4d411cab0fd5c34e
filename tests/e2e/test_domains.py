"""Engines whose bytes do not fit never exchange one, and somebody is told which field differs.

One engine publishes; others, each with one difference, ask for the very same tokens; at the end
one like the first asks for everything. Where the hashes agree it is the domain alone that keeps
the bytes apart.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from e2e_kit import B, tokens

from backhaul.deploy.engines import DEFAULT_ENV, StoreDaemon
from backhaul.deploy.processes import Cluster
from backhaul.protocols.comparison import compare
from backhaul.protocols.domain import DomainRecord
from backhaul.transfer.backends.inspector import StoreInspector

END = 6 * B


@dataclass(frozen=True)
class Stranger:
    """An engine with one difference. ``hashes_agree``: so that only its domain is another."""

    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    hashes_agree: bool = True


STRANGERS = {
    "conv_layout": Stranger(env={"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}),
    "state_dtypes": Stranger({"mamba_ssm_cache_dtype": "bfloat16"}),
    "revision": Stranger({"revision": "another"}),
    "layout.groups[].block_tokens": Stranger({"block_size": 64, "prefix_match_unit": B}),
    "layout.hash_tokens": Stranger({"prefix_match_unit": B // 2}, hashes_agree=False),
    "hash_function": Stranger({"prefix_caching_hash_algo": "sha256_cbor"}, hashes_agree=False),
}
"""Field of the cache domain -> an engine that differs from the others in it."""


@dataclass
class Answers:
    """What every engine said: of the others' tokens, then of its own before and after its cache
    was emptied."""

    records: dict[str, DomainRecord]
    first: dict[str, Any]
    strangers: dict[str, dict[str, Any]]
    last: dict[str, Any]


@pytest.fixture(scope="module")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    log_dir = tmp_path_factory.mktemp("strangers")
    rng = random.Random(4711)
    shared = tokens(rng, END + 9)
    own = {name: tokens(rng, END + 9) for name in STRANGERS}

    def ask(prompt: list[int], *, publish: bool, forget: bool = False) -> dict[str, Any]:
        return {"prompt": prompt, "publish": publish, "forget": forget}

    def engine(name: str, stranger: Stranger, *asks: dict[str, Any]) -> dict[str, Any]:
        env = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS", **stranger.env}
        return {"name": name, "args": dict(stranger.args), "env": env, "asks": asks}

    plan = [engine("first", Stranger(), ask(shared, publish=True))]
    for name, stranger in STRANGERS.items():
        others = ask(shared, publish=False)
        mine = ask(own[name], publish=True), ask(own[name], publish=False, forget=True)
        plan.append(engine(name, stranger, others, *mine))
    every = (ask(prompt, publish=False) for prompt in (shared, *own.values()))
    plan.append(engine("last", Stranger(), *every))
    store = StoreDaemon(log_dir, capacity="64MiB")
    with Cluster([store]), (log_dir / "engines.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "one_process.py"), str(model), store.uri],
            input="".join(json.dumps(one) + "\n" for one in plan),
            stdout=subprocess.PIPE, stderr=log, text=True, timeout=300, check=False,
            env={**os.environ, **DEFAULT_ENV},
        )  # fmt: skip
        assert done.returncode == 0, (log_dir / "engines.log").read_text()[-3000:]
        first, *others, last = [json.loads(line) for line in done.stdout.splitlines()]
        with StoreInspector(store.uri, timeout_s=5) as inspector:
            records = {info.id: info.record for info in inspector.domains()}
    yield Answers(records, first, dict(zip(STRANGERS, others, strict=True)), last)


def test_one_like_the_first_loads_what_it_published(answers: Answers) -> None:
    (published,), (loaded, *_) = answers.first["answers"], answers.last["answers"]
    assert published["cached_tokens"] == 0
    assert loaded["cached_tokens"] == loaded["backhaul"]["loaded_tokens"] == END
    assert loaded["tokens"] == published["tokens"]


@pytest.mark.parametrize("name", STRANGERS)
def test_engines_of_two_domains_share_nothing(answers: Answers, name: str) -> None:
    """Neither way, and the field that differs is named both ways."""
    stranger = answers.strangers[name]
    ours, theirs = answers.first["domain"], stranger["domain"]
    assert ours != theirs
    back = answers.last["answers"][1 + list(STRANGERS).index(name)]
    for answer, home in ((stranger["answers"][0], ours), (back, theirs)):
        record = answer["backhaul"]
        assert answer["cached_tokens"] == record["loaded_tokens"] == 0
        candidates = record["candidates"]
        if not STRANGERS[name].hashes_agree:  # to the other, nothing there is of its tokens
            assert candidates == [] and record["matched"]["exact_hash"] == 0
            continue
        assert not any(one["consumable"] for one in candidates)
        deepest = candidates[0]
        assert deepest["retained"] and deepest["hash_matched"]
        assert deepest["reason"] == record["reason"] == "domain_mismatch"
        assert (general(deepest["field"]), deepest["domain"]) == (name, home)
    causes = compare(answers.records[ours], answers.records[theirs]).causes
    assert {general(cause.path) for cause in causes} == {name}


@pytest.mark.parametrize("name", STRANGERS)
def test_the_stranger_uses_its_own(answers: Answers, name: str) -> None:
    _, published, loaded = answers.strangers[name]["answers"]
    assert published["cached_tokens"] == 0
    assert loaded["cached_tokens"] == loaded["backhaul"]["loaded_tokens"] > 0
    assert loaded["backhaul"]["selected"]["kind"] == "prompt_end"
    assert loaded["tokens"] == published["tokens"]


def general(path: str) -> str:
    """Without the groups' indices."""
    return re.sub(r"\[\d+\]", "[]", path)
