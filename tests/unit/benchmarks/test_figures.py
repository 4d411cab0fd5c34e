"""Each question's figures, counted by hand on a handful of requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.benchmarks.reuse.accounting import missing_counterparts, verdicts
from backhaul.benchmarks.reuse.figures import QUESTIONS, Context, contexts, gather
from backhaul.benchmarks.reuse.record import (
    Arm,
    ArmResult,
    Budget,
    EndFate,
    KindResult,
    PromptEndAt,
    Relation,
    RequestResult,
    Result,
    Source,
)
from backhaul.benchmarks.reuse.statistics import Estimate, Term, ratio
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.errors import ConfigError

D, U, P = CheckpointKind.DECODE_END, CheckpointKind.INPUT_END, CheckpointKind.PROMPT_END
J = CheckpointKind.SHARED_PREFIX


def arm(policy: str, **more: Any) -> Arm:
    return Arm(source=Source.REAL, workload="w", policy=policy, **more)


def request(name: str, policy: str = "both", **more: Any) -> RequestResult:
    """100 prompt tokens unless said otherwise; a conversation of its own by the first letter."""
    return RequestResult(
        arm=more.pop("arm", None) or arm(policy),
        request=name,
        conversation=name[0],
        **{"prompt_tokens": 100, **more},
    )


def done(policy: str, **more: Any) -> ArmResult:
    return ArmResult(
        arm=more.pop("arm", None) or arm(policy), **{"seconds": 10.0, "requests": 5, **more}
    )


BOTH = [
    request("a0", ttft_s=0.4, residency_s=1.0),
    # D_end, in a tool loop. Without it U_end at 40, without either 20.
    request(
        "a1",
        relation=Relation(continuation=1, reuse=1, tool_continuation=True, decode_end=80),
        local_tokens=20,
        loaded_tokens=60,
        selected="decode_end",
        selected_boundary=80,
        decode_end=EndFate.SELECTED,
        without={D: 40},
        added_flops={D: 400.0},
        loaded_flops=600.0,
        saved_flops=800.0,
        prefill_flops=1000.0,
        ttft_s=0.1,
        residency_s=2.0,
    ),
    # Rewritten before P_end: U_end is used; a junction at 10 was there too.
    request(
        "b1",
        relation=Relation(continuation=1, reuse=1, input_end=50, rewritten=(D, P)),
        loaded_tokens=50,
        selected="input_end",
        selected_boundary=50,
        decode_end=EndFate.REWRITTEN,
        input_end=EndFate.SELECTED,
        without={U: 10},
        added_flops={U: 450.0},
        junction_known=True,
        loaded_flops=500.0,
        saved_flops=500.0,
        prefill_flops=1000.0,
        ttft_s=0.2,
        residency_s=3.0,
    ),
    # A second continuation that found nothing: what was kept is gone.
    request(
        "b2",
        prompt_tokens=200,
        relation=Relation(continuation=2, reuse=2, decode_end=100),
        decode_end=EndFate.UNUSABLE,
        input_end=EndFate.NOT_KEPT,
        prefill_flops=2000.0,
        ttft_s=0.5,
        residency_s=4.0,
    ),
]
SPARSE = [
    request("a0", "main_sparse", ttft_s=0.4),
    request("a1", "main_sparse", local_tokens=20, saved_flops=200.0, ttft_s=0.3),
    request("b1", "main_sparse", local_tokens=10, saved_flops=100.0, ttft_s=0.4),
    request("b2", "main_sparse", prompt_tokens=200, local_tokens=40, saved_flops=400.0, ttft_s=0.2),
]
DECODE_ONLY = [
    request("a0", "decode_end"),
    request("a1", "decode_end", local_tokens=20, loaded_tokens=60),
    request("b1", "decode_end", local_tokens=10),
    request("b2", "decode_end", prompt_tokens=200, loaded_tokens=100),
]
KINDS = {
    D: KindResult(logical=4, duplicates=1, created=3, state_bytes=300, evicted=2),
    U: KindResult(logical=4, duplicates=2, created=2, state_bytes=200),
    J: KindResult(logical=2, duplicates=0, created=2, state_bytes=200, evicted=1),
    P: KindResult(logical=5, duplicates=3, created=1, state_bytes=100),
}
RESULTS: list[Result] = [
    *BOTH,
    done("both", kinds=KINDS, evicted_unused=1, refused=4, residents=1.5),
    *SPARSE,
    done("main_sparse"),
    *DECODE_ONLY,
    done("decode_end"),
]


def context(policy: str = "both", results: list[Result] = RESULTS) -> Context:
    return next(c for c in contexts(gather(results)) if c.cell.arm.policy == policy)


def figures(number: int, policy: str = "both") -> dict[str, float | None]:
    question = next(q for q in QUESTIONS if q.number == number)
    return {f.name: f.estimate.value for f in question.figures(context(policy))}


def test_there_are_thirteen_questions_in_order() -> None:
    assert [question.number for question in QUESTIONS] == list(range(1, 14))


EXPECTED: dict[int, dict[str, float]] = {
    # a1 and b1: 80 + 50 of 200.
    1: {"first_continuation_effective_hit_rate": 130 / 200, "hit tokens": 65},
    # Of a1, b1, b2.
    2: {"decode_end_hit_rate": 1 / 3, "D_end could match": 2 / 3},
    3: {"of D_end hits": 1.0, "D_end hits of tool continuations": 1.0},
    # b1 and b2 missed; b1 resumed at U_end.
    4: {"input_end_fallback_rate": 1 / 2, "where rewritten": 1.0, "D_end missed": 2 / 3},
    5: {"avoided by U_end": 1.0, "P_end unreachable": 1 / 2, "hit there": 0.5},
    6: {"U_end decisive": 1.0, "tokens added": 40, "junction known": 1 / 4},
    # 130 of 500; the baseline has 70.
    7: {"reused": 130 / 500, "extra against main_sparse": 60 / 500, "extra per request": 15},
    # 1,300 of 4,000 FLOPs; the baseline 700 over four requests.
    8: {"avoided": 1300 / 4000, "extra per request against main_sparse": 150},
    # 800 bytes of state, 110 tokens and 1,100 FLOPs loaded.
    9: {
        "P_end bytes": 100,
        "per P_end": 100,
        "U_end bytes": 200,
        "per U_end": 100,
        "D_end bytes": 300,
        "per D_end": 100,
        "saved_prompt_tokens_per_retained_state_byte": 110 / 800 * 2**20,
        "saved_prefill_work_per_retained_state_byte": 1100 / 800,
    },
    # U_end: b1's 40 tokens, 450 FLOPs. decode_end alone reused 190, so both lost 60 of 500.
    10: {
        "incremental_hit_rate_of_second_checkpoint": 1 / 4,
        "U_end's tokens": 10,
        "incremental_saved_work_of_second_checkpoint": 450 / 4,
        "against the better single end, here": -60 / 500,
        "evicted": 3,
        "evicted unused": 1,
        "refused": 4,
    },
    11: {
        "TTFT": 0.3,
        "TTFT p50": 0.3,
        "request throughput": 0.5,
        "input throughput": 50,
        "residency": 2.5,
        "residents": 1.5,
        "TTFT against main_sparse": -0.1 / 4,
    },
    12: {
        "first reuse": 130 / 200,
        "steady state": 0.0,
        "first reuse that found nothing": 0.0,
        "later ones that found nothing": 1.0,
    },
    13: {
        "shared": 6 / 15,
        "P_end": 3 / 5,
        "U_end": 1 / 2,
        "D_end": 1 / 4,
        "junction": 0.0,
        "logical ends": 15,
    },
}


@pytest.mark.parametrize("number", EXPECTED)
def test_a_question_counted_by_hand(number: int) -> None:
    found = figures(number)
    for name, value in EXPECTED[number].items():
        assert found[name] == pytest.approx(value), name


def test_nothing_to_count_is_no_number() -> None:
    alone = context("both", [request("z0"), done("both")])
    for question in QUESTIONS:
        for figure in question.figures(alone):
            value = figure.estimate.value
            assert value is None or value == 0 or figure.name.endswith("throughput")


def answers(number: int, results: list[Result], policy: str = "both") -> dict[str, Estimate]:
    return {f.name: f.estimate for f in QUESTIONS[number - 1].figures(context(policy, results))}


def test_u_end_of_an_earlier_request_is_a_fallback() -> None:
    """After a tool loop the next user message departs within the loop: what is left is the U_end
    of the user's turn, and that of the predecessor is gone."""
    after_loop = Relation(continuation=1, reuse=4, input_ends=(40,), rewritten=(D, U, P))
    gone = {"decode_end": EndFate.REWRITTEN, "input_end": EndFate.REWRITTEN}
    results: list[Result] = [
        # Loaded, and from prefill's own cache.
        request(
            "a5",
            relation=after_loop,
            loaded_tokens=40,
            selected="input_end",
            selected_kinds=(U, J),
            selected_boundary=40,
            **gone,
        ),
        request("b5", relation=after_loop, local_tokens=40, **gone),
        # A junction at the same position, and a hit that is nobody's U_end.
        request("c5", relation=after_loop, loaded_tokens=40, selected_kinds=(J,), **gone),
        request("d5", relation=after_loop, local_tokens=20, **gone),
        done("both"),
    ]
    found = answers(4, results)
    assert found["input_end_fallback_rate"].value == found["where rewritten"].value == 2 / 4
    assert answers(5, results)["avoided by U_end"].value == 2 / 4


@pytest.mark.parametrize("policy", ["none", "main_sparse", "decode_end", "boundaries"])
def test_without_u_end_there_is_no_fallback_to_it(policy: str) -> None:
    """A P_end that lies on the same boundary as U_end would."""
    relation = Relation(continuation=1, reuse=1, input_end=50, input_ends=(50,), rewritten=(D, P))
    one = request("a1", policy, relation=relation, local_tokens=50, decode_end=EndFate.REWRITTEN)
    found = answers(4, [one, done(policy)], policy)
    assert found["input_end_fallback_rate"].value is found["where rewritten"].value is None
    assert found["D_end missed"].value == 1.0
    found = answers(5, [one, done(policy)], policy)
    assert found["avoided by U_end"].value is None and found["hit there"].value == 0.5


@pytest.mark.parametrize("policy", ["none", "input_end", "decode_end", "auto"])
def test_one_end_has_no_second_checkpoint(policy: str) -> None:
    one = request(
        "a1", policy, loaded_tokens=50, selected_kinds=(U,), without={U: 0}, added_flops={U: 500.0}
    )
    found = answers(10, [one, done(policy, refused=2)], policy)
    assert found["refused"].value == 2
    for name in (
        "incremental_hit_rate_of_second_checkpoint",
        "U_end's tokens",
        "incremental_saved_work_of_second_checkpoint",
    ):
        assert found[name].value is None, name


def test_work_that_no_result_tells_is_no_number() -> None:
    one = request("a1", loaded_tokens=50, selected_kinds=(U,), without={U: 0})
    found = answers(10, [one, done("both")])
    assert found["incremental_hit_rate_of_second_checkpoint"].value == 1.0
    assert found["incremental_saved_work_of_second_checkpoint"].value is None


def test_throughput_and_residents_are_resampled_by_repeat() -> None:
    results: list[Result] = []
    for repeat, seconds in enumerate((5.0, 10.0, 25.0)):
        one = arm("both", repeat=repeat)
        results += [request(f"{c}1", arm=one, ttft_s=seconds) for c in "abcd"]
        results.append(done("both", arm=one, seconds=seconds, requests=4, residents=seconds / 5))
    found = answers(11, results)
    # 12 requests of 100 tokens in 40 s; no resample leaves four in 25 s ... four in 5 s.
    bounds = {
        "request throughput": (4 / 25, 12 / 40, 4 / 5),
        "input throughput": (400 / 25, 1200 / 40, 400 / 5),
        "residents": (1, 8 / 3, 5),
        "TTFT p50": (5, 10, 25),
        "TTFT p95": (5, 25, 25),
    }
    for name, (lowest, value, highest) in bounds.items():
        estimate = found[name]
        assert estimate.value == pytest.approx(value), name
        assert estimate.low is not None and estimate.high is not None, name
        assert lowest - 1e-9 <= estimate.low < estimate.high <= highest + 1e-9, name
        assert estimate.low <= value <= estimate.high, name
    alone = answers(11, RESULTS)["request throughput"]
    assert alone.value == 0.5 and alone.low is None


def test_a_budget_is_compared_with_the_same_without() -> None:
    tight = {"budget": Budget.CAPACITY, "budget_bytes": 1000}
    squeezed: list[Result] = []
    for result in RESULTS:
        squeezed.append(
            msgspec.structs.replace(result, arm=msgspec.structs.replace(result.arm, **tight))
        )
    book = gather([*RESULTS, *squeezed])
    found = next(
        c for c in contexts(book) if c.cell.arm.policy == "both" and c.cell.arm.budget_bytes
    )
    assert found.roomy["both"].arm.budget is Budget.UNLIMITED
    names = [f.name for f in QUESTIONS[9].figures(found)]
    assert "against the better single end, without budget" in names


def test_an_arm_that_was_cut_off_is_left_out_and_one_twice_refused() -> None:
    book = gather([*RESULTS, request("x1", "input_end")])
    assert set(next(iter(book.values()))) == {"both", "main_sparse", "decode_end"}
    with pytest.raises(ConfigError, match="an arm is there twice: w, both"):
        gather([*RESULTS, done("both")])
    with pytest.raises(ConfigError, match="no finished arm"):
        gather(BOTH)


@pytest.mark.parametrize("cut", range(len(BOTH) + 1))
def test_what_a_run_that_was_cut_off_left_is_not_counted_beside_its_repetition(cut: int) -> None:
    left = [msgspec.structs.replace(one, loaded_tokens=99) for one in BOTH[:cut]]
    closed = done("both", requests=len(BOTH))
    (cell,) = next(iter(gather([*left, *BOTH, closed, *left[:1]]).values())).values()
    assert cell.requests == BOTH


def test_the_account_says_where_little_is_added() -> None:
    present = {"prompt_end": PromptEndAt.PRESENT}
    results: list[Result] = []
    for policy, absent_hit, present_hit in (("none", 0, 90), ("both", 90, 91)):
        for extra, hit in (({}, absent_hit), (present, present_hit)):
            one = arm(policy, **extra)
            ttft = 2.0 - hit / 100
            results += [
                request(f"{c}1", arm=one, local_tokens=hit, ttft_s=ttft) for c in "abcdefgh"
            ]
            kinds = {U: KindResult(logical=8, created=8)} if policy == "both" else {}
            results.append(done(policy, arm=one, kinds=kinds, requests=8))
    first, second = verdicts(gather(results))
    assert first.arm.prompt_end is PromptEndAt.PRESENT
    assert "+1.0% of the prompt's tokens: both adds little here" in first.text
    assert "+90.0%" in second.text and "little" not in second.text
    assert "900 ms sooner" in second.text
    assert missing_counterparts([first, second]) == []
    assert missing_counterparts([second]) == [second.arm]


@pytest.mark.parametrize(
    ("policy", "kinds", "refused", "idle"),
    [
        ("boundaries", {}, 0, True),
        ("boundaries", {J: KindResult(logical=3, created=3)}, 0, True),
        ("boundaries", {CheckpointKind.BOUNDARY: KindResult(logical=1, created=1)}, 0, False),
        ("boundaries", {}, 1, False),
        ("input_end", {D: KindResult(logical=1, created=1)}, 0, True),
        ("both", {D: KindResult(logical=1, created=1)}, 0, False),
        ("main_sparse", {}, 0, False),
    ],
)
def test_a_policy_that_had_nothing_to_keep_is_not_judged(
    policy: str, kinds: dict[CheckpointKind, KindResult], refused: int, idle: bool
) -> None:
    results: list[Result] = [
        *(request(f"{c}1", name) for name in ("none", policy) for c in "ab"),
        done("none"),
        done(policy, kinds=kinds, refused=refused),
    ]
    (verdict,) = verdicts(gather(results))
    assert verdict.idle is idle
    assert ("had none of its ends to keep: nothing can be said" in verdict.text) is idle
    assert ("adds little here" in verdict.text) is not idle


terms = st.lists(
    st.builds(
        Term,
        st.tuples(st.just(0), st.sampled_from("abcd")),
        st.integers(0, 100),
        st.integers(1, 100),
    ),
    min_size=1,
    max_size=30,
)


@given(terms)
def test_an_interval_lies_around_what_its_parts_allow(found: list[Term]) -> None:
    estimate = ratio(found)
    assert estimate.value is not None
    assert estimate == ratio(found), "the same draws every time"
    if len({term.cluster for term in found}) == 1:
        assert estimate.low is None and estimate.high is None
        return
    assert estimate.low is not None and estimate.high is not None
    assert estimate.low <= estimate.high
    each = [
        ratio([t for t in found if t.cluster == cluster]).value or 0.0
        for cluster in {t.cluster for t in found}
    ]
    assert min(each) - 1e-9 <= estimate.low and estimate.high <= max(each) + 1e-9


def test_equal_conversations_leave_no_doubt() -> None:
    estimate = ratio([Term((0, c), 3.0, 4.0) for c in "abcde"])
    assert estimate[:3] == (0.75, 0.75, 0.75)
