"""Request logs of engines as results: which legs are one request, what it continues, and what
became of the ends before it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backhaul.benchmarks.reuse.record import (
    ArmResult,
    EndFate,
    PromptEndAt,
    RequestResult,
    Source,
)
from backhaul.benchmarks.reuse.report import build_report
from backhaul.benchmarks.reuse.served import is_request_log, read_logs, served_results
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.policy import Why
from backhaul.protocols.record import (
    Candidate,
    Chosen,
    InputEnd,
    InputEndOutcome,
    LoggedRequest,
    Selected,
)

GRID = 8
D, U = CheckpointKind.DECODE_END, CheckpointKind.INPUT_END
HISTORY, HEADER = list(range(100, 121)), [1, 2]
REPLY = list(range(200, 220))
MORE = list(range(300, 310))


def hashes(tokens: list[int]) -> tuple[str, ...]:
    """Chained, as vLLM's are."""
    ends = range(GRID, len(tokens) + 1, GRID)
    return tuple(hashlib.sha256(repr(tokens[:end]).encode()).hexdigest() for end in ends)


def logged(
    name: str, time: float, prompt: list[int], reply: Sequence[int] = (), **more: Any
) -> LoggedRequest:
    """One leg's line."""
    given = more.pop("u_end", None)
    fields: dict[str, Any] = {
        "recomputed_tokens": len(prompt),
        "input_end": InputEnd(
            outcome=InputEndOutcome.PUBLISHED if given else InputEndOutcome.ABSENT, given=given
        ),
        "chosen": Chosen(ends=(U, D)),
    }
    return LoggedRequest(
        time=time,
        engine="e",
        request_id=name,
        finish="FINISHED_STOPPED",
        prompt_tokens=len(prompt),
        output_tokens=len(reply),
        grid_tokens=GRID,
        boundary_hashes=hashes([*prompt, *reply]),
        **fields | more,
    )


def resumed(boundary: int, *kinds: CheckpointKind) -> dict[str, Any]:
    """What a request says that resumed there."""
    candidate = Candidate(
        boundary=boundary, kinds=kinds, retained=True, hash_matched=True, consumable=True,
        selected=True,
    )  # fmt: skip
    selected = Selected(boundary=boundary, kind=kinds[0].value, kinds=kinds, age_s=1.0)
    return {"loaded_tokens": boundary, "selected": selected, "candidates": (candidate,)}


def turn(
    name: str, time: float, prompt: list[int], reply: list[int], u_end: int, **more: Any
) -> list[LoggedRequest]:
    """Both legs; prefill does not see the prompt's last token."""
    first = logged(f"{name}-0000000a", time, prompt[:-1], [5], u_end=u_end, **more)
    second = logged(f"{name}-0000000b", time + 1, prompt, reply, other_tokens=len(prompt) - 1)
    return [first, second]


def results(lines: Iterable[LoggedRequest]) -> list[RequestResult]:
    return [one for one in served_results(lines) if isinstance(one, RequestResult)]


FIRST = turn("chat-1", 10, HISTORY + HEADER, REPLY, len(HISTORY))
U_END, D_END = 16, 40


def test_a_reply_that_came_back_is_resumed_at_its_end() -> None:
    prompt = HISTORY + HEADER + REPLY + MORE + HEADER
    again = turn("chat-2", 20, prompt, REPLY, len(prompt) - 2, **resumed(D_END, D))
    one, two = results([*FIRST, *again])
    assert (one.relation.continuation, two.relation.continuation) == (0, 1)
    assert (two.decode_end, two.input_end) == (EndFate.SELECTED, EndFate.NOT_KEPT)
    assert (two.conversation, two.producer_age) == (one.request, 1)
    assert (two.output_tokens, two.prompt_tokens) == (len(REPLY), len(prompt) - 1)


def test_a_reply_that_was_rewritten_is_said_to_be() -> None:
    rewritten = [*REPLY[:3], 7, *REPLY[4:]]
    prompt = HISTORY + HEADER + rewritten + MORE
    again = turn("chat-2", 20, prompt, REPLY, len(prompt), **resumed(U_END, U))
    _, two = results([*again, *FIRST])  # in any order
    assert (two.decode_end, two.input_end) == (EndFate.REWRITTEN, EndFate.SELECTED)
    assert two.relation.rewritten == (D,)


def test_a_tool_loop_that_is_over_is_continued_from_the_user_s_message() -> None:
    """The next message drops the loop's reasoning, so that nothing of its last step is left."""
    call = HISTORY + HEADER + REPLY + MORE
    step = turn("chat-2", 20, call + HEADER, REPLY, len(call), **resumed(D_END, D))
    prompt = HISTORY + MORE * 3
    after = turn("chat-3", 30, prompt, REPLY, len(prompt), **resumed(U_END, U))
    *_, three = results([*FIRST, *step, *after])
    assert (three.decode_end, three.input_end) == (EndFate.REWRITTEN, EndFate.SELECTED)
    assert three.relation.continuation == 2, "the loop went on from there first"


def test_a_common_system_prompt_makes_no_conversation() -> None:
    other = turn("chat-2", 20, HISTORY[:12] + MORE * 3, REPLY, 40)
    assert all(not one.relation.continuation for one in results([*FIRST, *other]))


def test_token_ids_tell_what_blocks_do_not() -> None:
    """Both begin with the same blocks, and only ids say that the first input ends otherwise."""
    for same, continued in ((True, 1), (False, 0)):
        prompt = [*HISTORY[:20], HISTORY[20] if same else 9, *MORE, *MORE]
        lines = [*FIRST, *turn("chat-2", 20, prompt, REPLY, len(prompt))]
        for leg in (1, 3):
            tokens = (*HISTORY, *HEADER, *REPLY) if leg == 1 else (*prompt, *REPLY)
            lines[leg] = msgspec.structs.replace(lines[leg], token_ids=tokens)
        *_, two = results(lines)
        assert two.relation.continuation == continued


def test_the_same_prompt_again_continues_nothing() -> None:
    again = turn("chat-2", 20, HISTORY + HEADER, REPLY, len(HISTORY))
    assert all(not one.relation.continuation for one in results([*FIRST, *again]))


def test_what_had_not_ended_yet_is_not_continued() -> None:
    prompt = HISTORY + HEADER + REPLY + MORE
    early = turn("chat-2", 10.5, prompt, REPLY, len(prompt))
    assert all(not one.relation.continuation for one in results([*FIRST, *early]))


def test_of_several_tries_the_last_one_that_asked_counts() -> None:
    tried, answered = FIRST
    again = msgspec.structs.replace(
        tried, request_id="chat-1-0000000c", local_tokens=16, recomputed_tokens=6
    )
    (one,) = results([tried, again, answered])
    assert (one.local_tokens, one.output_tokens) == (16, len(REPLY))


def test_an_engine_alone_has_one_leg_and_what_never_ran_is_no_request() -> None:
    alone = logged("cmpl-1-0000000a", 10, HISTORY, REPLY, u_end=len(HISTORY))
    prompt = HISTORY + REPLY + MORE
    more = logged("cmpl-2-0000000a", 20, prompt, REPLY, **resumed(D_END, D))
    gone = logged("cmpl-3-0000000a", 25, [])
    one, two = results([alone, more, gone])
    assert (one.decode_end, two.decode_end) == (EndFate.NO_PREDECESSOR, EndFate.SELECTED)


@pytest.mark.parametrize(
    ("chosen", "policy"),
    [
        (Chosen(), "main_sparse"),
        (Chosen(ends=(U,)), "input_end"),
        (Chosen(ends=(D,)), "decode_end"),
        (Chosen(ends=(U, D)), "both"),
        (Chosen(ends=(D,), why=Why.NO_REASONING), "auto"),
        (Chosen(ends=(CheckpointKind.BOUNDARY,)), "boundaries"),
    ],
)
def test_policies_are_told_by_what_they_choose(chosen: Chosen, policy: str) -> None:
    lines = list(served_results([logged("a", 1, HISTORY, REPLY, chosen=chosen)]))
    assert {(one.arm.policy, one.arm.source, one.arm.prompt_end) for one in lines} == {
        (policy, Source.SERVED, PromptEndAt.MIXED)
    }
    assert isinstance(lines[-1], ArmResult) and lines[-1].requests == 1


def test_what_logs_do_not_know_is_not_said() -> None:
    report = build_report(served_results(FIRST))
    assert report.runs.rows[0][-4:] == ("-",) * 4
    columns = {name for answer in report.answers for name in answer.table.header}
    assert not columns & {"evicted", "shared", "U_end bytes", "of D_end hits"}
    (times,) = (a.table for a in report.answers if a.question.number == 11)
    found = dict(zip(times.header, times.rows[0], strict=True))
    assert found["TTFT"] == found["residency"] == found["residents"] == "-"
    assert not any(chart.name.startswith("ttft") for chart in report.charts)


def test_thousands_that_share_their_beginning_are_related_quickly() -> None:
    lines = []
    for number in range(2000):
        lines += turn(f"c{number}", 10.0 * number, [*HISTORY, number], REPLY, len(HISTORY) + 1)
    assert len(results(lines)) == 2000


def test_lines_that_were_not_written_whole_cost_themselves_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine was killed while it wrote, or its disk was full, and others went on in the file."""
    log = tmp_path / "requests.jsonl"
    line = msgspec.json.encode(FIRST[0])
    for torn in (line[:40] + line, b"\0" * 50, line[:-1], b"[" * 100_000):
        log.write_bytes(b"\n".join([line, torn, b"", line, torn, line]) + b"\n")
        assert len(list(read_logs([log]))) == 3
        assert capsys.readouterr().err == (
            f"backhaul: {log}:2 was not written whole, and is passed over (as are 1 more)\n"
        )


def test_a_log_is_told_from_results_and_its_faults_are_named(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    line = msgspec.json.encode(FIRST[0])
    log.write_bytes(line + b"\n" + line[:40])
    assert is_request_log(log) and len(list(read_logs([log]))) == 1
    for fault in (
        b'{"request_id": 3}',
        line.replace(b'"prompt_tokens":22', b'"prompt_tokens":-1'),
        line.replace(hashes(HISTORY)[0].encode(), b"zz"),
    ):
        assert fault != line
        log.write_bytes(line + b"\n" + fault + b"\n")
        with pytest.raises(ConfigError, match=r"requests\.jsonl:2: no request"):
            list(read_logs([log]))
    for text in (b"", b"[]\n", b'{"type": "arm"}\n', b'{"type": "arm", "request_id": "r"}\n'):
        log.write_bytes(text)
        assert not is_request_log(log)
    assert not is_request_log(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_logs([tmp_path / "none"]))
