"""Request logs: which line is meant, who produced a checkpoint, who came closest."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_kit import GRID, chain

from backhaul.deploy.request_lines import (
    RequestLine,
    find_closest,
    find_producer,
    find_request,
    parse_line,
)
from backhaul.protocols.checkpoint import CheckpointKind, Reason
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.record import Candidate, LoggedRequest

TOKENS = st.lists(st.integers(0, 2), max_size=12)


def line(request_id: str = "r", **fields: object) -> bytes:
    whole = {"time": 0.0, "engine": "e", "request_id": request_id, "finish": "F"} | fields
    return msgspec.json.encode(msgspec.convert(whole, LoggedRequest)) + b"\n"


def log(folder: Path, *lines: bytes) -> list[str]:
    (folder / "log.jsonl").write_bytes(b"".join(lines))
    return [str(folder / "log.jsonl")]


CANDIDATE = Candidate(
    boundary=GRID,
    kinds=(CheckpointKind.DECODE_END,),
    retained=True,
    hash_matched=False,
    consumable=False,
    selected=False,
    reason=Reason.HASH_MISMATCH,
)


def test_the_id_that_a_client_knows_is_enough(tmp_path: Path) -> None:
    logs = log(
        tmp_path,
        line("cmpl-1-0-aaaa", candidates=[msgspec.to_builtins(CANDIDATE)], engine="prefill"),
        line("cmpl-12-0-bbbb"),
        line("cmpl-1-0-cccc", engine="decode"),
    )
    # Of both legs, the one that looked for checkpoints.
    assert find_request(logs, "cmpl-1").engine == "prefill"
    assert find_request(logs, "cmpl-1-0-cccc").engine == "decode"
    assert find_request(logs, "cmpl-12").request_id == "cmpl-12-0-bbbb"


def test_the_leg_that_another_connector_fed_did_not_ask(tmp_path: Path) -> None:
    logs = log(
        tmp_path,
        line("cmpl-1-0-aaaa", prompt_tokens=9, recomputed_tokens=9, engine="prefill"),
        line("cmpl-1-0-cccc", prompt_tokens=9, other_tokens=8, engine="decode"),
    )
    assert find_request(logs, "cmpl-1").engine == "prefill"
    assert find_request(logs, "cmpl-1-0-cccc").engine == "decode"


def test_hashes_lie_where_the_boundaries_are() -> None:
    hashes = tuple(one.hex() for one in chain("abc"))
    one = parse_line(line(prompt_tokens=2 * GRID + 1, grid_tokens=GRID, boundary_hashes=hashes))
    # The third boundary lies in the output: no lookup of the prompt asks for it.
    assert one.sparse_hashes(GRID) == tuple(chain("abc")[:2])
    step = 2
    assert GRID % step == 0
    sparse = one.sparse_hashes(GRID // step)
    assert sparse == (b"", chain("abc")[0], b"", chain("abc")[1])
    assert one.reaches(3 * GRID, hashes[2])
    assert not one.reaches(2 * GRID, hashes[2])
    assert not one.reaches(4 * GRID, hashes[2]) and not one.reaches(GRID + 1, hashes[0])
    assert not RequestLine(raw={}, request_id="r").reaches(GRID, hashes[0])
    assert RequestLine(raw={}, request_id="r").sparse_hashes(GRID) == ()


def test_the_producer_has_the_hash_and_the_tokens(tmp_path: Path) -> None:
    hashes = [one.hex() for one in chain("ab")]
    fields = {"grid_tokens": GRID, "boundary_hashes": hashes}
    whole = list(range(2 * GRID))
    logs = log(
        tmp_path,
        line("no tokens", **fields),
        line("too few", **fields, token_ids=whole[:-1]),
        line("producer", **fields, token_ids=whole),
    )
    found = find_producer(logs, 2 * GRID, hashes[1])
    assert found is not None and found.request_id == "producer" and list(found.tokens) == whole
    assert find_producer(logs, GRID, hashes[1]) is None
    assert find_producer(logs, GRID, "00" * 32) is None


@given(TOKENS, st.lists(TOKENS, max_size=6))
def test_the_closest_shares_most_and_departs(prompt: list[int], others: list[list[int]]) -> None:
    def shared(other: list[int]) -> int:
        pairs = zip(prompt, other, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(other)))

    with tempfile.TemporaryDirectory() as folder:
        lines = [line(f"r{i}", token_ids=other) for i, other in enumerate(others)]
        logs = log(Path(folder), *lines, line("me", token_ids=prompt))
        found = find_closest(logs, prompt, "me")
    departing = [shared(other) for other in others if 0 < shared(other) < len(prompt)]
    if found is None:
        assert not departing
    else:
        assert shared(list(found.tokens)) == max(departing)


@given(st.binary(max_size=60))
def test_any_line_is_a_request_or_malformed(raw: bytes) -> None:
    try:
        assert parse_line(raw).request_id
    except ValueError as error:
        assert str(error)


def test_lines_of_another_make_are_malformed() -> None:
    for text in (
        b'{"request_id": "r", "prompt_tokens": "x"}',
        b'{"request_id": "r", "token_ids": [[]]}',
        b'{"request_id": "r", "boundary_hashes": ["zz"]}',
        b'{"request_id": "r", "boundary_hashes": 3}',
        b'{"request_id": ""}',
        b'{"request_id": 1}',
        b'{"request_id": "r", "prompt_tokens": -1}',
        b'{"request_id": "r", "grid_tokens": 1' + b"0" * 400 + b"}",
        b'{"request_id": "r", "candidates": [{"age_s": 1e999}]}',
        b'{"request_id": "r", "note": NaN}',
        b'{"request_id": "r", "note": "\\ud800"}',
        b"[" * 100_000,
        b"",
    ):
        with pytest.raises(ValueError):
            parse_line(text)


def test_malformed_lines_are_counted_where_a_request_is_not_found(tmp_path: Path) -> None:
    odd = b'{"request_id": "wanted", "grid_tokens": -5}\n'
    (path,) = log(tmp_path, line("r"), odd, line("wanted-1"), odd, b'{"request_id": "wanted-2')
    assert find_request([path], "wanted").request_id == "wanted-1"
    log(tmp_path, line("r"), odd, odd)
    with pytest.raises(ConfigError) as raised:
        find_request([path], "wanted")
    assert f"2 of its lines that hold it are malformed, {path}:2: Expected `int` >= 0" in str(
        raised.value
    )
