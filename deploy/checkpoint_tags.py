"""The tags of listed checkpoints, for a request and a target worker or without either."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from backhaul.deploy.explain_view import GOES_ON
from backhaul.deploy.explanation import goes_on
from backhaul.deploy.explanation import tag as tag_for_prompt
from backhaul.deploy.prompt_lookup import (
    LIMIT,
    Subject,
    compared_tokens,
    differing_fields,
    look_up,
    prompt_hashes,
)
from backhaul.protocols.checkpoint import DomainId, Reason
from backhaul.transfer.base import CheckpointInfo, DomainInfo, Visibility
from backhaul.transfer.listing import LISTING_MAX

if TYPE_CHECKING:
    from backhaul.transfer.backends.inspector import StoreInspector
    from backhaul.transfer.listing import ListQuery


class Tags(NamedTuple):
    """A checkpoint's tags, each of which implies the one before; None where one means nothing
    without a request or a worker. ``reason``: why it is not consumable, or was passed over;
    ``field``: of a domain mismatch; ``goes_on``: it does not match since it is longer than the
    request, and departs from it nowhere that can be seen."""

    retained: bool
    hash_matched: bool | None
    consumable: bool | None
    selected: bool | None
    reason: str | None = None
    field: str = ""
    goes_on: bool = False

    @property
    def shown(self) -> str:
        """The deepest tag, and why not the next one, where a request or a worker is meant."""
        if self.consumable is None:
            return "-"
        reason = GOES_ON if self.goes_on and self.retained else self.reason
        why = f" ({reason}{f' {self.field}' if self.field else ''})" if reason else ""
        for name in ("selected", "consumable", "hash_matched", "retained"):
            if getattr(self, name):
                return name + why
        return f"none{why}"


class TaggedPage(NamedTuple):
    """A page of a listing with each checkpoint's tags."""

    checkpoints: tuple[CheckpointInfo, ...]
    tags: tuple[Tags, ...]
    next_cursor: str = ""


def tagged_without(
    inspector: StoreInspector,
    domains: list[DomainInfo],
    target: DomainInfo | None,
    query: ListQuery,
    wanted: str | None,
) -> TaggedPage:
    """A page without a request. With a ``target``, each checkpoint's tags are those for a request
    that goes on from its very prefix; which one such a request selects is not said. As many as the
    query's limit, 0: all, however many pages of the store that takes."""
    fields = differing_fields(domains, target) if target else {}
    rows: list[tuple[CheckpointInfo, Tags]] = []
    # Where most are passed over, a page asks for more than are wanted.
    asked = LISTING_MAX if wanted == "consumable" else query.limit
    cursor, most = query.cursor, asked
    while True:
        page = inspector.page(dataclasses.replace(query, limit=most, cursor=cursor))
        tags = [_tags_without(info, target, fields) for info in page.checkpoints]
        fit = [place for place, one in enumerate(tags) if wanted != "consumable" or one.consumable]
        left = query.limit - len(rows) if query.limit else len(fit)
        if len(fit) > left:
            # The same page again, ended with the last one wanted: its cursor goes on from there.
            most = fit[left - 1] + 1
            continue
        rows += [(page.checkpoints[place], tags[place]) for place in fit]
        cursor, most = page.next_cursor, asked
        if not cursor or (query.limit and len(rows) == query.limit):
            infos = tuple(info for info, _ in rows)
            return TaggedPage(infos, tuple(one for _, one in rows), cursor)


def _tags_without(
    info: CheckpointInfo, target: DomainInfo | None, fields: Mapping[DomainId, str]
) -> Tags:
    retained = info.visibility is Visibility.VISIBLE
    if target is None:
        return Tags(retained, hash_matched=None, consumable=None, selected=None)
    reason = None
    if not retained:
        evicted = info.visibility is Visibility.EVICTED
        reason = Reason.EVICTED if evicted else Reason.UNCOMMITTED
    elif info.domain != target.id and fields.get(info.domain) != "":
        reason = Reason.DOMAIN_MISMATCH
    return Tags(
        retained,
        hash_matched=retained,
        consumable=reason is None,
        selected=None,
        reason=reason,
        field=fields.get(info.domain, "") if reason is Reason.DOMAIN_MISMATCH else "",
    )


def tagged_for(
    inspector: StoreInspector,
    subject: Subject,
    domains: list[DomainInfo],
    target: DomainInfo,
    query: ListQuery,
    wanted: str | None,
    cache_salt: str,
) -> TaggedPage:
    """Checkpoints with their tags for a prompt and a worker of ``target``, those that share most
    first; ``wanted``: only those with this tag. Filters other than the tag are the query's; which
    one is selected does not depend on them. Of more than ``LIMIT`` the rest is not seen."""
    everything = look_up(
        inspector,
        prompt_hashes(subject, target, cache_salt),
        visibilities=query.visibilities | {Visibility.VISIBLE},
    )
    fields = differing_fields(domains, target)
    candidates = tag_for_prompt(everything, target.id, subject.prompt_tokens, fields)
    compared = compared_tokens(subject, target)
    rows = []
    for info, one in zip(everything, candidates, strict=True):
        tags = Tags(
            retained=one.retained,
            hash_matched=one.hash_matched,
            consumable=one.consumable,
            selected=one.selected,
            reason=one.reason or one.passed_over,
            field=one.field,
            goes_on=goes_on(info.boundary, info.common_tokens, subject.prompt_tokens, compared),
        )
        if _fits(query, info) and (wanted is None or getattr(tags, wanted)):
            rows.append((info, tags))
    rows = rows[: query.limit or LIMIT]
    return TaggedPage(tuple(info for info, _ in rows), tuple(tags for _, tags in rows))


def _fits(query: ListQuery, info: CheckpointInfo) -> bool:
    return (
        info.visibility in query.visibilities
        and info.hits >= query.hits_min
        and info.domain.startswith(query.domain_prefix)
        and (not query.kinds or not query.kinds.isdisjoint(info.kinds))
        and query.age_min_s <= info.age_s <= query.age_max_s
    )
