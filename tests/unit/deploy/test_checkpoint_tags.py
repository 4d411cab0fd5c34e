"""Tags of listed checkpoints, with and without a request: each implies the one before, one of a
request's is selected, and filters do not change what a checkpoint is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_kit import make_layout, make_record

from backhaul.deploy.checkpoint_tags import TaggedPage, tagged_for, tagged_without
from backhaul.deploy.checkpoints_command import as_document
from backhaul.deploy.prompt_lookup import Subject, differing_fields
from backhaul.deploy.request_lines import RequestLine
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.transfer.backends.inspector import StoreInspector
from backhaul.transfer.base import CheckpointInfo, DomainInfo, Visibility
from backhaul.transfer.listing import ListPage, ListQuery

TAGS = ("retained", "hash_matched", "consumable", "selected")


def domain(**fields: Any) -> DomainInfo:
    record = msgspec.structs.replace(make_record("m"), **fields)
    return DomainInfo(record.domain_id, record, (), 0.0, 0, {}, 0, 0)


MINE = domain(layout=make_layout(pages=True))
CONVERTIBLE = domain(layout=make_layout(2, pages=True), tensor_parallel=2)
FOREIGN = domain(layout=make_layout(pages=True), kv_dtype="fp8")
DOMAINS = [MINE, CONVERTIBLE, FOREIGN]
GRID = MINE.record.layout.boundary_tokens
QUERY = ListQuery(visibilities=frozenset(Visibility))


def test_the_domains_here_are_what_they_are_called() -> None:
    assert differing_fields(DOMAINS, MINE) == {CONVERTIBLE.id: "", FOREIGN.id: "kv_dtype"}


class Listing:
    """A store that answers one listing whole, whatever was asked beside visibility."""

    def __init__(self, infos: list[CheckpointInfo]) -> None:
        self._infos = infos

    def page(self, query: ListQuery) -> ListPage:
        fit = [info for info in self._infos if info.visibility in query.visibilities]
        return ListPage(tuple(fit))


class PagedListing(Listing):
    """A store that answers at most ``most`` at once."""

    def __init__(self, infos: list[CheckpointInfo], most: int) -> None:
        super().__init__(infos)
        self._most = most
        self.calls = 0

    def page(self, query: ListQuery) -> ListPage:
        self.calls += 1
        start = int(query.cursor.partition("/")[2] or 0)
        whole = super().page(query).checkpoints
        end = start + min(query.limit or self._most, self._most)
        more = f"0x1p0/{end}" if end < len(whole) else ""
        return ListPage(whole[start:end], more)


def info(
    blocks: int,
    common: int,
    home: DomainInfo = MINE,
    visibility: Visibility = Visibility.VISIBLE,
    hits: int = 0,
) -> CheckpointInfo:
    return CheckpointInfo(
        domain=home.id,
        boundary=blocks * GRID,
        block_hash=b"h",
        kinds=(CheckpointKind.DECODE_END,),
        state_bytes=1,
        attention_bytes=1,
        age_s=0.0,
        idle_s=0.0,
        leases=0,
        producer="p",
        visibility=visibility,
        hits=hits,
        common_tokens=min(common, blocks) * GRID,
    )


INFOS = st.lists(
    st.builds(
        info,
        st.integers(1, 4),
        st.integers(0, 4),
        st.sampled_from(DOMAINS),
        st.sampled_from(Visibility),
        st.integers(0, 2),
    ),
    max_size=10,
)


def without(infos: list[CheckpointInfo], target: DomainInfo | None, wanted: str | None) -> Any:
    store = cast(StoreInspector, Listing(infos))
    return tagged_without(store, DOMAINS, target, QUERY, wanted)


def along(
    infos: list[CheckpointInfo], blocks: int, wanted: str | None, query: ListQuery = QUERY
) -> TaggedPage:
    hashes = tuple(f"{index:02x}" for index in range(blocks))
    line = RequestLine(
        raw={}, request_id="r", prompt_tokens=blocks * GRID, grid_tokens=GRID,
        boundary_hashes=hashes,
    )  # fmt: skip
    subject = Subject(prompt_tokens=line.prompt_tokens, tokens=[], request=line)
    store = cast(StoreInspector, Listing(infos))
    return tagged_for(store, subject, DOMAINS, MINE, query, wanted, "")


def check(page: TaggedPage) -> list[dict[str, Any]]:
    """Each row's tags, as ``--json`` has them."""
    rows = [one["tags"] for one in as_document("s", page, None)["checkpoints"]]
    for tags, info in zip(rows, page.checkpoints, strict=True):
        flags = [tags[name] for name in TAGS]
        assert list(map(bool, flags)) == sorted(map(bool, flags), reverse=True), tags
        # What is unknown stays so from there on.
        known = [flag is not None for flag in flags]
        assert known == sorted(known, reverse=True), tags
        assert tags["retained"] == (info.visibility is Visibility.VISIBLE)
        assert (tags["field"] != "") == (tags["reason"] == "domain_mismatch")
    return rows


@given(INFOS, st.sampled_from([None, *DOMAINS]), st.booleans())
def test_without_a_request_each_tag_implies_the_one_before_and_none_is_selected(
    infos: list[CheckpointInfo], target: DomainInfo | None, only_consumable: bool
) -> None:
    filtered = target is not None and only_consumable
    page = without(infos, target, "consumable" if filtered else None)
    for tags in check(page):
        assert tags["selected"] is None
        assert (tags["consumable"] is None) == (tags["hash_matched"] is None) == (target is None)
        assert tags["consumable"] or not filtered
    assert filtered or len(page.checkpoints) == len(infos)


@given(
    st.lists(st.sampled_from(DOMAINS), max_size=40),
    st.integers(1, 7),
    st.integers(0, 9),
    st.booleans(),
)
def test_a_listing_has_as_many_as_fit_up_to_its_limit_and_goes_on_where_it_ended(
    homes: list[DomainInfo], most: int, limit: int, only_consumable: bool
) -> None:
    infos = [info(1, 1, home, hits=number) for number, home in enumerate(homes)]
    store = PagedListing(infos, most)
    wanted = [one for one in infos if one.domain != FOREIGN.id or not only_consumable]
    listed: list[CheckpointInfo] = []
    query = dataclasses.replace(QUERY, limit=limit)
    while True:
        before = store.calls
        page = tagged_without(
            cast(StoreInspector, store), DOMAINS, MINE, query,
            "consumable" if only_consumable else None,
        )  # fmt: skip
        assert store.calls - before <= len(infos) // most + 2
        left = len(wanted) - len(listed)
        assert len(page.checkpoints) == (min(limit, left) if limit else left)
        listed += page.checkpoints
        if not page.next_cursor:
            break
        query = dataclasses.replace(query, cursor=page.next_cursor)
    assert listed == wanted


@given(INFOS, st.integers(0, 4), st.sampled_from([None, *TAGS]), st.integers(0, 2))
def test_for_a_request_at_most_one_is_selected_and_filters_change_no_tag(
    infos: list[CheckpointInfo], blocks: int, wanted: str | None, hits_min: int
) -> None:
    every = along(infos, blocks, None)
    rows = check(every)
    assert sum(tags["selected"] for tags in rows) <= 1
    assert all(bool(tags["reason"]) == (not tags["selected"]) for tags in rows)
    page = along(infos, blocks, wanted, dataclasses.replace(QUERY, hits_min=hits_min))
    check(page)
    assert list(zip(*page[:2], strict=True)) == [
        (info, tags)
        for info, tags in zip(every.checkpoints, every.tags, strict=True)
        if info.hits >= hits_min and (wanted is None or getattr(tags, wanted))
    ]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda infos: without(infos, None, None), ["-", "-", "-"]),
        (
            lambda infos: without(infos, MINE, None),
            ["consumable", "consumable", "hash_matched (domain_mismatch kv_dtype)"],
        ),
        (
            lambda infos: along(infos, 3, None),
            ["consumable (same_boundary)", "selected", "hash_matched (domain_mismatch kv_dtype)"],
        ),
    ],
)
def test_what_the_table_says(
    make: Callable[[list[CheckpointInfo]], TaggedPage], words: list[str]
) -> None:
    infos = [info(2, 2, home, hits=1) for home in (CONVERTIBLE, MINE, FOREIGN)]
    assert [tags.shown for tags in make(infos).tags] == words
