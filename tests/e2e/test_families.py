"""Other model families, each on one real engine: it publishes, forgets, and resumes from the store.
Mamba-2 also runs on a pair, from prefill to decode by NIXL and back.

Which families vLLM's CPU build can serve, and why the others cannot, is in docs/groups.md. The
gated delta net is also what every other end-to-end test runs, in another model.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from conftest import PROBE_ARGS, PROBE_ENV
from e2e_kit import (
    COLD_TOLERANCE,
    B,
    Solo,
    agree,
    boundary,
    call_probe,
    published_checksums,
    tampered,
    tokens,
    worst_difference,
)
from tiny_models import FAMILIES

from backhaul.deploy.engines import StoreDaemon
from backhaul.deploy.pair import scrape
from backhaul.deploy.processes import Cluster

SIDE_BY_SIDE = (
    ("sliding-window", "full-attention"),
    ("short-convolution", "gated-delta-net"),
    ("mamba-2",),
)
"""Engines that run at once, one a core."""
PAIRED = "mamba-2"
"""Has both cores to itself: a prefill and a decode worker, Backhaul beside NIXL."""

TOLERANCES = dict.fromkeys(FAMILIES, 1e-3) | dict.fromkeys(
    ("mamba-2", "gated-delta-net"), COLD_TOLERANCE
)
"""Largest difference in log-probability (nats) between a loaded state and a cold recompute. The
gated delta net runs in bfloat16, the others in float32. Mamba-2's state is made by one kernel in
decode steps and by another in prefill chunks, and the two differ by more than attention does."""


DECODE = f"{PAIRED}, decode"


class Fleet:
    """Starts the engines of a family and its neighbour, and ends those before them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._solos: dict[str, Solo] = {}
        self._cluster: Cluster | None = None

    def engine(self, name: str) -> Solo:
        """The family's running engine."""
        if name not in self._solos:
            self.stop()
            names = next(pair for pair in SIDE_BY_SIDE if name in pair)
            self._solos = {one: self._solo(one, str(core)) for core, one in enumerate(names)}
            if name == PAIRED:
                self._solos[DECODE] = self._solo(name, "1", self._solos[name].store)
            self._cluster = Cluster([s for solo in self._solos.values() for s in solo.services])
            self._cluster.__enter__()
            for solo in self._solos.values():
                solo.client.complete([97], max_tokens=1)  # the first kernels
        return self._solos[name]

    def _solo(self, family: str, core: str, store: StoreDaemon | None = None) -> Solo:
        path = self._folder / family
        own, probes = FAMILIES[family], PROBE_ENV["PYTHONPATH"]
        paths = os.pathsep.join(filter(None, (own.env.get("PYTHONPATH"), probes)))
        return Solo(
            path if path.exists() else tiny_models.build(family, path),
            self._folder,
            core=core,
            args=(*PROBE_ARGS, *own.engine_args),
            env={**PROBE_ENV, **own.env, "PYTHONPATH": paths},
            store=store,
            nixl=family == PAIRED,
        )

    def stop(self) -> None:
        """End what runs."""
        if self._cluster is not None:
            self._cluster.__exit__(None, None, None)
        self._solos, self._cluster = {}, None


@pytest.fixture(scope="module")
def _fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("families"))
    try:
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture(scope="module", params=[name for pair in SIDE_BY_SIDE for name in pair])
def family(request: pytest.FixtureRequest) -> str:
    """Tests of one family run one after the other."""
    return str(request.param)


@pytest.fixture
def tolerance(family: str) -> float:
    """Of a comparison with a cold recompute."""
    return TOLERANCES[family]


@pytest.fixture
def solo(family: str, _fleet: Fleet) -> Iterator[Solo]:
    """The family's engine, with an empty cache; whatever a test did, no state is left behind."""
    solo = _fleet.engine(family)
    solo.forget()
    yield solo
    solo.settle()


@pytest.fixture
def decode(family: str, solo: Solo, _fleet: Fleet) -> Iterator[Solo]:
    """The other worker of the pair, which ``solo`` prefills for."""
    assert family == PAIRED
    decode = _fleet.engine(DECODE)
    yield decode
    decode.settle()


def test_a_model_is_the_same_every_time_it_is_built(tmp_path: Path) -> None:
    for name in FAMILIES:
        one, two = (tiny_models.build(name, tmp_path / copy / name) for copy in "ab")
        for file in one.iterdir():
            assert file.read_bytes() == (two / file.name).read_bytes(), file


def test_the_layout_is_the_familys(solo: Solo, family: str) -> None:
    """The grid that the tests assume, and the groups that the family is here for."""
    from backhaul.transfer.backends.inspector import StoreInspector

    with StoreInspector(solo.store.uri, timeout_s=5) as inspector:
        (domain,) = inspector.domains()
    layout = domain.record.layout
    assert layout.boundary_tokens == B
    kinds = {group.kind.value for group in layout.groups}
    expected = {"full_attention"}
    expected |= {"recurrent"} if FAMILIES[family].recurrent else set()
    expected |= {"sliding_window"} if FAMILIES[family].windows else set()
    assert kinds == expected


@pytest.mark.parametrize(
    ("prompt_tokens", "reply"), [(5 * B - 1, 40), (5 * B, 40), (5 * B + 1, 65), (7, 60)]
)
def test_turn_2_resumes_at_d_end(
    solo: Solo, rng: random.Random, tolerance: float, prompt_tokens: int, reply: int
) -> None:
    second = solo.turn(tokens(rng, prompt_tokens), reply, rng)
    solo.forget()
    leg = solo.run(second)
    d_end = boundary(prompt_tokens, reply)
    assert leg.backhaul is not None
    assert leg.cached_tokens == leg.backhaul["loaded_tokens"] == d_end
    assert leg.backhaul["selected"]["kind"] == "decode_end"
    assert agree(leg, solo.cold(second), tolerance)


def test_the_matrix_of_hits_gives_one_output(
    solo: Solo, rng: random.Random, tolerance: float
) -> None:
    """{local hit, remote hit, local + deeper remote, no hit}."""
    prompt, reply = tokens(rng, 200), 26
    second = solo.turn(prompt, reply, rng)
    d_end = boundary(200, reply)
    # No deeper boundary, whose state the first run would leave behind for the others.
    assert d_end == (len(second) - 1) // B * B
    local = solo.run(second)
    assert local.backhaul is not None and local.backhaul["loaded_tokens"] == 0
    solo.forget()
    remote = solo.run(second)
    assert remote.backhaul is not None and remote.backhaul["loaded_tokens"] == d_end
    solo.forget()
    solo.run(prompt[:110], 1, transfer={"backhaul": {"load": False}})
    mixed = solo.run(second)
    assert mixed.backhaul is not None and mixed.backhaul["local_tokens"] == 96
    assert mixed.backhaul["loaded_tokens"] == d_end - 96
    assert local.cached_tokens == remote.cached_tokens == mixed.cached_tokens == d_end
    # The same state and the same computation on top: the same numbers.
    assert local.tokens == remote.tokens == mixed.tokens
    assert worst_difference(remote, local) == worst_difference(mixed, local) == 0.0
    assert agree(remote, solo.cold(second), tolerance)


def test_loaded_pages_hold_the_published_bytes(solo: Solo, rng: random.Random) -> None:
    second = solo.turn(tokens(rng, 150), 40, rng)
    solo.forget()
    before = set(call_probe(solo.client, "probe_digests"))
    solo.run(second)
    pages = set(call_probe(solo.client, "probe_digests"))
    (written,) = published_checksums(solo.store.uri, second, boundary(150, 40))
    assert written and written <= pages and not written & before


def test_a_rewritten_history_falls_back(solo: Solo, rng: random.Random, tolerance: float) -> None:
    """To U_end where the request named it, else to nothing; and the answer is right."""
    for u_end in (140, None):
        prompt = tokens(rng, 170)
        solo.turn(prompt, 40, rng, transfer={"backhaul": {"u_end": u_end}})
        rewritten = [*prompt[:145], *tokens(rng, 60)]
        solo.forget()
        leg = solo.run(rewritten)
        assert leg.backhaul is not None
        assert leg.cached_tokens == leg.backhaul["loaded_tokens"] == (u_end or 0) // B * B
        assert agree(leg, solo.cold(rewritten), tolerance)


def test_wrong_bytes_break_the_comparison(
    solo: Solo, rng: random.Random, family: str, tolerance: float
) -> None:
    """The checks above can fail: zeros put in behind every checksum, in the states and in the
    attention blocks, show in the output, right after D_end."""
    for mode in ("zeros", "attention") if FAMILIES[family].recurrent else ("attention",):
        second = solo.turn(tokens(rng, 150), 45, rng)[: boundary(150, 45) + 1]
        good = solo.cold(second)
        solo.forget()
        with tampered(solo.client, mode):
            bad = solo.run(second)
        assert bad.backhaul is not None and bad.backhaul["loaded_tokens"] == boundary(150, 45)
        assert not agree(good, bad, tolerance), mode
        solo.forget()  # the spoilt blocks must not serve another test


@pytest.mark.parametrize("family", [PAIRED], indirect=True)
@pytest.mark.parametrize("prompt_tokens", [150, 5 * B, 5 * B + 1])
def test_a_conversation_goes_from_prefill_to_decode_and_back(
    solo: Solo, decode: Solo, rng: random.Random, tolerance: float, prompt_tokens: int
) -> None:
    """The prompt's cache by NIXL, the reply's end through the store, twice."""
    prompt = tokens(rng, prompt_tokens)
    resumed = 0
    for reply in (60, 30):
        handed = {"do_remote_decode": True, "do_remote_prefill": False}
        first = solo.run(prompt, 1, transfer=handed)
        assert first.cached_tokens == resumed
        second = decode.run(prompt, reply, transfer=first.kv_transfer_params)
        record = second.backhaul
        assert record is not None and record["other_tokens"] > 0, "NIXL hands the prompt over"
        assert record["local_tokens"] + record["other_tokens"] == len(prompt) - 1
        decode.settle()
        resumed = boundary(len(prompt), reply)
        prompt = [*prompt, *second.tokens, *tokens(rng, 24)]
    leg = solo.run(prompt)
    assert leg.backhaul is not None and leg.backhaul["selected"]["kind"] == "decode_end"
    assert leg.cached_tokens == resumed
    assert agree(leg, solo.cold(prompt), tolerance)


# -- n-gram drafting, on the family without recurrent state -----------------------------------

drafting = pytest.mark.parametrize("family", ["full-attention"], indirect=True)
BINARY = {"allowed_token_ids": [97, 98]}
"""Two letters make n-grams return, so that drafts are proposed, accepted and rejected."""


def drafts(solo: Solo) -> tuple[float, float]:
    """Draft tokens accepted and rejected so far."""
    found = scrape(solo.engine.url, "vllm:spec_decode_num_")
    accepted = found["vllm:spec_decode_num_accepted_tokens_total"]
    return accepted, found["vllm:spec_decode_num_draft_tokens_total"] - accepted


@drafting
def test_d_end_after_drafts_is_the_deepest_exact_boundary(
    solo: Solo, rng: random.Random, tolerance: float
) -> None:
    """n = prompt + reply - 1 one before, on and after a boundary, where a step of several tokens
    crosses it, and in between."""
    published = "backhaul:publications_total{kind=decode_end}"
    before, count = drafts(solo), solo.client.metrics().get(published, 0.0)
    lengths = [(70, 4 * B - 70 + 1 + extra) for extra in (-1, 0, 1, 13)]
    for prompt_tokens, reply in lengths:
        second = solo.turn(tokens(rng, prompt_tokens), reply, rng, **BINARY)
        solo.forget()
        leg = solo.run(second, 40, **BINARY)
        d_end = boundary(prompt_tokens, reply)
        assert leg.backhaul is not None
        assert leg.cached_tokens == leg.backhaul["loaded_tokens"] == d_end
        assert leg.backhaul["selected"]["boundary"] == d_end
        assert agree(leg, solo.cold(second, 40, **BINARY), tolerance)
    solo.settle()
    accepted, rejected = (now - then for now, then in zip(drafts(solo), before, strict=True))
    assert accepted > 0 and rejected > 0, "no draft was accepted, or none rejected"
    # Each turn and each continuation ended on a D_end; the cold runs published nothing.
    assert solo.client.metrics()[published] - count == 2 * len(lengths)
