"""The backends under test: each gives makers of clients of one store."""

from __future__ import annotations

from collections.abc import Iterator

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
def shared_daemon() -> Iterator[Daemon]:
    """One daemon for all tests that do not hurt it; each uses a domain of its own."""
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture(params=["embedded", "inprocess"])
def new_client(request: pytest.FixtureRequest) -> Iterator[ClientMaker]:
    """Makes clients of one store; closes them at the end."""
    clients: list[Store] = []
    if request.param == "embedded":
        uri = request.getfixturevalue("shared_daemon").uri

        def make() -> Store:
            clients.append(open_store(uri, client_name="contract"))
            return clients[-1]
    else:
        pool = InProcessPool(CAPACITY_BYTES, publication_ttl_s=PUBLICATION_TTL_S, quarantine_s=0.0)

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
def new_worker(new_client: ClientMaker) -> WorkerMaker:
    """Makes workers of one domain, which the test may replace."""
    shared = make_domain()

    def make(domain: DomainRecord = shared, rank: int = 0) -> Worker:
        return Worker(new_client(), domain, rank)

    return make
