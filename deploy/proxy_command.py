"""`backhaul proxy`: one OpenAI-compatible address in front of prefill and decode workers."""

from __future__ import annotations

from typing import Annotated

import typer

from backhaul.proxy.settings import Policy, ProxySettings, parse_urls

_DEFAULTS = ProxySettings(prefill=("http://p",), decode=("http://d",))
DEFAULT_LISTEN = "127.0.0.1:8000"


def proxy(
    prefill: Annotated[
        list[str], typer.Option(metavar="URL", help="A prefill worker; repeat for more.")
    ],
    decode: Annotated[
        list[str], typer.Option(metavar="URL", help="A decode worker; repeat for more.")
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0: any free.")
    ] = DEFAULT_LISTEN,
    prefill_policy: Annotated[
        Policy, typer.Option(help="How a prefill worker is chosen.")
    ] = _DEFAULTS.prefill_policy,
    decode_policy: Annotated[
        Policy, typer.Option(help="How a decode worker is chosen.")
    ] = _DEFAULTS.decode_policy,
    retries: Annotated[
        int, typer.Option(help="Further workers to try per leg, before the first token.")
    ] = _DEFAULTS.retries,
    connect_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest wait for a connection to a worker.")
    ] = _DEFAULTS.connect_timeout_s,
    prefill_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="After this, decode computes the prompt itself."),
    ] = _DEFAULTS.prefill_timeout_s,
    first_token_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Longest wait for the first token of an attempt; then another worker is tried.",
        ),
    ] = _DEFAULTS.first_token_timeout_s,
    request_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest request as a whole.")
    ] = _DEFAULTS.request_timeout_s,
    stall_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest silence inside a stream.")
    ] = _DEFAULTS.stall_timeout_s,
    health_interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Pause between two health checks.")
    ] = _DEFAULTS.health_interval_s,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long requests may end at shutdown.")
    ] = _DEFAULTS.grace_s,
) -> None:
    """Run the P/D proxy until SIGTERM or SIGINT."""
    from backhaul.transfer.daemon.ports import listen_on
    from backhaul.transfer.daemon.settings import parse_address

    settings = ProxySettings(
        prefill=parse_urls(prefill),
        decode=parse_urls(decode),
        prefill_policy=prefill_policy,
        decode_policy=decode_policy,
        retries=retries,
        connect_timeout_s=connect_timeout,
        prefill_timeout_s=prefill_timeout,
        first_token_timeout_s=first_token_timeout,
        request_timeout_s=request_timeout,
        stall_timeout_s=stall_timeout,
        health_interval_s=health_interval,
        grace_s=grace,
    )
    address = parse_address(listen)

    import logging

    from backhaul.proxy.run import serve

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "httpcore"):  # a line per request otherwise
        logging.getLogger(name).setLevel(logging.WARNING)
    serve(settings, listen_on(address, "--listen"))
