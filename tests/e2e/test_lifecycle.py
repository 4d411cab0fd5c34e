"""Several requests at once, aborts in every state, and nothing left behind. That pins, leases, jobs
and request state are back at zero is checked after every test, by the fixtures."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2e_kit import COLD_TOLERANCE, Session, agree, boundary, ends_after, tokens, wait_until

from backhaul.deploy.pair import EngineClient


def test_concurrent_partial_hits(pair: Session, rng: random.Random) -> None:
    """Five second turns at once, each with a local part and a deeper remote part of its own."""
    seconds = []
    for size in (150, 220, 300, 410, 530):
        first = pair.tokens(size)
        turn = pair.turn(first, 70)
        seconds.append((size, [*first, *turn.decode.tokens, *tokens(rng, 24)]))
    pair.settle()
    with ThreadPoolExecutor(5) as pool:
        legs = list(pool.map(lambda s: pair.continue_on_prefill(s[1]), seconds))
    for (size, prompt), leg in zip(seconds, legs, strict=True):
        assert leg.backhaul is not None
        assert leg.backhaul["local_tokens"] > 0 and leg.backhaul["loaded_tokens"] > 0
        assert leg.cached_tokens == boundary(size, 70)
        assert agree(leg, pair.cold(prompt), COLD_TOLERANCE)


def test_two_conversations_share_a_history(pair: Session, rng: random.Random) -> None:
    first = pair.tokens(300)
    turn = pair.turn(first, 70)
    pair.settle()
    pair.forget_locally()
    history = [*first, *turn.decode.tokens]
    prompts = [[*history, *tokens(rng, 24)] for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        legs = list(pool.map(pair.continue_on_prefill, prompts))
    for prompt, leg in zip(prompts, legs, strict=True):
        assert leg.cached_tokens == boundary(300, 70)
        assert agree(leg, pair.cold(prompt), COLD_TOLERANCE)


def abort(client: EngineClient, prompt: list[int], after_s: float, **sampling: object) -> None:
    """Send a request and hang up."""
    body = {
        "model": client.engine.spec.model.name, "prompt": prompt, "temperature": 0,
        "max_tokens": 200, "ignore_eos": True, "stream": True, **sampling,
    }  # fmt: skip
    try:
        with httpx.stream(
            "POST", f"{client.engine.url}/v1/completions", json=body, timeout=httpx.Timeout(after_s)
        ) as response:
            until = time.monotonic() + after_s
            for _ in response.iter_lines():
                if time.monotonic() > until:
                    break
    except httpx.TimeoutException:
        pass


@pytest.mark.parametrize("after_s", [0.01, 0.05, 0.2, 0.6, 1.5])
def test_abort_while_prefilling_and_decoding(pair: Session, after_s: float) -> None:
    threads = [
        threading.Thread(target=abort, args=(client, pair.tokens(900), after_s))
        for client in (pair.pair.prefill, pair.pair.decode)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_abort_while_a_load_is_under_way(pair: Session, rng: random.Random) -> None:
    first = pair.tokens(300)
    turn = pair.turn(first, 70)
    pair.settle()
    pair.forget_locally()
    second = [*first, *turn.decode.tokens, *tokens(rng, 24)]
    with pair.gate(pair.pair.prefill, "read"):
        abort(pair.pair.prefill, second, 1.0)
        wait_until(lambda: pair.gauges(pair.pair.prefill)["open_jobs"] == 1, "the load is held")
    wait_until(lambda: pair.gauges(pair.pair.prefill)["open_jobs"] == 0, "the load is settled")
    pair.forget_locally()  # succeeds only if no block is referenced any more
    leg = pair.continue_on_prefill(second)
    assert agree(leg, pair.cold(second), COLD_TOLERANCE)


def test_abort_while_a_publication_is_under_way(pair: Session) -> None:
    prompt = pair.tokens(300)
    with pair.gate(pair.pair.decode, "reserve"):
        request = threading.Thread(target=abort, args=(pair.pair.decode, prompt, 2.5))
        request.start()
        wait_until(
            lambda: pair.gauges(pair.pair.decode)["open_jobs"] > 0, "a publication is under way"
        )
        assert request.is_alive(), "the request still runs"
        request.join(60)


def test_a_thousand_short_requests_leave_nothing(pair: Session) -> None:
    def ask(number: int) -> None:
        client = pair.pair.prefill if number % 2 else pair.pair.decode
        client.complete([97 + number % 26, 97 + number // 26 % 26, 98], max_tokens=1)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(1000)))


def test_many_turns_at_once(pair: Session, rng: random.Random) -> None:
    """Both engines busy with turns of several conversations; every reply is the cold one."""

    def converse(seed: int) -> None:
        own = random.Random(seed)
        history = tokens(own, 120 + 37 * seed)
        for _ in range(3):
            prompt = [*history, *tokens(own, 30)]
            turn = pair.run(prompt, logprobs=10, u_end=len(prompt) - 5, **ends_after(45))
            assert agree(turn.decode, pair_cold(prompt, turn), COLD_TOLERANCE)
            history = [*prompt, *turn.decode.tokens]

    def pair_cold(prompt: list[int], turn: object) -> object:
        import uuid

        return pair.pair.decode.complete(
            prompt, logprobs=10, cache_salt=uuid.uuid4().hex, **ends_after(45)
        )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(converse, range(4)))
