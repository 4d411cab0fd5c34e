"""Backhaul without another connector: the store also carries prefill -> decode. One engine of
each role, few KV blocks."""

from __future__ import annotations

import random
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e_kit import COLD_TOLERANCE, AlonePair, B, agree, boundary, tokens, worst_difference


def cold(alone: AlonePair, prompt: list[int], max_tokens: int = 8) -> object:
    return alone.both.complete(
        prompt, max_tokens=max_tokens, logprobs=10, cache_salt=uuid.uuid4().hex
    )


@pytest.mark.parametrize("n", [10 * B - 1, 10 * B, 10 * B + 1, 5])
def test_prefill_hands_over_through_the_store(alone: AlonePair, rng: random.Random, n: int) -> None:
    prompt = tokens(rng, n)
    alone.producer.complete(prompt, max_tokens=1)
    alone.assert_idle()  # a lookup waits for an announced publication, but only for a moment
    leg = alone.both.complete(prompt, max_tokens=8, logprobs=10)
    assert leg.cached_tokens == (n - 1) // B * B, "block-aligned; the tail is recomputed"
    assert agree(leg, cold(alone, prompt), COLD_TOLERANCE)


def test_a_consumer_loads_and_never_publishes(alone: AlonePair, rng: random.Random) -> None:
    prompt = tokens(rng, 500)
    first = alone.both.complete(prompt, max_tokens=60, ignore_eos=True)
    alone.assert_idle()
    # The reply's last token was never computed.
    leg = alone.consumer.complete([*prompt, *first.tokens], max_tokens=40, ignore_eos=True)
    assert leg.cached_tokens == boundary(500, 60)
    alone.assert_idle()
    published = [n for n in alone.consumer.metrics() if n.startswith("backhaul:publications_total")]
    assert not any(alone.consumer.metrics()[name] for name in published)
    longer = [*prompt, *first.tokens, *leg.tokens]
    alone.consumer.reset_prefix_cache()
    assert alone.consumer.complete(longer, max_tokens=1).cached_tokens == leg.cached_tokens


def test_a_producer_never_loads(alone: AlonePair, rng: random.Random) -> None:
    prompt = tokens(rng, 200)
    alone.both.complete(prompt, max_tokens=60, ignore_eos=True)
    alone.assert_idle()
    assert alone.producer.complete([*prompt, 97], max_tokens=1).cached_tokens == 0


def test_a_loaded_state_equals_the_same_state_held_locally(
    alone: AlonePair, rng: random.Random
) -> None:
    """The engine that decoded keeps its boundary states and resumes from its own copy; after its
    cache is emptied it resumes from the store. Same state, same computation, same numbers."""
    prompt = tokens(rng, 300)
    first = alone.both.complete(prompt, max_tokens=60, ignore_eos=True)
    alone.assert_idle()
    second = [*prompt, *first.tokens, *tokens(rng, 24)]
    # No deeper boundary, whose state the first run would leave behind for the second.
    assert boundary(300, 60) == (len(second) - 1) // B * B
    local = alone.both.complete(second, max_tokens=8, logprobs=10)
    assert local.backhaul is not None and local.backhaul["loaded_tokens"] == 0
    assert local.cached_tokens == boundary(300, 60)
    alone.both.reset_prefix_cache()
    loaded = alone.both.complete(second, max_tokens=8, logprobs=10)
    assert loaded.backhaul is not None
    assert loaded.backhaul["loaded_tokens"] == loaded.cached_tokens == boundary(300, 60)
    assert loaded.tokens == local.tokens
    assert worst_difference(loaded, local) == 0.0


def test_preemption(alone: AlonePair, rng: random.Random) -> None:
    """More decoding requests than the 160 blocks hold: some are preempted and resume, also from
    the store; every reply is the one of an undisturbed run."""
    before = preemptions(alone)
    prompts = [tokens(rng, 200) for _ in range(12)]
    with ThreadPoolExecutor(12) as pool:
        legs = list(
            pool.map(
                lambda p: alone.both.complete(p, max_tokens=200, logprobs=10, ignore_eos=True),
                prompts,
            )
        )
    assert preemptions(alone) > before, "nothing was preempted: the test shows nothing"
    for prompt, leg in zip(prompts[:4], legs, strict=False):
        undisturbed = alone.both.complete(
            prompt, max_tokens=200, logprobs=10, ignore_eos=True, cache_salt=uuid.uuid4().hex
        )
        assert agree(leg, undisturbed, COLD_TOLERANCE)


def preemptions(alone: AlonePair) -> float:
    from backhaul.deploy.pair import scrape

    return sum(scrape(alone.both.engine.url, "vllm:num_preemptions").values())


def pressed_out(alone: AlonePair) -> float:
    """Checkpoints evicted, and objects refused, for lack of space."""
    from backhaul.deploy.pair import scrape

    books = scrape(alone.store.http_url, "backhaul:store_")
    return (
        books["backhaul:store_evictions_total{reason=capacity}"]
        + books["backhaul:store_full_objects_total"]
    )


def publication_failures(alone: AlonePair) -> float:
    return sum(
        value
        for name, value in alone.both.metrics().items()
        if name.startswith("backhaul:publication_failures_total")
    )


def test_a_full_store_evicts_or_declines_and_nothing_fails(
    alone: AlonePair, rng: random.Random
) -> None:
    """More checkpoints than the store holds, each well under the engine's own limit of pages that
    wait to be published."""
    before, refused = pressed_out(alone), publication_failures(alone)
    for _ in range(8):
        prompt = tokens(rng, 1000)
        alone.both.complete(prompt, max_tokens=4)
        alone.assert_idle()
    assert publication_failures(alone) == refused
    assert pressed_out(alone) > before, "the store was never full: the test shows nothing"
    leg = alone.both.complete([*prompt, 97], max_tokens=8, logprobs=10)
    assert agree(leg, cold(alone, [*prompt, 97]), COLD_TOLERANCE)
