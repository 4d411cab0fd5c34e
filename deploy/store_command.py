"""`backhaul store`: the store daemon."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from backhaul.deploy.arguments import each, listen_address, pool_size, seconds, size_of_bytes
from backhaul.transfer.daemon.settings import (
    DaemonSettings,
    format_bytes,
    parse_address,
    parse_byte_rate,
    parse_bytes,
)
from backhaul.transfer.strategies import DEFAULT, Admission, Eviction, Strategies

_DEFAULTS = DaemonSettings()
_DEFAULT_BURST = format_bytes(DEFAULT.admit_burst_bytes).replace(" ", "")
_DEFAULT_CAPACITY = format_bytes(_DEFAULTS.capacity_bytes).replace(" ", "")


class LogLevel(enum.StrEnum):
    """What the daemon writes to standard error."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def store(
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Catalog (gRPC) address; port 0: any free.",
            callback=each(listen_address),
        ),
    ] = str(_DEFAULTS.listen),
    capacity: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Pool size, e.g. 512MiB, 8GiB or plain bytes.",
            callback=each(pool_size),
        ),
    ] = _DEFAULT_CAPACITY,
    http: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the status page, /healthz and /metrics.",
            callback=each(listen_address),
        ),
    ] = str(_DEFAULTS.http),
    publication_ttl: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Life of a publication without a sign of its writer.",
            callback=each(seconds),
        ),
    ] = _DEFAULTS.publication_ttl_s,
    lease_max: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Longest lease of a reader.", callback=each(seconds)),
    ] = _DEFAULTS.lease_max_s,
    eviction: Annotated[
        Eviction,
        typer.Option(
            help="What goes first: the least recently used, the least saved work per byte, or the "
            "least utility after Marconi."
        ),
    ] = DEFAULT.eviction,
    marconi_alpha: Annotated[
        float, typer.Option(help="Weight of saved work against recency, with marconi.")
    ] = DEFAULT.marconi_alpha,
    admission: Annotated[
        Admission,
        typer.Option(help="Take in all that fits, or so many bytes per prompt token looked up."),
    ] = DEFAULT.admission,
    admit_per_token: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Bytes per prompt token, with budget.",
            callback=each(size_of_bytes),
        ),
    ] = "0",
    admit_burst: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Bytes that may come at once, with budget.",
            callback=each(size_of_bytes),
        ),
    ] = _DEFAULT_BURST,
    prefault: Annotated[
        bool, typer.Option(help="Touch the whole pool at start, so that it is really there.")
    ] = _DEFAULTS.prefault,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe message to log.")] = (
        LogLevel.INFO
    ),
) -> None:
    """Run the embedded store until SIGTERM or SIGINT.

    Example: backhaul store --listen 0.0.0.0:7400 --http 0.0.0.0:7401 --capacity 64GiB

    Exit code 0: it was told to stop; 2: wrong usage, or what it needs is not there.
    """
    settings = DaemonSettings(
        listen=parse_address(listen),
        http=parse_address(http),
        capacity_bytes=parse_bytes(capacity),
        publication_ttl_s=publication_ttl,
        lease_max_s=lease_max,
        strategies=Strategies(
            eviction=eviction,
            marconi_alpha=marconi_alpha,
            admission=admission,
            admit_bytes_per_token=parse_byte_rate(admit_per_token),
            admit_burst_bytes=parse_bytes(admit_burst),
        ),
        prefault=prefault,
    )

    import asyncio

    from backhaul.deploy.service import announce, begin
    from backhaul.transfer.daemon.run import serve

    begin(log_level.upper())
    asyncio.run(serve(settings, announce))
