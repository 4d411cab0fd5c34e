"""The known A/B in kind: how much of five turns with the full history a prefill worker has cached.

On one engine 63.6 % of prompt tokens were cached without decode checkpoints and 94.7 % with them.
Here prefill and decode are two engines: prefill computes each prompt and one token, decode the
reply. All five requests count, the first included, of which nothing can be cached.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from harness import BLOCK, Pair, SimEngine, new_uri

TURNS = 5
QUESTION = BLOCK + 3
REPLY = 20 * BLOCK + 5
"""Replies are long and questions short, as in the reference: most of a prompt was generated."""

ROOM = {"num_blocks": 1200, "max_tokens": 4096, "budget": 512}


@pytest.fixture
def pair() -> Iterator[Pair]:
    one = Pair(new_uri())
    yield one
    one.check_idle()
    one.close()


def shares(prefill: Callable[[], SimEngine], decode: SimEngine) -> tuple[float, list[int]]:
    """Cached / prompt tokens of prefill over all turns by vLLM's own count, and cached tokens per
    turn. ``prefill`` gives the engine that the next turn meets."""
    generator = random.Random(5)
    history: list[int] = []
    prompts, cached = [], []
    for _turn in range(TURNS):
        prompt = history + [generator.randrange(2, 1000) for _ in range(QUESTION)]
        first = prefill().run(prompt, 1, stops=False)
        prompts.append(len(prompt))
        cached.append(first.prefill.num_cached_tokens)
        history = decode.run(prompt, REPLY).history
    return sum(cached) / sum(prompts), cached


@pytest.mark.parametrize("kept", [True, False], ids=["P_end present", "P_end absent"])
def test_prefill_has_what_decode_generated(pair: Pair, kept: bool) -> None:
    """Whether the worker kept the dialogue's prompts or meets it for the first time."""
    decode = pair.engine(name="decode", **ROOM)
    first = pair.engine(name="prefill", **ROOM)
    share, cached = shares(lambda: first if kept else pair.engine(name="fresh", **ROOM), decode)
    ends = [turn * (QUESTION + REPLY) for turn in range(1, TURNS)]
    assert cached == [0, *((end - 1) // BLOCK * BLOCK for end in ends)]
    assert share >= 0.947


def test_without_backhaul_a_worker_has_the_last_prompt_or_nothing() -> None:
    """P_end present: below two thirds, as in the reference. P_end absent: nothing at all."""
    decode = SimEngine(None, **ROOM)
    sticky = SimEngine(None, **ROOM)
    share, cached = shares(lambda: sticky, decode)
    prompts = [QUESTION + turn * (QUESTION + REPLY) for turn in range(TURNS)]
    assert cached[1:] == [prompt // BLOCK * BLOCK for prompt in prompts[:-1]]
    assert 0.58 < share < 0.67
    assert shares(lambda: SimEngine(None, **ROOM), decode)[0] == 0.0
