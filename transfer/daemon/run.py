"""The daemon's life: start everything, say so in one line, stop at SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
import uuid
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from backhaul.protocols import store_pb2, store_pb2_grpc
from backhaul.protocols.errors import ConfigError
from backhaul.transfer.daemon.catalog import Catalog
from backhaul.transfer.daemon.guard import InputGuard
from backhaul.transfer.daemon.http import make_app, make_server
from backhaul.transfer.daemon.metrics import EvictionTimer, RpcTimer, StatsCollector
from backhaul.transfer.daemon.pool import Pool
from backhaul.transfer.daemon.ports import listen_on
from backhaul.transfer.daemon.settings import Address, DaemonSettings, format_bytes
from backhaul.transfer.daemon.status import StatusReport
from backhaul.transfer.index import BlockIndex
from backhaul.transfer.nixl_agent import BACKEND

MESSAGE_BYTES_MAX = 64 << 20
"""A manifest of a million tokens at a 16-token hash unit with 32-byte hashes is 2 MiB; Reserve
and Locate carry several times that. gRPC's own limit of 4 MiB would be too low."""
EXPIRE_INTERVAL_S = 0.5
"""How late, at most, space of something that ran out is freed while nobody calls."""
CUT_SHORT_S = 1.0
"""How long calls may take to end that a stop cut short; they have nothing to wait for."""
QUARANTINE_S = 10.0
"""How long the space of a publication that ran out is not reused: longer than any transfer that
its writer may have had in flight when it stalled. Checksums catch what is later still."""

_SERVICE = store_pb2.DESCRIPTOR.services_by_name["Catalog"].full_name
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.http2.ping_timeout_ms", 60_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""A client that is gone without a word is noticed within two minutes, as on the HTTP port. One that
never begins to speak HTTP/2 is cut off by gRPC itself, after a minute."""
_OPTIONS = (
    *_KEEPALIVE,
    # Two daemons on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)

_aio_health: Any = health.aio  # type: ignore[attr-defined, unused-ignore]  # absent in stubs

logger = logging.getLogger(__name__)


async def serve(settings: DaemonSettings, announce: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT. Raises ``ConfigError`` where it cannot start.

    ``announce`` gets the one line that says where it listens, once it does."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        http_socket = stack.enter_context(listen_on(settings.http, "--http"))
        index = _make_index(settings)
        registry = CollectorRegistry()
        registry.register(StatsCollector(index.stats))
        index.checkpoints.on_evicted = EvictionTimer(registry)
        server = grpc.aio.server(interceptors=[InputGuard(), RpcTimer(registry)], options=_OPTIONS)
        # The ports are taken before the pool: a second daemon must fail before it maps memory.
        port = _bind_grpc(server, settings.listen)
        pool = Pool(
            settings.capacity_bytes, instance_id=index.instance_id, prefault=settings.prefault
        )
        stack.callback(pool.close)
        http_address = Address(settings.http.host, http_socket.getsockname()[1])
        catalog = Catalog(index, pool, http_address=str(http_address))
        status = _add_services(server, catalog)
        await server.start()
        stack.push_async_callback(_stop, server, settings.grace_s)
        for name in ("", _SERVICE):
            await status.set(name, health_pb2.HealthCheckResponse.SERVING)
        address = Address(settings.listen.host, port)
        report = StatusReport(index, f"backhaul://{address}", time.monotonic)
        http = make_server(make_app(registry, lambda: not stop.is_set(), report.document))
        http_task = asyncio.create_task(http.serve(sockets=[http_socket]), name="http")
        expire_task = asyncio.create_task(_expire(catalog), name="expire")
        stop_task = asyncio.create_task(stop.wait(), name="stop")
        announce(
            f"backhaul store ready: grpc {address}, "
            f"pool {format_bytes(settings.capacity_bytes)}, http {http_address}, "
            f"nixl {BACKEND}, instance {index.instance_id}"
        )
        # The first two never end by themselves: if one does, it failed, and so does the daemon.
        await asyncio.wait((http_task, expire_task, stop_task), return_when=asyncio.FIRST_COMPLETED)
        logger.info("stopping")
        stop.set()
        await status.enter_graceful_shutdown()
        expire_task.cancel()
        http.should_exit = True
        failures = await asyncio.gather(http_task, expire_task, return_exceptions=True)
        for failure in failures:
            if isinstance(failure, Exception):
                raise failure


def _make_index(settings: DaemonSettings) -> BlockIndex:
    return BlockIndex(
        settings.capacity_bytes,
        publication_ttl_s=settings.publication_ttl_s,
        lease_max_s=settings.lease_max_s,
        instance_id=uuid.uuid4().hex[:16],
        first_token=secrets.randbits(48) + 1,
        quarantine_s=QUARANTINE_S,
        strategy=settings.strategies.make_eviction(),
        admission=settings.strategies.make_admission(),
    )


def _bind_grpc(server: grpc.aio.Server, address: Address) -> int:
    # Tried with a socket of our own first: gRPC does not say what is wrong, and it logs.
    listen_on(address, "--listen").close()
    try:
        return server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}; give another --listen") from None


def _add_services(server: grpc.aio.Server, catalog: Catalog) -> Any:
    store_pb2_grpc.add_CatalogServicer_to_server(catalog, server)  # type: ignore[no-untyped-call]
    status = _aio_health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return status


async def _stop(server: grpc.aio.Server, grace_s: float) -> None:
    await server.stop(grace_s)
    # What was cut short is being told so. If the loop ended first, gRPC would print a traceback of
    # every call.
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=CUT_SHORT_S)


async def _expire(catalog: Catalog) -> None:
    while True:
        await asyncio.sleep(EXPIRE_INTERVAL_S)
        catalog.expire()
