"""Comparison of domains: three verdicts, differences by path, causes apart from what follows."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.protocols.comparison import (
    FOLLOWS,
    OPTIONS,
    Comparison,
    Conversion,
    Verdict,
    compare,
    flatten,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout
from backhaul.protocols.sharding import Part, Rows, page_bytes
from backhaul.protocols.stages import most_layers, portions, stages_fit

GROUPS = tuple(
    GroupLayout(
        index=2 * index, kind=kind, block_tokens=64, page_bytes=4096, layers=2, members=f"m{index}",
        interior="heads", window_tokens=32 if kind is GroupKind.WINDOW else 0,
    )
    for index, kind in enumerate((GroupKind.FULL, GroupKind.RECURRENT, GroupKind.WINDOW))
)  # fmt: skip
RECORD = DomainRecord(
    model="m", weights="w", revision="r", quantization="q", compute_dtype="bfloat16",
    draft_model="d", layout=CacheLayout(groups=GROUPS, hash_tokens=16, ranks=4),
    scheduler_block_tokens=64, hash_function="sha256", hash_probe="00", kv_dtype="bfloat16",
    state_dtypes=("bfloat16", "float32"), conv_layout="DS", kv_layout="LBHNC",
    attention_backend="FLASH_ATTN", platform="cuda", cpu_isa="avx2", tensor_parallel=2,
    pipeline_parallel=2, speculative_tokens=1, vllm="0.32",
)  # fmt: skip


OTHER_KIND = {
    GroupKind.FULL: GroupKind.RECURRENT,
    GroupKind.RECURRENT: GroupKind.FULL,
    GroupKind.WINDOW: GroupKind.CHUNK,  # only these two have a window
}


def plain(record: DomainRecord) -> Any:
    """The record as JSON has it."""
    return json.loads(record.canonical())


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every scalar of a record lies; element types of states count as one."""
    if isinstance(value, dict):
        return [leaf for name in value for leaf in leaves(value[name], (*path, name))]
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        return [leaf for index, one in enumerate(value) for leaf in leaves(one, (*path, index))]
    return [path]


def changed(path: tuple[Any, ...]) -> DomainRecord:
    """The record with another value at one place."""
    raw = plain(RECORD)
    place = raw
    for step in path[:-1]:
        place = place[step]
    old = place[path[-1]]
    if path[-1] == "kind":
        new: Any = OTHER_KIND[GroupKind(old)].value
    elif isinstance(old, bool):
        new = not old
    elif isinstance(old, int):
        new = old * 2 + (old == 0)
        if path[-1] == "hash_tokens":
            new = 32
        if path[-1] == "index":
            new = old + 1  # still below the next group's
    elif path[-1] == "numbers":
        new = [7, 9]
    elif path[-1] == "page":
        new = [{"count": 1, "parts": [{"units": 2, "nbytes": 2048}]}]
    elif isinstance(old, list):
        new = ["float16", *old[1:]]
    else:
        new = f"{old}-other"
    place[path[-1]] = new
    return msgspec.convert(raw, DomainRecord)


def named(path: tuple[Any, ...]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def may_change(path: tuple[Any, ...]) -> bool:
    """A layout that gives a window to another group is none."""
    return path[-1] != "window_tokens" or GROUPS[path[2]].kind is GroupKind.WINDOW


LEAVES = list(filter(may_change, leaves(plain(RECORD))))


@given(st.sampled_from(LEAVES))
@settings(max_examples=200)
def test_any_single_change_gives_another_id_and_is_named_alone(path: tuple[Any, ...]) -> None:
    other = changed(path)
    assert other.domain_id != RECORD.domain_id
    found = compare(RECORD, other)
    assert found.verdict is Verdict.MISMATCH
    assert [one.path for one in found.differences] == [named(path)] == [found.field]
    assert found.differences[0].ours != found.differences[0].theirs
    back = compare(other, RECORD)
    assert [one[::-1] for one in [(d.ours, d.theirs) for d in back.differences]] == [
        (d.ours, d.theirs) for d in found.differences
    ]


@given(st.sets(st.sampled_from(LEAVES), min_size=2, max_size=6))
def test_several_changes_leave_at_least_one_cause(paths: set[tuple[Any, ...]]) -> None:
    raw = plain(RECORD)
    for path in paths:
        source, target = plain(changed(path)), raw
        for step in path[:-1]:
            source, target = source[step], target[step]
        target[path[-1]] = source[path[-1]]
    found = compare(RECORD, msgspec.convert(raw, DomainRecord))
    assert {one.path for one in found.differences} == {named(path) for path in paths}
    assert found.causes and found.field == found.causes[0].path
    assert found.differences[: len(found.causes)] == found.causes, "causes come first"


def test_equal_domains() -> None:
    found = compare(RECORD, msgspec.convert(plain(RECORD), DomainRecord))
    assert found == Comparison(Verdict.EQUAL)
    assert (found.field, found.rows()) == ("", [])
    assert found.line() == "the cache domains are equal"


def test_more_ranks_explain_smaller_pages_and_larger_blocks() -> None:
    groups = tuple(
        msgspec.structs.replace(g, page_bytes=2048, block_tokens=128, interior="half")
        for g in GROUPS
    )
    other = msgspec.structs.replace(
        RECORD, tensor_parallel=4, scheduler_block_tokens=128,
        layout=CacheLayout(groups=groups, hash_tokens=16, ranks=8),
    )  # fmt: skip
    found = compare(RECORD, other)
    assert [one.path for one in found.causes] == ["tensor_parallel"]
    assert len(found.differences) == 2 + 1 + 3 * len(GROUPS)
    assert found.line() == (
        "the cache domains differ: tensor_parallel 2 here, 4 there [--tensor-parallel-size], "
        "and 11 that follow from it"
    )
    notes = {path: note for path, _, _, note in found.rows()}
    assert notes["layout.groups[2].page_bytes"] == "follows from tensor_parallel"
    assert notes["scheduler_block_tokens"] == "follows from layout.groups.block_tokens"


def test_a_conv_layout_explains_the_shape_of_states() -> None:
    groups = tuple(msgspec.structs.replace(g, interior="transposed") for g in GROUPS)
    other = msgspec.structs.replace(
        RECORD, conv_layout="SD", layout=CacheLayout(groups=groups, hash_tokens=16, ranks=4)
    )
    assert compare(RECORD, other).field == "conv_layout"


def test_another_number_of_groups_is_named_before_its_groups() -> None:
    other = msgspec.structs.replace(RECORD, layout=CacheLayout(groups=GROUPS[:2], hash_tokens=16,
                                                               ranks=4))  # fmt: skip
    found = compare(RECORD, other)
    assert [one.path for one in found.causes] == ["layout.groups"]
    assert (found.causes[0].ours, found.causes[0].theirs) == ("3", "2")
    absent = next(one for one in found.differences if one.path == "layout.groups[2].kind")
    assert (absent.theirs, absent.follows) == ("(absent)", "layout.groups")


# -- conversion -------------------------------------------------------------------------------


HEADS = (Rows(1, (Part(4, 512),)),)
STATE = (Rows(3, (Part(4, 16), Part(4, 16), Part(8, 32))), Rows(1, (Part(8, 100),)))
LATENT = (Rows(1, (Part(1, 4096),)),)


NUMBERS = (1, 4), (0, 3), (2, 5)
"""Layers of each group, of six."""


def sharded(tensor: int, cut: tuple[int, ...] = (6,), **changes: Any) -> DomainRecord:
    """A domain of so many tensor-parallel ranks, whose pages are known; block sizes were fixed.
    ``cut``: layers of each pipeline stage."""
    numbers = [tuple(n for n in group if n < cut[0]) for group in NUMBERS]
    groups = tuple(
        GroupLayout(
            index=index, kind=kind, block_tokens=64, layers=len(numbers[index]),
            numbers=numbers[index], members=f"m{numbers[index]}",
            interior=f"{kind} over {tensor}", page=page, page_bytes=page_bytes(page, tensor),
            copies=tensor if page is LATENT else 1,
        )
        for index, (kind, page) in enumerate(
            ((GroupKind.FULL, HEADS), (GroupKind.RECURRENT, STATE), (GroupKind.FULL, LATENT))
        )
    )  # fmt: skip
    layout = CacheLayout(groups=groups, hash_tokens=16, ranks=tensor * len(cut))
    size = {
        "tensor_parallel": tensor, "layout": layout, "draft_model": "",
        "pipeline_parallel": len(cut),
        "pipeline_layers": ",".join(map(str, cut)) if len(cut) > 1 else "",
    }  # fmt: skip
    return msgspec.structs.replace(RECORD, **(size | changes))


@pytest.mark.parametrize("theirs", [1, 4])
def test_another_number_of_ranks_is_convertible_by_heads(theirs: int) -> None:
    found = compare(sharded(2), sharded(theirs))
    assert (found.verdict, found.field) == (Verdict.CONVERTIBLE, "")
    assert f"convertible: tensor_parallel 2 here, {theirs} there" in found.line()
    assert "(by taking heads together or apart)" in found.line()


def test_blocks_that_grew_with_the_ranks_are_not() -> None:
    """Other blocks have other hashes and end elsewhere."""
    other = sharded(4)
    groups = tuple(msgspec.structs.replace(g, block_tokens=128) for g in other.layout.groups)
    layout = msgspec.structs.replace(other.layout, groups=groups)
    found = compare(sharded(2), msgspec.structs.replace(other, layout=layout))
    assert (found.verdict, found.field) == (Verdict.MISMATCH, "tensor_parallel")


@pytest.mark.parametrize(
    "group",
    [
        {"page": ()},
        {"page_bytes": 1},
        {"page": (Rows(1, (Part(3, 512),)),)},
    ],
    ids=["unknown", "of other bytes", "that ranks cannot share"],
)
@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_a_page_that_is_not_known_to_the_byte_is_not(group: dict[str, Any], side: str) -> None:
    records = {"ours": sharded(2), "theirs": sharded(4)}
    layout = records[side].layout
    first = msgspec.structs.replace(layout.groups[0], **group)
    groups = (first, *layout.groups[1:])
    records[side] = msgspec.structs.replace(
        records[side], layout=msgspec.structs.replace(layout, groups=groups)
    )
    assert compare(**records).verdict is Verdict.MISMATCH


@pytest.mark.parametrize("field", ["weights", "kv_layout", "conv_layout", "vllm", "platform"])
def test_ranks_are_not_enough_where_anything_else_differs(field: str) -> None:
    found = compare(sharded(2), sharded(4, **{field: "other"}))
    assert (found.verdict, found.field) == (Verdict.MISMATCH, field)


HALVES = (3, 3)
BEYOND = (*sharded(2).layout.groups[0].numbers, sum(HALVES))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (sharded(2, HALVES), sharded(4, HALVES)),
        (sharded(2), sharded(2, HALVES)),
        (sharded(2), sharded(1, HALVES)),
        (sharded(1), sharded(4, HALVES)),
        (sharded(2, draft_model="ngram"), sharded(2, HALVES, draft_model="ngram")),
    ],
    ids=["the same stages", "stages", "stages and ranks", "more of both", "drafts of no model"],
)
def test_stages_are_convertible_where_one_side_has_a_single_one(
    ours: DomainRecord, theirs: DomainRecord
) -> None:
    for one, other in ((ours, theirs), (theirs, ours)):
        found = compare(one, other)
        assert (found.verdict, found.field) == (Verdict.CONVERTIBLE, "")
        causes = {cause.path for cause in found.causes}
        assert causes <= {"tensor_parallel", "pipeline_parallel"}


@given(st.data())
def test_no_stage_has_more_layers_to_convert_than_were_reckoned_with(data: st.DataObject) -> None:
    """Whatever layers the stages hold that the scheduler half does not see."""
    cut = tuple(data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)))
    numbers = sorted(data.draw(st.sets(st.integers(0, sum(cut) - 1), min_size=1)))
    ends = list(itertools.accumulate(cut))
    held = [
        [n for n in numbers if start <= n < end]
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    whole = regrouped(sharded(2, (sum(cut),)), layers=len(numbers), numbers=tuple(numbers))
    first = {"layers": len(held[0]), "numbers": tuple(held[0])}
    stages, other_ranks = (regrouped(sharded(n, cut), **first) for n in (2, 4))
    most = max(map(len, held))
    assert most <= most_layers(stages, other_ranks, 0) <= max(cut)
    for one, other in ((whole, stages), (stages, whole)):
        assert most_layers(one, other, 0) == len(numbers)


def regrouped(record: DomainRecord, **changes: Any) -> DomainRecord:
    """The record with another first group."""
    first = msgspec.structs.replace(record.layout.groups[0], **changes)
    layout = msgspec.structs.replace(record.layout, groups=(first, *record.layout.groups[1:]))
    return msgspec.structs.replace(record, layout=layout)


@pytest.mark.parametrize(
    ("ours", "theirs", "field"),
    [
        (sharded(2, HALVES), sharded(2, (4, 2)), "pipeline_layers"),
        (sharded(2, HALVES), sharded(2, (3, 2, 1)), "pipeline_parallel"),
        (sharded(2, HALVES), sharded(2, (6, 1, 1)), "pipeline_parallel"),
        (sharded(2), sharded(2, (5, 1)), "pipeline_parallel"),
        (sharded(2), sharded(2, (3, 2)), "pipeline_parallel"),
        (sharded(2), sharded(2, HALVES, pipeline_layers=""), "pipeline_parallel"),
        (sharded(2), sharded(2, HALVES, pipeline_layers="a,b"), "pipeline_parallel"),
        (sharded(2), sharded(2, HALVES, pipeline_parallel=3), "pipeline_parallel"),
        (regrouped(sharded(2), numbers=()), sharded(2, HALVES), "pipeline_parallel"),
        (regrouped(sharded(2), numbers=(4, 1)), sharded(2, HALVES), "pipeline_parallel"),
        (sharded(2), regrouped(sharded(2, HALVES), numbers=(0,)), "pipeline_parallel"),
        (sharded(2), regrouped(sharded(2, HALVES), layers=2), "pipeline_parallel"),
        (regrouped(sharded(2), layers=9), sharded(2, HALVES), "pipeline_parallel"),
        (regrouped(sharded(2), numbers=BEYOND, layers=len(BEYOND)), sharded(2, HALVES),
         "pipeline_parallel"),
        (regrouped(sharded(2), draft=True), regrouped(sharded(2, HALVES), draft=True),
         "pipeline_parallel"),
        (regrouped(sharded(2), page=()), regrouped(sharded(2, HALVES), page=()),
         "pipeline_parallel"),
        (sharded(2, draft_model="d"), sharded(2, HALVES, draft_model="d"), "pipeline_parallel"),
        (sharded(2), sharded(2, HALVES, weights="other"), "weights"),
    ],
    ids=[
        "cut elsewhere", "several on both sides", "several, the first one whole",
        "a stage without a layer of a group",
        "fewer layers", "not told", "nonsense", "fewer stages told", "not numbered", "out of order",
        "another first stage", "more layers than numbers", "fewer numbers than layers",
        "more layers than the stages have", "a draft's layers", "unknown pages", "drafting",
        "something else",
    ],
)  # fmt: skip
def test_stages_that_are_not_known_are_not(
    ours: DomainRecord, theirs: DomainRecord, field: str
) -> None:
    for one, other in ((ours, theirs), (theirs, ours)):
        found = compare(one, other)
        assert (found.verdict, found.field) == (Verdict.MISMATCH, field)


def test_groups_that_only_one_side_has_do_not_fit() -> None:
    record = sharded(2)
    layout = msgspec.structs.replace(record.layout, groups=record.layout.groups[:1])
    assert not stages_fit(msgspec.structs.replace(record, layout=layout), sharded(2, HALVES))
    assert not stages_fit(sharded(2, HALVES), sharded(2, (4, 2)))


def test_an_object_of_other_layers_than_the_records_tell_is_refused() -> None:
    ours, theirs = sharded(2), sharded(2, HALVES)
    layers = ours.layout.groups[0].layers
    assert sum(one.layers for one in portions(ours, theirs, 0, 0, layers)) == layers
    with pytest.raises(ValueError, match=f"group 0 has {layers + 1} layers here"):
        portions(ours, theirs, 0, 0, layers + 1)


def test_a_convertible_field_is_convertible_and_says_how() -> None:
    rules = (Conversion("conv_layout", "transposing the state"),)
    other = msgspec.structs.replace(RECORD, conv_layout="SD")
    found = compare(RECORD, other, rules)
    assert (found.verdict, found.field) == (Verdict.CONVERTIBLE, "")
    assert "are convertible: conv_layout DS here, SD there" in found.line()
    assert "by transposing the state" in found.line()
    assert compare(RECORD, other).verdict is Verdict.MISMATCH


def test_a_second_field_forbids_what_the_first_allows() -> None:
    rules = (Conversion("conv_layout", "transposing the state"),)
    other = msgspec.structs.replace(RECORD, conv_layout="SD", revision="s")
    found = compare(RECORD, other, rules)
    assert (found.verdict, found.field) == (Verdict.MISMATCH, "revision")


def test_what_follows_from_a_convertible_cause_is_covered_by_it() -> None:
    rules = (Conversion("tensor_parallel", "gathering the shards", frozenset({"layout.ranks"})),)
    other = msgspec.structs.replace(
        RECORD, tensor_parallel=1,
        layout=CacheLayout(groups=GROUPS, hash_tokens=16, ranks=2),
    )  # fmt: skip
    assert compare(RECORD, other, rules).verdict is Verdict.CONVERTIBLE
    rules = (Conversion("tensor_parallel", "gathering the shards"),)
    assert compare(RECORD, other, rules).verdict is Verdict.MISMATCH


# -- the tables -------------------------------------------------------------------------------


def general(path: str) -> str:
    return path.replace("[0]", "").replace("[1]", "").replace("[2]", "")


def test_the_tables_name_fields_that_there_are() -> None:
    known = {general(path) for path in flatten(RECORD)}
    assert set(OPTIONS) <= known
    assert set(FOLLOWS) <= known
    assert {cause for causes in FOLLOWS.values() for cause in causes} <= known


@pytest.mark.parametrize("start", sorted(FOLLOWS))
def test_no_field_follows_from_itself(start: str) -> None:
    reached, todo = set(), list(FOLLOWS[start])
    while todo:
        one = todo.pop()
        reached.add(one)
        todo += [cause for cause in FOLLOWS.get(one, ()) if cause not in reached]
    assert start not in reached
