"""Which chunk ends were forced: those that vLLM would not have made by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from harness import BLOCK, FULL, STATE, Group, Pair, SimEngine
from sim_kit import tokens

B = BLOCK
PROMPT = 5 * B + 3
EXPORTS = Group(layers=2, recurrent=True, exports=True)


def chunk_ends(engine: SimEngine, name: str) -> list[int]:
    """Where the chunks of a request's prompt end, while the engine runs it."""
    ends = [0]
    request = engine.requests[name]
    while engine.step():
        if ends[-1] < request.num_computed_tokens <= request.num_prompt_tokens:
            ends.append(request.num_computed_tokens)
    return ends[1:]


def forced(engine: SimEngine, name: str) -> list[int]:
    """What the request's record says, which the counter must agree with."""
    ends: list[int] = engine.finished[name].params["backhaul"]["forced_chunk_ends"]
    counted = [n for key, n in engine.counters.items() if key.startswith("forced_chunk_ends")]
    assert sum(counted) == len(ends)
    return ends


@pytest.mark.parametrize(
    ("budget", "u_end", "state", "expected"),
    [
        (2 * B, 2 * B, STATE, []),
        (512, 5 * B, STATE, []),
        (512, 2 * B, STATE, [2 * B]),
        (512, 5 * B, EXPORTS, [5 * B]),
    ],
    ids=["the budget ends", "vLLM keeps P_end", "forced", "vLLM would export P_end"],
)
def test_an_end_is_forced_where_the_chunk_would_have_been_longer(
    pair: Pair, budget: int, u_end: int, state: Group, expected: list[int]
) -> None:
    engine = pair.engine(groups=(FULL, state), budget=budget)
    name = engine.submit(tokens(PROMPT, 1), 2, u_end=u_end)
    assert u_end in chunk_ends(engine, name)
    assert forced(engine, name) == expected
    pair.check_idle()


@pytest.mark.parametrize("budget", [2 * B, 3 * B + 5, 512])
@pytest.mark.parametrize(
    "groups",
    [(FULL, STATE), (FULL, EXPORTS), (Group(draft=True), STATE)],
    ids=["plain", "exports", "draft"],
)
@pytest.mark.parametrize("before", [0, 2 * B + 3], ids=["alone", "second"])
def test_vllm_without_the_end_is_the_measure(
    pair: Pair, groups: Sequence[Group], budget: int, before: int
) -> None:
    """Before its first forced end a prompt is cut as it is without any."""
    keywords = {"groups": groups, "budget": budget, "role": "kv_producer"}
    plain, engine = (pair.engine(name=name, **keywords) for name in ("plain", "hinted"))
    for prompt in (PROMPT, 5 * B):
        for u_end in range(B, prompt + 1, B):
            ends, names = [], []
            for one, hint in ((plain, None), (engine, u_end)):
                if before:
                    one.submit(tokens(before, 9 * prompt + u_end), 1)
                names.append(one.submit(tokens(prompt, prompt + u_end), 1, u_end=hint))
                ends.append(chunk_ends(one, names[-1]))
            natural, actual = ends
            said = engine.finished[names[1]].params["backhaul"]["forced_chunk_ends"]
            assert said == ([u_end] if u_end in set(actual) - set(natural) else [])
    pair.check_idle()
