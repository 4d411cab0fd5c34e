"""Which ends a policy publishes: the rules as a table, and what holds of every input."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.protocols.checkpoint import CheckpointKind, CheckpointMatch, Reason
from backhaul.protocols.match_history import WINDOW, MatchHistory, Observation, observe
from backhaul.protocols.policy import EXTRA_MAX, Choice, Known, Matched, Policy, Why, choose

MAYBE = st.sampled_from([None, False, True])
POSITION = st.none() | st.integers(1, 5000)
MATCHED = st.builds(
    Matched,
    decode_end_matched=st.integers(0, 9),
    decode_end_missed=st.integers(0, 9),
    input_end_matched=st.integers(0, 9),
)
KNOWN = st.builds(
    Known,
    tool_continuation=st.booleans(),
    tools=MAYBE,
    reasoning=MAYBE,
    reasoning_kept=MAYBE,
    user_turn=st.booleans(),
    history=MATCHED,
    u_end=POSITION,
    offsets=st.lists(st.integers(1, 5000), max_size=12).map(tuple),
    verbatim_end=POSITION,
    suffix_start=POSITION,
)


def auto(**values: Any) -> tuple[str, Why]:
    """The end that ``auto`` takes, and why."""
    choice = choose(Policy.AUTO, Known(**{"u_end": 500, **values}))
    return "D" if choice.decode_end else "U", choice.why


def history(matched: int, missed: int) -> Matched:
    return Matched(decode_end_matched=matched, decode_end_missed=missed)


@pytest.mark.parametrize(
    ("known", "end", "why"),
    [
        ({"u_end": None}, "D", Why.NO_INPUT_END),
        ({"u_end": None, "reasoning": True, "reasoning_kept": False}, "D", Why.NO_INPUT_END),
        ({"history": history(3, 2)}, "D", Why.HISTORY_MATCHES),
        ({"history": history(9, 1), "reasoning_kept": False}, "D", Why.HISTORY_MATCHES),
        ({"history": history(3, 3), "tool_continuation": True}, "U", Why.HISTORY_MISSES),
        ({"history": history(0, 3), "reasoning": False}, "U", Why.HISTORY_MISSES),
        ({"history": history(2, 2), "reasoning": False}, "D", Why.NO_REASONING),
        # A thinking template that strips the reasoning of earlier turns, and the same with tools.
        ({"reasoning": True, "reasoning_kept": False}, "U", Why.REASONING_DROPPED),
        ({"reasoning_kept": False, "tools": True}, "U", Why.REASONING_DROPPED),
        # A client that drops the reasoning within its tool loop.
        (
            {"reasoning": True, "reasoning_kept": False, "tool_continuation": True},
            "U",
            Why.REASONING_DROPPED,
        ),
        # Thinking switched off by an empty block that the template drops again.
        ({"reasoning": False, "suffix_start": 490}, "U", Why.SUFFIX_DROPPED),
        ({"reasoning": True, "tool_continuation": True}, "D", Why.TOOL_CONTINUATION),
        ({"reasoning": True, "reasoning_kept": True}, "D", Why.REASONING_KEPT),
        ({"reasoning": False}, "D", Why.NO_REASONING),
        ({"reasoning": False, "reasoning_kept": False}, "D", Why.NO_REASONING),
        ({"tools": True}, "D", Why.TOOLS),
        ({"tools": True, "reasoning": True}, "U", Why.UNKNOWN),
        ({"tools": False}, "U", Why.UNKNOWN),
        ({}, "U", Why.UNKNOWN),
    ],
)
def test_the_rules_of_auto(known: dict[str, Any], end: str, why: Why) -> None:
    assert auto(**known) == (end, why)


@given(KNOWN)
def test_auto_takes_exactly_one_end(known: Known) -> None:
    choice = choose(Policy.AUTO, known)
    assert choice.input_end != choice.decode_end
    assert not choice.prompt_end and not choice.extra
    assert not choice.input_end or known.u_end is not None


@given(KNOWN, st.integers(1, 9))
def test_more_matches_never_turn_decode_end_into_input_end(known: Known, more: int) -> None:
    matched = known.history.decode_end_matched + more
    seen = msgspec.structs.replace(known.history, decode_end_matched=matched)
    after = choose(Policy.AUTO, msgspec.structs.replace(known, history=seen))
    assert after.decode_end >= choose(Policy.AUTO, known).decode_end


@given(KNOWN, st.integers(1, 9))
def test_more_misses_never_turn_input_end_into_decode_end(known: Known, more: int) -> None:
    missed = known.history.decode_end_missed + more
    seen = msgspec.structs.replace(known.history, decode_end_missed=missed)
    after = choose(Policy.AUTO, msgspec.structs.replace(known, history=seen))
    assert after.decode_end <= choose(Policy.AUTO, known).decode_end


@given(KNOWN)
def test_learning_that_reasoning_is_kept_never_turns_decode_end_into_input_end(
    known: Known,
) -> None:
    chosen = [
        choose(Policy.AUTO, msgspec.structs.replace(known, reasoning_kept=kept)).decode_end
        for kept in (False, None, True)
    ]
    assert chosen == sorted(chosen)


@given(KNOWN)
def test_fixed_policies_look_at_nothing(known: Known) -> None:
    chosen = {policy: choose(policy, known) for policy in Policy}
    assert chosen[Policy.MAIN_SPARSE] == Choice(prompt_end=True)
    assert chosen[Policy.INPUT_END] == Choice(input_end=True)
    assert chosen[Policy.DECODE_END] == Choice(decode_end=True)
    assert chosen[Policy.BOTH] == Choice(input_end=True, decode_end=True)


@given(KNOWN)
def test_boundaries_takes_supplied_and_derived_positions_only(known: Known) -> None:
    choice = choose(Policy.BOUNDARIES, known)
    assert not (choice.prompt_end or choice.input_end or choice.decode_end)
    derived = {p for p in (known.verbatim_end, known.suffix_start) if p is not None}
    extra = set(choice.extra)
    assert list(choice.extra) == sorted(extra)
    assert derived <= extra <= derived | set(known.offsets)
    assert len(extra) == min(EXTRA_MAX, len(derived | set(known.offsets)))
    dropped = set(known.offsets) - extra
    assert all(low < high for low in dropped for high in extra - derived), "shallow ones give way"
    assert (choice.why is Why.SUPPLIED) == bool(extra)


@given(KNOWN, st.integers(1, 5000))
def test_the_verbatim_end_only_adds_to_what_was_planned(known: Known, end: int) -> None:
    known = msgspec.structs.replace(known, verbatim_end=None, offsets=known.offsets[:6])
    planned = choose(Policy.BOUNDARIES, known)
    finally_ = choose(Policy.BOUNDARIES, msgspec.structs.replace(known, verbatim_end=end))
    assert set(finally_.extra) == {*planned.extra, end}


# -- what matched so far ---------------------------------------------------------------------------

D, U, J = CheckpointKind.DECODE_END, CheckpointKind.INPUT_END, CheckpointKind.SHARED_PREFIX


def candidate(boundary: int, *kinds: CheckpointKind, reason: Reason | None = None) -> Any:
    return CheckpointMatch(
        boundary=boundary,
        kinds=kinds,
        consumable=reason is None,
        reason=reason,
        hash_matched=reason is not Reason.HASH_MISMATCH,
    )


REWRITTEN = Reason.HASH_MISMATCH


@pytest.mark.parametrize(
    ("candidates", "seen"),
    [
        ([], Observation(None, False)),
        ([candidate(64, D)], Observation(True, False)),
        ([candidate(128, D), candidate(64, U)], Observation(True, False)),
        ([candidate(64, D, U)], Observation(True, False)),
        ([candidate(128, U), candidate(64, D)], Observation(None, True)),
        ([candidate(128, D, reason=REWRITTEN), candidate(64, U)], Observation(False, True)),
        ([candidate(128, D, reason=REWRITTEN), candidate(64, D)], Observation(False, False)),
        ([candidate(64, D, reason=REWRITTEN), candidate(128, D)], Observation(True, False)),
        ([candidate(128, U, reason=REWRITTEN), candidate(64, J)], Observation(None, False)),
        # The tokens are the same: that the bytes cannot be used says nothing of the template.
        ([candidate(128, D, reason=Reason.DOMAIN_MISMATCH)], Observation(True, False)),
    ],
)
def test_what_one_request_says(candidates: list[Any], seen: Observation) -> None:
    assert observe(candidates) == seen
    assert observe(reversed(candidates)) == seen


@pytest.mark.parametrize(
    ("candidates", "seen"),
    [
        ([], Observation(False, False)),
        ([candidate(64, D)], Observation(False, False)),
        ([candidate(64, U)], Observation(False, True)),
        ([candidate(128, D)], Observation(True, False)),
        ([candidate(128, D, reason=REWRITTEN), candidate(64, U)], Observation(False, True)),
    ],
)
def test_a_request_that_goes_on_from_where_a_decode_end_was_chosen(
    candidates: list[Any], seen: Observation
) -> None:
    assert observe(candidates, continues=64) == seen


def test_a_continuation_is_recognised_once_and_by_the_deepest_it_goes_on_from() -> None:
    matches = MatchHistory(keys_max=2)
    matches.expect(b"2", 128, 200)
    matches.expect(b"4", 256, 300)
    assert matches.continued([b"5", b"3", b"1"], 400) is None
    assert matches.continued([b"4", b"3", b"2"], 300) is None, "the same request again"
    assert matches.continued([b"5", b"4", b"3", b"2"], 400) == 256
    assert matches.continued([b"5", b"4", b"3", b"2"], 400) == 128
    assert matches.continued([b"5", b"4", b"3", b"2"], 400) is None
    for name in (b"a", b"b", b"c"):
        matches.expect(name, 64, 100)
    assert matches.continued([b"a"], 200) is None, "the oldest gave way"


def test_pairs_are_counted_apart() -> None:
    matches = MatchHistory()
    matches.add("t", "a", Observation(True))
    matches.add("t", "a", Observation(False, True))
    matches.add("t", "b", Observation(None, True))
    matches.add("t", "c", Observation())
    assert matches.of("t", "a") == Matched(
        decode_end_matched=1, decode_end_missed=1, input_end_matched=1
    )
    assert matches.of("t", "b") == Matched(input_end_matched=1)
    assert matches.of("x", "c") == Matched()
    assert len(matches) == 2, "what says nothing is not remembered"


def test_the_pair_counted_longest_ago_gives_way() -> None:
    matches = MatchHistory(keys_max=2)
    for client in ("a", "b", "a", "c"):
        matches.add("t", client, Observation(True))
    assert [matches.of("t", client).decode_end_matched for client in "abc"] == [2, 0, 1]


@given(st.lists(st.builds(Observation, MAYBE, st.booleans()), max_size=200))
def test_counts_stay_within_the_window(seen: list[Observation]) -> None:
    matches = MatchHistory()
    for one in seen:
        matches.add("t", "c", one)
    assert sum(msgspec.structs.astuple(matches.of("t", "c"))) <= WINDOW


@given(st.booleans(), st.integers(1, 300))
def test_a_client_that_changes_is_learnt_again(before: bool, outcomes: int) -> None:
    """Whatever was counted before, a window of the opposite decides."""
    matches = MatchHistory()
    for _ in range(outcomes):
        matches.add("t", "c", Observation(before))
    for _ in range(WINDOW):
        matches.add("t", "c", Observation(not before))
    choice = choose(Policy.AUTO, Known(u_end=5, history=matches.of("t", "c")))
    assert choice.why is (Why.HISTORY_MISSES if before else Why.HISTORY_MATCHES)
