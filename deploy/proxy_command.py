"""`backhaul proxy`: one OpenAI-compatible address in front of prefill and decode workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from backhaul.deploy.arguments import (
    UsageError,
    each,
    http_urls,
    listen_address,
    pause_of_seconds,
    seconds,
)
from backhaul.protocols.errors import ConfigError
from backhaul.proxy.settings import Policy, ProxySettings, parse_urls

_DEFAULTS = ProxySettings(prefill=("http://p",), decode=("http://d",))
DEFAULT_LISTEN = "127.0.0.1:8000"


def proxy(
    prefill: Annotated[
        list[str],
        typer.Option(
            metavar="URL", help="A prefill worker; repeat for more.", callback=each(http_urls)
        ),
    ],
    decode: Annotated[
        list[str],
        typer.Option(
            metavar="URL", help="A decode worker; repeat for more.", callback=each(http_urls)
        ),
    ],
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen; port 0: any free.",
            callback=each(listen_address),
        ),
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
        float,
        typer.Option(
            metavar="SECONDS",
            help="Longest wait for a connection to a worker.",
            callback=each(seconds),
        ),
    ] = _DEFAULTS.connect_timeout_s,
    prefill_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="After this, decode computes the prompt itself.",
            callback=each(seconds),
        ),
    ] = _DEFAULTS.prefill_timeout_s,
    first_token_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Longest wait for the first token of an attempt; then another worker is tried.",
            callback=each(seconds),
        ),
    ] = _DEFAULTS.first_token_timeout_s,
    request_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Longest request as a whole.", callback=each(seconds)),
    ] = _DEFAULTS.request_timeout_s,
    stall_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Longest silence inside a stream.", callback=each(seconds)
        ),
    ] = _DEFAULTS.stall_timeout_s,
    health_interval: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Pause between two health checks.", callback=each(seconds)
        ),
    ] = _DEFAULTS.health_interval_s,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="How long requests may end at shutdown.",
            callback=each(pause_of_seconds),
        ),
    ] = _DEFAULTS.grace_s,
) -> None:
    """Run the P/D proxy until SIGTERM or SIGINT.

    Example: backhaul proxy --prefill http://10.0.0.7:8000 --decode http://10.0.0.8:8000

    Exit code 0: it was told to stop; 2: wrong usage, or the address is taken.
    """
    from backhaul.transfer.daemon.ports import listen_on
    from backhaul.transfer.daemon.settings import parse_address

    settings = make_settings(
        prefill=prefill,
        decode=decode,
        prefill_policy=prefill_policy,
        decode_policy=decode_policy,
        retries=retries,
        connect_timeout=connect_timeout,
        prefill_timeout=prefill_timeout,
        first_token_timeout=first_token_timeout,
        request_timeout=request_timeout,
        stall_timeout=stall_timeout,
        health_interval=health_interval,
        grace=grace,
    )
    address = parse_address(listen)

    import logging

    from backhaul.deploy.service import announce, begin
    from backhaul.proxy.run import serve

    begin("INFO")
    for name in ("httpx", "httpcore"):  # a line per request otherwise
        logging.getLogger(name).setLevel(logging.WARNING)
    serve(settings, listen_on(address, "--listen"), announce)


def make_settings(
    *,
    prefill: list[str],
    decode: list[str],
    prefill_policy: Policy,
    decode_policy: Policy,
    retries: int,
    connect_timeout: float,
    prefill_timeout: float,
    first_token_timeout: float,
    request_timeout: float,
    stall_timeout: float,
    health_interval: float,
    grace: float,
) -> ProxySettings:
    """The options as settings. Raises ``ConfigError``."""
    return ProxySettings(
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


def check_further_arguments(arguments: Sequence[str]) -> None:
    """Arguments that another command hands on, besides workers and ``--listen``, which are its
    own. Raises ``ConfigError`` for what a proxy would refuse."""
    whole = [*arguments, "--prefill=http://p", "--decode=http://d"]
    try:
        given = get_command(_alone).make_context("proxy", whole)
    except UsageError as error:
        raise ConfigError(f"--proxy-arg: {error.format_message()}") from None
    params = dict(given.params)
    if params.pop("listen") != DEFAULT_LISTEN:
        raise ConfigError("--proxy-arg --listen: the proxy listens where --listen says")
    make_settings(**params)


_alone = typer.Typer(add_completion=False)
_alone.command(add_help_option=False)(proxy)
