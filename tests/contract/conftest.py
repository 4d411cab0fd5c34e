"""The backends under test: each gives makers of clients of one store."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
from store_contract import (
    CAPACITY_BYTES,
    PUBLICATION_TTL_S,
    ClientMaker,
    Daemon,
    Worker,
    WorkerMaker,
    make_domain,
    running_daemon,
)

from backhaul.protocols.domain import DomainRecord
from backhaul.transfer.backends.inprocess import InProcessPool, InProcessStore
from backhaul.transfer.base import Store
from backhaul.transfer.registry import open_store


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[Callable[[float], Daemon]]:
    """The daemon with this life of publications, for all tests that do not hurt it; each uses a
    domain of its own."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(
            lambda ttl_s: stack.enter_context(running_daemon(publication_ttl_s=ttl_s))
        )


@pytest.fixture
def publication_ttl_s() -> float:
    """Life of publications in the store; tests of its end have another one."""
    return PUBLICATION_TTL_S


@pytest.fixture(params=["embedded", "inprocess"])
def new_client(request: pytest.FixtureRequest, publication_ttl_s: float) -> Iterator[ClientMaker]:
    """Makes clients of one store; closes them at the end."""
    clients: list[Store] = []
    if request.param == "embedded":
        uri = request.getfixturevalue("shared_daemon")(publication_ttl_s).uri

        def make() -> Store:
            clients.append(open_store(uri, client_name="contract"))
            return clients[-1]
    else:
        pool = InProcessPool(CAPACITY_BYTES, publication_ttl_s=publication_ttl_s, quarantine_s=0.0)

        def make() -> Store:
            clients.append(InProcessStore(pool))
            return clients[-1]

    yield make
    for client in clients:
        client.close()
        client.close()  # safe to call twice
    if request.param == "inprocess":
        pool.index.check()


@pytest.fixture
def new_worker(new_client: ClientMaker) -> Iterator[WorkerMaker]:
    """Makes workers of one domain, which the test may replace; they leave nothing behind."""
    shared = make_domain()
    workers: list[Worker] = []

    def make(domain: DomainRecord = shared, rank: int = 0) -> Worker:
        workers.append(Worker(new_client(), domain, rank))
        return workers[-1]

    yield make
    for worker in workers:
        worker.leave()
