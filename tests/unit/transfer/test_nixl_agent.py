"""The agent against a fake NIXL: what is released, removed and kept, and when."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backhaul.protocols.errors import StoreUnavailable
from backhaul.transfer import nixl_agent, ucx_lanes
from backhaul.transfer.base import MemoryKind, MemoryRegion
from backhaul.transfer.nixl_agent import NixlAgent, Operation, Outcome, Post

DONE, RUNNING = 0, 1
POST = Post(np.ones((1, 3), np.uint64), np.ones((1, 3), np.uint64), MemoryKind.DRAM)


class NotFound(Exception): ...


class Disconnected(Exception): ...


class FakeNixl:
    """Requests are numbers; ``status`` says what each one answers, an exception is raised."""

    def __init__(self) -> None:
        self.status: dict[int, Any] = {}
        self.default: Any = DONE
        self.posted: list[int] = []
        self.released: list[int] = []
        self.removed: list[str] = []
        self.deregistered = 0
        self.post_error: Exception | None = None

    def createBackend(self, name: str, options: dict[str, str]) -> int:
        return 1

    def registerMem(self, descriptors: Any, backends: list[int]) -> None: ...

    def deregisterMem(self, descriptors: Any, backends: list[int]) -> None:
        self.deregistered += 1

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        return b"peer"

    def invalidateRemoteMD(self, name: str) -> None:
        self.removed.append(name)

    def createXferReq(self, *args: Any) -> int:
        return len(self.posted) + 1

    def postXferReq(self, request: int, message: str) -> None:
        if self.post_error is not None:
            raise self.post_error
        self.posted.append(request)

    def getXferStatus(self, request: int) -> int:
        status = self.status.get(request, self.default)
        if isinstance(status, Exception):
            raise status
        return int(status)

    def releaseXferReq(self, request: int) -> None:
        self.released.append(request)


class Time:
    """Passes where somebody sleeps, and a little wherever somebody looks."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        self.now += 1e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> FakeNixl:
    fake = FakeNixl()
    monkeypatch.setattr(nixl_agent, "time", Time())
    bindings = SimpleNamespace(
        nixlAgentConfig=SimpleNamespace,
        nixlAgent=lambda name, config: fake,
        nixlXferDList=lambda kind, rows: rows,
        nixlRegDList=lambda kind, rows: rows,
        nixlNotFoundError=NotFound,
        NIXL_THREAD_SYNC_RW=0,
        NIXL_READ=0,
        NIXL_WRITE=1,
        NIXL_SUCCESS=DONE,
        NIXL_IN_PROG=RUNNING,
        DRAM_SEG=0,
        VRAM_SEG=1,
    )
    monkeypatch.setattr(nixl_agent, "_bindings", lambda: bindings)
    monkeypatch.setattr(nixl_agent, "_KEPT", [])
    return fake


@pytest.fixture
def agent(nixl: FakeNixl) -> NixlAgent:
    agent = NixlAgent("me")
    agent.register([MemoryRegion(1, 1)])
    agent.add_peer("peer", b"metadata")
    return agent


def run(agent: NixlAgent, posts: int = 3, timeout_s: float = 0.05, **hooks: Any) -> Any:
    deadline = nixl_agent.time.monotonic() + timeout_s
    return agent.transfer(Operation.READ, "peer", [POST] * posts, deadline, **hooks)


def test_hooks_run_in_order(agent: NixlAgent, nixl: FakeNixl) -> None:
    seen: list[str] = []

    def note(kind: str) -> Callable[[int], None]:
        return lambda index: seen.append(f"{kind}{index}")

    ended = run(agent, 2, before=note("before"), after=note("after"))
    assert ended.outcome is Outcome.DONE and ended.unsettled is None
    assert seen == ["before0", "before1", "after0", "after1"] or seen == [
        "before0", "after0", "before1", "after1",
    ]  # fmt: skip
    assert nixl.released == nixl.posted == [1, 2]


def test_posts_in_flight_are_bounded(agent: NixlAgent, nixl: FakeNixl) -> None:
    nixl.default = RUNNING
    assert run(agent, 20).outcome is Outcome.TIMEOUT
    assert len(nixl.posted) == nixl_agent.POSTS_IN_FLIGHT_MAX


def test_what_is_in_flight_is_never_released(agent: NixlAgent, nixl: FakeNixl) -> None:
    """A released READ filled memory later: only NIXL's own word settles it."""
    nixl.status = {2: RUNNING}
    ended = run(agent)
    assert ended.outcome is Outcome.TIMEOUT
    assert ended.unsettled is not None and not ended.unsettled.settled()
    assert 2 not in nixl.released
    nixl.status = {}
    assert ended.unsettled.settled() and ended.unsettled.settled()
    assert sorted(nixl.released) == [1, 2, 3]


@pytest.mark.parametrize("word", [Disconnected(), DONE])
def test_settled_by_an_error_too(agent: NixlAgent, nixl: FakeNixl, word: Any) -> None:
    nixl.default = RUNNING
    ended = run(agent, 1)
    nixl.default = word
    assert ended.unsettled.settled()


def test_a_request_that_cannot_be_asked_is_not_settled(agent: NixlAgent, nixl: FakeNixl) -> None:
    """NIXL says so once the peer was removed, while the bytes still come."""
    nixl.default = RUNNING
    ended = run(agent, 1)
    nixl.default = NotFound()
    assert not ended.unsettled.settled()


def test_a_peer_stays_while_its_transfers_do(agent: NixlAgent, nixl: FakeNixl) -> None:
    nixl.default = RUNNING
    ended = run(agent, 1)
    agent.remove_peer("peer")
    assert nixl.removed == []
    with pytest.raises(StoreUnavailable, match="in flight"):
        agent.add_peer("peer", b"metadata")
    assert run(agent, 1).outcome is Outcome.FAILED
    nixl.default = DONE
    assert ended.unsettled.settled()
    agent.add_peer("peer", b"metadata")
    assert nixl.removed == ["peer"]
    assert run(agent, 1).outcome is Outcome.DONE


def test_a_peer_is_not_removed_under_a_running_transfer(agent: NixlAgent, nixl: FakeNixl) -> None:
    during: list[list[str]] = []

    def remove(index: int) -> None:
        agent.remove_peer("peer")
        during.append(list(nixl.removed))

    assert run(agent, 1, after=remove).outcome is Outcome.DONE
    assert during == [[]] and nixl.removed == ["peer"]


def test_a_failed_post_leaves_the_others_to_settle(agent: NixlAgent, nixl: FakeNixl) -> None:
    nixl.status = {1: RUNNING}

    def fail_second(index: int) -> None:
        nixl.post_error = Disconnected("gone") if index == 1 else None

    ended = run(agent, before=fail_second)
    assert (ended.outcome, ended.detail) == (Outcome.FAILED, "Disconnected: gone")
    assert ended.unsettled is not None and not ended.unsettled.settled()


def test_a_hook_that_raises_loses_nothing(agent: NixlAgent, nixl: FakeNixl) -> None:
    nixl.status = {2: RUNNING}

    def fail(index: int) -> None:
        raise RuntimeError("no checksum")

    ended = run(agent, after=fail)
    assert (ended.outcome, ended.detail) == (Outcome.FAILED, "RuntimeError: no checksum")


def test_close_deregisters(agent: NixlAgent, nixl: FakeNixl) -> None:
    agent.close()
    agent.close()
    assert nixl.deregistered == 1
    assert run(agent).outcome is Outcome.FAILED


def test_close_keeps_what_may_still_be_touched(agent: NixlAgent, nixl: FakeNixl) -> None:
    nixl.default = RUNNING
    ended = run(agent, 1)
    agent.close()
    assert nixl.deregistered == 0 and [agent] == nixl_agent._KEPT
    assert not ended.unsettled.settled()
    nixl.default = DONE
    assert ended.unsettled.settled()


# -- what transfers travel over --------------------------------------------------------------


class FakeUcx:
    """An agent's endpoints: one to itself, and one more per connection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nixl: FakeNixl) -> None:
        self.live = [1]
        self.asked: list[int] = []
        self.nixl = nixl
        monkeypatch.setattr(ucx_lanes, "endpoints", lambda agent: frozenset(self.live))
        monkeypatch.setattr(ucx_lanes, "lanes", self._lanes)
        monkeypatch.setattr(nixl, "loadRemoteMD", self._connect)

    def _connect(self, metadata: bytes) -> bytes:
        self.live.append(len(self.live) + 1)
        return b"peer"

    def _lanes(self, agent: str, endpoint: int) -> tuple[str, ...]:
        """Nothing may be in flight: whatever is polled could free the endpoint."""
        assert sorted(self.nixl.released) == self.nixl.posted
        self.asked.append(endpoint)
        return (f"tcp/lo{endpoint}",)


@pytest.fixture
def ucx(monkeypatch: pytest.MonkeyPatch, nixl: FakeNixl) -> FakeUcx:
    return FakeUcx(monkeypatch, nixl)


def test_lanes_are_looked_at_once_per_connection(ucx: FakeUcx, agent: NixlAgent) -> None:
    """Of the peer's endpoint only: the agent's own to itself may use others."""
    assert agent.lanes("peer") == ()
    for _ in range(2):
        assert run(agent).outcome is Outcome.DONE
        assert agent.lanes("peer") == ("tcp/lo2",)
    agent.remove_peer("peer")
    agent.add_peer("peer", b"metadata")
    assert agent.lanes("peer") == ()
    run(agent)
    assert agent.lanes("peer") == ("tcp/lo3",) and ucx.asked == [2, 3]


def test_lanes_wait_until_nothing_else_runs(ucx: FakeUcx, agent: NixlAgent, nixl: FakeNixl) -> None:
    nixl.status = {2: RUNNING}
    pending = run(agent, 2)
    assert pending.outcome is Outcome.TIMEOUT and run(agent, 1).outcome is Outcome.DONE
    assert ucx.asked == []
    nixl.status = {}
    assert pending.unsettled.settled()

    def another(index: int) -> None:
        assert run(agent, 1).outcome is Outcome.DONE
        assert ucx.asked == []

    assert run(agent, 1, after=another).outcome is Outcome.DONE
    assert ucx.asked == [2] and agent.lanes("peer") == ("tcp/lo2",)
