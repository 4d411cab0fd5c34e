"""Tags of a request's candidates: for any answer of a store and any request."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from hypothesis import given
from hypothesis import strategies as st

from backhaul.connector.endpoints import deepest_usable
from backhaul.connector.outcome import (
    Answered,
    Limits,
    Outcome,
    count_outcome,
    matched_tokens,
    shown,
    tag_candidates,
)
from backhaul.connector.stats import StatsRecorder
from backhaul.protocols.checkpoint import (
    NOT_RETAINED,
    CheckpointKind,
    CheckpointMatch,
    PassedOver,
    Reason,
    primary_kind,
)
from backhaul.protocols.metrics import ENGINE, known_label_values
from backhaul.protocols.record import CANDIDATES_MAX, Selected

GRID = 8
KINDS = st.lists(st.sampled_from(CheckpointKind), unique=True).map(tuple)
REASONS = st.sampled_from(
    [Reason.EVICTED, Reason.UNCOMMITTED, Reason.DOMAIN_MISMATCH, Reason.HASH_MISMATCH]
)


@st.composite
def matches(draw: st.DrawFn) -> tuple[CheckpointMatch, ...]:
    """What a store may answer: deepest first, one per boundary."""
    found = []
    for block in sorted(draw(st.sets(st.integers(1, 20))), reverse=True):
        reason = draw(st.none() | REASONS)
        found.append(
            CheckpointMatch(
                boundary=block * GRID,
                kinds=draw(KINDS),
                consumable=reason is None,
                reason=reason,
                retained=reason not in NOT_RETAINED,
                hash_matched=reason in (None, Reason.DOMAIN_MISMATCH),
                age_s=draw(st.floats(0, 1e6)),
            )
        )
    return tuple(found)


LIMITS = st.builds(
    Limits,
    local_tokens=st.integers(0, 20).map(lambda n: n * GRID),
    limit_tokens=st.integers(0, 22 * GRID),
    min_gain_tokens=st.integers(1, 5 * GRID),
    denied=st.frozensets(st.integers(1, 20).map(lambda n: n * GRID)),
    loads_over=st.booleans(),
)


def choose(found: tuple[CheckpointMatch, ...], limits: Limits) -> int:
    """As the consumer does."""
    if limits.loads_over:
        return 0
    return deepest_usable(
        [match.boundary for match in found if match.consumable],
        local_tokens=limits.local_tokens + limits.min_gain_tokens - 1,
        limit_tokens=limits.limit_tokens,
        denied=limits.denied,
    )


@given(matches(), LIMITS)
def test_the_tags_form_a_ladder(found: tuple[CheckpointMatch, ...], limits: Limits) -> None:
    selected = choose(found, limits)
    candidates = tag_candidates(found, selected, limits)
    assert [c.boundary for c in candidates] == [m.boundary for m in found]
    for candidate, match in zip(candidates, found, strict=True):
        assert candidate.selected <= candidate.consumable <= candidate.hash_matched
        assert candidate.hash_matched <= candidate.retained
        assert (candidate.reason is None) == candidate.consumable
        assert (candidate.passed_over is None) == (candidate.selected or not candidate.consumable)
        failed = match.consumable and match.boundary in limits.denied
        assert candidate.consumable == (match.consumable and not failed)
        assert (candidate.reason is Reason.LOAD_FAILED) == failed
        assert candidate.passed_over is not PassedOver.NOT_TAKEN, "what could be used was chosen"
    chosen = [candidate for candidate in candidates if candidate.selected]
    assert [candidate.boundary for candidate in chosen] == ([selected] if selected else [])
    kept = shown(candidates)
    assert len(kept) == min(len(candidates), CANDIDATES_MAX)
    assert [candidate for candidate in kept if candidate.selected] == chosen


@given(matches(), LIMITS)
def test_an_offer_that_was_not_taken_selects_nothing(
    found: tuple[CheckpointMatch, ...], limits: Limits
) -> None:
    offered = choose(found, limits)
    candidates = tag_candidates(found, 0, limits)
    assert not any(candidate.selected for candidate in candidates)
    for candidate in candidates:
        if candidate.boundary == offered:
            assert candidate.passed_over is PassedOver.NOT_TAKEN


@given(matches(), st.integers(0, 22), st.integers(0, 22), st.booleans())
def test_lengths_are_ordered(
    found: tuple[CheckpointMatch, ...], attention: int, recurrent: int, has_recurrent: bool
) -> None:
    answered = Answered(found, attention * GRID, recurrent * GRID)
    matched = matched_tokens(answered, has_recurrent=has_recurrent)
    assert matched.joint <= matched.attention <= matched.exact_hash
    assert has_recurrent or not matched.recurrent
    assert not has_recurrent or matched.joint <= matched.recurrent <= matched.exact_hash
    assert matched.joint == max((m.boundary for m in found if m.consumable), default=0)


@given(matches(), LIMITS, st.integers(0, 100))
def test_every_count_is_of_a_series_that_is_known(
    found: tuple[CheckpointMatch, ...], limits: Limits, more: int
) -> None:
    selected = choose(found, limits)
    candidates = tag_candidates(found, selected, limits)
    match = next((m for m in found if selected and m.boundary == selected), None)
    kinds = match.kinds if match else ()
    if match is not None and not kinds:
        return  # what is consumable was committed with a manifest, which names a kind
    outcome = Outcome(
        prompt_tokens=max(limits.local_tokens, selected) + more,
        local_tokens=limits.local_tokens,
        loaded_tokens=selected - limits.local_tokens if selected else 0,
        other_tokens=0,
        selected=Selected(boundary=selected, kind=primary_kind(kinds), kinds=kinds, age_s=1.0)
        if match
        else None,
        candidates=candidates,
        matched=matched_tokens(Answered(found), has_recurrent=True),
    )
    recorder = StatsRecorder()
    count_outcome(outcome, recorder, asked=True)
    report = recorder.report({})
    assert report is not None
    for part in ("counters", "observations"):
        for key in report.data[part]:
            name, *labels = key.split("|")
            assert tuple(labels) in set(known_label_values(ENGINE[name])), key
    counters = report.data["counters"]
    assert all(n > 0 for n in counters.values())
    sources = [counters.get(f"prompt_tokens|{s}", 0) for s in ("local", "loaded", "recomputed")]
    assert sum(sources) == outcome.prompt_tokens
    known = sum(n for key, n in counters.items() if key.startswith("candidates|known|"))
    assert known == len(found)


@pytest.mark.parametrize(
    ("deeper", "shallower", "gain", "alone"),
    [
        (("decode_end",), ("input_end",), 8, False),
        (("decode_end",), ("decode_end",), 24, True),
        (("decode_end", "input_end"), (), 0, False),
        (("decode_end",), (), 24, True),
    ],
)
def test_what_the_second_end_adds(
    deeper: tuple[str, ...], shallower: tuple[str, ...], gain: int, alone: bool
) -> None:
    """Local hit 8, ends at 24 and 32 tokens."""
    ends = [(32, deeper), (24, shallower)]
    found = tuple(
        CheckpointMatch(
            boundary=boundary, kinds=tuple(CheckpointKind(k) for k in kinds), consumable=True
        )
        for boundary, kinds in ends
        if kinds
    )
    limits = Limits(local_tokens=8, limit_tokens=40)
    kinds = tuple(CheckpointKind(k) for k in deeper)
    outcome = Outcome(
        prompt_tokens=41, local_tokens=8, loaded_tokens=24, other_tokens=0,
        selected=Selected(boundary=32, kind=primary_kind(kinds), kinds=kinds, age_s=0.0),
        candidates=tag_candidates(found, 32, limits),
        matched=matched_tokens(Answered(found), has_recurrent=True),
    )  # fmt: skip
    recorder = StatsRecorder()
    count_outcome(outcome, recorder, asked=True)
    report = recorder.report({})
    assert report is not None
    counters = report.data["counters"]
    assert counters.get("incremental_tokens|decode_end", 0) == gain
    assert counters.get("incremental_hits|decode_end", 0) == alone
