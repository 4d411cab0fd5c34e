"""`backhaul checkpoints`: what lies in a store."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backhaul.deploy.arguments import (
    domain_prefix,
    each,
    file_to_read,
    one_line,
    prompt_file,
)
from backhaul.deploy.store_options import (
    DEFAULT_STORE,
    AsJson,
    CacheSalt,
    StoreTimeout,
    StoreUri,
    TokenizerFolder,
)
from backhaul.deploy.terminal import format_age, parse_duration, print_json
from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.protocols.errors import ConfigError, StoreRejected
from backhaul.transfer.daemon.settings import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from backhaul.deploy.checkpoint_tags import TaggedPage
    from backhaul.deploy.prompt_lookup import Subject
    from backhaul.transfer.base import CheckpointInfo, DomainInfo
    from backhaul.transfer.listing import ListQuery

_HASH_DIGITS = 12
_DOMAIN_DIGITS = 8
_LEFT = ("domain", "ends", "is", "tag", "hash", "producer")
_GAP = 2
_PIPE_WIDTH = 1_000
_EXPENDABLE = ("hash", "producer", "unused for", "leases", "attention", "state", "hits")
"""Columns that a narrow terminal does without, the first ones first."""


class Tag(enum.StrEnum):
    """The tags of a checkpoint; each implies the one before it."""

    RETAINED = "retained"
    HASH_MATCHED = "hash_matched"
    CONSUMABLE = "consumable"
    SELECTED = "selected"


class Show(enum.StrEnum):
    """Which part of the life of checkpoints is listed."""

    VISIBLE = "visible"
    PENDING = "pending"
    EVICTED = "evicted"
    ALL = "all"


def checkpoints(
    store: StoreUri = DEFAULT_STORE,
    domain: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="Only this cache domain; the id's start is enough.",
            callback=each(domain_prefix),
        ),
    ] = "",
    kind: Annotated[
        list[CheckpointKind] | None,
        typer.Option(help="Only checkpoints that stand for this end; may be repeated."),
    ] = None,
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Only those at least so old, e.g. 10m.")
    ] = "0",
    newer_than: Annotated[
        str, typer.Option(metavar="TIME", help="Only those at most so old, e.g. 2h30m.")
    ] = "",
    show: Annotated[
        Show, typer.Option(help="Visible to lookups, not yet committed by all ranks, or evicted.")
    ] = Show.VISIBLE,
    tag: Annotated[
        Tag | None,
        typer.Option(
            help="Only those with this tag: for the prompt or request given, else as far as it "
            "means something without one (see docs/checkpoints.md)."
        ),
    ] = None,
    used: Annotated[
        bool,
        typer.Option(
            "--used", help="Only those that some lookup so far found the deepest to load."
        ),
    ] = False,
    prompt: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Tags are for this prompt: text, JSON token ids, or - for standard input.",
            callback=each(prompt_file),
        ),
    ] = "",
    tokenizer: TokenizerFolder = None,
    cache_salt: CacheSalt = "",
    request: Annotated[
        str,
        typer.Option(
            metavar="ID", help="Tags are for this request of the log.", callback=each(one_line)
        ),
    ] = "",
    request_log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="An engine's request log; may be repeated.",
            callback=each(file_to_read),
        ),
    ] = None,
    for_domain: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="The target worker's cache domain; default: the request's, or the only one.",
            callback=each(domain_prefix),
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=0, max=1_000_000, help="At most so many; 0: all.")] = 50,
    cursor: Annotated[
        str, typer.Option(metavar="TEXT", help="Continue where a former listing ended.")
    ] = "",
    as_json: AsJson = False,
    timeout: StoreTimeout = 5.0,
) -> None:
    """List a store's checkpoints, newest first. Listing counts as no use of them.

    Example: backhaul checkpoints --kind decode_end --newer-than 10m

    Exit code 0: listed, also where nothing fits; 1: the store does not answer; 2: wrong usage.
    """
    subject = _subject(prompt, request, request_log or [], tokenizer)
    _check_tag(tag, for_domain, show, cursor, relative=subject is not None)
    query = make_query(
        domain=domain.lower(),
        kinds=kind or [],
        age_min_s=parse_duration(older_than, "--older-than"),
        age_max_s=parse_duration(newer_than, "--newer-than") if newer_than else math.inf,
        show=show,
        limit=limit,
        cursor=cursor,
        hits_min=int(used),
    )

    from backhaul.deploy.checkpoint_tags import tagged_for, tagged_without
    from backhaul.deploy.prompt_lookup import choose_domain, domain_of
    from backhaul.transfer.backends.inspector import StoreInspector

    with StoreInspector(store, timeout_s=timeout) as inspector:
        domains = inspector.domains() if subject or for_domain else []
        target: DomainInfo | None = None
        if subject is not None:
            target = domain_of(domains, subject, for_domain, "--for-domain")
            page = tagged_for(inspector, subject, domains, target, query, tag, cache_salt)
        else:
            if for_domain:
                target = choose_domain(domains, for_domain, "--for-domain")
            page = tagged_without(inspector, domains, target, query, tag)
        if as_json:
            print_json(as_document(store, page, target.id if target else None))
            return
        known = [] if page.checkpoints else [info.id for info in inspector.domains()]
    _print(page, domain, known)


def _subject(
    prompt: str, request: str, request_logs: list[str], tokenizer: str | None
) -> Subject | None:
    if not (prompt or request):
        if request_logs or tokenizer:
            raise ConfigError("--request-log and --tokenizer go with --request ID or --prompt FILE")
        return None
    from backhaul.deploy.prompt_lookup import find_subject, make_reader

    reader = make_reader(tokenizer, special_tokens=False)
    return find_subject(prompt, request, request_logs, reader)


def _check_tag(
    tag: Tag | None, for_domain: str, show: Show, cursor: str, *, relative: bool
) -> None:
    if relative:
        if cursor:
            raise ConfigError("--cursor goes with no prompt: a listing along a prompt has no pages")
    elif tag in (Tag.HASH_MATCHED, Tag.SELECTED):
        or_used = ", or --used for what any lookup found" if tag is Tag.SELECTED else ""
        raise ConfigError(
            f"--tag {tag} is said of a request: give --prompt FILE or --request ID{or_used}"
        )
    elif tag is Tag.CONSUMABLE and not for_domain:
        raise ConfigError(
            "--tag consumable is said of a worker: give --for-domain ID, or a request with "
            "--prompt FILE or --request ID"
        )
    if tag is not None and show is not Show.VISIBLE:
        raise ConfigError(
            f"--tag {tag} with --show {show}: whoever has a tag is retained, so visible; leave out "
            "one of them"
        )


def make_query(
    *,
    domain: str,
    kinds: list[CheckpointKind],
    age_min_s: float,
    age_max_s: float,
    show: Show,
    limit: int,
    cursor: str,
    hits_min: int = 0,
) -> ListQuery:
    """The query that the options describe. Raises ``ConfigError`` where they contradict."""
    from backhaul.transfer.base import Visibility
    from backhaul.transfer.listing import ListQuery

    if age_min_s > age_max_s:
        raise ConfigError(
            f"--older-than is {format_age(age_min_s)} and --newer-than {format_age(age_max_s)}: "
            "nothing is both; give --newer-than the longer time"
        )
    try:
        return ListQuery(
            domain_prefix=domain,
            kinds=frozenset(kinds),
            age_min_s=age_min_s,
            age_max_s=age_max_s,
            visibilities=frozenset(Visibility if show is Show.ALL else {Visibility(show)}),
            limit=limit,
            cursor=cursor,
            hits_min=hits_min,
        )
    except StoreRejected as error:
        raise ConfigError(str(error)) from None


def as_document(store: str, page: TaggedPage, target: str | None) -> dict[str, Any]:
    """What ``--json`` prints. Times in seconds, sizes in bytes; ``next_cursor`` is empty on the
    last page; a tag is null where it means nothing without a request or a worker."""
    return {
        "store": store,
        "for_domain": target,
        "checkpoints": [
            checkpoint_document(info) | {"tags": tags._asdict()}
            for info, tags in zip(page.checkpoints, page.tags, strict=True)
        ],
        "next_cursor": page.next_cursor,
    }


def checkpoint_document(info: CheckpointInfo) -> dict[str, Any]:
    """One checkpoint as JSON."""
    return {
        "domain": info.domain,
        "boundary": info.boundary,
        "block_hash": info.block_hash.hex(),
        "kinds": [kind.value for kind in info.kinds],
        "visibility": info.visibility.value,
        "age_s": round(info.age_s, 3),
        "idle_s": round(info.idle_s, 3),
        "state_bytes": info.state_bytes,
        "attention_bytes": info.attention_bytes,
        "hits": info.hits,
        "leases": info.leases,
        "producer": info.producer,
    }


def _print(page: TaggedPage, domain: str, known: list[Any]) -> None:
    from backhaul.deploy.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)  # a file has no edge
    if not page.checkpoints:
        console.print("No checkpoint fits.")
        if not known:
            console.print("No engine has opened a cache domain in this store yet.")
        elif not any(one.startswith(domain) for one in known):
            console.print(f"No domain's id starts with {domain!r}; known: {', '.join(known)}")
        return
    shown, left_out = table(
        page.checkpoints,
        console.width if console.is_terminal else None,
        [tags.shown for tags in page.tags],
    )
    console.print(shown)
    if left_out:
        console.print(f"Not shown for lack of width: {', '.join(left_out)}. --json has all.")
    if page.next_cursor:
        console.print(
            f"{len(page.checkpoints)} shown, there are more: --limit 0 for all, or go on with "
            f"--cursor {page.next_cursor}",
            soft_wrap=True,
        )


def table(
    infos: tuple[CheckpointInfo, ...], width: int | None, tags: Sequence[str] = ()
) -> tuple[Table, list[str]]:
    """The rows that people see, and the columns that ``width`` characters (None: any number) had
    no place for. Columns that say the same usual thing of every row are left out too; ``tags``: a
    word per row, none where no request is meant."""
    from rich.table import Table

    digits = _unambiguous([info.domain for info in infos])
    columns: dict[str, list[str]] = {
        "domain": [info.domain[:digits] for info in infos],
        "tokens": [str(info.boundary) for info in infos],
        "ends": [",".join(kind.value for kind in info.kinds) for info in infos],
        "is": [info.visibility.value for info in infos],
        "tag": list(tags) or ["-"] * len(infos),
        "age": [format_age(info.age_s) for info in infos],
        "unused for": [format_age(info.idle_s) for info in infos],
        "hits": [str(info.hits) for info in infos],
        "leases": [str(info.leases) for info in infos],
        "state": [format_bytes(info.state_bytes) for info in infos],
        "attention": [format_bytes(info.attention_bytes) for info in infos],
        "hash": [info.block_hash.hex()[:_HASH_DIGITS] for info in infos],
        "producer": [info.producer or "-" for info in infos],
    }
    for name, usual in (("is", "visible"), ("tag", "-"), ("leases", "0"), ("producer", "-")):
        if set(columns[name]) == {usual}:
            del columns[name]
    left_out: list[str] = []
    for name in _EXPENDABLE:
        if width is None or _natural_width(columns) <= width:
            break
        if columns.pop(name, None) is not None:
            left_out.append(name)
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for name in columns:
        right = name not in _LEFT
        shown.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        shown.add_row(*row)
    return shown, left_out


def _natural_width(columns: dict[str, list[str]]) -> int:
    gaps = _GAP * (len(columns) - 1)
    return gaps + sum(max(map(len, (name, *cells))) for name, cells in columns.items())


def _unambiguous(ids: list[str]) -> int:
    """Digits that tell the ids apart, at least ``_DOMAIN_DIGITS``."""
    different = set(ids)
    digits = _DOMAIN_DIGITS
    while len({one[:digits] for one in different}) < len(different):
        digits += 1
    return digits
