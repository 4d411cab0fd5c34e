"""The store daemon as a process: what clients, orchestrators and people meet."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from index_kit import GRID, chain, keys_of, make_layout, make_record, size_of

from backhaul.protocols import errors, store_pb2, store_pb2_grpc
from backhaul.protocols.checkpoint import ObjectKey
from backhaul.protocols.errors import BackhaulError, ConfigError, LookupUnanswered
from backhaul.transfer.backends.embedded import EmbeddedStore
from backhaul.transfer.daemon import pool as pool_module
from backhaul.transfer.daemon import run
from backhaul.transfer.daemon.catalog import STATUS_CODES, status_code
from backhaul.transfer.daemon.pool import Pool
from backhaul.transfer.daemon.ports import listen_on
from backhaul.transfer.daemon.settings import (
    Address,
    DaemonSettings,
    format_bytes,
    parse_address,
    parse_bytes,
)
from backhaul.transfer.entries import HASHES_MAX, NotKnown

START_TIMEOUT_S = 120
"""Importing NIXL takes seconds, and far more on a machine that is busy otherwise."""


@dataclass
class Daemon:
    """A running daemon and where it listens."""

    process: subprocess.Popen[str]
    ready_line: str
    grpc: str
    http: str

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """(exit code, standard error)."""
        self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=300)
        return self.process.returncode, stderr


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "backhaul.deploy.cli", "store", *options]


def start(*options: str) -> Daemon:
    process = subprocess.Popen(
        command("--listen=127.0.0.1:0", "--http=127.0.0.1:0", "--capacity=4MiB", *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killer = threading.Timer(START_TIMEOUT_S, process.kill)
    killer.start()
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    killer.cancel()
    match = re.search(r"grpc (\S+), .*http (\S+),", line)
    if match is None:
        process.kill()
        pytest.fail(f"no ready line but {line!r}; {process.stderr.read()}")
    return Daemon(process, line, match[1], match[2])


def run_to_its_end(*options: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command(*options), capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    daemon = start("--log-level=warning")
    yield daemon
    if daemon.process.poll() is None:
        _, stderr = daemon.stop(signal.SIGKILL)
        assert "Traceback" not in stderr, stderr


@pytest.fixture
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(daemon.grpc) as channel:
        yield channel


@pytest.fixture
def catalog(channel: grpc.Channel) -> Any:
    return store_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call]


LAYOUT = make_layout()


def wire_key(key: ObjectKey) -> store_pb2.Key:
    return store_pb2.Key(rank=key.rank, group=key.group, block_hash=key.block_hash)


def publish(catalog: Any, domain: str, tokens: str) -> Any:
    wants = [
        store_pb2.Want(key=wire_key(key), nbytes=size_of(LAYOUT, key))
        for key in keys_of(LAYOUT, tokens)
    ]
    grants = catalog.Reserve(
        store_pb2.ReserveRequest(domain_id=domain, publication_id=tokens, wants=wants)
    ).grants
    written = [
        store_pb2.Written(key=want.key, token=grant.token, checksum=2**64 - 1)
        for want, grant in zip(wants, grants, strict=True)
        if grant.status == store_pb2.Grant.GRANTED
    ]
    manifest = store_pb2.Manifest(
        boundary=len(tokens) * GRID, hashes=chain(tokens), kinds=["decode_end"], producer="engine"
    )
    return catalog.Commit(
        store_pb2.CommitRequest(
            domain_id=domain, publication_id=tokens, rank=0, written=written, manifest=manifest
        )
    )


def open_domain(catalog: Any, model: str) -> str:
    record = make_record(model, LAYOUT).canonical()
    return str(catalog.OpenDomain(store_pb2.OpenDomainRequest(record=record)).domain_id)


# -- the process ------------------------------------------------------------------------------


def test_the_ready_line_stands_alone_and_says_where_and_what(daemon: Daemon) -> None:
    assert re.fullmatch(
        r"backhaul store ready: grpc 127\.0\.0\.1:\d+, pool 4 MiB, http 127\.0\.0\.1:\d+, "
        r"nixl UCX, instance [0-9a-f]{16}\n",
        daemon.ready_line,
    )


def test_it_may_open_as_many_files_as_there_may_be(daemon: Daemon) -> None:
    """Every connection is one."""
    soft, hard = psutil.Process(daemon.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard


def test_health_is_serving(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", "backhaul.v1.Catalog"):
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_services(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (reply,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in reply.list_services_response.service}
    assert {"backhaul.v1.Catalog", "grpc.health.v1.Health"} <= names


def test_hello_describes_the_pool(catalog: Any) -> None:
    reply = catalog.Hello(store_pb2.HelloRequest(protocol_version=1, client_name="test"))
    assert reply.capacity_bytes == 4 << 20
    assert reply.pool_address and reply.pool_address % 4096 == 0
    assert reply.agent_name == f"backhaul-store-{reply.instance_id}"
    assert len(reply.agent_metadata) > 50
    assert (reply.publication_ttl_s, reply.lease_ttl_max_s) == (60.0, 300.0)


def test_metrics_follow_what_clients_do(daemon: Daemon, catalog: Any) -> None:
    def sample(name: str) -> float:
        text = httpx.get(f"http://{daemon.http}/metrics").text
        match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert match, f"{name} is not in {text}"
        return float(match[1])

    domain = open_domain(catalog, "metrics")
    before = {
        name: sample(name)
        for name in ("backhaul:store_checkpoints", "backhaul:store_lookups_total")
    }
    assert publish(catalog, domain, "m").visible
    catalog.Lookup(store_pb2.LookupRequest(domain_id=domain, boundary_hashes=chain("m")))
    assert {name: sample(name) - value for name, value in before.items()} == dict.fromkeys(
        before, 1.0
    )
    assert sample("backhaul:store_capacity_bytes") == 4 << 20
    assert 0 < sample("backhaul:store_used_bytes") <= 4 << 20
    assert sample('backhaul:store_evictions_total{reason="capacity"}') == 0
    assert sample('backhaul:store_rpc_seconds_count{method="Lookup"}') >= 1
    assert sample("backhaul:store_leases") >= 0 and sample("backhaul:store_publications") >= 1
    assert httpx.get(f"http://{daemon.http}/healthz").status_code == 200
    assert httpx.get(f"http://{daemon.http}/").headers["content-type"].startswith("text/html")
    assert httpx.get(f"http://{daemon.http}/nonesuch").status_code == 404


@pytest.mark.parametrize(("taken", "free"), [("listen", "http"), ("http", "listen")])
def test_a_second_daemon_on_a_taken_port_refuses(daemon: Daemon, taken: str, free: str) -> None:
    address = daemon.grpc if taken == "listen" else daemon.http
    code, stdout, stderr = run_to_its_end(
        f"--{taken}={address}", f"--{free}=127.0.0.1:0", "--capacity=4MiB"
    )
    assert (code, stdout) == (2, "")
    assert re.fullmatch(
        rf"backhaul: error: cannot listen on {address}: Address already in use; .*--{taken}\n",
        stderr,
    )


def test_an_interrupted_daemon_says_so_and_exits_in_order() -> None:
    """Whoever still listens, waits, or has half asked."""
    daemon = start()
    host, _, port = daemon.http.rpartition(":")
    with (
        grpc.insecure_channel(daemon.grpc) as channel,
        socket.create_connection((host, int(port))) as half_open,
    ):
        half_open.sendall(b"GET /metrics HTTP/1.1\r\nHo")
        catalog: Any = store_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call]
        domain = open_domain(catalog, "interrupted")
        catalog.Announce(
            store_pb2.AnnounceRequest(
                domain_id=domain, boundary=GRID, block_hash=chain("a")[-1], ttl_s=50.0
            )
        )
        waiting = catalog.Lookup.future(
            store_pb2.LookupRequest(domain_id=domain, boundary_hashes=chain("a"), wait_s=30.0)
        )
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        daemon.process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert waiting.exception(timeout=300).code() is grpc.StatusCode.UNAVAILABLE
        stdout, stderr = daemon.process.communicate(timeout=300)
    assert (daemon.process.returncode, stdout) == (0, "")
    assert "Traceback" not in stderr and "stopping" in stderr


# -- calls ------------------------------------------------------------------------------------


def test_publish_lookup_locate_release_over_the_wire(catalog: Any) -> None:
    domain = open_domain(catalog, "round trip")
    assert publish(catalog, domain, "ab").visible
    reply = catalog.Lookup(
        store_pb2.LookupRequest(domain_id=domain, boundary_hashes=chain("abc"), lease_s=5.0)
    )
    (match,) = reply.matches
    assert (match.boundary, list(match.kinds), match.consumable) == (2 * GRID, ["decode_end"], True)
    assert (match.reason, match.producer, reply.waited_s) == ("", "engine", 0.0)
    keys = [wire_key(key) for key in keys_of(LAYOUT, "ab")]
    request = store_pb2.LocateRequest(lease_id=reply.lease_id, keys=keys)
    assert {place.checksum for place in catalog.Locate(request).locations} == {2**64 - 1}
    catalog.RenewLease(store_pb2.RenewLeaseRequest(lease_id=reply.lease_id, lease_s=9.0))
    (info,) = catalog.ListCheckpoints(
        store_pb2.ListCheckpointsRequest(domain_id=domain)
    ).checkpoints
    assert (info.boundary, info.leases, info.block_hash) == (2 * GRID, 1, chain("ab")[-1])
    catalog.ReleaseLease(store_pb2.ReleaseLeaseRequest(lease_ids=[reply.lease_id]))
    with pytest.raises(grpc.RpcError) as caught:
        catalog.Locate(request)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.NOT_FOUND
    catalog.Abandon(store_pb2.AbandonRequest(publication_id="ab"))
    unknown = catalog.KeepAlive(store_pb2.KeepAliveRequest(publication_ids=["ab"])).unknown
    assert list(unknown) == ["ab"]
    assert catalog.Stats(store_pb2.StatsRequest()).counters["commits"] >= 1


def test_a_lookup_waits_for_what_was_announced_and_wakes_with_its_commit(catalog: Any) -> None:
    domain = open_domain(catalog, "waiting")
    publish(catalog, domain, "w")
    catalog.Announce(
        store_pb2.AnnounceRequest(
            domain_id=domain, boundary=3 * GRID, block_hash=chain("wxy")[-1], ttl_s=30.0
        )
    )
    request = store_pb2.LookupRequest(
        domain_id=domain, boundary_hashes=chain("wxyz"), lease_s=5.0, wait_s=25.0
    )
    pending = catalog.Lookup.future(request)
    time.sleep(0.3)
    assert not pending.done()
    assert publish(catalog, domain, "wxy").visible
    reply = pending.result(timeout=300)
    assert [match.boundary for match in reply.matches] == [3 * GRID, GRID]
    assert 0 < reply.waited_s < 20


def test_a_lookup_waits_no_longer_than_the_announcement_lasts(catalog: Any) -> None:
    domain = open_domain(catalog, "announced in vain")
    begun = time.monotonic()
    catalog.Announce(
        store_pb2.AnnounceRequest(
            domain_id=domain, boundary=GRID, block_hash=chain("v")[-1], ttl_s=0.2
        )
    )
    reply = catalog.Lookup(
        store_pb2.LookupRequest(domain_id=domain, boundary_hashes=chain("v"), wait_s=25.0)
    )
    assert not reply.matches
    assert reply.waited_s < 20 and time.monotonic() - begun >= 0.2


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("unary_unary", "/backhaul.v1.Catalog/Lookup"),
        ("unary_unary", "/grpc.health.v1.Health/Check"),
        ("unary_stream", "/grpc.health.v1.Health/Watch"),
        ("stream_stream", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
    ],
)
def test_bytes_that_are_no_message_are_refused_by_every_service(
    channel: grpc.Channel, kind: str, method: str
) -> None:
    call: Any = getattr(channel, kind)(method)
    with pytest.raises(grpc.RpcError) as caught:
        answer = call(iter([b"\xff"]) if kind == "stream_stream" else b"\xff", timeout=300)
        list(answer)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "1 bytes that are not its request message" in error.details()


def test_a_client_that_is_gone_without_a_word_is_noticed() -> None:
    """The daemon's own options, but for their time: a client that answers no ping is cut off."""
    silent_hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    times = {name: 100 for name, _ in run._KEEPALIVE if name.endswith("_ms")}
    assert all(value <= 60_000 for name, value in run._KEEPALIVE if name in times)

    async def closed() -> None:
        server = grpc.aio.server(options=list({**dict(run._OPTIONS), **times}.items()))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(silent_hello)
        await asyncio.wait_for(reader.read(), 300)
        writer.close()
        await server.stop(0)

    asyncio.run(closed())


def test_a_watch_of_health_still_streams(channel: grpc.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
    answers = stub.Watch(health_pb2.HealthCheckRequest(), timeout=300)
    assert next(answers).status == health_pb2.HealthCheckResponse.SERVING
    answers.cancel()


# -- callers that are gone --------------------------------------------------------------------


@pytest.fixture(scope="module")
def stoppable_daemon() -> Iterator[Daemon]:
    """A daemon for these tests, whose leases and publications outlast them."""
    daemon = start("--publication-ttl=600", "--lease-max=600")
    yield daemon
    _, stderr = daemon.stop(signal.SIGKILL)
    assert "Traceback" not in stderr, stderr


@pytest.fixture
def stoppable(stoppable_daemon: Daemon) -> Iterator[Daemon]:
    """The same, running before and after each test."""
    yield stoppable_daemon
    stoppable_daemon.process.send_signal(signal.SIGCONT)


def stop(daemon: Daemon) -> None:
    """Return once it stands still."""
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)


def holdings(catalog: Any) -> tuple[int, int]:
    """(valid leases, open publications)."""
    stats = catalog.Stats(store_pb2.StatsRequest())
    return stats.leases, stats.publications


def comes_to(catalog: Any, expected: tuple[int, int]) -> bool:
    """Whether holdings settle there; a poll, far below any lease's life."""
    for _ in range(100):
        if holdings(catalog) == expected:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("end", ["deadline", "cancel"])
def test_a_lookup_that_outlives_its_caller_leaves_no_lease(stoppable: Daemon, end: str) -> None:
    """The wait for a publication is over by the time the daemon goes on, and so is its caller."""
    with grpc.insecure_channel(stoppable.grpc) as channel:
        catalog: Any = store_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call]
        domain = open_domain(catalog, f"gone by {end}")
        publish(catalog, domain, "g")
        catalog.Abandon(store_pb2.AbandonRequest(publication_id="g"))
        announcement = store_pb2.AnnounceRequest(
            domain_id=domain, boundary=2 * GRID, block_hash=chain("go")[-1], ttl_s=0.6
        )
        request = store_pb2.LookupRequest(
            domain_id=domain, boundary_hashes=chain("go"), lease_s=600.0, wait_s=5.0, lease_name=end
        )
        named = f"{catalog.Stats(store_pb2.StatsRequest()).instance_id}.{end}"
        while True:
            begun = time.monotonic()
            catalog.Announce(announcement)
            pending = catalog.Lookup.future(request, timeout=0.8 if end == "deadline" else 60)
            time.sleep(0.2)
            stop(stoppable)
            if time.monotonic() - begun < announcement.ttl_s:
                break
            # A busy machine: the wait is over already, and an answer may be on its way.
            stoppable.process.send_signal(signal.SIGCONT)
            with contextlib.suppress(grpc.RpcError):
                pending.result(timeout=300)
            catalog.ReleaseLease(store_pb2.ReleaseLeaseRequest(lease_ids=[named]))
        time.sleep(0.2)
        if end == "cancel":
            pending.cancel()
        with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
            pending.result(timeout=300)
        time.sleep(0.6)
        stoppable.process.send_signal(signal.SIGCONT)
        before = catalog.Stats(store_pb2.StatsRequest()).counters["lookups"]
        assert comes_to(catalog, (0, 0))
        request.wait_s = 0
        lease = catalog.Lookup(request, timeout=300).lease_id
        assert lease and holdings(catalog) == (1, 0), "whoever is there gets one"
        catalog.ReleaseLease(store_pb2.ReleaseLeaseRequest(lease_ids=[lease]))
        assert catalog.Stats(store_pb2.StatsRequest()).counters["lookups"] == before + 1


class Held:
    """A connection between a client and the daemon whose answers can be held back, as they are to
    a client that stands still. One client at a time."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._connect)]
        self._threads[0].start()

    def hold(self) -> None:
        self._flows.clear()

    def go_on(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self.go_on()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(300)
        for one in self._sockets:
            one.close()

    def _connect(self) -> None:
        client, _ = self._listener.accept()
        host, _, port = self._target.rpartition(":")
        daemon = socket.create_connection((host, int(port)))
        self._sockets += [client, daemon]
        back = threading.Thread(target=self._copy, args=(daemon, client, True))
        self._threads.append(back)
        back.start()
        self._copy(client, daemon, False)

    def _copy(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if answers:
                    self._flows.wait()
                sink.sendall(data)


def test_an_answer_that_comes_too_late_leaves_no_lease(stoppable: Daemon) -> None:
    """The daemon answered in time, so that only the caller can know that it never heard it."""
    record = make_record("late answer", LAYOUT)
    with grpc.insecure_channel(stoppable.grpc) as channel:
        catalog: Any = store_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call]
        publish(catalog, open_domain(catalog, "late answer"), "l")
        catalog.Abandon(store_pb2.AbandonRequest(publication_id="l"))
        held = Held(stoppable.grpc)
        store = EmbeddedStore(held.address)
        store.open_domain(record, timeout_s=60)
        assert store.lookup(record.domain_id, chain("l"), timeout_s=60).matches
        held.hold()
        with pytest.raises(LookupUnanswered) as caught:
            store.lookup(record.domain_id, chain("l"), lease_s=600, timeout_s=1.0)
        assert comes_to(catalog, (1, 0)), "it was answered"
        held.go_on()
        catalog.ReleaseLease(store_pb2.ReleaseLeaseRequest(lease_ids=[caught.value.lease]))
        assert holdings(catalog) == (0, 0)
        store.close()
        held.close()


def test_calls_that_a_stop_cut_short_leave_nothing(stoppable: Daemon) -> None:
    """Many callers at once, stopped at any point of a call; each gives back what it was told of,
    and what it named and was told nothing of."""
    with grpc.insecure_channel(stoppable.grpc) as channel:
        catalog: Any = store_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call]
        domain = open_domain(catalog, "cut short")
        publish(catalog, domain, "c")
        catalog.Abandon(store_pb2.AbandonRequest(publication_id="c"))
        instance_id = catalog.Stats(store_pb2.StatsRequest()).instance_id
        wants = [store_pb2.Want(key=wire_key(key), nbytes=64) for key in keys_of(LAYOUT, "d")]
        finished = threading.Event()
        cut = Counter[str]()

        def call(number: int) -> None:
            for turn in itertools.count():
                if finished.is_set():
                    return
                name = f"{number}.{turn}"
                lookup = store_pb2.LookupRequest(
                    domain_id=domain, boundary_hashes=chain("c"), lease_s=600.0, lease_name=name
                )
                reserve = store_pb2.ReserveRequest(
                    domain_id=domain, publication_id=name, wants=wants
                )
                lease = f"{instance_id}.{name}"
                try:
                    assert catalog.Lookup(lookup, timeout=0.25).lease_id == lease
                except grpc.RpcError:
                    cut["Lookup"] += 1
                catalog.ReleaseLease(store_pb2.ReleaseLeaseRequest(lease_ids=[lease]))
                try:
                    catalog.Reserve(reserve, timeout=0.25)
                except grpc.RpcError:
                    cut["Reserve"] += 1
                catalog.Abandon(store_pb2.AbandonRequest(publication_id=name))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for turn in itertools.count():
            if turn >= 8 and cut["Lookup"] and cut["Reserve"]:
                break
            time.sleep(0.05 + turn % 8 * 0.011)
            stop(stoppable)
            time.sleep(0.35)
            stoppable.process.send_signal(signal.SIGCONT)
        finished.set()
        for thread in threads:
            thread.join(300)
        assert comes_to(catalog, (0, 0)), holdings(catalog)


def test_a_message_of_several_mebibytes_is_taken(catalog: Any) -> None:
    domain = open_domain(catalog, "long prompt")
    hashes = [bytes([n % 256]) * 32 for n in range(HASHES_MAX)]  # more than gRPC's own 4 MiB
    reply = catalog.Lookup(store_pb2.LookupRequest(domain_id=domain, boundary_hashes=hashes))
    assert not reply.matches


@pytest.mark.parametrize(
    ("method", "request_", "code", "words"),
    [
        ("Hello", store_pb2.HelloRequest(protocol_version=2), "FAILED_PRECONDITION", "protocol 2"),
        ("OpenDomain", store_pb2.OpenDomainRequest(record=b"{"), "INVALID_ARGUMENT", "malformed"),
        ("Lookup", store_pb2.LookupRequest(domain_id="x"), "NOT_FOUND", "domain 'x' is unknown"),
        ("Locate", store_pb2.LocateRequest(lease_id="x"), "NOT_FOUND", "lease 'x' is unknown"),
        (
            "Commit",
            store_pb2.CommitRequest(manifest=store_pb2.Manifest(kinds=["whole_end" * 999])),
            "INVALID_ARGUMENT",
            "is none of prompt_end, input_end, decode_end, shared_prefix",
        ),
    ],
)
def test_refusals_have_a_code_and_say_why(
    catalog: Any, method: str, request_: Any, code: str, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(catalog, method)(request_)
    error: Any = caught.value
    assert error.code().name == code
    assert words in error.details()


def test_every_error_of_ours_has_a_code_and_none_hides_another() -> None:
    ours = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BackhaulError)
    ]
    assert len(ours) >= 6
    for kind in ours:
        assert status_code(kind("text")) is not None
    assert status_code(NotKnown("text")) is grpc.StatusCode.NOT_FOUND
    kinds = [kind for kind, _ in STATUS_CODES]
    for position, kind in enumerate(kinds):
        assert not any(issubclass(kind, earlier) for earlier in kinds[:position])


# -- what the user got wrong ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--capacity=5"], "capacity is 5 bytes: at least 1 MiB is needed"),
        (["--capacity=8Gold"], "size '8Gold' is unreadable: write e.g. 512MiB"),
        (["--listen=7400"], "address '7400' is unreadable: write host:port"),
        (["--lease-max=0"], "--lease-max is 0.0"),
        (["--admission=budget"], "--admit-per-token is 0"),
        (["--marconi-alpha=-1"], "--marconi-alpha is -1.0"),
        (["--admit-burst=0"], "--admit-burst is 0"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(options: list[str], words: str) -> None:
    code, stdout, stderr = run_to_its_end(*options)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("backhaul: error: ") and stderr.count("\n") == 1
    assert words in stderr


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot listen on 192\.0\.2\.1:0: Cannot assign.*give another --listen"
    ):
        listen_on(Address("192.0.2.1", 0), "--listen")


def test_more_than_the_available_memory_is_refused_in_one_line() -> None:
    code, stdout, stderr = run_to_its_end(
        "--capacity=900TiB", "--listen=127.0.0.1:0", "--http=127.0.0.1:0"
    )
    assert (code, stdout) == (2, "")
    assert re.fullmatch(r"backhaul: error: capacity of 900 TiB exceeds the .* --capacity\n", stderr)


def test_a_cgroup_limit_counts_as_available_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    limit, usage = tmp_path / "memory.max", tmp_path / "memory.current"
    usage.write_text("1000000\n")
    monkeypatch.setattr(pool_module, "_CGROUP_FILES", ((limit, usage),))
    without = pool_module.available_bytes()
    limit.write_text("max\n")
    assert pool_module.available_bytes() > 3_000_000
    limit.write_text("3000000\n")
    assert pool_module.available_bytes() == 2_000_000 < without
    with pytest.raises(ConfigError, match=r"exceeds the 1\.9 MiB of memory"):
        Pool(4 << 20, instance_id="test", prefault=False)


def test_a_mapping_that_fails_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "available_bytes", lambda: 1 << 62)
    with pytest.raises(ConfigError, match="cannot map a pool of"):
        Pool(1 << 60, instance_id="test", prefault=False)


def test_a_missing_nixl_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r"NIXL cannot be imported .*pip install nixl"):
        Pool(1 << 20, instance_id="test", prefault=False)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("8GiB", 8 << 30),
        ("8 GiB", 8 << 30),
        ("8g", 8 << 30),
        ("1.5KiB", 1536),
        ("2T", 2 << 40),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "1e9",
        "5 parsecs",
        "8GB8",
        "0x10",
        "٣MiB",
        "9" * 5000,
        "9e",
        "1_0",
        "2048P",
        f"{2**61}",
    ],
)
def test_unreadable_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is unreadable"):
        parse_bytes(text)


@pytest.mark.parametrize("nbytes", [1, 1023, 1024, 4 << 20, 3 << 29, 7 << 40])
def test_a_size_that_was_written_can_be_read_again(nbytes: int) -> None:
    written = format_bytes(nbytes).replace("bytes", "B")
    assert parse_bytes(written) == nbytes


def test_addresses_are_read_and_written() -> None:
    assert parse_address("127.0.0.1:7400") == Address("127.0.0.1", 7400)
    assert parse_address("[::1]:0") == Address("::1", 0)
    assert str(Address("::1", 7400)) == "[::1]:7400"
    for text in ("", "host", ":7400", "host:", "host:x", "host:²", "host:٣"):
        with pytest.raises(ConfigError, match="is unreadable"):
            parse_address(text)
    for text in ("host:65536", f"host:{'9' * 5000}"):
        with pytest.raises(ConfigError, match="is above 65535"):
            parse_address(text)


def test_settings_have_the_documented_defaults() -> None:
    settings = DaemonSettings()
    assert (str(settings.listen), str(settings.http)) == ("127.0.0.1:7400", "127.0.0.1:7401")
    assert settings.capacity_bytes == 4 << 30
