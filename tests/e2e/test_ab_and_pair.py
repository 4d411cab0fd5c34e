"""The known A/B across a pair: five turns with the full history, one at a time, at temperature 0.

On one engine 63.6 % of prompt tokens were cached without decode checkpoints and 94.7 % with them.
Here the next turn meets a prefill worker that never saw the dialogue. All five requests count,
the first included, of which nothing can be cached.

Replies are long and questions short, so that nearly all of a prompt is what was generated before: a
question and the template around it have some 60 tokens, a reply 700. The random model neither
reasons nor calls tools; all that it generates is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from e2e_kit import END, B, Session, boundary

from backhaul.benchmarks.ab import AbPlan, Arm, run_arm
from backhaul.deploy.processes import Cluster
from backhaul.deploy.up import ProxyService

REPLY = 700

PLAN = AbPlan(
    system="Be brief.",
    questions=(
        "Close for a week, or go floor by floor?",
        "And if the lift fails on day two?",
        "Which ten risks worry you most?",
        "The budget fell by a fifth: what now?",
        "Sum it up for the town's paper.",
    ),
    max_tokens=REPLY + 8,
    # The end token is forbidden before and all but certain after: the reply ends by itself.
    extra={"min_tokens": REPLY, "logit_bias": {str(END): 100}},
    salt=True,
)


@pytest.fixture
def proxy(pair: Session, tmp_path: Path) -> Iterator[str]:
    """A proxy before the shared pair."""
    engines = pair.pair.engines
    service = ProxyService(
        tmp_path, prefill=[engines["prefill"].url], decode=[engines["decode"].url]
    )
    with Cluster([service]):
        yield service.url


def test_prefill_that_never_saw_the_dialogue_has_it_cached(pair: Session, proxy: str) -> None:
    report = run_arm(
        Arm(name="with", url=proxy, reset=[pair.pair.engines["prefill"].url]),
        PLAN,
        lambda arm, request: print(request),
    )
    for before, request in pairwise(report.requests):
        assert before.finish_reason == "stop"
        assert request.cached_tokens == boundary(before.prompt_tokens, before.completion_tokens)
    assert report.cached_share >= 0.947
    # What a worker that kept each prompt's end, and nothing of decode, could have at most: the
    # dialogue is of the reference's kind, where that was 63.6 %.
    prompt_ends = sum(r.prompt_tokens // B * B for r in report.requests[:-1])
    assert 0.58 < prompt_ends / report.prompt_tokens < 0.67
    print(f"cached {report.cached_share:.1%}, P_end alone {prompt_ends / report.prompt_tokens:.1%}")

    # The other side: the same engines, of which Backhaul neither keeps nor loads anything. Short
    # replies, since nothing is found behind them anyway.
    nothing = {"backhaul": {"publish": False, "load": False}}
    without = run_arm(
        Arm(name="without", url=proxy, reset=[pair.pair.engines["prefill"].url]),
        replace(
            PLAN,
            turns=3,
            max_tokens=2 * B + 8,
            extra={**PLAN.extra, "min_tokens": 2 * B, "kv_transfer_params": nothing},
        ),
        lambda arm, request: print(request),
    )
    assert [request.finish_reason for request in without.requests] == ["stop"] * 3
    assert all(request.prompt_tokens > B for request in without.requests)
    assert without.cached_share == 0
