"""Tags of a request's candidates: for any answer of a store and any request."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from hypothesis import given
from hypothesis import strategies as st

from backhaul.connector.outcome import (
    Answered,
    Outcome,
    count_outcome,
    matched_tokens,
    producer_age,
    reuse_of,
    shown,
)
from backhaul.connector.stats import StatsRecorder
from backhaul.protocols.candidates import Limits, deepest_usable, tag_candidates
from backhaul.protocols.checkpoint import (
    NOT_RETAINED,
    CheckpointKind,
    CheckpointMatch,
    PassedOver,
    ProducerAge,
    Reason,
    Reuse,
    primary_kind,
)
from backhaul.protocols.metrics import ENGINE, known_label_values
from backhaul.protocols.record import CANDIDATES_MAX, Selected
from backhaul.protocols.work import FULL, ModelWork

GRID = 8
KINDS = st.lists(st.sampled_from(CheckpointKind), unique=True).map(tuple)
REASONS = st.sampled_from([*NOT_RETAINED, Reason.DOMAIN_MISMATCH, Reason.HASH_MISMATCH])


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
                hits=draw(st.integers(0, 2)),
                age_s=draw(st.floats(0, 1e6)),
            )
        )
    return tuple(found)


LIMITS = st.builds(
    Limits,
    local_tokens=st.integers(0, 20).map(lambda n: n * GRID),
    limit_tokens=st.integers(0, 22 * GRID),
    min_gain_tokens=st.integers(1, 5 * GRID),
    denied=st.dictionaries(
        st.integers(1, 20).map(lambda n: n * GRID),
        st.sampled_from([Reason.UNREACHABLE, Reason.CORRUPT, Reason.LEASE_EXPIRED]),
    ),
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
        unreachable = failed and limits.denied[match.boundary] is Reason.UNREACHABLE
        assert (candidate.reason is Reason.UNREACHABLE) == unreachable
        assert (candidate.reason is Reason.LOAD_FAILED) == (failed and not unreachable)
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
        reuse=reuse_of(found),
        junction=more,
        work=ModelWork(1),
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
    outcome = outcome._replace(work=ModelWork(100, ((FULL, 1),)))
    counters = counters_of(outcome)
    assert counters.get("incremental_tokens|decode_end", 0) == gain
    assert counters.get("incremental_hits|decode_end", 0) == alone
    assert counters["avoided_prefill_flops|decode_end"] == 24 * 100 + sum(range(9, 33))
    spared = gain * 100 + sum(range(33 - gain, 33))
    assert counters.get("incremental_prefill_flops|decode_end", 0) == spared


def counters_of(outcome: Outcome) -> dict[str, float]:
    recorder = StatsRecorder()
    count_outcome(outcome, recorder, asked=True)
    report = recorder.report({})
    assert report is not None
    counters: dict[str, float] = report.data["counters"]
    return counters


def test_ages_and_boundaries_are_those_of_the_selected_one() -> None:
    outcome = Outcome(
        prompt_tokens=40, local_tokens=0, loaded_tokens=32, other_tokens=0,
        selected=Selected(
            boundary=32, kind="input_end", kinds=(CheckpointKind.INPUT_END,), age_s=2.5,
            producer_age=ProducerAge.OLDER,
        ),
        candidates=(), matched=matched_tokens(Answered(), has_recurrent=True),
    )  # fmt: skip
    recorder = StatsRecorder()
    count_outcome(outcome, recorder, asked=False)
    report = recorder.report({})
    assert report is not None
    observed = report.data["observations"]
    assert observed["selected_age_seconds|input_end"] == [2.5]
    assert observed["selected_boundary_tokens|input_end"] == [32]
    assert report.data["counters"]["selections|input_end|older"] == 1
    assert "avoided_prefill_flops|input_end" not in report.data["counters"], "no work is known"


def candidate(
    boundary: int, *kinds: str, reason: Reason | None = None, hits: int = 0
) -> CheckpointMatch:
    return CheckpointMatch(
        boundary=boundary,
        kinds=tuple(CheckpointKind(kind) for kind in kinds),
        consumable=reason is None,
        reason=reason,
        retained=reason not in NOT_RETAINED,
        hash_matched=reason is None,
        hits=hits,
    )


@pytest.mark.parametrize(
    ("later", "age"),
    [
        ([], "previous"),
        ([("input_end", Reason.EVICTED)], "previous"),
        ([("unknown", Reason.STATE_MISSING)], "previous"),
        ([("decode_end", Reason.EVICTED)], "two_earlier"),
        ([("decode_end", None)], "two_earlier"),
        ([("decode_end", Reason.HASH_MISMATCH), ("input_end", None)], "two_earlier"),
        ([("decode_end", Reason.EVICTED), ("decode_end", Reason.HASH_MISMATCH)], "older"),
        ([("decode_end", Reason.EVICTED)] * 4, "older"),
    ],
)
def test_an_end_is_as_old_as_there_are_later_ones_of_its_kind(
    later: list[tuple[str, Reason | None]], age: str
) -> None:
    deeper = [
        candidate(80 - 8 * n, *(() if kind == "unknown" else (kind,)), reason=reason)
        for n, (kind, reason) in enumerate(later)
    ]
    selected = candidate(16, "decode_end", "prompt_end")
    below = candidate(8, "decode_end")
    assert producer_age([*deeper, selected, below], selected) == age


@pytest.mark.parametrize(
    ("found", "reuse"),
    [
        ([], None),
        ([candidate(24, reason=Reason.STATE_MISSING)], None),
        ([candidate(24, "decode_end", reason=Reason.HASH_MISMATCH, hits=3)], None),
        ([candidate(24, "decode_end"), candidate(8, "input_end", hits=1)], "first"),
        ([candidate(24, "decode_end", hits=1), candidate(8, "input_end")], "steady"),
        ([candidate(24, "decode_end", reason=Reason.EVICTED, hits=2)], "steady"),
        (
            [candidate(24, "decode_end", reason=Reason.HASH_MISMATCH), candidate(8, "input_end")],
            "first",
        ),
    ],
)
def test_a_continuation_is_the_first_of_what_nobody_looked_up(
    found: list[CheckpointMatch], reuse: str | None
) -> None:
    assert reuse_of(found) == reuse


@pytest.mark.parametrize(("junction", "missed"), [(0, 0), (16, 0), (24, 0), (32, 8), (40, 16)])
def test_a_junction_above_the_hit_is_a_miss_that_teaches(junction: int, missed: int) -> None:
    outcome = Outcome(
        prompt_tokens=50, local_tokens=8, loaded_tokens=16, other_tokens=0, selected=None,
        candidates=(), matched=matched_tokens(Answered(), has_recurrent=True), junction=junction,
        reuse=Reuse.STEADY,
    )  # fmt: skip
    counters = counters_of(outcome)
    assert counters.get("branch_learning_misses", 0) == bool(missed)
    assert counters.get("branch_learning_tokens", 0) == missed
    assert outcome.missed_junction == (junction if missed else 0)
    assert counters["continuations|steady"] == 1
    assert counters["continuation_tokens|steady|reused"] == 24
    assert counters["continuation_tokens|steady|recomputed"] == 26
