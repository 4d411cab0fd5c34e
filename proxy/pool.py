"""The workers of one role: who is healthy, who is busy, whose turn it is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import httpx

from backhaul.proxy.routing import Candidate, preference
from backhaul.proxy.settings import Policy

logger = logging.getLogger(__name__)

FAILURES_UNTIL_UNHEALTHY = 2
"""One missed answer may be a busy engine; a refused connection counts in full."""


@dataclass(frozen=True)
class Health:
    """What the checks say about one worker. Workers get requests until a check says otherwise, but
    are not said to be healthy before one has told so."""

    healthy: bool = True
    failures: int = 0
    told: bool = False

    @property
    def known_healthy(self) -> bool | None:
        """For people and load balancers; None before a check has told."""
        return self.healthy if self.told else None

    def observed(self, *, ok: bool) -> Health:
        """After one more check."""
        if ok:
            return Health(told=True)
        failures = self.failures + 1
        healthy = self.healthy and failures < FAILURES_UNTIL_UNHEALTHY
        return Health(healthy, failures, self.told or not healthy)

    def refused(self) -> Health:
        """After a connection was refused: out until a check succeeds."""
        return replace(self, healthy=False, told=True)


class Worker:
    """One engine. ``in_flight``: requests that it is answering for this proxy."""

    def __init__(self, role: str, url: str) -> None:
        self.role = role
        self.url = url
        self.in_flight = 0
        self.health = Health()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Counts as load for the length of the block."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def update(self, health: Health) -> None:
        """Take over what was observed; a change is logged."""
        if health.healthy != self.health.healthy:
            words = "is healthy" if health.healthy else "is not healthy: it gets no requests"
            logger.warning("%s worker %s %s", self.role, self.url, words)
        self.health = health


class Pool:
    """Workers of one role. Everything runs in one event loop."""

    def __init__(self, role: str, urls: Sequence[str], policy: Policy) -> None:
        self.role = role
        self.workers = [Worker(role, url) for url in urls]
        self._policy = policy
        self._turn = 0

    def choose(self, key: bytes, tried: Collection[Worker] = ()) -> Worker | None:
        """The best worker that was not tried yet; None when all were. Each choice takes a turn: ask
        once for every request that is sent."""
        left = {worker.url: worker for worker in self.workers if worker not in tried}
        if not left:
            return None
        candidates = [Candidate(w.url, w.in_flight, w.health.healthy) for w in left.values()]
        names = preference(self._policy, candidates, key=key, turn=self._turn)
        self._turn += 1
        return left[names[0]]

    def has_other(self, tried: Collection[Worker]) -> bool:
        """Whether ``choose`` would still find one. Takes no turn."""
        return any(worker not in tried for worker in self.workers)

    @property
    def healthy(self) -> list[Worker]:
        """Those that answer their health checks."""
        return [worker for worker in self.workers if worker.health.healthy]

    async def watch(self, client: httpx.AsyncClient, interval_s: float, timeout_s: float) -> None:
        """Check all workers until cancelled."""
        while True:
            await asyncio.gather(*(check(worker, client, timeout_s) for worker in self.workers))
            await asyncio.sleep(interval_s)


async def check(worker: Worker, client: httpx.AsyncClient, timeout_s: float) -> None:
    """Ask one worker's ``/health`` once."""
    health = worker.health
    try:
        response = await client.get(f"{worker.url}/health", timeout=timeout_s)
        health = health.observed(ok=response.is_success)
    except httpx.ConnectError:
        health = health.refused()
    except httpx.HTTPError:
        health = health.observed(ok=False)
    worker.update(health)
