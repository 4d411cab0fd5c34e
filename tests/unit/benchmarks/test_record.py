"""Results as lines, and what a request's candidates say about its predecessor's ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backhaul.benchmarks.reuse.model_shape import preset
from backhaul.benchmarks.reuse.real import request_result
from backhaul.benchmarks.reuse.record import (
    Arm,
    ArmResult,
    EndFate,
    KindResult,
    RequestResult,
    Source,
    read_results,
    write_results,
)
from backhaul.benchmarks.reuse.relations import Relations, ends_of, fate, hits_without
from backhaul.benchmarks.reuse.trace import Span, Turn
from backhaul.deploy.pair import Leg
from backhaul.deploy.pair import Turn as Answer
from backhaul.protocols.checkpoint import CheckpointKind, PassedOver, Reason
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.record import Candidate, RequestRecord, Selected

ARM = Arm(source=Source.REAL, workload="full_replay", policy="both")
D, U, P = CheckpointKind.DECODE_END, CheckpointKind.INPUT_END, CheckpointKind.PROMPT_END


def candidate(
    boundary: int, *kinds: CheckpointKind, selected: bool = False, reason: Reason | None = None
) -> Candidate:
    usable = reason is None
    return Candidate(
        boundary=boundary,
        kinds=kinds,
        retained=usable,
        hash_matched=usable,
        consumable=usable,
        selected=selected,
        reason=reason,
        passed_over=PassedOver.SHALLOWER if usable and not selected else None,
    )


def turn(name: str, prompt: tuple[Span, ...], output: int, **more: object) -> Turn:
    return Turn(
        request=name,
        prompt=prompt,
        output=(Span(f"{name}/out", 0, output),),
        **more,  # type: ignore[arg-type]
    )


def test_lines_survive_and_a_torn_one_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    request = RequestResult(
        arm=ARM, request="r", prompt_tokens=100, local_tokens=32, loaded_tokens=32, without={D: 32}
    )
    done = ArmResult(arm=ARM, seconds=2.0, requests=1, kinds={D: KindResult(created=1)})
    with path.open("wb") as file:
        write_results([request, done], file)
        file.write(b'{"type":"request","arm"')
    assert list(read_results(path)) == [request, done]
    assert request.hit_tokens == 64 and request.recomputed_tokens == 36


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", '{"type":"arm"}', '{"type":"x"}'])
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f"\n{line}\n"[1:])
    with pytest.raises(ConfigError, match=r"results.jsonl:1: no result"):
        list(read_results(path))


NUMBERS = [
    (kind, name)
    for kind in (RequestResult, ArmResult)
    for name, field in msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"].items()
    if field.get("type") in ("integer", "number") and name != "version"
]


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.parametrize(
    "number", ["-1", "-0.001", "NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "null"]
)
def test_a_number_that_cannot_be_is_named(
    tmp_path: Path, kind: type[Any], name: str, number: str
) -> None:
    path = tmp_path / "results.jsonl"
    needed = {"request": "r", "prompt_tokens": 1, "seconds": 1.0, "requests": 1}
    known = {n: v for n, v in needed.items() if n in kind.__struct_fields__}
    plain = msgspec.to_builtins(kind(arm=ARM, **known))
    whole = json.dumps(plain)
    odd = json.dumps(plain | {name: "odd"}).replace('"odd"', number)
    path.write_text(f"{whole}\n{odd}\n")
    with pytest.raises(ConfigError) as raised:
        list(read_results(path))
    assert "results.jsonl:2: no result of this experiment: " in str(raised.value)
    assert f"$.{name}" in str(raised.value) or "malformed" in str(raised.value)


def test_a_file_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        list(read_results(tmp_path / "none"))


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with path.open("wb") as file:
        write_results([ArmResult(version=7, arm=ARM, seconds=1, requests=0)], file)
    with pytest.raises(ConfigError, match="version 7, this report reads 1"):
        list(read_results(path))


def test_ends_lie_where_states_exist() -> None:
    one = turn("a", (Span("s", 0, 100),), 40, u_end=95)
    # n = 100 + 40 - 1 committed tokens.
    assert ends_of(one, 32) == (128, 64, 96)
    # A prompt of 96 tokens and one more: decode starts at 95, on no boundary, and never reaches
    # another; prefill was given 95 tokens.
    short = turn("b", (Span("s", 0, 96),), 1)
    assert ends_of(short, 32, handed_tokens=1) == (96, 0, 64)
    assert ends_of(turn("c", (Span("s", 0, 100),), 1), 32, handed_tokens=1).decode_end == 0


def test_relations_name_what_was_rewritten() -> None:
    relations = Relations(grid=10)
    first_turn = turn("a", (Span("s", 0, 100),), 50, u_end=95)
    assert relations.add(first_turn).continuation == 0
    replay = turn("b", (Span("s", 0, 100), Span("a/out", 0, 50), Span("u", 0, 9)), 5, after="a")
    kept = relations.add(replay)
    assert (kept.decode_end, kept.input_end, kept.prompt_end) == (140, 90, 90)
    assert kept.continuation == 1 and not kept.rewritten
    dropped = turn("c", (Span("s", 0, 95), Span("a/out", 20, 50), Span("v", 0, 9)), 5, after="a")
    relation = relations.add(dropped)
    assert relation.continuation == 2
    assert relation.rewritten == (D,) and relation.input_end == 90
    assert relations.producer_age(dropped, D, 140) == 1
    later = turn("d", (Span("s", 0, 100),), 5, after="b")
    relations.add(later)
    assert relations.producer_age(later, U, 90) == 2
    assert relations.producer_age(later, U, 50) == 0


def test_reuse_counts_a_conversations_history() -> None:
    relations = Relations(grid=10)
    system = (Span("s", 0, 50),)
    seen = {}
    for name, after in (("a", ""), ("b", "a"), ("c", "b"), ("d", "b"), ("e", "d"), ("x", "")):
        relation = relations.add(turn(name, system, 20, after=after))
        seen[name] = (relation.continuation, relation.reuse)
    # d branches off after b. x is another conversation, whose opening was there once before.
    assert seen == {"a": (0, 0), "b": (1, 1), "c": (1, 2), "d": (2, 3), "e": (1, 4), "x": (0, 1)}


def test_u_ends_of_a_loop_outlive_its_reasoning() -> None:
    """A tool loop a -> b, then a user message that drops the reasoning of both replies."""
    relations = Relations(grid=10)
    question = Span("q", 0, 100)
    relations.add(turn("a", (question, Span("g", 0, 5)), 50, u_end=100))
    looped = (question, Span("g", 0, 5), Span("a/out", 0, 50), Span("tool", 0, 30))
    step = relations.add(turn("b", (*looped, Span("g", 0, 5)), 50, after="a", u_end=185))
    assert step.input_ends == (100,) and step.input_end == 100
    cleaned = (question, Span("h", 0, 3), Span("a/out", 20, 50), Span("next", 0, 60))
    asked = relations.add(turn("c", cleaned, 50, after="b", u_end=190))
    assert asked.rewritten == (D, U, P) and asked.input_end == 0
    assert asked.input_ends == (100,)
    assert relations.producer_age(turn("c", cleaned, 50, after="b"), U, 100) == 2


def test_fates_are_told_apart() -> None:
    relations = Relations(grid=10)
    relations.add(turn("a", (Span("s", 0, 100),), 50, u_end=95))
    relation = relations.add(
        turn("b", (Span("s", 0, 100), Span("a/out", 0, 50), Span("u", 0, 9)), 5, after="a")
    )
    used = [candidate(140, D, selected=True), candidate(90, U)]
    assert fate(D, relation, used, 140) is EndFate.SELECTED
    assert fate(U, relation, used, 140) is EndFate.PASSED_OVER
    gone = [candidate(140, D, reason=Reason.EVICTED)]
    assert fate(D, relation, gone, 0) is EndFate.UNUSABLE
    assert fate(U, relation, gone, 0) is EndFate.NOT_KEPT
    assert fate(P, relation, [candidate(90, U)], 0) is EndFate.NOT_KEPT


def test_a_real_request_says_the_work_that_its_end_added() -> None:
    candidates = (candidate(64, U, selected=True), candidate(32, P))
    said = RequestRecord(
        prompt_tokens=100,
        loaded_tokens=64,
        recomputed_tokens=36,
        selected=Selected(boundary=64, kind=U, kinds=(U,), age_s=1.0),
        candidates=candidates,
    )
    leg = Leg(
        tokens=(1,),
        finish_reason="stop",
        prompt_tokens=100,
        cached_tokens=64,
        backhaul=msgspec.to_builtins(said),
        kv_transfer_params=None,
        seconds=1.0,
        first_token_s=1.0,
    )
    shape = preset("tiny-hybrid")
    one = turn("b", (Span("s", 0, 101),), 1)
    relations = Relations(grid=32)
    result = request_result(
        ARM, one, relations.add(one), relations, shape, Answer(prefill=leg, decode=leg), 0.0, 2.0
    )
    assert result.without == {U: 32}
    # Pairs of tokens grow towards the end: more than half of the work of 64 tokens.
    assert result.added_flops == {U: shape.prefill_flops(32, 64)}
    assert result.added_flops[U] > result.loaded_flops / 2


def test_the_hit_without_a_kind() -> None:
    chosen = [candidate(140, D, selected=True), candidate(90, U), candidate(50, P)]
    assert hits_without(chosen, local_tokens=20, selected=140) == {D: 90}
    assert hits_without(chosen, local_tokens=95, selected=140) == {D: 95}
    # Two ends on one checkpoint: neither alone is decisive.
    shared = [candidate(140, D, U, selected=True)]
    assert hits_without(shared, local_tokens=0, selected=140) == {}
    assert hits_without(shared, local_tokens=0, selected=0) == {}
