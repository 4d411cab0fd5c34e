"""Loaded bytes are the published ones, outputs do not depend on where a state came from, and both
comparisons break when the state is another one."""

from __future__ import annotations

import random

import pytest
from e2e_kit import (
    COLD_TOLERANCE,
    B,
    Session,
    agree,
    boundary,
    published_checksums,
    tokens,
    worst_difference,
)

RECURRENT_GROUPS = 3


def second_turn(
    session: Session, rng: random.Random, prompt: int = 400, reply: int = 80
) -> list[int]:
    first = session.tokens(prompt)
    turn = session.turn(first, reply)
    session.settle()
    return [*first, *turn.decode.tokens, *tokens(rng, 24)]


def test_the_grid_is_the_one_that_the_tests_assume(pair: Session) -> None:
    log = pair.pair.engines["prefill"].log_path.read_text()
    assert f"boundary grid {B} tokens" in log


def test_loaded_pages_hold_the_published_bytes(pair: Session, rng: random.Random) -> None:
    """Every object of the checkpoint, by the checksum that decode took of its own pages."""
    second = second_turn(pair, rng)
    pair.forget_locally()
    before = set(pair.rpc(pair.pair.prefill, "probe_digests"))
    leg = pair.prefill(second)
    assert leg.backhaul is not None and leg.backhaul["loaded_tokens"] == boundary(400, 80)
    pages = set(pair.rpc(pair.pair.prefill, "probe_digests"))
    (written,) = published_checksums(pair.pair.store.uri, second, boundary(400, 80))
    # Every attention block below the boundary, and one state of each recurrent group.
    assert len(written) == boundary(400, 80) // B + RECURRENT_GROUPS
    assert written <= pages
    assert written - before, "the pages held these bytes already: nothing was shown"


def test_the_matrix_of_hits_gives_one_output(pair: Session, rng: random.Random) -> None:
    """{no hit, remote hit, local hit, local + deeper remote}."""
    # No boundary between D_end and the end of the second prompt, so that the first run leaves no
    # deeper state behind for the second.
    first = pair.tokens(400)
    turn = pair.turn(first, 50)
    pair.settle()
    second = [*first, *turn.decode.tokens, *tokens(rng, 24)]
    assert boundary(400, 50) == (len(second) - 1) // B * B
    mixed = pair.continue_on_prefill(second)
    assert mixed.backhaul is not None
    assert mixed.backhaul["local_tokens"] > 0 and mixed.backhaul["loaded_tokens"] > 0
    local = pair.continue_on_prefill(second)
    assert local.backhaul is not None
    assert local.backhaul["loaded_tokens"] == 0
    assert local.cached_tokens == mixed.cached_tokens
    pair.forget_locally()
    remote = pair.continue_on_prefill(second)
    assert remote.backhaul is not None
    assert remote.backhaul["local_tokens"] == 0 and remote.cached_tokens == mixed.cached_tokens
    cold = pair.cold(second)
    assert cold.cached_tokens == 0
    # The same state and the same computation on top: the same numbers.
    assert remote.tokens == local.tokens == mixed.tokens
    assert worst_difference(remote, local) == worst_difference(mixed, local) == 0.0
    # Other chunk boundaries and kernels: within the tolerance.
    assert agree(remote, cold, COLD_TOLERANCE)


@pytest.mark.parametrize("mode", ["zeros", "other", "attention"])
def test_another_state_breaks_the_comparison(pair: Session, rng: random.Random, mode: str) -> None:
    """The check above can fail: zeros, the state of another request, or zeroed attention, put in
    behind every checksum, change the log-probabilities beyond the tolerance."""
    if mode == "other":
        other = second_turn(pair, rng)
        pair.forget_locally()
        with pair.tampered(pair.pair.prefill, "record"):
            pair.continue_on_prefill(other)
    second = second_turn(pair, rng)
    good = pair.cold(second)
    pair.forget_locally()
    with pair.tampered(pair.pair.prefill, mode):
        bad = pair.continue_on_prefill(second)
    assert bad.backhaul is not None and bad.backhaul["loaded_tokens"] > 0
    assert not agree(good, bad, COLD_TOLERANCE)
    pair.forget_locally()  # the spoilt state must not serve another test


def test_the_state_of_another_boundary_breaks_the_comparison(
    pair: Session, rng: random.Random
) -> None:
    first = pair.tokens(400)
    turn = pair.turn(first, 80)
    pair.settle()
    earlier = [*first, *turn.decode.tokens[:10]]
    second = [*first, *turn.decode.tokens, *tokens(rng, 24)]
    good = pair.cold(second)
    pair.forget_locally()
    # U_end of a prefix: a state 2 boundaries lower, of the same request.
    pair.run([*first[:390], *tokens(rng, 10)], max_tokens=1, u_end=384)
    pair.settle()
    pair.forget_locally()
    with pair.tampered(pair.pair.prefill, "record"):
        leg = pair.continue_on_prefill(earlier)
        assert leg.backhaul is not None and leg.backhaul["selected"]["boundary"] == 384
    pair.forget_locally()
    with pair.tampered(pair.pair.prefill, "other"):
        bad = pair.continue_on_prefill(second)
        assert bad.backhaul is not None and bad.backhaul["selected"]["boundary"] == 448
    assert not agree(good, bad, COLD_TOLERANCE)
    pair.forget_locally()
