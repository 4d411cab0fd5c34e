"""Where turn 2 resumes on prefill: D_end, else U_end, else nothing; and the answer is right."""

from __future__ import annotations

import random

import pytest
from e2e_kit import COLD_TOLERANCE, B, Session, agree, boundary, tokens


def followed_up(session: Session, prompt: list[int], reply: int, rng: random.Random) -> list[int]:
    """The next turn's prompt after a reply of ``reply`` tokens, replayed token for token."""
    turn = session.turn(prompt, reply)
    session.settle()
    return [*prompt, *turn.decode.tokens, *tokens(rng, 20)]


@pytest.mark.parametrize(
    ("prompt_tokens", "reply"),
    [
        # Prompts around multiples of B; replies that cross at least one boundary.
        *((n, 40) for n in (10 * B - 1, 10 * B, 10 * B + 1)),
        (7, 60),  # shorter than a block
        # n = prompt + reply - 1 exactly on a boundary, one token before it and after it.
        *((300, boundary(300, 100) + B - 300 + 1 + extra) for extra in (-1, 0, 1)),
    ],
)
def test_turn_2_resumes_at_d_end(
    pair: Session, rng: random.Random, prompt_tokens: int, reply: int
) -> None:
    prompt = pair.tokens(prompt_tokens)
    second = followed_up(pair, prompt, reply, rng)
    leg = pair.prefill(second)
    d_end = boundary(prompt_tokens, reply)
    assert leg.cached_tokens == d_end
    local = (prompt_tokens - 2) // B * B  # what prefill kept of the truncated prompt
    record = leg.backhaul
    assert record is not None
    assert record["local_tokens"] == local
    assert record["loaded_tokens"] == d_end - local
    if d_end > local:
        assert record["selected"]["kind"] == "decode_end"
        assert record["selected"]["boundary"] == d_end
    assert agree(pair.continue_on_prefill(second), pair.cold(second), COLD_TOLERANCE)


@pytest.mark.parametrize("prompt_tokens", [10 * B - 1, 10 * B, 10 * B + 1])
def test_a_one_token_reply_resumes_where_its_state_exists(
    pair: Session, rng: random.Random, prompt_tokens: int
) -> None:
    prompt = pair.tokens(prompt_tokens)
    second = followed_up(pair, prompt, 1, rng)
    leg = pair.prefill(second)
    # n = prompt_tokens: on a boundary exactly, decode computed the last prompt token and has the
    # state there; else prefill's own P_end is the deepest state at or below n.
    assert leg.cached_tokens == boundary(prompt_tokens, 1)


def test_another_prefill_worker_loads_the_whole_d_end(pair: Session, rng: random.Random) -> None:
    prompt = pair.tokens(200)
    second = followed_up(pair, prompt, 70, rng)
    pair.forget_locally()
    leg = pair.prefill(second)
    assert leg.backhaul is not None
    assert leg.backhaul["local_tokens"] == 0
    assert leg.backhaul["loaded_tokens"] == leg.cached_tokens == boundary(200, 70)


def test_a_rewritten_reply_falls_back_to_u_end(pair: Session, rng: random.Random) -> None:
    prompt = pair.tokens(330)
    u_end = 300
    pair.turn(prompt, 40, u_end=u_end)
    pair.settle()
    pair.forget_locally()
    rewritten = [*prompt[:u_end], *tokens(rng, 90)]
    leg = pair.prefill(rewritten)
    assert leg.backhaul is not None
    assert leg.cached_tokens == leg.backhaul["loaded_tokens"] == u_end // B * B
    assert leg.backhaul["selected"]["kind"] == "input_end"
    assert agree(pair.continue_on_prefill(rewritten), pair.cold(rewritten), COLD_TOLERANCE)


def test_without_u_end_and_d_end_nothing_is_found_and_the_answer_is_right(
    pair: Session, rng: random.Random
) -> None:
    prompt = pair.tokens(330)
    pair.turn(prompt, 40)
    pair.settle()
    pair.forget_locally()
    rewritten = [*prompt[:300], *tokens(rng, 90)]
    leg = pair.prefill(rewritten)
    assert leg.cached_tokens == 0
    assert leg.backhaul is not None and leg.backhaul["selected"] is None
    assert agree(pair.continue_on_prefill(rewritten), pair.cold(rewritten), COLD_TOLERANCE)


@pytest.mark.parametrize("u_end", [0, -1, 10_000, True, 5.5, "7", [7], {"x": 1}])
def test_a_malformed_u_end_is_counted_and_ignored(pair: Session, u_end: object) -> None:
    name = "backhaul:hints_rejected_total{field=u_end}"
    before = pair.pair.prefill.metrics().get(name, 0.0)
    turn = pair.run(pair.tokens(100), max_tokens=2, u_end=u_end)
    assert len(turn.decode.tokens) == 2
    assert pair.pair.prefill.metrics()[name] == before + 1


@pytest.mark.parametrize(
    ("sampling", "finish", "published"),
    [
        ({"max_tokens": 60}, "length", False),
        # Nothing but "e" is generated, and the stop string counts from the 50th token on.
        (
            {
                "max_tokens": 60,
                "min_tokens": 50,
                "stop": ["e"],
                "logit_bias": {str(ord("e")): 100.0},
            },
            "stop",
            False,
        ),
    ],
)
def test_other_ends_do_not_publish_by_default(
    pair: Session, sampling: dict[str, object], finish: str, published: bool
) -> None:
    """A length-capped reply is an option; a stop string ends as an abort (see the README)."""
    name = "backhaul:publications_total{kind=decode_end}"
    before = pair.pair.decode.metrics().get(name, 0.0)
    turn = pair.run(pair.tokens(100), **sampling)
    assert turn.decode.finish_reason == finish
    pair.settle()
    assert (pair.pair.decode.metrics().get(name, 0.0) > before) is published
