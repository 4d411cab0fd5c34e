"""Whatever a file holds, a reader yields turns or raises its own error, in bounded memory."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from backhaul.benchmarks.traces import FORMATS, Reason, TraceError, open_trace, records

KNOWN = [name for name in FORMATS if name != "auto"]

_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "tool", "system", "text", "{}", -1, 2**63, 1e308])
)  # fmt: skip

_FIELDS = st.sampled_from(
    [
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
        "request",
        "prompt",
        "output",
        "after",
        "arrival_s",
        "u_end",
        "messages",
        "traj",
        "history",
        "trajectory",
        "role",
        "content",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "tools",
        "session_id",
        "input",
        "query",
        "response",
        "text",
        "type",
        "reasoning",
        "replay_config",
        "agent",
        "message_type",
    ]
)

_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_FIELDS, inner, max_size=6),
    max_leaves=25,
)

NESTED = b"[" * 100_000
DEEP_MEMBER = b'{"hash_ids":' + b'{"a":' * 100_000


@given(
    st.one_of(
        st.binary(max_size=200),
        _JSON.map(lambda value: json.dumps(value).encode()),
        st.lists(_JSON, max_size=3).map(
            lambda values: b"\n".join(json.dumps(value).encode() for value in values)
        ),
    ),
    st.booleans(),
)
@example(NESTED, False)
@example(DEEP_MEMBER, False)
@example(b"\x00" * 1000, False)
@example(b'{"request": "\\ud800", "prompt": []}', True)
@example(b"\xef\xbb\xbf{}", True)
@settings(
    max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_a_reader_raises_nothing_but_its_own_error(
    tmp_path: Path, data: bytes, strict: bool
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    for name in (*KNOWN, "auto"):
        try:
            turns = list(open_trace(path, name, strict=strict))
        except TraceError as error:
            assert "\n" not in str(error).replace(str(path), "")
            assert len(str(error)) < len(str(path)) + 500
        else:
            assert all(turn.prompt_tokens > 0 for turn in turns)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 10**400, "1", None, [], {}])
@pytest.mark.parametrize(
    "line",
    [
        {"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1]},
        {"request": "a", "arrival_s": 1, "prompt": [["s", 0, 9]], "output": [], "u_end": 3},
    ],
    ids=["mooncake", "backhaul"],
)
def test_no_number_is_taken_for_what_it_is_not(
    tmp_path: Path, line: dict[str, Any], value: Any
) -> None:
    """Each numeric field in turn holds something else: the line is skipped, the next one read."""
    path = tmp_path / "trace"
    changed = [line | {field: value} for field in line if isinstance(line[field], int)]
    if value is None:
        changed = [one for one in changed if "u_end" not in one or one["u_end"] is not None]
    path.write_text("".join(json.dumps(one) + "\n" for one in [*changed, line]))
    trace = open_trace(path, "backhaul" if "request" in line else "mooncake", strict=False)
    assert len(list(trace)) == 1
    assert trace.skipped.total() == len(changed)


def test_a_line_without_end_is_passed_over_and_never_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "LINE_BYTES_MAX", 1 << 16)
    good = b'{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n'
    path = tmp_path / "trace"
    with path.open("wb") as file:
        file.write(good)
        for _ in range(64):
            file.write(b"7" * (1 << 20))
        file.write(b"\n" + good)
    tracemalloc.start()
    trace = open_trace(path, "mooncake", strict=False)
    turns = list(trace)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [turn.request for turn in turns] == ["r1", "r3"]
    assert trace.skipped == {Reason.TOO_LONG: 1}
    assert peak < 8 << 20
    with pytest.raises(TraceError, match=r":2: line .*: give lines of at most 65,536 bytes"):
        list(open_trace(path, "mooncake"))


def test_a_document_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "DOCUMENT_BYTES_MAX", 100)
    path = tmp_path / "trace"
    path.write_bytes(b"[\n" + b" " * 100 + b"]")
    with pytest.raises(TraceError, match="above 100 bytes in one JSON document"):
        open_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "the file is empty"), (b'{"a": 1}\n', r"cannot be told .*members: a"),
     (b"[1, 2]", r"cannot be told .*members: none")],
)  # fmt: skip
def test_an_unknown_format_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        open_trace(path)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_no_plain_text_is_named_with_what_to_do(tmp_path: Path, format: str) -> None:
    """Whole or cut short: nothing of it is unpacked."""
    path = tmp_path / "trace"
    line = json.dumps(VALID["mooncake"]).encode()
    for content, message in (
        (gzip.compress(line)[:-9], "compressed with gzip: decompress it first"),
        (bz2.compress(line), "compressed with bzip2: decompress it first"),
        (lzma.compress(line)[:20], "compressed with xz: decompress it first"),
        (line.decode().encode("utf-16"), "UTF-16 text: write it as UTF-8"),
        (line.decode().encode("utf-16-be"), "no JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=message) as error:
            list(open_trace(path, format))
        assert str(error.value).isprintable()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r\n\r\n"])
def test_marks_and_line_ends_of_other_systems(tmp_path: Path, end: str) -> None:
    for name, record in VALID.items():
        path = tmp_path / name
        path.write_bytes(codecs.BOM_UTF8 + json.dumps(record).encode() + end.encode())
        trace = open_trace(path)
        assert trace.format == name
        assert len(list(trace)) == (2 if name in ("messages", "swe-agent") else 1)


def test_what_is_no_file_or_no_format_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(TraceError, match=r"No such file|Is a directory"):
            open_trace(path)
    with pytest.raises(TraceError, match="format 'parquet' is not known: give auto, backhaul"):
        open_trace(tmp_path, "parquet")


_CALL = {"function": {"name": "f", "arguments": '{"a":1}'}}
_MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": "x", "reasoning": "y", "tool_calls": [_CALL]},
    {"role": "tool", "content": "z"},
    {"role": "assistant", "content": "done"},
]
VALID = {
    "messages": {"messages": _MESSAGES, "tools": [{"name": "f"}]},
    "swe-agent": {
        "history": [one | {"agent": "a", "message_type": "observation"} for one in _MESSAGES],
        "trajectory": [{"query": _MESSAGES}, {"query": _MESSAGES}],
        "replay_config": {
            "agent": {"history_processors": [{"type": "last_n_observations", "n": 1}]}
        },
    },
    "lmcache": {"session_id": "s", "timestamp": 1, "input": "user: x", "output": "y"},
    "mooncake": {"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]},
    "backhaul": {"request": "a", "prompt": [["s", 0, 9]], "output": [["o", 0, 4]], "after": ""},
}  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        value.items() if isinstance(value, dict)
        else enumerate(value) if isinstance(value, list) else ()
    )  # fmt: skip
    return [path, *(place for key, one in inner for place in _places(one, (*path, key)))]


@given(st.data(), st.sampled_from(sorted(VALID)))
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_one_wrong_value_anywhere_is_a_turn_or_an_error(
    tmp_path: Path, data: st.DataObject, name: str
) -> None:
    """Valid but for one node: it reaches as deep into a reader as its neighbours allow."""
    record = json.loads(json.dumps(VALID[name]))
    *way, last = data.draw(st.sampled_from([p for p in _places(record) if p]))
    node = record
    for key in way:
        node = node[key]
    node[last] = data.draw(_JSON)
    path = tmp_path / "trace"
    path.write_text(json.dumps(record))
    for strict in (True, False):
        try:
            trace = open_trace(path, name, strict=strict)
            turns = list(trace)
        except TraceError:
            continue
        assert turns or trace.skipped or name in ("messages", "swe-agent")


def test_the_valid_ones_are(tmp_path: Path) -> None:
    for name, record in VALID.items():
        path = tmp_path / name
        path.write_text(json.dumps(record))
        trace = open_trace(path)
        assert trace.format == name
        assert len(list(trace)) == (2 if name in ("messages", "swe-agent") else 1)
