"""The cache domain: canonical, complete, and every difference named."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from backhaul.protocols.comparison import compare
from backhaul.protocols.domain import (
    DOMAIN_VERSION,
    RECORD_BYTES_MAX,
    DomainRecord,
    parse_domain,
)
from backhaul.protocols.errors import StoreRejected, UnsupportedError
from backhaul.protocols.layout import GROUPS_MAX, TEXT_MAX, CacheLayout, GroupKind, GroupLayout
from backhaul.protocols.sharding import Part, Rows

LAYOUT = CacheLayout(
    groups=(
        GroupLayout(index=0, kind=GroupKind.FULL, block_tokens=64, page_bytes=4096),
        GroupLayout(index=1, kind=GroupKind.RECURRENT, block_tokens=64, page_bytes=4000),
    ),
    hash_tokens=64,
)
RECORD = DomainRecord(
    model="m", weights="w", layout=LAYOUT, hash_function="sha256", hash_probe="00",
    kv_dtype="bfloat16", state_dtypes=("bfloat16", "float32"), conv_layout="DS",
    platform="cpu:x86_64:avx2", vllm="0.32",
)  # fmt: skip

CHANGES: dict[str, object] = {
    "version": 99, "model": "other", "weights": "other", "revision": "r", "quantization": "fp8",
    "compute_dtype": "float16", "draft_model": "mtp", "length_scaling": "longrope:long",
    "scheduler_block_tokens": 128,
    "layout": CacheLayout(groups=LAYOUT.groups, hash_tokens=32), "hash_function": "xxhash",
    "hash_probe": "01", "kv_dtype": "fp8", "state_dtypes": ("float32", "float32"),
    "conv_layout": "SD", "kv_layout": "HND", "attention_backend": "other", "platform": "cuda",
    "cpu_isa": "avx512f",
    "tensor_parallel": 2, "pipeline_parallel": 2, "pipeline_layers": "1,1",
    "speculative_tokens": 3, "vllm": "0.33",
}  # fmt: skip


def test_changes_cover_every_field() -> None:
    assert set(CHANGES) == set(DomainRecord.__struct_fields__)


@pytest.mark.parametrize("field", list(CHANGES))
def test_every_field_decides_the_id_and_is_named(field: str) -> None:
    other = msgspec.structs.replace(RECORD, **{field: CHANGES[field]})
    assert other.domain_id != RECORD.domain_id
    path = "layout.hash_tokens" if field == "layout" else field
    assert [one.path for one in compare(RECORD, other).differences] == [path]


def test_equal_records_have_one_id_and_no_difference() -> None:
    copy = parse_domain(RECORD.canonical())
    assert copy == RECORD
    assert copy.domain_id == RECORD.domain_id
    assert compare(copy, RECORD).differences == ()


def test_the_encoding_is_canonical_and_never_changes_within_a_version() -> None:
    """A change of this digest parts every running cluster: raise DOMAIN_VERSION with it."""
    assert (DOMAIN_VERSION, RECORD.domain_id) == (5, "909e7e80f44e43df")
    text = json.dumps(json.loads(RECORD.canonical()), sort_keys=True, separators=(",", ":"))
    assert text.encode() == RECORD.canonical()


@pytest.mark.parametrize("version", [1, DOMAIN_VERSION + 1])
def test_a_record_of_another_version_is_refused_by_its_version(version: int) -> None:
    """Whatever fields it has: it is not malformed."""
    for record in (
        {"version": version, "of": "another shape"},
        {**msgspec.to_builtins(RECORD), "version": version},
    ):
        with pytest.raises(
            StoreRejected, match=rf"of version {version}, this side speaks {DOMAIN_VERSION}"
        ):
            parse_domain(msgspec.json.encode(record))


@pytest.mark.parametrize(
    "record",
    [
        msgspec.json.encode({**msgspec.to_builtins(RECORD), "unknown": 1}),
        b'{"a":' * 100_000, b"", b"{", b"[]", b"{}", b"\xff\xfe",
        msgspec.json.encode({**msgspec.to_builtins(RECORD), "tensor_parallel": "two"}),
        msgspec.json.encode({**msgspec.to_builtins(RECORD), "version": 99}),
        msgspec.json.encode(
            {**msgspec.to_builtins(RECORD), "layout": {"groups": [], "hash_tokens": 1}}
        ),
    ],
)  # fmt: skip
def test_malformed_records_are_rejected(record: bytes) -> None:
    with pytest.raises(StoreRejected):
        parse_domain(record)


FULL_RECORD = msgspec.structs.replace(
    RECORD,
    layout=msgspec.structs.replace(
        LAYOUT,
        groups=(
            msgspec.structs.replace(
                LAYOUT.groups[0], members="x", interior="x", page=(Rows(1, (Part(4, 1024),)),)
            ),
            GroupLayout(index=1, kind=GroupKind.WINDOW, block_tokens=64, window_tokens=9),
        ),
    ),
)
Path = tuple[str | int, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, value) of every list and of everything that holds nothing, at any depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, one in inner:
        if isinstance(one, (dict, list)):
            yield from leaves(one, (*path, name))
        if not isinstance(one, dict):
            yield (*path, name), one


LEAVES = list(leaves(json.loads(FULL_RECORD.canonical())))


def changed(path: Path, value: object) -> bytes:
    """The record with one value replaced."""
    fields = inner = json.loads(FULL_RECORD.canonical())
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return msgspec.json.encode(fields)


def refusal(record: bytes) -> str:
    with pytest.raises(StoreRejected) as caught:
        parse_domain(record)
    return str(caught.value)


def test_the_record_that_is_spoilt_below_has_every_field() -> None:
    assert parse_domain(FULL_RECORD.canonical()) == FULL_RECORD
    named = {str(step) for path, _ in LEAVES for step in path}
    for kind in (DomainRecord, CacheLayout, GroupLayout, Rows, Part):
        assert set(kind.__struct_fields__) - {"layout"} <= named


@pytest.mark.parametrize("path", [path for path, value in LEAVES if type(value) is int])
@pytest.mark.parametrize("value", [-1, -(2**63), 2**41, 2**63 - 1, 2**64 - 1, 2**80])
def test_no_number_is_taken_that_no_engine_has(path: Path, value: int) -> None:
    """A store compares every record with those of everybody else, and counts with them."""
    assert "\n" not in refusal(changed(path, value))


@pytest.mark.parametrize("path", [path for path, value in LEAVES if type(value) is str])
@pytest.mark.parametrize("length", [40_000, 200_000])
def test_no_text_is_taken_that_no_engine_has(path: Path, length: int) -> None:
    """A store answers with all its records at once."""
    assert len(refusal(changed(path, "x\n" * (length // 2)))) < 500


@pytest.mark.parametrize(("path", "value"), [leaf for leaf in LEAVES if type(leaf[1]) is list])
def test_no_list_is_taken_that_no_engine_has(path: Path, value: list[object]) -> None:
    refusal(changed(path, (value or ["x"]) * 300))


def test_a_huge_record_is_refused_by_its_size() -> None:
    assert "bytes: at most 131072" in refusal(changed(("model",), "x" * (20 << 20)))


@pytest.mark.parametrize("name", ["x\ny", "x" * 5000])
def test_what_a_refusal_quotes_keeps_it_short_and_on_one_line(name: str) -> None:
    said = refusal(msgspec.json.encode({**msgspec.to_builtins(RECORD), name: 1}))
    assert "unknown field" in said and "\n" not in said and len(said) < 500


def test_blocks_that_never_end_together_are_refused() -> None:
    primes = (p for p in range(2**24, 2**25) if all(p % d for d in range(2, 6000)))
    groups = [
        {"index": i, "kind": "full_attention", "block_tokens": next(primes)} for i in range(3)
    ]
    said = refusal(changed(("layout",), {"groups": groups, "hash_tokens": 1}))
    assert "no common boundary" in said


@pytest.mark.parametrize("indices", [(0, 0), (1, 0)])
def test_groups_are_told_apart_by_their_index(indices: tuple[int, int]) -> None:
    groups = tuple(
        GroupLayout(index=index, kind=GroupKind.FULL, block_tokens=64) for index in indices
    )
    with pytest.raises(UnsupportedError, match="each index once"):
        CacheLayout(groups=groups, hash_tokens=64)


def test_the_largest_record_is_bounded_by_more_than_its_fields() -> None:
    """Every field within its bounds, and the whole beyond: also where what is left out counts."""
    group = {"index": 0, "kind": "full_attention", "block_tokens": 64}
    wide = [{**group, "index": i, "interior": "x" * TEXT_MAX} for i in range(GROUPS_MAX)]
    assert "bytes" in refusal(changed(("layout",), {"groups": wide, "hash_tokens": 64}))
    fitting = [{**group, "index": i} for i in range(GROUPS_MAX)]
    record = changed(("layout",), {"groups": fitting, "hash_tokens": 64})
    assert len(record) < len(parse_domain(record).canonical()) <= RECORD_BYTES_MAX
