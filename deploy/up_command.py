"""`backhaul up`: store, engines and proxy on this machine, until Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backhaul.deploy.arguments import (
    core_list,
    device_list,
    each,
    folder_to_write,
    listen_address,
    model_folder,
    model_or_hub_name,
    not_ours,
    one_line,
    option_pair,
    pool_size,
    seconds,
)
from backhaul.deploy.demo_command import default_cache_dir
from backhaul.deploy.proxy_command import DEFAULT_LISTEN, check_further_arguments
from backhaul.deploy.requirements import ENGINE, TINY_MODEL, need
from backhaul.protocols.errors import ConfigError
from backhaul.transfer.daemon.settings import Address, DaemonSettings, parse_address

if TYPE_CHECKING:
    from backhaul.deploy.console import Console
    from backhaul.deploy.up import UpPlan


_STORE = DaemonSettings()


def up(
    prefill: Annotated[int, typer.Option(metavar="N", help="Prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(metavar="N", help="Decode engines.")] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Folder of the model to serve (with --gpus also a hub's name); default: a tiny "
            "one, built here.",
            callback=each(model_or_hub_name),
        ),
    ] = None,
    cores: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CORES",
            help="CPU cores of one engine, e.g. 0-3 (0|1: one per rank). Repeat per engine, "
            "prefill first. Default: one core each.",
            callback=each(core_list),
        ),
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="IDS",
            help="CUDA_VISIBLE_DEVICES of one engine, e.g. 0,1. Repeat per engine, prefill first. "
            "Default: engines run on the CPU.",
            callback=each(device_list),
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the proxy listens; port 0: any free.",
            callback=each(listen_address),
        ),
    ] = DEFAULT_LISTEN,
    first_engine_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="Engines take this and the next ports. Default: free."),
    ] = None,
    store_listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the store's catalog listens; port 0: any free.",
            callback=each(listen_address),
        ),
    ] = str(_STORE.listen),
    store_http: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the store's status page and /metrics are; port 0: any free.",
            callback=each(listen_address),
        ),
    ] = str(_STORE.http),
    capacity: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Size of the store's pool.", callback=each(pool_size)),
    ] = "512MiB",
    backhaul: Annotated[
        bool, typer.Option(help="Run the store and the connector; without, NIXL's hand-over only.")
    ] = True,
    connector_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An option of the connector in every engine, e.g. policy=auto (docs/"
            "configuration.md); values as in JSON or plain text. Repeat.",
            callback=each(one_line, option_pair),
        ),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARG",
            help="A further vLLM argument of every engine; repeat.",
            callback=each(one_line, not_ours),
        ),
    ] = None,
    proxy_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARG",
            help="A further argument of `backhaul proxy`; repeat.",
            callback=each(one_line),
        ),
    ] = None,
    log_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where logs go, and stay; default: a new folder in /tmp, which is removed at the "
            "end unless something failed.",
            callback=each(folder_to_write),
        ),
    ] = None,
    start_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Longest start of a service.", callback=each(seconds)),
    ] = 600.0,
) -> None:
    """Start store, engines and proxy on this machine; stop all of them on Ctrl-C or SIGTERM, or
    when one of them ends.

    Example: backhaul up --decode 2 --listen 127.0.0.1:8000

    Exit code 1: a service failed, and everything was stopped before any signal came; 2: wrong
    usage; 130: Ctrl-C; 143: SIGTERM.
    """
    need("`backhaul up`", *ENGINE, *(() if model else TINY_MODEL))
    from backhaul.deploy.console import Console
    from backhaul.deploy.logs import log_folder
    from backhaul.deploy.processes import ServiceError, exit_on_sigterm, free_port
    from backhaul.deploy.up import UpPlan
    from backhaul.transfer.daemon.ports import listen_on

    exit_on_sigterm()
    address = parse_address(listen)
    if model is None and gpus:
        raise ConfigError("the tiny model runs on the CPU only: give --model with --gpus")
    if model is not None and not gpus:
        model_folder("--model", model)
    check_further_arguments(proxy_arg or ())
    plan = UpPlan(
        model=Path(model) if model else Path(),
        log_dir=Path(),
        prefill=prefill,
        decode=decode,
        cores=cores or (),
        gpus=gpus or (),
        host=address.host,
        port=address.port or free_port(),
        first_engine_port=first_engine_port,
        store_listen=parse_address(store_listen),
        store_http=parse_address(store_http),
        capacity=capacity,
        with_backhaul=backhaul,
        connector_options=dict(
            option_pair("--connector-option", one) for one in connector_option or ()
        ),
        engine_args=engine_arg or (),
        proxy_args=proxy_arg or (),
    )
    # The proxy starts last; a taken port is better known now, in one line.
    listen_on(Address(plan.host, plan.port), "--listen").close()
    if plan.with_backhaul:
        listen_on(plan.store_listen, "--store-listen").close()
        listen_on(plan.store_http, "--store-http").close()
    try:
        with log_folder("backhaul-up-", Path(log_dir) if log_dir else None) as logs:
            plan = dataclasses.replace(plan, log_dir=logs)
            run(Console(), plan, tiny=model is None, start_timeout_s=start_timeout)
    except ServiceError as error:
        print(f"backhaul: error: {error}\nbackhaul: everything was stopped", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("backhaul: interrupted; everything was stopped", file=sys.stderr)
        raise typer.Exit(130) from None


def run(console: Console, plan: UpPlan, *, tiny: bool, start_timeout_s: float) -> None:
    """Start a plan and wait. Ends only by an exception: ``ServiceError``, ``KeyboardInterrupt``,
    ``SystemExit`` at SIGTERM; nothing that was started runs any more then."""
    import contextlib

    from backhaul.deploy.processes import Cluster
    from backhaul.deploy.progress import StartProgress, say_stopping
    from backhaul.deploy.up import make_services

    if tiny:
        from backhaul.deploy.tiny_model import build_tiny_model

        model = build_tiny_model(default_cache_dir() / "tiny-hybrid")
        plan = dataclasses.replace(plan, model=model)
    services = make_services(plan)
    progress = StartProgress()
    cluster = Cluster(
        services.all,
        timeout_s=start_timeout_s,
        on_progress=progress.update,
        on_interrupt=say_stopping,
    )
    console.print(f"Model {plan.model}, logs in {plan.log_dir}", soft_wrap=True)
    with contextlib.ExitStack() as stack:
        with progress.shown(console):
            stack.enter_context(cluster)
        for line in _lines([(s.name, services.urls[s.name], s.log_path) for s in services.all]):
            console.print(line, soft_wrap=True)
        if services.store is not None:
            console.print(
                f"Status page of the store: {services.store.http_url}/ (metrics: /metrics); "
                f"backhaul doctor --store {services.store.uri}",
                soft_wrap=True,
            )
        for line in first_steps(f"{services.proxy.url}/v1", plan.model.name, tiny=tiny):
            console.print(line, soft_wrap=True)
        console.print(
            f"Ready after {time.monotonic() - progress.started:.0f} s. Ctrl-C stops everything.",
            soft_wrap=True,
        )
        cluster.watch()


def first_steps(base_url: str, model: str, *, tiny: bool) -> list[str]:
    """What to type in another shell."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 32,
    }
    quoted = shlex.quote(json.dumps(body))
    lines = [
        f"export OPENAI_BASE_URL={base_url} OPENAI_API_KEY=none; model {model}",
        f"curl {base_url}/chat/completions -H 'content-type: application/json' -d {quoted}",
    ]
    if tiny:
        lines.append(
            "The tiny model writes nonsense and never ends a reply by itself: give max_tokens, or "
            "a request runs to the end of its context."
        )
    return lines


def _lines(rows: Sequence[tuple[object, ...]]) -> list[str]:
    """Columns under each other, never cut: paths must be whole to be of use."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    ]
