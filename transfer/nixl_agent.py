"""NIXL, behind the few calls that Backhaul needs. The only module that imports it.

The bindings are used directly: the ``nixl_agent`` class in front of them sets the progress
thread's delay to 0, which burns a core for as long as the process lives.

What NIXL 1.5.1 with UCX was seen to do, and what follows from it:

- Over shared memory the copy happens inside the post call (the GIL is released). A long transfer
  is therefore cut into posts, so that a deadline can be kept between them.
- Over TCP a transfer stands still while the peer is stopped. Releasing its handle reports success,
  and yet a READ filled memory once the peer went on; so did removing the peer, after which the
  handle can no longer be asked. A transfer that is given up is neither released nor is its peer
  removed: it is polled until NIXL says that it is over.
- Death of the peer ends its transfers with ``nixlRemoteDisconnectError`` within milliseconds, and
  nothing arrived after that. The agent goes on with other peers.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backhaul.protocols.errors import ConfigError, StoreUnavailable
from backhaul.transfer import ucx_lanes
from backhaul.transfer.base import MemoryKind, MemoryRegion, Unsettled

BACKEND = "UCX"
POSTS_IN_FLIGHT_MAX = 4
"""Enough to keep a network card busy between two looks at the oldest one."""
PROGRESS_DELAY_US = 20_000
"""Longest sleep of a serving agent's progress thread between looks; traffic wakes it earlier."""
CLOSE_WAIT_S = 2.0
"""How long ``close`` waits for running transfers to notice."""
_SPIN_S = 0.000_2
"""A transfer that ends within this is not delayed by a sleep."""
_PAUSE_S = (0.000_05, 0.000_5)
"""First and longest pause between two polls. Over TCP the polls also move the data, so the
longest bounds the throughput: a socket buffer's worth per pause."""


class Operation(enum.StrEnum):
    """Direction, seen from this side."""

    READ = "READ"
    WRITE = "WRITE"


class Outcome(enum.Enum):
    """How a transfer ended."""

    DONE = "done"
    FAILED = "failed"
    """The peer is gone, or refused. Connect again before the next one."""
    TIMEOUT = "timeout"


class Ended(NamedTuple):
    """``unsettled`` is set where posts were still in flight at the deadline."""

    outcome: Outcome
    unsettled: Unsettled | None = None
    detail: str = ""


class Post(NamedTuple):
    """One batch: rows (address, bytes, device) on each side, in the same order."""

    local: npt.NDArray[np.uint64]
    remote: npt.NDArray[np.uint64]
    kind: MemoryKind


class _Handle:
    """One posted request. Polled by one thread at a time."""

    def __init__(self, agent: Any, value: int) -> None:
        self._agent = agent
        self._value: int | None = value

    def finish(self) -> bool | None:
        """None while in flight; else whether it succeeded. Frees the request when it is over."""
        if self._value is None:
            return False
        try:
            status = self._agent.getXferStatus(self._value)
        except _bindings().nixlNotFoundError:
            return None  # its peer was removed: says nothing about the bytes in flight
        except Exception:  # NIXL's errors share no base below Exception
            self.free()
            return False
        if status == _bindings().NIXL_IN_PROG:
            return None
        self.free()
        return bool(status == _bindings().NIXL_SUCCESS)

    def free(self) -> None:
        """Only for a request that is over, or was never posted."""
        value, self._value = self._value, None
        if value is not None:
            with contextlib.suppress(Exception):
                self._agent.releaseXferReq(value)


class PendingTransfer:
    """``Unsettled`` by evidence: NIXL has reported the end of every request in flight."""

    def __init__(self, handles: Iterable[_Handle]) -> None:
        self._handles = list(handles)
        self._lock = threading.Lock()

    def settled(self) -> bool:
        """See ``Unsettled``. Also drives the transfer's progress."""
        with self._lock:
            self._handles = [handle for handle in self._handles if handle.finish() is None]
            return not self._handles


class NixlAgent:
    """One NIXL agent. Thread-safe; transfers of several threads run side by side."""

    def __init__(self, name: str, *, serve: bool = False) -> None:
        """``serve``: let a thread answer peers whose transport needs this side's help. An initiator
        drives its own transfers by polling them. Raises ``ConfigError`` where NIXL is lacking."""
        self.name = name
        bindings = _bindings()
        config = bindings.nixlAgentConfig()
        config.useProgThread = serve
        config.useListenThread = False
        config.pthrDelay = PROGRESS_DELAY_US
        config.syncMode = bindings.NIXL_THREAD_SYNC_RW
        try:
            self._agent: Any = bindings.nixlAgent(name, config)
            self._backend = self._agent.createBackend(BACKEND, {})
        except Exception as error:  # NIXL's errors share no base below Exception
            raise ConfigError(f"NIXL cannot start its {BACKEND} backend: {error}") from None
        self._registered: list[Any] = []
        self._lock = threading.Lock()
        self._pending: dict[str, list[PendingTransfer]] = {}
        self._removed: set[str] = set()
        self._running: Counter[str] = Counter()
        self._unseen: dict[str, frozenset[int]] = {}
        self._lanes: dict[str, tuple[str, ...]] = {}
        self._closed = False

    @property
    def metadata(self) -> bytes:
        """What a peer needs to reach the memory registered so far."""
        return bytes(self._agent.getLocalMD())

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make memory usable. It must stay mapped until ``close``. Raises ``ConfigError``."""
        for kind in MemoryKind:
            rows = [(r.address, r.nbytes, r.device, "") for r in regions if r.kind is kind]
            if not rows:
                continue
            descriptors = _bindings().nixlRegDList(_segment(kind), rows)
            try:
                self._agent.registerMem(descriptors, [self._backend])
            except Exception as error:
                raise ConfigError(
                    f"NIXL cannot register {sum(row[1] for row in rows)} bytes of {kind}: {error}"
                ) from None
            self._registered.append(descriptors)

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Make the agent ``name`` reachable. Raises ``StoreUnavailable``, also while a transfer
        from before its removal is still in flight."""
        with self._lock:
            self._sweep()
            if name in self._removed:
                raise StoreUnavailable(f"transfers with {name} are still in flight")
            others = ucx_lanes.endpoints(self.name)
            try:
                self._agent.loadRemoteMD(metadata)
            except Exception as error:
                raise StoreUnavailable(f"NIXL refused the store's metadata: {error}") from None
            self._lanes.pop(name, None)
            self._unseen[name] = ucx_lanes.endpoints(self.name) - others

    def remove_peer(self, name: str) -> None:
        """Forget a peer, at once or when its last transfer has settled."""
        with self._lock:
            self._removed.add(name)
            self._unseen.pop(name, None)
            self._sweep()

    def lanes(self, peer: str) -> tuple[str, ...]:
        """UCX's names of what reads and writes of ``peer`` may use, e.g. ``cma/memory``. Empty
        before the first transfer that succeeded, and where UCX cannot be asked."""
        return self._lanes.get(peer, ())

    def transfer(
        self,
        operation: Operation,
        peer: str,
        posts: Sequence[Post],
        deadline: float,
        *,
        before: Callable[[int], None] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> Ended:
        """Run ``posts`` in order until all are done or ``deadline`` (``time.monotonic``).

        ``before(i)`` runs ahead of post i, while earlier ones are in flight; ``after(i)`` when
        post i is done, in order."""
        with self._lock:
            if self._closed or peer in self._removed:
                return Ended(Outcome.FAILED, None, "the connection was closed")
            self._running[peer] += 1
        flying: deque[tuple[int, _Handle]] = deque()
        detail = ""
        try:
            outcome = Outcome.DONE
            for index, post in enumerate(posts):
                if before is not None:
                    before(index)
                outcome = self._finish(flying, after, deadline, POSTS_IN_FLIGHT_MAX - 1)
                if outcome is not Outcome.DONE:
                    break
                flying.append((index, self._post(operation, peer, post)))
            if outcome is Outcome.DONE:
                outcome = self._finish(flying, after, deadline, 0)
        except Exception as error:  # a hook's, or NIXL's, which share no base below Exception
            outcome, detail = Outcome.FAILED, f"{type(error).__name__}: {error}"
        finally:
            if outcome is Outcome.DONE and not flying and peer in self._unseen:
                self._look_at_lanes(peer)
            unsettled = self._give_up(peer, flying)
        return Ended(outcome, unsettled, detail)

    def close(self) -> None:
        """Give up running transfers and deregister the memory. With posts in flight the agent is
        kept for the process's life instead: freeing it would not stop them. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        give_up = time.monotonic() + CLOSE_WAIT_S
        while self._running and time.monotonic() < give_up:
            time.sleep(_PAUSE_S[1])
        with self._lock:
            self._sweep()
            if self._running or self._pending:
                _KEPT.append(self)
                return
        for descriptors in self._registered:
            with contextlib.suppress(Exception):
                self._agent.deregisterMem(descriptors, [self._backend])
        self._registered = []
        self._agent = None

    def _post(self, operation: Operation, peer: str, post: Post) -> _Handle:
        bindings = _bindings()
        code = bindings.NIXL_READ if operation is Operation.READ else bindings.NIXL_WRITE
        local = bindings.nixlXferDList(_segment(post.kind), post.local)
        remote = bindings.nixlXferDList(bindings.DRAM_SEG, post.remote)
        value = self._agent.createXferReq(code, local, remote, peer, "", [self._backend])
        handle = _Handle(self._agent, value)
        try:
            self._agent.postXferReq(value, "")
        except Exception:
            handle.free()
            raise
        return handle

    def _finish(
        self,
        flying: deque[tuple[int, _Handle]],
        after: Callable[[int], None] | None,
        deadline: float,
        leave: int,
    ) -> Outcome:
        """Take finished posts off, then poll until at most ``leave`` are in flight."""
        started = time.monotonic()
        pause = _PAUSE_S[0]
        while True:
            # Over shared memory a post is done by now: look while its bytes are in the cache.
            before = len(flying)
            if not _reap(flying, after):
                return Outcome.FAILED
            now = time.monotonic()
            if now > deadline or self._closed:
                return Outcome.TIMEOUT if flying or leave else Outcome.DONE
            if len(flying) <= leave:
                return Outcome.DONE
            if len(flying) < before:
                started, pause = now, _PAUSE_S[0]
            elif now - started > _SPIN_S:
                time.sleep(pause)
                pause = min(pause * 1.5, _PAUSE_S[1])

    def _look_at_lanes(self, peer: str) -> None:
        """Once per connection. Nobody else may make UCX progress meanwhile, which could free the
        endpoint: so only where this thread's transfer, just done, is the only one that there is. A
        new one needs the lock to begin, and so does removing a peer."""
        with self._lock:
            if self._running.total() > 1 or self._pending:
                return
            endpoints = self._unseen.pop(peer, frozenset())
            found = (ucx_lanes.lanes(self.name, one) for one in sorted(endpoints))
            self._lanes[peer] = tuple(dict.fromkeys(lane for some in found for lane in some))

    def _give_up(self, peer: str, flying: deque[tuple[int, _Handle]]) -> Unsettled | None:
        pending = PendingTransfer(handle for _, handle in flying)
        settled = pending.settled()
        with self._lock:
            self._running[peer] -= 1
            self._running += Counter()  # drops what is 0
            if not settled:
                self._pending.setdefault(peer, []).append(pending)
            self._sweep()
        return None if settled else pending

    def _sweep(self) -> None:
        """Drop what has settled; carry out removals that waited for it. Needs the lock."""
        for peer, pending in list(self._pending.items()):
            self._pending[peer] = [one for one in pending if not one.settled()]
            if not self._pending[peer]:
                del self._pending[peer]
        for peer in self._removed - self._pending.keys() - self._running.keys():
            self._removed.discard(peer)
            with contextlib.suppress(Exception):
                self._agent.invalidateRemoteMD(peer)


_KEPT: list[Any] = []
"""Agents that were closed with posts in flight."""


def _reap(flying: deque[tuple[int, _Handle]], after: Callable[[int], None] | None) -> bool:
    """Take finished posts off the front. False where one failed."""
    while flying:
        index, handle = flying[0]
        done = handle.finish()
        if done is None:
            break
        flying.popleft()
        if not done:
            return False
        if after is not None:
            after(index)
    return True


def _bindings() -> Any:
    try:
        import nixl._bindings
    except ImportError as error:
        raise ConfigError(f"NIXL cannot be imported ({error}): pip install nixl==1.5.1") from None
    return nixl._bindings


def _segment(kind: MemoryKind) -> Any:
    return _bindings().DRAM_SEG if kind is MemoryKind.DRAM else _bindings().VRAM_SEG
