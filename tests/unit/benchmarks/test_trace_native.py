"""Backhaul's own trace format: what was written is read, and nothing impossible is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.benchmarks.reuse.trace import Span, Turn
from backhaul.benchmarks.traces import Reason, TraceError, open_trace
from backhaul.benchmarks.traces.native import encode_turn

_SPANS = st.lists(
    st.builds(
        lambda source, start, more: Span(source, start, start + more),
        st.text(max_size=5), st.integers(0, 99), st.integers(1, 99),
    ), min_size=1, max_size=3,
).map(tuple)  # fmt: skip


@st.composite
def _turns(draw: st.DrawFn) -> list[Turn]:
    turns: list[Turn] = []
    for i in range(draw(st.integers(1, 4))):
        prompt, output = draw(_SPANS), draw(_SPANS)
        turn = Turn(
            request=f"r{i}",
            conversation=draw(st.text(max_size=4)),
            arrival_s=draw(st.floats(0, 1e9)),
            after=draw(st.sampled_from(["", *(t.request for t in turns)])),
            prompt=prompt,
            output=output,
            reasoning_kept=draw(st.sampled_from([None, True, False])),
            tools=draw(st.booleans()),
        )
        turns.append(turn)
    return turns


@given(_turns())
@settings(max_examples=40)
def test_turns_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, turns: list[Turn]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_bytes(b"".join(map(encode_turn, turns)))
    trace = open_trace(path)
    assert trace.format == "backhaul"
    assert list(trace) == turns


GOOD: dict[str, Any] = {"request": "a", "prompt": [["s", 0, 9]], "output": [["o", 0, 4]]}


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        ({"request": "first"}, Reason.INCONSISTENT, "request 'first': an earlier line has"),
        ({"request": ""}, Reason.OUT_OF_RANGE, "request '': give every request a name"),
        ({"after": "nobody"}, Reason.UNKNOWN_REQUEST, "after 'nobody': no earlier line"),
        ({"arrival_s": -1}, Reason.OUT_OF_RANGE, "arrival_s -1.0: give seconds in 0"),
        ({"prompt": []}, Reason.OUT_OF_RANGE, "prompt <0 elements>: a prompt has"),
        ({"prompt": [["s", 5, 4]]}, Reason.OUT_OF_RANGE, "prompt[0] (5, 4): start must"),
        ({"output": [["s", -1, 4]]}, Reason.OUT_OF_RANGE, "output[0] (-1, 4): start must"),
        ({"output": [["s", 0, 2**40]]}, Reason.OUT_OF_RANGE, "output[0] 1099511627776: give"),
        ({"output": [["s", 0]]}, Reason.WRONG_TYPE, "output[0] <2 elements>: expected array"),
        ({"prompt": [["s", 0, "9"]]}, Reason.WRONG_TYPE, "prompt[0][2] '9': expected int"),
        ({"u_end": 10}, Reason.INCONSISTENT, "u_end 10: must lie in 0 ... 9"),
        ({"reasoning_tokens": 5}, Reason.INCONSISTENT, "reasoning_tokens 5: must lie in 0 ... 4"),
        ({"suffix_start": 10}, Reason.INCONSISTENT, "suffix_start 10: must lie in 0 ... 9"),
        ({"verbatim_tokens": 5}, Reason.INCONSISTENT, "verbatim_tokens 5: must lie in 0 ... 4"),
        ({"boundaries": [3, 10]}, Reason.INCONSISTENT, "boundaries 10: must lie in 1 ... 9"),
        ({"boundaries": [1] * 9}, Reason.OUT_OF_RANGE, "boundaries 9: give at most 8 positions"),
    ],
)
def test_an_impossible_turn_is_named_or_counted(
    tmp_path: Path, change: dict[str, Any], reason: Reason, message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [GOOD | {"request": "first"}, GOOD | change, GOOD | {"request": "last"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TraceError) as error:
        list(open_trace(path))
    assert str(error.value).startswith(f"{path}:2: {message}")
    trace = open_trace(path, strict=False)
    assert [turn.request for turn in trace] == ["first", "last"]
    assert trace.skipped == {reason: 1}
