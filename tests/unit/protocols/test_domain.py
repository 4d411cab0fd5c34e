"""The cache domain: canonical, complete, and every difference named."""

import json

import msgspec
import pytest

from backhaul.protocols.comparison import compare
from backhaul.protocols.domain import DOMAIN_VERSION, DomainRecord, parse_domain
from backhaul.protocols.errors import StoreRejected
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout
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
    "compute_dtype": "float16", "draft_model": "mtp", "scheduler_block_tokens": 128,
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
    assert (DOMAIN_VERSION, RECORD.domain_id) == (4, "f39b4712d47f79eb")
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


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("tensor_parallel",), 0), (("tensor_parallel",), 10**9), (("pipeline_parallel",), 0),
        (("layout", "groups", 0, "page", 0, "count"), 0),
        (("layout", "groups", 0, "page", 0, "parts", 0, "units"), 0),
        (("layout", "groups", 0, "page", 0, "parts", 0, "units"), 2**64 - 1),
        (("layout", "groups", 0, "page", 0, "parts", 0, "nbytes"), -1),
    ],
)  # fmt: skip
def test_numbers_with_which_no_other_record_can_be_compared_are_rejected(
    path: tuple[str | int, ...], value: int
) -> None:
    """A store compares every record with those of everybody else."""
    group = msgspec.structs.replace(LAYOUT.groups[0], page=(Rows(1, (Part(4, 1024),)),))
    layout = msgspec.structs.replace(LAYOUT, groups=(group,))
    record = msgspec.structs.replace(RECORD, layout=layout)
    assert parse_domain(record.canonical()) == record
    fields = inner = json.loads(record.canonical())
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(StoreRejected):
        parse_domain(msgspec.json.encode(fields))
