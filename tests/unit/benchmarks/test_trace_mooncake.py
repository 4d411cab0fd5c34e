"""What the Mooncake reader infers from block ids, shown on conversations made up here."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backhaul.benchmarks.reuse.trace import Turn, shared_prefix
from backhaul.benchmarks.traces import Reason, TraceError, open_trace


def _line(ms: int, prompt: int, output: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": ms, "input_length": prompt, "output_length": output, "hash_ids": ids}


def _read(tmp_path: Path, lines: list[dict[str, Any]], *, strict: bool = True) -> list[Turn]:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return list(open_trace(path, strict=strict))


def test_a_longer_prompt_over_all_full_blocks_continues_the_request(tmp_path: Path) -> None:
    """1,100 tokens and 500 generated; the next prompt of 2,000 tokens replays all of it."""
    one, two = _read(
        tmp_path,
        [_line(0, 1100, 500, [1, 2, 3]), _line(2500, 2000, 40, [1, 2, 4, 5])],
    )
    assert (two.conversation, two.after) == (one.conversation, one.request)
    assert (one.prompt_tokens, one.output_tokens, two.prompt_tokens) == (1100, 500, 2000)
    assert (one.arrival_s, two.arrival_s) == (0.0, 2.5)
    assert shared_prefix(two.prompt, one.prompt + one.output) == 1600
    assert shared_prefix(two.prompt, one.prompt) == 1100


def test_the_last_output_of_a_conversation_is_nobodys_prompt(tmp_path: Path) -> None:
    one, two = _read(tmp_path, [_line(0, 600, 50, [1, 2]), _line(1, 1300, 70, [1, 3, 4])])
    assert two.output_tokens == 70
    assert not {s.source for s in two.output} & {s.source for s in one.prompt + two.prompt}


def test_a_reply_that_was_not_replayed_whole_is_not_in_the_next_prompt(tmp_path: Path) -> None:
    """The continuation is shorter than prompt and output together."""
    one, two = _read(tmp_path, [_line(0, 600, 900, [1, 2]), _line(1, 1000, 5, [1, 3])])
    assert two.after == one.request
    assert shared_prefix(two.prompt, one.prompt + one.output) == 600


def test_a_second_continuation_starts_a_conversation_of_its_own(tmp_path: Path) -> None:
    one, two, three = _read(
        tmp_path,
        [
            _line(0, 600, 50, [1, 2]),
            _line(1, 1100, 50, [1, 3, 4]),
            _line(2, 1100, 50, [1, 5, 6]),
        ],
    )
    assert two.after == three.after == one.request
    assert two.conversation == one.conversation != three.conversation


def test_the_deepest_and_then_the_latest_request_is_continued(tmp_path: Path) -> None:
    turns = _read(
        tmp_path,
        [
            _line(0, 520, 1, [1, 2]),
            _line(1, 1030, 1, [1, 3, 4]),
            _line(2, 1030, 1, [1, 3, 4]),
            _line(3, 1600, 1, [1, 3, 5, 6]),
        ],
    )
    assert [turn.after for turn in turns] == ["", "r1", "r1", "r3"]


def test_a_shared_head_is_no_conversation(tmp_path: Path) -> None:
    """A system prompt of one block, after which every conversation goes its own way."""
    turns = _read(tmp_path, [_line(i, 600, 1, [1, 10 + i]) for i in range(40)])
    longer = _read(tmp_path, [_line(i, 600 + i, 1, [1, 10 + i]) for i in range(40)])
    assert not any(turn.after for turn in turns + longer)
    assert shared_prefix(longer[0].prompt, longer[1].prompt) == 512


def test_prompts_without_a_full_block_continue_nothing(tmp_path: Path) -> None:
    turns = _read(tmp_path, [_line(0, 100, 9, [1]), _line(1, 300, 9, [2])])
    assert not any(turn.after for turn in turns)


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        (_line(0, -3, 1, [1]), Reason.OUT_OF_RANGE, "input_length -3: expected int >= 1"),
        (_line(0, 600, 1, [1]), Reason.INCONSISTENT, "hash_ids <1 elements>: an input of 600"),
        (_line(0, 5, "x", [1]), Reason.WRONG_TYPE, "output_length 'x': expected int, got str"),
        (_line(0, 5, 1, [1.5]), Reason.WRONG_TYPE, "hash_ids[0] 1.5: expected int, got float"),
        ({"timestamp": 0, "input_length": 4, "hash_ids": [1]}, Reason.MISSING,
         "output_length None: the field is missing"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named_or_counted(
    tmp_path: Path, line: dict[str, Any], reason: Reason, message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    good = json.dumps(_line(0, 5, 1, [7]))
    path.write_text(f"{good}\n\n{json.dumps(line)}\n{good}\n")
    with pytest.raises(TraceError) as error:
        list(open_trace(path))
    assert str(error.value).startswith(f"{path}:3: {message}")
    trace = open_trace(path, strict=False)
    assert len(list(trace)) == 2
    assert trace.skipped == {reason: 1}


def test_what_is_not_a_number_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": NaN, "input_length": 4, "output_length": 1, "hash_ids": [1]}')
    with pytest.raises(TraceError, match=r":1: line .*: is no JSON: invalid character \(byte 14\)"):
        list(open_trace(path, "mooncake"))


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), max_size=3), st.integers(1, 512), st.integers(0, 900)
        ),
        min_size=1,
        max_size=7,
    )
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_prompts_share_their_common_blocks_and_less_than_one_more(
    tmp_path: Path, shapes: list[tuple[list[int], int, int]]
) -> None:
    """Full blocks of a small tree, then one that is filled as far as given: what is inferred of
    partly filled blocks never reaches over the first block that differs."""
    ids: dict[tuple[Any, ...], int] = {}
    lines = []
    for way, filled, output in shapes:
        blocks = [tuple(way[: i + 1]) for i in range(len(way))] + [(*way, "last", filled)]
        hash_ids = [ids.setdefault(block, len(ids)) for block in blocks]
        lines.append(_line(0, 512 * len(way) + filled, output, hash_ids))
    turns = _read(tmp_path, lines)
    for (a, one), (b, other) in itertools.combinations(zip(lines, turns, strict=True), 2):
        assert (one.prompt_tokens, one.output_tokens) == (a["input_length"], a["output_length"])
        pairs = zip(a["hash_ids"], b["hash_ids"], strict=False)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        least = min(512 * same, a["input_length"], b["input_length"])
        assert least <= shared_prefix(one.prompt, other.prompt) <= 512 * same + 512
    assert {turn.after for turn in turns} <= {"", *(turn.request for turn in turns)}
    for i, turn in enumerate(turns):
        assert turn.after in ("", *(earlier.request for earlier in turns[:i]))
