"""Policies that choose per request, through vLLM's scheduler: what is published, and nothing else.

``check_idle`` compares every published state and block with what the model gives for the tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import BLOCK, Finished, Pair, SimEngine
from sim_kit import ASYNC, kinds, tokens
from sim_record import check_record

from backhaul.protocols.checkpoint import CheckpointKind

B = BLOCK
D, U, J = CheckpointKind.DECODE_END, CheckpointKind.INPUT_END, CheckpointKind.SHARED_PREFIX
X = CheckpointKind.BOUNDARY


def engine(pair: Pair, policy: str, name: str = "one", **keywords: Any) -> SimEngine:
    options = {"policy": policy, "publish_prompt_end": False}
    return pair.engine(name=name, options=options, **keywords)


def run(engine: SimEngine, prompt: list[int], output: int, **hints: Any) -> Finished:
    return engine.run(prompt, output, params={"backhaul": hints})


# -- auto --------------------------------------------------------------------------------------


@ASYNC
@pytest.mark.parametrize(
    ("hints", "expected", "why"),
    [
        ({}, D, "no_input_end"),
        ({"u_end": 4 * B}, U, "unknown"),
        ({"u_end": 4 * B, "tool_continuation": True}, D, "tool_continuation"),
        ({"u_end": 4 * B, "reasoning": True, "reasoning_kept": False}, U, "reasoning_dropped"),
        ({"u_end": 4 * B, "reasoning": True, "reasoning_kept": True}, D, "reasoning_kept"),
        ({"u_end": 4 * B, "suffix_start": 4 * B, "reasoning": False}, U, "suffix_dropped"),
    ],
)
def test_auto_publishes_one_end(
    pair: Pair, hints: dict[str, Any], expected: CheckpointKind, why: str, asynchronous: bool
) -> None:
    one = engine(pair, "auto", asynchronous=asynchronous, budget=20)
    done = run(one, tokens(4 * B + 5, 1), 2 * B + 6, **hints)
    pair.check_idle()
    boundary = 4 * B if expected is U else 7 * B
    assert kinds(pair) == [(boundary, {expected})]
    assert done.params["backhaul"]["chosen"] == {"ends": [expected], "why": why}
    assert one.counters[f"chosen_ends|{expected}|{why}"] == 1
    assert one.counters["publication_failures"] == 0
    materialised = {k: n for k, n in one.observed.items() if k.startswith("materialise_seconds")}
    assert materialised == {f"materialise_seconds|{expected}": 1}
    assert one.observed["finish_to_consumable_seconds"] == (expected is D)


def test_auto_learns_that_a_clients_replies_do_not_come_back(pair: Pair) -> None:
    """Structure says that they would; the client rewrites them. Others are not affected."""
    one = engine(pair, "auto")
    facts = {"reasoning": False, "template": "t", "client": "c"}
    whys = []
    for turn in range(6):
        prompt = tokens(3 * B, turn)
        first = run(one, prompt + tokens(4, 90), 2 * B, u_end=3 * B, **facts)
        whys.append(first.params["backhaul"]["chosen"]["why"])
        pair.check_idle()
        # All that is in the store is the D_end, which does not match: nothing says so but that.
        run(one, prompt + tokens(5 * B, 91 + turn), 1, u_end=3 * B, publish=False, **facts)
    other = run(one, tokens(3 * B, 50), B, u_end=2 * B, reasoning=False, client="other")
    assert other.params["backhaul"]["chosen"]["why"] == "no_reasoning"
    assert whys[0] == "no_reasoning" and whys[-1] == "history_misses"
    pair.check_idle()


def test_only_auto_learns(pair: Pair) -> None:
    """Nothing else reads what was learnt."""
    one = engine(pair, "both")
    facts = {"reasoning": False, "template": "t", "client": "c"}
    for turn in range(4):
        prompt = tokens(3 * B, turn)
        run(one, prompt + tokens(4, 90), 2 * B, u_end=3 * B, **facts)
        pair.check_idle()
        run(one, prompt + tokens(5 * B, 91 + turn), 1, u_end=3 * B, publish=False, **facts)
    last = run(one, tokens(3 * B, 50), B, u_end=2 * B, policy="auto", **facts)
    assert last.params["backhaul"]["chosen"]["why"] == "no_reasoning"
    pair.check_idle()


def test_the_second_leg_follows_the_first(pair: Pair) -> None:
    decode = engine(pair, "auto")
    for ends, expected in (([U], [(4 * B, {U})]), ([D], [(4 * B, {U}), (8 * B, {D})])):
        prompt = tokens(4 * B + 5, len(expected))
        run(decode, prompt, 3 * B + 6, u_end=4 * B, ends=ends)
        assert kinds(pair) == expected
    assert decode.counters["chosen_ends|input_end|handed_over"] == 1


@pytest.mark.parametrize("policy", ["main_sparse", "input_end", "decode_end", "both"])
def test_a_request_may_choose_its_policy(pair: Pair, policy: str) -> None:
    one = engine(pair, "main_sparse" if policy == "both" else "both")
    run(one, tokens(5 * B + 3, 1), B, u_end=3 * B, policy=policy)
    expected = {"input_end": {U}, "decode_end": {D}, "both": {U, D}, "main_sparse": set()}[policy]
    assert {kind for _, found in kinds(pair) for kind in found} == expected
    pair.check_idle()


@pytest.mark.parametrize("policy", ["auto", "boundaries"])
def test_junctions_are_kept_in_every_policy(pair: Pair, policy: str) -> None:
    one = engine(pair, policy)
    shared = tokens(3 * B + 2, 1)
    for seed in range(2, 5):
        run(one, shared + tokens(2 * B, seed), 2, u_end=5 * B)
    assert (3 * B, {J}) in kinds(pair)
    pair.check_idle()


# -- boundaries --------------------------------------------------------------------------------


@ASYNC
@pytest.mark.parametrize("budget", [20, 1000])
def test_supplied_boundaries_are_published_and_nothing_else(
    pair: Pair, budget: int, asynchronous: bool
) -> None:
    one = engine(pair, "boundaries", asynchronous=asynchronous, budget=budget)
    offsets = [3, B, 2 * B + 1, 2 * B + 5, 5 * B - 1, 7 * B + 4]
    done = run(one, tokens(7 * B + 4, 1), 3 * B, u_end=6 * B, boundaries=offsets)
    pair.check_idle()
    assert kinds(pair) == [(n * B, {X}) for n in (1, 2, 4, 7)]
    assert done.params["backhaul"]["chosen"]["why"] == "supplied"
    assert one.counters["publications|boundary"] == 4
    again = engine(pair, "boundaries", name="two")
    for deep in (1, 2, 4, 7):
        next_turn = run(again, done.prompt[: deep * B + 3] + tokens(B, 10 + deep), 2)
        assert next_turn.resumed == deep * B
    pair.check_idle()


def test_a_request_without_positions_publishes_nothing(pair: Pair) -> None:
    one = engine(pair, "boundaries")
    done = run(one, tokens(5 * B, 1), 2 * B, u_end=4 * B)
    assert kinds(pair) == []
    assert done.params["backhaul"]["chosen"] == {"ends": [], "why": "nothing_supplied"}
    assert one.counters["chosen_ends|none|nothing_supplied"] == 1
    pair.check_idle()


def test_too_many_or_wrong_positions_are_counted_and_ignored(pair: Pair) -> None:
    one = engine(pair, "boundaries")
    for wrong in (list(range(1, 10)), [0], [10**9], "8", [1.5]):
        run(one, tokens(3 * B, 1), 1, boundaries=wrong)
    assert kinds(pair) == []
    assert one.counters["hints_rejected|boundaries"] == 5
    pair.check_idle()


@ASYNC
@pytest.mark.parametrize(
    ("policy", "output", "stops", "hints", "reason"),
    [
        ("both", 2 * B, True, {}, None),
        ("both", 2 * B, False, {}, "finish_excluded"),
        ("both", 2 * B, True, {"publish": False}, "not_wanted"),
        ("input_end", 2 * B, False, {}, "not_wanted"),
        ("both", 3, True, {}, "below_grid"),
    ],
)
def test_every_reply_whose_end_is_not_published_says_why(
    pair: Pair,
    policy: str,
    output: int,
    stops: bool,
    hints: dict[str, Any],
    reason: str | None,
    asynchronous: bool,
) -> None:
    one = engine(pair, policy, asynchronous=asynchronous)
    prompt = tokens(3 * B + 4, 1)
    done = one.run(prompt, output, stops=stops, params={"backhaul": hints})
    pair.check_idle()
    record = check_record(one, done)
    assert record.decode_end_reason == reason
    assert record.publishing_decode_end == (reason is None)
    assert ((5 * B, {D}) in kinds(pair)) == (reason is None)


@ASYNC
@pytest.mark.parametrize(
    ("params", "kind", "replies"),
    [
        ({"do_remote_decode": True}, None, False),
        ({}, "prefill", False),
        ({}, None, True),
        ({}, "both", True),
    ],
)
def test_a_prefill_legs_token_is_no_reply(
    pair: Pair, params: dict[str, Any], kind: str | None, replies: bool, asynchronous: bool
) -> None:
    """However it ends: of a prompt that is one token longer than a boundary its one token would
    end on that boundary, inside the prompt."""
    options: dict[str, Any] = {
        "policy": "decode_end", "publish_prompt_end": False, "publish_on": ["stop", "length"],
        **({"worker_kind": kind} if kind else {}),
    }  # fmt: skip
    one = pair.engine(name="one", options=options, asynchronous=asynchronous)
    # A reply that may go on, and stops, is what a prefill engine gives that was asked itself.
    ways = (False,) if kind == "prefill" else (True, False)
    for stops in ways:
        prompt = tokens(3 * B + 1, 7 + stops)
        record = check_record(one, one.run(prompt, 1, stops=stops, params=params))
        assert record.publishing_decode_end == replies
        assert record.chosen.ends == (D,), "which decode is told"
        assert record.decode_end_reason == (None if replies else "no_reply")
    pair.check_idle()
    assert [ends for _, ends in kinds(pair) if D in ends] == [{D}] * 2 * replies


@ASYNC
@pytest.mark.parametrize("call_at", [0, 1, B - 3, 2 * B + 1, 3 * B, None])
def test_the_verbatim_part_of_a_reply_is_published(
    pair: Pair, call_at: int | None, asynchronous: bool
) -> None:
    """Up to the token with which the parser's rewriting begins, however long the reply goes on."""
    one = engine(pair, "boundaries", asynchronous=asynchronous)
    prompt = tokens(3 * B + 3, 1)
    reply = run(one, prompt, 4 * B + 2, publish=False).output
    rewrites = [] if call_at is None else [reply[call_at]]
    first = reply.index(rewrites[0]) if rewrites else 4 * B + 2 - 1
    done = run(one, prompt, 4 * B + 2, rewrites=rewrites)
    assert done.output == reply
    pair.check_idle()
    end = (len(prompt) + first) // B * B
    # The position from which the reply starts is the prompt's, not the reply's.
    assert kinds(pair) == ([(end, {X})] if end >= len(prompt) - 1 else [])
    assert done.params["backhaul"]["publishing_decode_end"] is False


@pytest.mark.parametrize("drafts", [2, 3, 5])
def test_the_verbatim_end_of_a_reply_that_ends_among_accepted_drafts(
    pair: Pair, drafts: int
) -> None:
    """The engine has computed drafts beyond the reply's end, of which there are no token ids."""
    one = engine(pair, "boundaries", drafts=drafts, accept=1.0)
    for output in range(B, B + 2 * drafts + 2):
        prompt = tokens(3 * B - 1, output)
        done = run(one, prompt, output, rewrites=[])
        pair.check_idle()
        end = (len(prompt) + len(done.output) - 1) // B * B
        assert (end, {X}) in kinds(pair)


def test_a_suffix_that_will_be_gone_is_left_out(pair: Pair) -> None:
    one = engine(pair, "boundaries")
    run(one, tokens(5 * B + 3, 1), B, u_end=5 * B + 1, suffix_start=4 * B + 6)
    assert kinds(pair) == [(4 * B, {X})]
    pair.check_idle()
