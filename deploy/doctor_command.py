"""`backhaul doctor`: why is nothing reused?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from backhaul.deploy.arguments import each, http_url, seconds, store_uri
from backhaul.deploy.checkpoints_command import DEFAULT_STORE
from backhaul.deploy.terminal import print_json
from backhaul.protocols.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from rich.console import Console

    from backhaul.deploy.diagnosis import Finding
    from backhaul.deploy.domain_rows import Row
    from backhaul.transfer.base import DomainInfo

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    store: Annotated[
        str,
        typer.Option(
            metavar="URI",
            help="The store's address, backhaul://HOST:PORT.",
            callback=each(store_uri),
        ),
    ] = DEFAULT_STORE,
    store_http: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="The store's --http address; default: port + 1.",
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
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Show these two side by side: starts of domain ids or of engines' names. "
            "Default: the two of one model that were used last.",
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option(help="Read from the pool once to see which transports UCX uses.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Longest wait for each answer.", callback=each(seconds)
        ),
    ] = 5.0,
) -> None:
    """Examine a store and engines; exit code 1 where a problem was found."""
    from backhaul.deploy.diagnosis import (
        Finding,
        Level,
        check_domains,
        check_engine,
        check_store,
        check_transports,
        worst,
    )
    from backhaul.deploy.domain_rows import differences
    from backhaul.deploy.engine_view import read_engine
    from backhaul.transfer.backends.inspector import StoreInspector, catalog_target
    from backhaul.transfer.transport_probe import probe_transports

    target = catalog_target(store)
    findings: list[Finding] = []
    domains: list[DomainInfo] = []
    with StoreInspector(store, timeout_s=timeout) as inspector:
        try:
            inspector.hello()
            findings.append(check_store(inspector.stats()))
            domains = inspector.domains()
            reached = True
        except StoreError as error:
            reached = False
            findings.append(
                Finding("store catalog", Level.PROBLEM, str(error), "start it, or correct --store")
            )
    findings.append(_check_http(store_http, target, timeout))
    if reached:
        if probe:
            findings.append(check_transports(probe_transports(target, timeout)))
        findings += check_domains(domains)
    for url in engine or []:
        view = read_engine(url, timeout)
        record = next((one.record for one in domains if one.id == view.domain), None)
        findings += check_engine(view, record)
    pair = choose_pair(domains, compare) if reached else None
    rows = differences(pair[0].record, pair[1].record) if pair else []
    if as_json:
        print_json(as_document(findings, domains, pair, rows))
    else:
        _print(findings, pair, rows)
    if worst(findings) is Level.PROBLEM:
        raise typer.Exit(1)


def choose_pair(
    domains: list[DomainInfo], wanted: tuple[str, str] | None
) -> tuple[DomainInfo, DomainInfo] | None:
    """The two domains to show. Raises ``ConfigError`` where a name fits none or several."""
    if wanted:
        return _named(domains, wanted[0]), _named(domains, wanted[1])
    for index, first in enumerate(domains):
        for second in domains[index + 1 :]:
            if first.record.model == second.record.model:
                return first, second
    return None


def _named(domains: list[DomainInfo], name: str) -> DomainInfo:
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


def _check_http(url: str, target: str, timeout_s: float) -> Finding:
    import httpx

    from backhaul.deploy.diagnosis import Finding, Level
    from backhaul.transfer.daemon.settings import PORT_MAX

    guessed = not url
    if guessed:
        host, _, port = target.rpartition(":")
        if int(port) == PORT_MAX:
            return Finding(
                "store HTTP",
                Level.WARNING,
                f"no port comes after the catalog's {port}",
                "name its --http address: --store-http",
            )
        url = f"http://{host}:{int(port) + 1}"
    try:
        reply = httpx.get(f"{url.rstrip('/')}/healthz", timeout=timeout_s, trust_env=False)
        if reply.status_code == 200:
            return Finding("store HTTP", Level.OK, f"{url} is healthy")
        why = f"{url}/healthz answers {reply.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = f"{url} cannot be read: {error or type(error).__name__}"
    if guessed:
        return Finding("store HTTP", Level.WARNING, why, "name its --http address: --store-http")
    return Finding("store HTTP", Level.PROBLEM, why, "correct --store-http, or restart the store")


def as_document(
    findings: list[Finding],
    domains: list[DomainInfo],
    pair: tuple[DomainInfo, DomainInfo] | None,
    rows: list[Row],
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
        "compared": [one.id for one in pair] if pair else [],
        "differences": [row._asdict() for row in rows if row.differs],
    }


def _print(
    findings: list[Finding], pair: tuple[DomainInfo, DomainInfo] | None, rows: list[Row]
) -> None:
    from rich.console import Console
    from rich.text import Text

    from backhaul.deploy.domain_rows import domain_table

    console: Console = Console(highlight=False)
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
        console.print(f"{pair[0].id} and {pair[1].id} are one domain.")
        return
    console.print(domain_table((_title(pair[0]), _title(pair[1])), rows))


def _title(info: DomainInfo) -> str:
    from backhaul.deploy.diagnosis import engine_of

    names = sorted({engine_of(client.name) for client in info.clients})
    return f"{info.id}\n{', '.join(names[:3]) or 'no client'}"
