"""A whole P/D cluster on one machine: store, prefill and decode engines, proxy."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from backhaul.deploy.engines import ANY_PORT, Engine, EngineSpec, StoreDaemon, pair_config
from backhaul.deploy.processes import Service, free_port
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.options import WorkerKind, parse_options
from backhaul.transfer.daemon.settings import Address

ENGINES_MAX = 64
"""More on one machine is a slip of the keyboard."""


@dataclass(frozen=True, kw_only=True)
class UpPlan:
    """What to start. Raises ``ConfigError`` for counts and devices that do not fit together.

    Attributes:
        model: a model directory, or with ``gpus`` also a hub name.
        log_dir: where every service logs to ``<name>.log``.
        prefill: number of prefill engines.
        decode: number of decode engines.
        cores: one entry per engine, prefill first (``"0"``, ``"0-3"``; ``"0|1"``: one per rank);
            empty: one core each, in turn.
        gpus: one ``CUDA_VISIBLE_DEVICES`` per engine, prefill first; empty: engines on the CPU.
        host: address that the proxy listens on.
        port: the proxy's port.
        first_engine_port: engines listen on this and the following ports; None: free ones.
        store_listen, store_http: addresses of the store; port 0: a free one.
        capacity: size of the store.
        with_backhaul: False: NIXL's hand-over only, no store.
        connector_options: ``kv_connector_extra_config`` of every engine, without the store.
        engine_args: further arguments of every engine.
        proxy_args: further arguments of the proxy.
    """

    model: Path
    log_dir: Path
    prefill: int = 1
    decode: int = 1
    cores: Sequence[str] = ()
    gpus: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    first_engine_port: int | None = None
    store_listen: Address = ANY_PORT
    store_http: Address = ANY_PORT
    capacity: str = "512MiB"
    with_backhaul: bool = True
    connector_options: Mapping[str, Any] = field(default_factory=dict)
    engine_args: Sequence[str] = ()
    proxy_args: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        for role in ("prefill", "decode"):
            if not 1 <= getattr(self, role) <= ENGINES_MAX:
                raise ConfigError(f"{getattr(self, role)} {role} engines: give 1 ... {ENGINES_MAX}")
        for option, given in (("--cores", self.cores), ("--gpus", self.gpus)):
            if given and len(given) != self.engines:
                times = "once" if len(given) == 1 else f"{len(given)} times"
                raise ConfigError(
                    f"{option} is given {times} for {self.engines} engines: give it once per "
                    "engine, prefill first"
                )
        if self.cores and self.gpus:
            raise ConfigError("--cores and --gpus exclude each other: engines run on one of them")
        if self.connector_options and not self.with_backhaul:
            raise ConfigError("--connector-option needs the connector: leave --no-backhaul out")
        if "store" in self.connector_options:
            raise ConfigError("--connector-option store=... : the store is the one started here")
        # Its address is not known before it runs.
        parse_options({**self.connector_options, "store": "backhaul://127.0.0.1:1"})
        first = self.first_engine_port
        if first is not None and not 1 <= first <= 65_536 - self.engines:
            raise ConfigError(
                f"engine ports {first} ... {first + self.engines - 1} are not all ports: "
                "give another --first-engine-port"
            )

    @property
    def engines(self) -> int:
        """How many engines there are."""
        return self.prefill + self.decode

    @property
    def names(self) -> list[str]:
        """Of the engines, prefill first."""
        return [
            *(f"prefill-{i}" for i in range(self.prefill)),
            *(f"decode-{i}" for i in range(self.decode)),
        ]


class ProxyService(Service):
    """One ``backhaul proxy`` process. It has started once it sees every engine healthy: before
    that it would answer, but not hand over."""

    def __init__(
        self,
        log_dir: Path,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        host: str = "127.0.0.1",
        port: int | None = None,
        name: str = "proxy",
        args: Sequence[str] = (),
    ) -> None:
        super().__init__(name, log_dir)
        self._workers = {"--prefill": tuple(prefill), "--decode": tuple(decode)}
        self._host = host
        self._port = port or free_port()
        self._args = tuple(args)

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API, without a trailing slash."""
        return f"http://{Address(self._host, self._port).from_here}"

    @property
    def health_url(self) -> str:
        return f"{self.url}/health"

    def is_ready(self, answer: httpx.Response) -> bool:
        """Success, and every engine that is listed is healthy."""
        if not super().is_ready(answer):
            return False
        state = answer.json()
        return all(all(state[role].values()) for role in ("prefill", "decode"))

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "backhaul.deploy.cli", "proxy"]
        command += ["--listen", str(Address(self._host, self._port))]
        for option, urls in self._workers.items():
            for url in urls:
                command += [option, url]
        return [*command, *self._args]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)


@dataclass(frozen=True)
class Services:
    """What a plan starts."""

    store: StoreDaemon | None
    prefill: Sequence[Engine]
    decode: Sequence[Engine]
    proxy: ProxyService

    @property
    def all(self) -> list[Service]:
        """In the order in which they start."""
        store: list[Service] = [self.store] if self.store else []
        return [*store, *self.prefill, *self.decode, self.proxy]

    @property
    def urls(self) -> dict[str, str]:
        """Service -> where it is."""
        urls = {self.store.name: self.store.uri} if self.store else {}
        urls |= {engine.name: engine.url for engine in (*self.prefill, *self.decode)}
        return urls | {self.proxy.name: f"{self.proxy.url}/v1"}


def make_services(plan: UpPlan) -> Services:
    """Services of a plan, not started."""
    store = None
    if plan.with_backhaul:
        store = StoreDaemon(
            plan.log_dir, capacity=plan.capacity, listen=plan.store_listen, http=plan.store_http
        )
    device = "cuda" if plan.gpus else "cpu"
    uri = store.uri if store else None

    def config(kind: WorkerKind) -> dict[str, object]:
        options = plan.connector_options if uri else {}
        return pair_config(uri, kind, buffer_device=device, **options)

    cores = list(plan.cores) or _one_core_each(plan.engines)
    engines = [
        Engine(
            EngineSpec(
                name=name,
                model=plan.model,
                cores="" if plan.gpus else cores[i],
                gpus=plan.gpus[i] if plan.gpus else "",
                port=free_port() if plan.first_engine_port is None else plan.first_engine_port + i,
                kv_transfer_config=config(
                    WorkerKind.PREFILL if i < plan.prefill else WorkerKind.DECODE
                ),
                args=plan.engine_args,
            ),
            plan.log_dir,
        )
        for i, name in enumerate(plan.names)
    ]
    prefill, decode = engines[: plan.prefill], engines[plan.prefill :]
    proxy = ProxyService(
        plan.log_dir,
        prefill=[engine.url for engine in prefill],
        decode=[engine.url for engine in decode],
        host=plan.host,
        port=plan.port,
        args=plan.proxy_args,
    )
    return Services(store, prefill, decode, proxy)


def _one_core_each(engines: int) -> list[str]:
    available = sorted(os.sched_getaffinity(0))
    return [str(available[i % len(available)]) for i in range(engines)]
