"""Tags of what a prompt could reuse, the first difference of two prompts, prompts from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.deploy.explanation import CONTEXT_TOKENS, Explanation, explain, first_difference
from backhaul.deploy.prompts import PromptReader, parse_token_ids
from backhaul.deploy.request_lines import find_request
from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointMatch,
    DomainId,
    PassedOver,
    Reason,
)
from backhaul.protocols.errors import ConfigError
from backhaul.transfer.base import CheckpointInfo, Visibility

MINE, OTHER, THIRD = DomainId("mine"), DomainId("other"), DomainId("third")
TOKENS = st.lists(st.integers(0, 3), max_size=30)


def info(
    boundary: int,
    common: int | None = None,
    visibility: Visibility = Visibility.VISIBLE,
    domain: DomainId = MINE,
) -> CheckpointInfo:
    return CheckpointInfo(
        domain, boundary, b"h", (CheckpointKind.DECODE_END,), 1, 1, 2.0, 1.0, 0, "p", visibility, 0,
        boundary if common is None else common,
    )  # fmt: skip


def matches_of(
    infos: list[CheckpointInfo], length: int, differing: dict[DomainId, str]
) -> list[CheckpointMatch]:
    """What a lookup answers of a listing's rows: one a boundary, what is consumable first."""
    found: dict[int, CheckpointMatch] = {}
    for one in infos:
        own, boundary = one.domain == MINE, one.boundary
        if one.common_tokens != boundary or boundary >= length:
            continue
        visible = one.visibility is Visibility.VISIBLE
        if not own and not visible:
            continue
        field = "" if own else differing.get(one.domain, "kv_dtype")
        reason = {
            Visibility.VISIBLE: Reason.DOMAIN_MISMATCH if field else None,
            Visibility.PENDING: Reason.UNCOMMITTED,
            Visibility.EVICTED: Reason.EVICTED,
        }[one.visibility]
        match = CheckpointMatch(
            boundary=boundary, kinds=one.kinds, consumable=reason is None, reason=reason,
            retained=visible, hash_matched=visible, age_s=one.age_s, field=field,
            domain=DomainId("") if own else one.domain,
        )  # fmt: skip
        before = found.get(boundary)
        if before is None or (match.consumable, own) > (before.consumable, not before.domain):
            found[boundary] = match
    return sorted(found.values(), key=lambda one: -one.boundary)


def explained(
    infos: list[CheckpointInfo], length: int, differing: dict[DomainId, str] | None = None
) -> Explanation:
    fields = differing or {}
    return explain(infos, matches_of(infos, length, fields), MINE, length, fields)


def test_each_candidate_has_its_tags_and_one_reason() -> None:
    infos = [
        info(96),
        info(64),
        info(32),
        info(80, domain=OTHER),
        info(48, visibility=Visibility.EVICTED),
        info(16, visibility=Visibility.PENDING),
        info(128, common=96),
        info(112, common=64),
        info(128, common=0),
    ]
    found = explained(infos, 96)
    by_boundary = {one.boundary: one for one in found.candidates}
    assert by_boundary[96].passed_over is PassedOver.NO_TOKEN_LEFT
    assert by_boundary[64].selected
    assert by_boundary[32].passed_over is PassedOver.SHALLOWER
    assert by_boundary[80].reason is Reason.DOMAIN_MISMATCH and by_boundary[80].hash_matched
    assert by_boundary[48].reason is Reason.EVICTED and not by_boundary[48].retained
    assert by_boundary[16].reason is Reason.UNCOMMITTED
    assert by_boundary[128].reason is Reason.HASH_MISMATCH and by_boundary[128].retained
    assert found.closest == infos[6] and found.strangers == 1


@given(
    st.lists(
        st.builds(
            lambda boundary, share, visibility, domain: info(
                16 * boundary, 16 * min(share, boundary), visibility, domain
            ),
            st.integers(1, 8),
            st.integers(0, 8),
            st.sampled_from(Visibility),
            st.sampled_from([MINE, OTHER, THIRD]),
        ),
        max_size=12,
    ),
    st.integers(0, 140),
    st.fixed_dictionaries({}, optional=dict.fromkeys([OTHER, THIRD], st.sampled_from(["", "tp"]))),
)
def test_tags_imply_each_other_and_one_is_selected_that_leaves_a_token(
    infos: list[CheckpointInfo], length: int, differing: dict[DomainId, str]
) -> None:
    """``Candidate`` itself refuses tags that contradict each other."""
    found = explained(infos, length, differing)
    assert len(found.candidates) == len(found.common)
    answered = matches_of(infos, length, differing)
    assert [(one.boundary, one.reason) for one in found.candidates[: found.looked_up]] == [
        (one.boundary, one.reason) for one in answered
    ], "tags and reasons of a lookup come first, and as it said them"
    usable = [one for one in found.candidates if one.consumable and one.boundary < length]
    selected = [one for one in found.candidates if one.selected]
    assert len(selected) == bool(usable)
    for one in usable:
        assert (one.boundary, not one.domain) <= (selected[0].boundary, not selected[0].domain)
        same = one.boundary == selected[0].boundary and not one.selected
        assert (one.passed_over is PassedOver.SAME_BOUNDARY) == same
        assert one.domain in ("", *(other for other, field in differing.items() if not field))
    if found.closest:
        assert found.closest.common_tokens < found.closest.boundary
        mine = [one for one in found.candidates if one.hash_matched and not one.domain]
        assert all(one.boundary <= found.closest.common_tokens for one in mine)


@given(TOKENS, TOKENS)
def test_the_first_difference_is_the_first(left: list[int], right: list[int]) -> None:
    found = first_difference(left, right, lambda ids: " ".join(map(str, ids)))
    if found is None:
        assert left == right
        return
    at = found.position
    assert left[:at] == right[:at] and left[at : at + 1] != right[at : at + 1]
    assert list(found.left_ids) == left[at : at + CONTEXT_TOKENS]
    assert found.before.split() == [str(t) for t in left[max(at - CONTEXT_TOKENS, 0) : at]]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("[1, 2]", [1, 2]),
        ('{"prompt_token_ids": [3]}', [3]),
        ('{"count": 1, "tokens": [4]}', [4]),
        ("hello", None),
        ("[]", None),
        ('{"messages": []}', None),
        ("3", None),
    ],
)
def test_token_ids_are_told_from_text(text: str, tokens: list[int] | None) -> None:
    assert parse_token_ids(text) == tokens


@pytest.mark.parametrize("text", ["[1, -1]", "[true]", '[1, "x"]', "[1.5]"])
def test_impossible_ids_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        parse_token_ids(text)


@given(st.text(max_size=40))
def test_any_text_is_ids_or_not_or_refused_in_words(text: str) -> None:
    try:
        parse_token_ids(text)
    except ConfigError as error:
        assert "\n" not in str(error)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("hello")
    with pytest.raises(ConfigError, match="--tokenizer"):
        PromptReader(None, special_tokens=False).read(str(tmp_path / "prompt"))
    with pytest.raises(ConfigError, match="cannot be read"):
        PromptReader(tmp_path, special_tokens=False)
    with pytest.raises(ConfigError, match="cannot be read"):
        PromptReader(None, special_tokens=False).read(str(tmp_path / "absent"))


def test_a_request_is_found_in_a_log_that_is_being_written(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first, last = {"request_id": "r-1", "n": 1}, {"request_id": "r-1", "n": 2}
    lines = [first, {"request_id": "r-12"}, ["r-1"], last, {"other": "r-1"}]
    log.write_text("\n".join(map(json.dumps, lines)) + '\n{"request_id": "r-1", "n"')
    assert find_request([str(log)], "r-1").raw == last
    with pytest.raises(ConfigError, match="not in"):
        find_request([str(log)], "r-2")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_request([str(tmp_path / "absent")], "r-1")


def test_what_can_be_converted_is_consumable_and_what_cannot_names_the_field() -> None:
    infos = [info(1), info(3, domain=OTHER), info(2, domain=THIRD)]
    found = explained(infos, 10, {OTHER: "", THIRD: "kv_dtype"}).candidates
    by_boundary = {one.boundary: one for one in found}
    assert by_boundary[3].selected and by_boundary[3].field == ""
    assert by_boundary[2].reason is Reason.DOMAIN_MISMATCH
    assert (by_boundary[2].field, by_boundary[2].domain) == ("kv_dtype", "third")
    assert by_boundary[1].passed_over is PassedOver.SHALLOWER


@pytest.mark.parametrize("domains", [(OTHER, THIRD), (OTHER, MINE), (MINE, OTHER)])
def test_of_domains_that_hold_one_prefix_one_is_selected(domains: tuple[DomainId, ...]) -> None:
    infos = [info(2, domain=domain) for domain in domains]
    found = explained(infos, 10, {OTHER: "", THIRD: ""}).candidates
    (selected,) = [one for one in found if one.selected]
    assert selected.domain == ("" if MINE in domains else OTHER)
    assert [one.passed_over for one in found if not one.selected] == [PassedOver.SAME_BOUNDARY]
