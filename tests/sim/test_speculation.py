"""Speculative decoding: only committed tokens count, and a state is of exactly its length.

The simulated model writes the state after every draft into its own block, as the kernels do, and
the runner copies the one at an accepted boundary to where prefix caching looks for it; a state of
another length has other bytes, and ``check_idle`` reads every stored checkpoint back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from harness import (
    ATTENTION,
    BLOCK,
    FULL,
    HYBRID,
    MIXED,
    STATE,
    WINDOW,
    Group,
    Pair,
    SimEngine,
    new_uri,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_kit import kinds, tokens

from backhaul.protocols.checkpoint import CheckpointKind

B = BLOCK
DRAFTED = (FULL, Group(layers=1, wide=True, draft=True), STATE)
"""A target, a draft group of another shape, and recurrent state."""

MODES = {
    "sync": {},
    "async": {"asynchronous": True},
    "late": {"asynchronous": True, "late": True},
}
MODE = pytest.mark.parametrize("mode", list(MODES))
METHOD = pytest.mark.parametrize(
    ("method", "groups"),
    [("ngram", HYBRID), ("eagle", DRAFTED), ("mtp", DRAFTED), ("ngram", MIXED)],
    ids=["ngram", "eagle", "mtp", "ngram with windows"],
)


@MODE
@METHOD
@pytest.mark.parametrize("accept", [0.0, 0.5, 1.0])
def test_the_simulated_engine_speculates_and_gives_the_model_s_output(
    mode: str, method: str, groups: tuple[Any, ...], accept: float
) -> None:
    engine = SimEngine(
        None, groups=groups, method=method, drafts=3, accept=accept, budget=40, **MODES[mode]
    )
    for seed in range(3):
        prompt = tokens(30 + 7 * seed, seed)
        first = engine.run(prompt, 30)
        engine.submit(first.history + tokens(9, seed), 5)
        engine.submit(prompt, 20, stops=False)
        engine.drain()
        engine.check()
    engine.check_idle()
    assert engine.runner.checked_bytes > 100_000
    assert (engine.runner.accepted_drafts > 0) is (accept > 0)
    assert (engine.runner.rejected_drafts > 0) is (accept < 1)


def deepest(prompt: int, history: int, method: str = "ngram") -> int:
    """The deepest boundary of a finished request that some step materialised. Under EAGLE vLLM
    ends the prompt's chunks one block below its last full one and runs past that."""
    end = (history - 1) // B * B
    if method == "ngram" or end > prompt:
        return end
    return min(end, max(prompt // B - 1, 0) * B)


@MODE
@METHOD
@pytest.mark.parametrize("accept", [0.0, 0.6, 1.0])
def test_turn_two_resumes_at_the_deepest_committed_boundary(
    pair: Pair, mode: str, method: str, groups: tuple[Any, ...], accept: float
) -> None:
    keywords: dict[str, Any] = {"groups": groups, "method": method, "drafts": 3, "accept": accept}
    decode = pair.engine(name="decode", **keywords, **MODES[mode])
    prefill = pair.engine(name="prefill", **keywords)
    for output in range(1, 3 * B, 2):
        first = decode.run(tokens(2 * B + 3, output), output)
        second = prefill.run(first.history + tokens(5, 7), 4)
        assert second.resumed == deepest(len(first.prompt), len(first.history), method)
    pair.check_idle()


@MODE
@pytest.mark.parametrize("drafts", [1, 2, 3, B - 1])
def test_a_stop_inside_an_accepted_run_that_crosses_a_boundary(
    pair: Pair, mode: str, drafts: int
) -> None:
    """The step that crosses also computes tokens after the stop: D_end is the boundary before."""
    keywords: dict[str, Any] = {"drafts": drafts, "accept": 1.0}
    decode = pair.engine(name="decode", **keywords, **MODES[mode])
    prefill = pair.engine(name="prefill", **keywords)
    for end in range(5 * B - drafts, 5 * B + drafts + 2):
        for shift in range(drafts + 1):
            prompt = tokens(3 * B + 1 + shift, 100 * end + shift)
            first = decode.run(prompt, end - len(prompt))
            second = prefill.run([*first.history, 5], 3)
            assert second.resumed == (end - 1) // B * B
    assert not decode.counters["publication_failures|state_missing"]
    pair.check_idle()


@pytest.mark.parametrize(
    ("mode", "drafts"), [*((mode, B) for mode in MODES), ("sync", B + 3), ("sync", 2 * B + 1)]
)
def test_more_drafts_than_a_block_holds(pair: Pair, mode: str, drafts: int) -> None:
    """A step can pass a boundary whose state is never materialised: it must not be published. Then
    what the prompt left is still there.

    Asynchronous scheduling with more drafts than a block holds reads wrong states in this
    simulation without any connector, too.
    """
    keywords: dict[str, Any] = {"drafts": drafts, "budget": 80}
    decode = pair.engine(name="decode", **keywords, accept=0.9, **MODES[mode])
    prefill = pair.engine(name="prefill", **keywords)
    for output in range(1, 6 * B, 3):
        first = decode.run(tokens(2 * B + 3, output), output)
        second = prefill.run(first.history + tokens(5, 7), 4)
        assert (len(first.prompt) - 1) // B * B <= second.resumed
        assert second.resumed <= (len(first.history) - 1) // B * B
    pair.check_idle()


class Accepts:
    """Stands for an engine's random numbers: of the n-th run of drafts so many are right."""

    def __init__(self, drafts: int, counts: Sequence[int]) -> None:
        self._values = [i >= right for right in counts for i in range(drafts)]

    def random(self) -> float:
        return float(self._values.pop(0)) if self._values else 0.0


@pytest.mark.parametrize("first", [14, 15])
@pytest.mark.parametrize("second", [0, 1, 8, 9, 10, 17])
def test_a_boundary_that_one_step_ends_at_and_the_next_one_passes(
    pair: Pair, first: int, second: int
) -> None:
    """The first step of drafts ends at 5 blocks and is accepted short of it; the second reaches
    beyond 6, and leaves a state where it is accepted only."""
    drafts, prompt = 2 * B + 1, tokens(3 * B - 2, 1)
    keywords: dict[str, Any] = {"drafts": drafts, "budget": 80, "accept": 0.5}
    decode = pair.engine(name="decode", **keywords)
    prefill = pair.engine(name="prefill", **keywords)
    decode.random = Accepts(drafts, (first, second))
    done = decode.run(prompt, 1 + (first + 1) + (second + 1))
    assert decode.runner.accepted_drafts == first + second
    reached = {5 * B, len(prompt) + (first + 1) + (1 + drafts)}
    end = (len(done.history) - 1) // B * B
    again = prefill.run(done.history + tokens(5, 7), 4)
    # vLLM has no block for a state between where the two steps end; then the prompt's end is left.
    assert again.resumed == (end if end in reached else (len(prompt) - 1) // B * B)
    pair.check_idle()


@MODE
@pytest.mark.parametrize("groups", [ATTENTION, (FULL, WINDOW)], ids=["full", "windows"])
@pytest.mark.parametrize("accept", [0.5, 0.9])
def test_attention_alone_leaves_every_boundary_of_a_long_run_of_drafts(
    pair: Pair, mode: str, groups: tuple[Any, ...], accept: float
) -> None:
    keywords: dict[str, Any] = {"groups": groups, "drafts": 2 * B + 3, "budget": 80}
    decode = pair.engine(name="decode", **keywords, accept=accept, **MODES[mode])
    prefill = pair.engine(name="prefill", **keywords)
    for output in range(3, 6 * B, 9):
        first = decode.run(tokens(2 * B + 3, output), output)
        second = prefill.run(first.history + tokens(5, 7), 4)
        assert second.resumed == (len(first.history) - 1) // B * B
    pair.check_idle()


@MODE
@pytest.mark.parametrize("accept", [0.3, 0.9])
def test_preempted_speculation_publishes_nothing_wrong(
    pair: Pair, mode: str, accept: float
) -> None:
    engine = pair.engine(drafts=3, accept=accept, num_blocks=40, max_requests=4, **MODES[mode])
    generator = random.Random(5)
    for i in range(8):
        engine.submit(tokens(2 * B + generator.randrange(B), i), 3 * B + i, u_end=2 * B)
    engine.drain()
    assert sum(request.num_preemptions for request in engine.requests.values())
    pair.check_idle()


def test_the_target_model_s_end_is_published_under_eagle(pair: Pair) -> None:
    decode = pair.engine(groups=DRAFTED, drafts=2, method="eagle")
    first = decode.run(tokens(2 * B + 3, 1), 2 * B)
    found = [boundary for boundary, one in kinds(pair) if CheckpointKind.DECODE_END in one]
    assert found == [(len(first.history) - 1) // B * B]
    pair.check_idle()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_any_conversation_resumes_where_it_was_committed(data: st.DataObject) -> None:
    pair = Pair(new_uri())
    groups, method = data.draw(
        st.sampled_from(
            [(HYBRID, "ngram"), (DRAFTED, "eagle"), (MIXED, "ngram"), (ATTENTION, "ngram")]
        )
    )
    keywords: dict[str, Any] = {
        "groups": groups,
        "method": method,
        "drafts": data.draw(st.integers(1, 5)),
        "accept": data.draw(st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0])),
        "budget": 48,
    }
    engines = [
        pair.engine(name=name, **keywords, **MODES[data.draw(st.sampled_from(list(MODES)))])
        for name in ("a", "b")
    ]
    try:
        history, reached = tokens(data.draw(st.integers(1, 3 * B)), 1), 0
        for turn in range(3):
            done = engines[turn % 2].run(history, data.draw(st.integers(1, 3 * B)))
            if turn:
                assert done.resumed >= reached
            reached = deepest(len(history), len(done.history), method)
            history = done.history + tokens(data.draw(st.integers(1, B)), turn)
        pair.check_idle()
    finally:
        pair.close()
