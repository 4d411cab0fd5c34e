"""Engines whose bytes do not fit never exchange one, and somebody is told which field differs.

One engine publishes; others, each with one difference, ask for the very same tokens; at the end
one like the first asks for everything. Where the hashes agree it is the domain alone that keeps
the bytes apart.

And where no prefill engine can load what decode publishes, decode says so, and the prefill
engines' own checkpoints go on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from e2e_kit import B, boundary, tokens
from one_process import OneProcess

from backhaul.deploy.engines import DEFAULT_ENV, StoreDaemon
from backhaul.deploy.processes import Cluster
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.comparison import compare
from backhaul.protocols.domain import DomainRecord
from backhaul.transfer.backends.inspector import StoreInspector
from backhaul.transfer.listing import ListQuery

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
def process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    log = tmp_path_factory.mktemp("one-process") / "engines.log"
    with OneProcess(model, log, DEFAULT_ENV) as one:
        yield one


def engine(
    name: str, stranger: Stranger, store: str, *asks: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """An engine for ``OneProcess``, unlike the others in what ``stranger`` says."""
    spec = {"role": "kv_both", "options": {}, "hears": False, "stays": False, **more}
    env = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS", **stranger.env}
    return {
        "name": name,
        "store": store,
        "args": dict(stranger.args),
        "env": env,
        "asks": asks,
        **spec,
    }


def ask(
    prompt: list[int], *, reply: int = 4, forget: bool = False, **backhaul: Any
) -> dict[str, Any]:
    return {"prompt": prompt, "reply": reply, "forget": forget, "backhaul": backhaul}


@pytest.fixture(scope="module")
def answers(process: OneProcess, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    rng = random.Random(4711)
    shared = tokens(rng, END + 9)
    own = {name: tokens(rng, END + 9) for name in STRANGERS}
    store = StoreDaemon(tmp_path_factory.mktemp("strangers"), capacity="64MiB")
    with Cluster([store]):
        first = process.run(engine("first", Stranger(), store.uri, ask(shared, publish=True)))
        others = {}
        for name, stranger in STRANGERS.items():
            theirs = ask(shared, publish=False)
            mine = ask(own[name], publish=True), ask(own[name], publish=False, forget=True)
            others[name] = process.run(engine(name, stranger, store.uri, theirs, *mine))
        every = (ask(prompt, publish=False) for prompt in (shared, *own.values()))
        last = process.run(engine("last", Stranger(), store.uri, *every))
        with StoreInspector(store.uri, timeout_s=5) as inspector:
            records = {info.id: info.record for info in inspector.domains()}
    return Answers(records, first, others, last)


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


# -- no way back ----------------------------------------------------------------------------------

REPLY = 2 * B + 5
"""Long enough for a D_end that is deeper than the prompt."""
PREFILL = {"options": {"worker_kind": "prefill", "publish_prompt_end": False}}
PRODUCER = {**PREFILL, "role": "kv_producer", "stays": True}


def decode(no_path: str) -> dict[str, Any]:
    """A decode engine, which publishes what replies leave; it is asked once it has complained."""
    options = {
        "worker_kind": "decode",
        "no_path": no_path,
        "publish_on": ["stop", "length"],
        "publish_prompt_end": False,
    }
    return {"role": "kv_producer", "options": options, "hears": True}


@dataclass
class NoWayBack:
    """What engines of such deployments said, in the order in which they were started."""

    producer: dict[str, Any]
    decode_by_role: dict[str, Any]
    prefill: dict[str, Any]
    decode_by_domain: dict[str, Any]
    next_prefill: dict[str, Any]
    visible: dict[str, set[tuple[int, str]]]
    """At the end: domain -> boundary and kind of every checkpoint in it."""


@pytest.fixture(scope="module")
def no_way_back(process: OneProcess, tmp_path_factory: pytest.TempPathFactory) -> NoWayBack:
    rng = random.Random(17)
    by_role, by_domain = tokens(rng, END + 9), tokens(rng, END + 9)
    store = StoreDaemon(tmp_path_factory.mktemp("no-way-back"), capacity="64MiB")

    def start(name: str, stranger: Stranger, *asks: dict[str, Any], **more: Any) -> dict[str, Any]:
        return process.run(engine(name, stranger, store.uri, *asks, **more))

    with Cluster([store]):
        # The prefill engine publishes, and loads nothing.
        producer = start("producer", Stranger(), ask(by_role, u_end=END), **PRODUCER)
        one = start("by-role", Stranger(), ask(by_role, reply=REPLY), **decode("disable"))
        # The prefill engine uses another domain.
        first = ask(by_domain, u_end=END), ask(by_domain, forget=True)
        prefill = start("prefill", Stranger(), *first, **PREFILL, stays=True)
        other = STRANGERS["conv_layout"]
        two = start("by-domain", other, ask(by_domain, reply=REPLY), **decode("report"))
        turns = [
            [*prompt, *answer["answers"][0]["tokens"], *tokens(rng, 5)]
            for prompt, answer in ((by_role, one), (by_domain, two))
        ]
        last = start("next-prefill", Stranger(), *map(ask, turns), **PREFILL)
        with StoreInspector(store.uri, timeout_s=5) as inspector:
            page = inspector.page(ListQuery(limit=100))
    visible: dict[str, set[tuple[int, str]]] = {}
    for one_of in page.checkpoints:
        kinds = visible.setdefault(one_of.domain, set())
        kinds |= {(one_of.boundary, kind) for kind in one_of.kinds}
    return NoWayBack(producer, one, prefill, two, last, visible)


def test_decode_says_once_at_start_why_there_is_no_way_back(no_way_back: NoWayBack) -> None:
    """Before any request, in one line that names the cause: role, and domain with its field."""
    ours, theirs = (no_way_back.prefill["domain"], no_way_back.decode_by_domain["domain"])
    for answer, cause, then in (
        (
            no_way_back.decode_by_role,
            f"no other engine that loads and prefills uses domain {ours}",
            "decode ends are not kept",
        ),
        (
            no_way_back.decode_by_domain,
            f"uses domain {theirs} of store .*, but 1 in domain {ours}, where conv_layout is DS "
            "instead of SD",
            "decode ends are published all the same",
        ),
    ):
        (line,) = answer["said_at_start"]
        assert re.search(rf"no publication path: .*{cause}.*; {then}", line), line
        assert "\n" not in line and answer["said_later"] == []
    (line,) = no_way_back.producer["said_at_start"]
    assert "no publication path to here: kv_role kv_producer loads nothing" in line


def test_decode_ends_without_a_way_back_follow_the_option(no_way_back: NoWayBack) -> None:
    end = boundary(END + 9, REPLY)
    assert end > END
    for answer, published in (
        (no_way_back.decode_by_role, False),
        (no_way_back.decode_by_domain, True),
    ):
        record = answer["answers"][0]["backhaul"]
        assert record["decode_end_reason"] == "no_publication_path"
        assert record["publishing_decode_end"] == published
        found = no_way_back.visible.get(answer["domain"], set())
        assert ((end, CheckpointKind.DECODE_END) in found) == published


def test_ends_of_users_input_go_on_without_a_way_back(no_way_back: NoWayBack) -> None:
    """In the prefill engines' domain; what decode published is shown, and why it is of no use."""
    assert no_way_back.producer["domain"] == no_way_back.prefill["domain"]
    for answer in (no_way_back.producer, no_way_back.prefill):
        assert answer["answers"][0]["backhaul"]["input_end"]["outcome"] == "published"
    resumed = [no_way_back.prefill["answers"][1], *no_way_back.next_prefill["answers"]]
    for one in resumed:
        assert one["cached_tokens"] == one["backhaul"]["loaded_tokens"] == END
        assert one["backhaul"]["selected"]["kinds"] == ["input_end"]
    deepest = resumed[-1]["backhaul"]["candidates"][0]
    assert deepest["boundary"] == boundary(END + 9, REPLY)
    assert deepest["kinds"] == ["decode_end"]
    assert (deepest["reason"], deepest["field"]) == ("domain_mismatch", "conv_layout")


def general(path: str) -> str:
    """Without the groups' indices."""
    return re.sub(r"\[\d+\]", "[]", path)
