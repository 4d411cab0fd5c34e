"""The store dies, hangs, fills up or restarts at every moment; engines keep answering right."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable

import pytest
from e2e_kit import COLD_TOLERANCE, Session, agree, boundary, tokens, wait_until

from backhaul.deploy.pair import Leg


def prepared(session: Session, rng: random.Random) -> tuple[list[int], Leg]:
    """A second turn's prompt whose D_end is in the store only, and its cold answer."""
    first = session.tokens(300)
    turn = session.turn(first, 70)
    session.settle()
    second = [*first, *turn.decode.tokens, *tokens(rng, 24)]
    cold = session.cold(second)
    session.forget_locally()
    return second, cold


def answer_while(
    session: Session, prompt: list[int], operation: str, during: Callable[[], None]
) -> Leg:
    """Run a prompt on prefill; once its worker stands at ``operation``, do ``during``."""
    answers: list[Leg] = []
    with session.gate(session.pair.prefill, operation):
        thread = threading.Thread(
            target=lambda: answers.append(session.continue_on_prefill(prompt))
        )
        thread.start()
        wait_until(
            lambda: session.gauges(session.pair.prefill)["open_jobs"] > 0, "a load is under way"
        )
        during()
    thread.join(60)
    assert answers, "the request did not come back"
    return answers[0]


def test_store_killed_before_the_lookup(pair: Session, rng: random.Random) -> None:
    second, cold = prepared(pair, rng)
    pair.pair.store.kill()
    leg = pair.continue_on_prefill(second)
    assert leg.cached_tokens == 0
    assert leg.backhaul is not None and leg.backhaul["reason"] == "unreachable"
    assert agree(leg, cold, COLD_TOLERANCE)


def test_store_killed_between_lookup_and_load(pair: Session, rng: random.Random) -> None:
    second, cold = prepared(pair, rng)
    leg = answer_while(pair, second, "read", pair.pair.store.kill)
    assert leg.backhaul is not None and leg.backhaul["loaded_tokens"] == 0
    assert leg.backhaul["reason"] in ("unreachable", "lease_expired", "timeout")
    assert agree(leg, cold, COLD_TOLERANCE)


def test_store_stopped_during_the_load(pair: Session, rng: random.Random) -> None:
    """A hung store: the load runs into its time-out, and the request is recomputed."""
    second, cold = prepared(pair, rng)
    pid = pair.pair.store.pid
    assert pid is not None
    try:
        leg = answer_while(pair, second, "read", lambda: os.kill(pid, signal.SIGSTOP))
        assert leg.backhaul is not None and leg.backhaul["loaded_tokens"] == 0
        assert agree(leg, cold, COLD_TOLERANCE)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_store_restarted_between_lookup_and_load(pair: Session, rng: random.Random) -> None:
    second, cold = prepared(pair, rng)

    def restart() -> None:
        pair.pair.store.kill()
        pair.ensure_store()

    leg = answer_while(pair, second, "read", restart)
    assert leg.backhaul is not None and leg.backhaul["loaded_tokens"] == 0
    assert agree(leg, cold, COLD_TOLERANCE)


@pytest.mark.parametrize("operation", ["reserve", "commit"])
def test_store_killed_during_a_publication(
    pair: Session, rng: random.Random, operation: str
) -> None:
    first = pair.tokens(300)

    def failures() -> float:
        name = "backhaul:publication_failures_total"
        return sum(n for k, n in pair.pair.decode.metrics().items() if k.startswith(name))

    before = failures()
    with pair.gate(pair.pair.decode, operation):
        turn = pair.turn(first, 70)
        pair.pair.store.kill()
    wait_until(lambda: failures() > before, "the publication is given up")
    second = [*first, *turn.decode.tokens, *tokens(rng, 24)]
    leg = pair.continue_on_prefill(second)
    assert agree(leg, pair.cold(second), COLD_TOLERANCE)


def test_after_a_restart_publications_and_loads_work_again(
    pair: Session, rng: random.Random
) -> None:
    pair.pair.store.kill()
    pair.turn(pair.tokens(100), 40)
    pair.ensure_store()

    # The clients' channels come back by themselves, after gRPC's own back-off.
    def loads_again() -> bool:
        first = pair.tokens(200)
        turn = pair.turn(first, 70)
        pair.settle()
        leg = pair.prefill([*first, *turn.decode.tokens, *tokens(rng, 24)])
        assert leg.backhaul is not None
        return bool(leg.backhaul["loaded_tokens"]) and leg.cached_tokens == boundary(200, 70)

    wait_until(loads_again, "a turn after the restart loads its D_end", seconds=60)
