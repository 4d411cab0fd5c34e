"""`backhaul doctor`: why is nothing reused?"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from backhaul.deploy.arguments import each, http_url, seconds, store_uri
from backhaul.deploy.store_options import DEFAULT_STORE, AsJson, StoreUri
from backhaul.deploy.terminal import print_json
from backhaul.protocols.errors import ConfigError, StoreError
from backhaul.transfer.daemon.settings import parse_address

if TYPE_CHECKING:
    from backhaul.deploy.console import Console
    from backhaul.deploy.diagnosis import EngineView
    from backhaul.deploy.domain_rows import Row
    from backhaul.deploy.findings import Finding
    from backhaul.transfer.base import DomainInfo

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    store: StoreUri = DEFAULT_STORE,
    store_http: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="The store's --http address; default: what the store says.",
            callback=each(http_url),
        ),
    ] = "",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A vLLM server to examine; may be repeated.",
            callback=each(http_url),
        ),
    ] = None,
    other_store: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URI",
            help="Look for engines' cache domains there too; may be repeated.",
            callback=each(store_uri),
        ),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Show these two side by side: starts of domain ids or of engines' names, or the "
            "--engine URLs. Default: two engines given, or one and another domain of its model, "
            "or the two domains of one model that were used last.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            help="Read from the pool once to see which transports UCX uses from here. What an "
            "engine itself uses is in its metrics."
        ),
    ] = True,
    as_json: AsJson = False,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Longest wait for each answer.", callback=each(seconds)
        ),
    ] = 5.0,
) -> None:
    """Examine a store and engines, and show two cache domains side by side.

    Example: backhaul doctor --engine http://prefill:8000 --engine http://decode:8000

    Exit code 0: no problem; 1: at least one; 2: wrong usage.
    """
    from backhaul.deploy.diagnosis import (
        check_domains,
        check_engine,
        check_side_by_side,
        check_store,
    )
    from backhaul.deploy.domain_rows import differences
    from backhaul.deploy.engine_view import read_engine
    from backhaul.deploy.findings import Finding, Level, worst
    from backhaul.deploy.transports import check_transports
    from backhaul.transfer.backends.inspector import StoreInspector, catalog_target
    from backhaul.transfer.transport_probe import probe_transports

    target = catalog_target(store)
    findings: list[Finding] = []
    domains: list[DomainInfo] = []
    with StoreInspector(store, timeout_s=timeout) as inspector:
        listening = ""
        try:
            listening = inspector.hello()
            findings.append(check_store(inspector.stats()))
            domains = inspector.domains()
            reached = True
        except StoreError as error:
            reached = False
            findings.append(
                Finding("store catalog", Level.PROBLEM, str(error), "start it, or correct --store")
            )
    if store_http or reached:
        findings.append(_check_http(store_http, target, listening, timeout))
    if reached:
        if probe:
            findings.append(check_transports(probe_transports(target, timeout)))
        findings += check_domains(domains)
    others, unreached = _domains_elsewhere(other_store or [], timeout)
    findings += unreached
    seen: list[Seen] = []
    for url in engine or []:
        view = read_engine(url, timeout)
        info = next((one for one in domains if one.id == view.domain), None)
        uri = ""
        if info is None and view.domain:
            uri, info = others.get(view.domain, ("", None))
        seen.append(Seen(view, info, uri))
        findings += check_engine(view, info.record if info else None, uri)
    findings += check_side_by_side([(one.view, one.info) for one in seen])
    everything = [*domains, *(info for _, info in others.values() if info not in domains)]
    pair = choose_pair(everything, compare, seen) if reached or others else None
    rows = differences(pair[0].record, pair[1].record) if pair else []
    if as_json:
        print_json(as_document(findings, domains, pair, rows, seen))
    else:
        _print(findings, pair, rows, seen)
    if worst(findings) is Level.PROBLEM:
        raise typer.Exit(1)


class Seen(NamedTuple):
    """An engine that was examined, its cache domain where a store knows it, and that store's
    address where it is not the one examined."""

    view: EngineView
    info: DomainInfo | None
    store: str = ""


def _domains_elsewhere(
    uris: list[str], timeout_s: float
) -> tuple[dict[str, tuple[str, DomainInfo]], list[Finding]]:
    """Domain id -> a store that knows it, and the domain; stores that do not answer."""
    from backhaul.deploy.findings import Finding, Level
    from backhaul.transfer.backends.inspector import StoreInspector

    found: dict[str, tuple[str, DomainInfo]] = {}
    unreached = []
    for uri in uris:
        try:
            with StoreInspector(uri, timeout_s=timeout_s) as inspector:
                for info in inspector.domains():
                    found.setdefault(info.id, (uri, info))
        except StoreError as error:
            todo = "start it, or correct --other-store"
            unreached.append(Finding(f"store {uri}", Level.PROBLEM, str(error), todo))
    return found, unreached


def choose_pair(
    domains: list[DomainInfo], wanted: tuple[str, str] | None, seen: Sequence[Seen] = ()
) -> tuple[DomainInfo, DomainInfo] | None:
    """The two domains to show: those asked for; else of the engines given, the first two that
    differ, or the first two; else the only engine's and another one of its model; else the first
    two of one model. Raises ``ConfigError`` where a name fits none or several."""
    if wanted:
        return _named(domains, wanted[0], seen), _named(domains, wanted[1], seen)
    mine = [one.info for one in seen if one.info is not None]
    if len(mine) > 1:
        pairs = list(itertools.combinations(mine, 2))
        return next((pair for pair in pairs if pair[0].id != pair[1].id), pairs[0])
    for first in [*mine, *domains]:
        for second in domains:
            if first.id != second.id and first.record.model == second.record.model:
                return first, second
    return None


def _named(domains: list[DomainInfo], name: str, seen: Sequence[Seen]) -> DomainInfo:
    for one in seen:
        if one.view.url == name.rstrip("/"):
            if one.info is None:
                raise ConfigError(
                    f"--compare {name!r}: no store asked knows this engine's cache domain; name "
                    "its store with --store or --other-store"
                )
            return one.info
    fitting = [
        one
        for one in domains
        if one.id.startswith(name) or any(c.name.startswith(name) for c in one.clients)
    ]
    if len(fitting) == 1:
        return fitting[0]
    known = "; ".join(
        f"{one.id} ({', '.join(client.name for client in one.clients) or 'no client'})"
        for one in fitting or domains
    )
    what = "fits several domains" if fitting else "fits no domain and no engine"
    raise ConfigError(f"--compare {name!r} {what}: {known or 'the store knows none'}")


def http_of(target: str, listening: str) -> str:
    """Where the HTTP of a store whose catalog is reached at ``target`` is reached, if it listens at
    ``listening``; both ``host:port``. "": on the store's own machine only, which is another one, or
    nobody knows."""
    if not listening:
        return ""
    host = parse_address(target).host
    there = parse_address(listening).seen_from(host)
    return "" if is_loopback(there.host) and not is_loopback(host) else f"http://{there}"


def is_loopback(host: str) -> bool:
    """Whether only its own machine reaches a host; a name counts only if it says so."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_http(url: str, target: str, listening: str, timeout_s: float) -> Finding:
    import httpx

    from backhaul.deploy.findings import Finding, Level

    given = bool(url)
    url = url or http_of(target, listening)
    if not url:
        return Finding(
            "store HTTP",
            Level.WARNING,
            f"it listens on {listening or 'an unknown address'}, not reached from here",
            "start it with --http 0.0.0.0:PORT where its metrics are to be read",
        )
    try:
        reply = httpx.get(f"{url.rstrip('/')}/healthz", timeout=timeout_s, trust_env=False)
        if reply.status_code == 200:
            return Finding("store HTTP", Level.OK, f"{url} is healthy")
        why = f"{url}/healthz answers {reply.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = f"{url} cannot be read: {error or type(error).__name__}"
    if given:
        return Finding(
            "store HTTP", Level.PROBLEM, why, "correct --store-http, or restart the store"
        )
    # Ports may have other numbers outside the store's container.
    todo = "name the address under which it is reached from here: --store-http"
    return Finding("store HTTP", Level.WARNING, why, todo)


def as_document(
    findings: list[Finding],
    domains: list[DomainInfo],
    pair: tuple[DomainInfo, DomainInfo] | None,
    rows: list[Row],
    seen: Sequence[Seen] = (),
) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "findings": [one._asdict() for one in findings],
        "domains": [
            {
                "id": one.id,
                "clients": [client._asdict() for client in one.clients],
                "idle_s": round(one.idle_s, 3),
                "checkpoints": one.checkpoints,
                "object_bytes": one.object_bytes,
            }
            for one in domains
        ],
        "engines": [
            {
                "url": one.view.url,
                "domain": one.view.domain,
                "policy": one.view.policy,
                "transports": dict(one.view.transports),
                "known_here": one.info is not None and not one.store,
            }
            for one in seen
        ],
        "compared": [one.id for one in pair] if pair else [],
        "differences": [row._asdict() for row in rows if row.differs],
    }


def _print(
    findings: list[Finding],
    pair: tuple[DomainInfo, DomainInfo] | None,
    rows: list[Row],
    seen: Sequence[Seen],
) -> None:
    from rich.text import Text

    from backhaul.deploy.console import Console
    from backhaul.deploy.domain_rows import domain_table

    console: Console = Console()
    for one in findings:
        line = Text.assemble((f"{one.level.value:<8}", _STYLES[one.level]), f"{one.check}: ")
        line.append(one.says)
        if one.todo:
            line.append(f"\n         -> {one.todo}", style="bold")
        console.print(line, soft_wrap=True)
    if pair is None:
        return
    console.print()
    if not any(row.differs for row in rows):
        names = " and ".join(dict.fromkeys(_title(one, seen).replace("\n", " ") for one in pair))
        console.print(f"{names}: one domain.", soft_wrap=True)
        return
    console.print(domain_table((_title(pair[0], seen), _title(pair[1], seen)), rows))


def _title(info: DomainInfo, seen: Sequence[Seen]) -> str:
    """A domain's id, the engines given that are in it, and the names of who opened it."""
    from backhaul.deploy.diagnosis import engine_of

    urls = [one.view.url for one in seen if one.info is not None and one.info.id == info.id]
    names = sorted({engine_of(client.name) for client in info.clients})
    return "\n".join([info.id, *urls, ", ".join(names[:3]) or "no client"])
