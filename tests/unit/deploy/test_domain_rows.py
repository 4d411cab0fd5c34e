"""The two-column view names every difference as it is in the record."""

import io

import msgspec

from backhaul.deploy.console import Console
from backhaul.deploy.domain_rows import differences, domain_table
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout

LAYOUT = CacheLayout(
    groups=(GroupLayout(index=0, kind=GroupKind.FULL, block_tokens=64, page_bytes=4096),),
    hash_tokens=64,
)
RECORD = DomainRecord(
    model="m", weights="w", layout=LAYOUT, hash_function="sha256", hash_probe="00",
    kv_dtype="bfloat16", platform="cuda", vllm="0.32",
)  # fmt: skip


def shown(ours: DomainRecord, theirs: DomainRecord) -> str:
    text = io.StringIO()
    Console(file=text, width=160).print(
        domain_table(("prefill", "decode"), differences(ours, theirs))
    )
    return text.getvalue()


def test_every_difference_is_a_row_with_both_values() -> None:
    smaller = msgspec.structs.replace(LAYOUT.groups[0], page_bytes=2048)
    other = msgspec.structs.replace(
        RECORD, kv_dtype="uint8:fp8_e4m3", layout=CacheLayout(groups=(smaller,), hash_tokens=64)
    )
    text = shown(RECORD, other)
    for part in (
        "prefill", "decode", "kv_dtype", "bfloat16",
        "uint8:fp8_e4m3", "--kv-cache-dtype", "layout.groups[0].page_bytes", "4096", "2048",
        "follows from kv_dtype",
    ):  # fmt: skip
        assert part in text


def test_equal_fields_are_shown_once_and_unmarked() -> None:
    text = shown(RECORD, RECORD)
    assert "≠" not in text and text.count("bfloat16") == 1
