"""The guarantees under faults that need a process of its own: the embedded store only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_contract import (
    BOUNDARY,
    SHORT_TTL_S,
    TIMEOUT_S,
    Daemon,
    Worker,
    eventually,
    hash_chain,
    make_domain,
    new_publication,
    running_daemon,
)

from backhaul.deploy.processes import free_port
from backhaul.protocols.checkpoint import LeaseId, Reason
from backhaul.protocols.errors import StoreRejected, StoreUnavailable
from backhaul.transfer.backends import embedded, rpc
from backhaul.transfer.backends.payload import Payload
from backhaul.transfer.base import GrantStatus
from backhaul.transfer.registry import open_store
from backhaul.transfer.transport_probe import probe_transports

STOPPED_TIMEOUT_S = 0.5

CLIENT_THAT_DIES = """
import sys, time
sys.path.insert(0, sys.argv[1])
from store_contract import *
from backhaul.protocols.domain import parse_domain
from backhaul.transfer.registry import open_store
from backhaul.transfer.transport_probe import probe_transports
worker = Worker(open_store(sys.argv[2]), parse_domain(sys.argv[3].encode()))
chain = hash_chain("a", BOUNDARY)
print(time.monotonic(), flush=True)
worker.write(worker.reserve(new_publication(), worker.keys(chain, BOUNDARY)))
print("written", flush=True)
time.sleep(120)
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon that the test may hurt, on a port that nobody is given while it is down."""
    with running_daemon(free_port()) as one:
        yield one


@pytest.fixture
def hasty_daemon() -> Iterator[Daemon]:
    """The same, where publications run out soon."""
    with running_daemon(publication_ttl_s=SHORT_TTL_S) as one:
        yield one


@pytest.fixture
def new_worker(daemon: Daemon) -> Iterator[Callable[[], Worker]]:
    """Workers of one domain at ``daemon``."""
    domain = make_domain()
    workers: list[Worker] = []

    def make() -> Worker:
        workers.append(Worker(open_store(daemon.uri), domain))
        return workers[-1]

    yield make
    for worker in workers:
        worker.store.close()


def test_a_client_killed_before_its_commit_costs_its_time_out(
    hasty_daemon: Daemon,
) -> None:
    worker = Worker(open_store(hasty_daemon.uri), make_domain())
    chain = hash_chain("a", BOUNDARY)
    keys = worker.keys(chain, BOUNDARY)
    arguments = [str(Path(__file__).parent), hasty_daemon.uri, worker.domain.canonical().decode()]
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT_THAT_DIES, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert client.stdout is not None
        began = float(client.stdout.readline())
        assert client.stdout.readline() == "written\n"
    finally:
        client.kill()
        client.wait(timeout=300)
    assert worker.lookup(chain) == ([], None)

    def free() -> bool:
        status = worker.reserve(new_publication(), keys)[0].status
        return status is GrantStatus.GRANTED or bool(busy.append(status))

    busy: list[GrantStatus] = []
    assert eventually(free)
    assert set(busy) <= {GrantStatus.BUSY}
    assert time.monotonic() - began >= SHORT_TTL_S
    assert worker.lookup(chain) == ([], None)
    worker.store.close()


def test_a_killed_store_fails_cleanly_and_a_new_one_works(
    daemon: Daemon, new_worker: Callable[[], Worker]
) -> None:
    worker = new_worker()
    chain, publication = hash_chain("a", BOUNDARY), new_publication()
    assert worker.publish(chain, BOUNDARY).visible
    _, lease = worker.lookup(chain)
    assert lease
    other = hash_chain("b", BOUNDARY)
    grants = worker.reserve(publication, worker.keys(other, BOUNDARY))

    daemon.kill()
    result = worker.read(lease, chain, BOUNDARY)
    assert (result.ok, result.reason, result.unsettled) == (False, Reason.UNREACHABLE, None)
    result = worker.write(grants)
    assert (result.ok, result.reason, result.unsettled) == (False, Reason.UNREACHABLE, None)
    with pytest.raises(StoreUnavailable):
        worker.store.lookup(worker.domain_id, [chain[1]], timeout_s=TIMEOUT_S)

    with running_daemon(daemon.port):

        def answers() -> bool:
            try:
                return worker.lookup(chain) == ([], None)  # the domain is opened again
            except StoreUnavailable:
                return False

        assert eventually(answers)
        assert worker.read(lease, chain, BOUNDARY).reason is Reason.LEASE_EXPIRED
        with pytest.raises(StoreRejected):
            worker.store.renew(lease, 5, timeout_s=TIMEOUT_S)
        # Space that the old daemon granted is another object's in the new one.
        assert worker.write(grants).reason is Reason.UNREACHABLE
        assert worker.publish(chain, BOUNDARY).visible
        boundaries, lease = worker.lookup(chain)
        assert boundaries == [BOUNDARY] and lease
        assert worker.read(lease, chain, BOUNDARY).ok and worker.holds(chain, BOUNDARY)


@contextlib.contextmanager
def beside_a_new_daemon(daemon: Daemon, worker: Worker) -> Iterator[Worker]:
    """Another worker of the same domain, which is the first to talk to a restarted daemon."""
    daemon.kill()
    with running_daemon(daemon.port) as restarted:
        other = Worker(open_store(restarted.uri), worker.domain)
        yield other
        other.store.close()


def test_a_worker_that_only_reads_loses_nothing_to_a_restart(
    daemon: Daemon, new_worker: Callable[[], Worker]
) -> None:
    """It made no call since, and is given a lease that somebody else got from the new daemon."""
    reader = new_worker()
    earlier = hash_chain("earlier", BOUNDARY)
    assert reader.publish(earlier, BOUNDARY).visible
    transports = reader.store.transports()
    with beside_a_new_daemon(daemon, reader) as writer:
        chain = hash_chain("a", BOUNDARY)
        assert writer.publish(chain, BOUNDARY).visible
        boundaries, lease = writer.lookup(chain)
        assert boundaries == [BOUNDARY] and lease
        assert reader.read(lease, chain, BOUNDARY).ok and reader.holds(chain, BOUNDARY)
        # Of the new connection, and not of the old one, whose endpoint is still there.
        assert reader.store.transports() == transports != ()


def test_a_worker_that_only_publishes_loses_nothing_to_a_restart(
    daemon: Daemon, new_worker: Callable[[], Worker]
) -> None:
    """It made no call since, and the new daemon knows its domain from somebody else."""
    writer = new_worker()
    assert writer.publish(hash_chain("earlier", BOUNDARY), BOUNDARY).visible
    with beside_a_new_daemon(daemon, writer) as reader:
        chain = hash_chain("a", BOUNDARY)
        assert writer.publish(chain, BOUNDARY).visible
        boundaries, lease = reader.lookup(chain)
        assert boundaries == [BOUNDARY] and lease
        assert reader.read(lease, chain, BOUNDARY).ok


def test_transports_are_known_from_the_first_transfer_on(
    daemon: Daemon,
) -> None:
    """What UCX reports at a probe's end, that its read used, is among them."""
    store = open_store(daemon.uri, client_name="x" * 80)
    assert store.transports() == ()
    worker = Worker(store, make_domain())
    assert store.transports() == ()
    assert worker.publish(hash_chain("a", BOUNDARY), BOUNDARY).visible
    probed = probe_transports(daemon.uri.removeprefix("backhaul://"), TIMEOUT_S)
    assert probed.transports and {*probed.transports} <= {*store.transports()}
    store.close()


def test_nothing_needs_the_store_at_start() -> None:
    port = free_port()
    store = open_store(f"backhaul://127.0.0.1:{port}")
    domain = make_domain()
    with pytest.raises(StoreUnavailable):
        Worker(store, domain)  # attach() passed: it is open_domain() that raises
    assert store.read(LeaseId("x"), [], verify=True, timeout_s=TIMEOUT_S).ok
    with running_daemon(port):
        chain = hash_chain("a", BOUNDARY)

        def answers() -> bool:
            try:
                return not store.lookup(domain.domain_id, [chain[1]], timeout_s=TIMEOUT_S).matches
            except StoreUnavailable:
                return False

        assert eventually(answers)  # the domain that could not be opened is known by now
    store.close()


def test_a_hung_store_costs_one_deadline(
    daemon: Daemon, new_worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "BACKOFF_S", (5.0, 5.0))  # and no longer on a busy machine
    worker = new_worker()
    chain = hash_chain("a", BOUNDARY)
    worker.publish(chain, BOUNDARY)
    _, lease = worker.lookup(chain)
    assert lease
    daemon.send(signal.SIGSTOP)
    result = worker.read(lease, chain, BOUNDARY, timeout_s=STOPPED_TIMEOUT_S)
    assert (result.ok, result.reason, result.unsettled) == (False, Reason.TIMEOUT, None)
    with pytest.raises(StoreUnavailable, match="next attempt"):  # at once, as it still stands
        worker.store.lookup(worker.domain_id, [chain[1]], timeout_s=TIMEOUT_S)
    daemon.send(signal.SIGCONT)

    def answers() -> bool:
        try:
            return worker.lookup(chain)[0] == [BOUNDARY]
        except StoreUnavailable:
            return False

    assert eventually(answers)
    assert worker.read(lease, chain, BOUNDARY).ok


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_memory_is_unsettled_until_the_store_goes_on_or_dies(
    operation: str, end: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP, where the peer's help is needed, a transfer stands still while it is stopped, and
    touches memory when it goes on, however long ago it was given up."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with running_daemon() as daemon:
        worker = Worker(open_store(daemon.uri), make_domain())
        chain = hash_chain("a", 4 * BOUNDARY)
        worker.publish(chain, 4 * BOUNDARY)
        _, lease = worker.lookup(chain)
        assert lease
        assert worker.read(lease, chain, 4 * BOUNDARY).ok  # the connection stands

        monkeypatch.setattr(Payload, "fetch", _stopped_first(daemon, Payload.fetch))
        monkeypatch.setattr(Payload, "send", _stopped_first(daemon, Payload.send))
        if operation == "read":
            result = worker.read(lease, chain, 4 * BOUNDARY)
        else:
            other = hash_chain("b", 8 * BOUNDARY)
            grants = worker.reserve(new_publication(), worker.keys(other, 8 * BOUNDARY))
            result = worker.write(grants)
        assert not result.ok and result.reason is Reason.TIMEOUT and not result.written
        assert result.unsettled is not None
        unsettled = result.unsettled
        for _ in range(20):
            assert not unsettled.settled()
            time.sleep(0.02)
        daemon.send(end)
        assert eventually(unsettled.settled)
        if operation == "read":
            at_rest = [worker.pages.get(k.group, s).copy() for s, k in enumerated(worker, chain)]
            time.sleep(0.3)
            again = [worker.pages.get(k.group, s) for s, k in enumerated(worker, chain)]
            assert all((a == b).all() for a, b in zip(at_rest, again, strict=True))
            if end is signal.SIGCONT:  # what was given up did arrive: it had to be waited for
                assert worker.holds(chain, 4 * BOUNDARY)
        worker.store.close()


def test_closing_with_a_transfer_in_flight_does_not_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with running_daemon() as daemon:
        worker = Worker(open_store(daemon.uri), make_domain())
        chain = hash_chain("a", 4 * BOUNDARY)
        worker.publish(chain, 4 * BOUNDARY)
        _, lease = worker.lookup(chain)
        assert lease
        monkeypatch.setattr(Payload, "fetch", _stopped_first(daemon, Payload.fetch))
        result = worker.read(lease, chain, 4 * BOUNDARY)
        assert result.unsettled is not None
        worker.store.close()  # while the daemon stands still
        assert not result.unsettled.settled()
        daemon.kill()
        assert eventually(result.unsettled.settled)


def _stopped_first(daemon: Daemon, method: Any) -> Any:
    """``method``, behind a SIGSTOP that has taken effect; from then on it has little time."""

    def call(
        self: Payload, peer: str, segments: Any, addresses: Any, deadline: float, *more: Any
    ) -> Any:
        daemon.send(signal.SIGSTOP)
        os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)
        return method(self, peer, segments, addresses, time.monotonic() + STOPPED_TIMEOUT_S, *more)

    return call


def enumerated(worker: Worker, chain: tuple[bytes, ...]) -> list[tuple[int, Any]]:
    """Slots and keys as ``Worker.read`` lays them out."""
    return list(enumerate(worker.keys(chain, 4 * BOUNDARY)))


@pytest.mark.parametrize("verify", [True, False])
def test_a_long_checkpoint_takes_several_calls(
    new_worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    monkeypatch.setattr(embedded, "OBJECTS_PER_CALL", 2)
    chain = hash_chain(f"long {verify}", 3 * BOUNDARY)
    producer, consumer = new_worker(), new_worker()
    assert len(producer.keys(chain, 3 * BOUNDARY)) % 2, "the last call should be a short one"
    assert producer.publish(chain, 3 * BOUNDARY).visible
    boundaries, lease = consumer.lookup(chain)
    assert boundaries == [3 * BOUNDARY] and lease is not None
    assert consumer.read(lease, chain, 3 * BOUNDARY, verify=verify).ok
    assert consumer.holds(chain, 3 * BOUNDARY)
