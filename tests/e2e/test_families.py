"""Other model families, each on one real engine with Backhaul alone: it publishes, forgets, and
resumes from the store.

Which families vLLM's CPU build can serve, and why the others cannot, is in docs/groups.md. The
gated delta net is what every other end-to-end test runs.
"""

from __future__ import annotations

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

from backhaul.deploy.pair import scrape
from backhaul.deploy.processes import Cluster

SIDE_BY_SIDE = (("sliding-window", "full-attention"), ("mamba-2",))
"""Engines that run at once, one a core."""

TOLERANCES = {"sliding-window": 1e-3, "full-attention": 1e-3, "mamba-2": COLD_TOLERANCE}
"""Largest difference in log-probability (nats) between a loaded state and a cold recompute. All
families here run in float32. Mamba-2's state is made by one kernel in decode steps and by another
in prefill chunks, and the two differ by more than attention does."""


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
            self._solos = {
                one: Solo(
                    tiny_models.build(one, self._folder / one),
                    self._folder,
                    core=str(core),
                    args=(*PROBE_ARGS, *FAMILIES[one].engine_args),
                    env=PROBE_ENV,
                )
                for core, one in enumerate(names)
            }
            self._cluster = Cluster([s for solo in self._solos.values() for s in solo.services])
            self._cluster.__enter__()
            for solo in self._solos.values():
                solo.client.complete([97], max_tokens=1)  # the first kernels
        return self._solos[name]

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
