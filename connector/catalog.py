"""Catalog calls off the scheduler's thread: lookups with a deadline, leases, small messages.

vLLM asks about a waiting request once per scheduler pass and must never be blocked, so a lookup
runs on a thread and ``poll`` says "not yet" until it has answered or its time is up.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from backhaul.protocols.checkpoint import LeaseId, PublicationId, Reason
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import LookupUnanswered, StoreDenied, StoreError, StoreUnavailable
from backhaul.protocols.options import Options
from backhaul.transfer.base import LookupResult, Store
from backhaul.transfer.foreign import ConvertibleDomains, Foreign

logger = logging.getLogger("vllm.backhaul")

_MARGIN_S = 0.02
"""Of a lookup's time, what is left to hand its answer over."""
_SEND_TIMEOUT_S = 2.0
"""For releases, announcements and the like: nobody waits for them."""
_REPEAT_S = 1.0
"""Pause before what a store did not take back is sent again."""
_OWED_MAX = 4096
"""Undelivered messages kept; beyond it the oldest is left to the store's own expiry."""


@dataclass
class Answer:
    """What a lookup came to. ``reason`` is set where the store could not be asked; ``seconds`` is
    how long it took to answer; ``foreign`` is what was found in a convertible domain, whose
    checkpoints are among the result's matches and come with a lease of their own."""

    result: LookupResult
    reason: Reason | None = None
    expires: float = 0.0
    seconds: float | None = None
    foreign: Foreign | None = None

    @property
    def leases(self) -> list[LeaseId]:
        """Every lease that came with it."""
        foreign = self.foreign.lease if self.foreign else None
        return [lease for lease in (self.result.lease, foreign) if lease is not None]


class _Pending:
    """A lookup under way. ``own``: what it found in one's own domain, while others are asked."""

    def __init__(self, deadline: float) -> None:
        self.future: Future[Answer] = Future()
        self.deadline = deadline
        self.own: Answer | None = None
        self.answer: Answer | None = None


class Catalog:
    """Lookups and one-way messages to a store's catalog, for one engine.

    All methods but ``end_for_good`` return at once, and all are called from the scheduler's thread
    only. ``open_leases`` counts leases that were granted and not given back.
    """

    def __init__(
        self,
        store: Store,
        domain: DomainRecord,
        options: Options,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._record = domain
        self._domain = domain.domain_id
        self._options = options
        self._clock = clock
        self._pending: dict[str, _Pending] = {}
        self._leases: set[LeaseId] = set()
        self._lock = threading.Lock()  # guards _leases: filled on the threads below
        self._domain_known = False
        self._convertible = ConvertibleDomains(
            store, domain, options.convert_buffer_bytes, self._return
        )
        self._owed: deque[tuple[Callable[[], object], float]] = deque(maxlen=_OWED_MAX)
        self._repeat: threading.Timer | None = None  # both guarded by _lock
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="backhaul-catalog")

    @property
    def open_leases(self) -> int:
        """Leases this engine holds."""
        with self._lock:
            return len(self._leases)

    def start(
        self, request_id: str, boundary_hashes: Sequence[bytes], *, repeat: bool = False
    ) -> None:
        """Begin a lookup unless one is under way for this request. ``repeat``: not its first."""
        if request_id in self._pending:
            return
        budget = self._options.lookup_timeout_s + self._options.publication_wait_s
        self._pending[request_id] = pending = _Pending(self._clock() + budget)
        pending.future = self._threads.submit(self._lookup, list(boundary_hashes), pending, repeat)

    def poll(self, request_id: str) -> Answer | None:
        """The answer, or None while there is still time to wait for it.

        Raises ``KeyError`` where no lookup was started.
        """
        pending = self._pending[request_id]
        if pending.answer is not None:
            return pending.answer
        if pending.future.done():
            pending.answer = pending.future.result()
        elif self._clock() >= pending.deadline:
            # Other domains may take their time, but not what was found in one's own.
            own = pending.own
            self._abandon(pending, keeping=own)
            pending.answer = own or Answer(LookupResult(), Reason.TIMEOUT, float("inf"))
        return pending.answer

    def stop_converting(self) -> None:
        """From now on use nothing of other domains."""
        self._convertible.close()

    def started(self, request_id: str) -> bool:
        """Whether a lookup is under way or answered for this request."""
        return request_id in self._pending

    def seconds(self, request_id: str) -> float | None:
        """How long the store took to answer; None where it did not."""
        pending = self._pending.get(request_id)
        return pending.answer.seconds if pending is not None and pending.answer else None

    def take(self, request_id: str, *, foreign: bool = False) -> LeaseId | None:
        """Use the answer: its lease, or that of its ``foreign`` part, is now the caller's to
        release."""
        answer = self._pending.pop(request_id).answer
        assert answer is not None
        lease = answer.foreign.lease if foreign and answer.foreign else answer.result.lease
        for other in answer.leases:
            if other != lease:
                self.release(other)
        return lease

    def drop(self, request_id: str) -> None:
        """Forget a lookup and give its lease back. Harmless where there is none."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        if pending.answer is None:
            self._abandon(pending)
        else:
            for lease in pending.answer.leases:
                self.release(lease)

    def release(self, lease: LeaseId) -> None:
        """Give a lease back."""
        with self._lock:
            self._leases.discard(lease)
        self._return(lease)

    def give_back(self, call: Callable[[], object]) -> None:
        """As ``send``, of a release: while the store does not answer it is repeated, for as long
        as a lease lasts, so that a store that stood still frees its space when it goes on."""
        until = self._clock() + self._options.lease_s
        self.send(lambda: self._give_back_each([(call, until)]))

    def end_for_good(self, publications: Sequence[PublicationId]) -> None:
        """End publications that a rank may still be writing, and wait for the store's word, a
        moment at most; what it does not answer is repeated like any release."""
        done = threading.Event()
        calls: list[Callable[[], object]] = [
            functools.partial(
                self._store.abandon, one, still_written=True, timeout_s=_SEND_TIMEOUT_S
            )
            for one in publications
        ]
        until = self._clock() + self._options.lease_s

        def end() -> None:
            self._give_back_each([(call, until) for call in calls])
            done.set()

        if calls:
            self.send(end)
            done.wait(_SEND_TIMEOUT_S)

    def send(self, call: Callable[[], object]) -> None:
        """Run a call on a catalog thread; a store error is logged and forgotten."""
        try:
            self._threads.submit(self._guarded, call)
        except RuntimeError:  # closed: the store lets leases and publications run out
            logger.debug("backhaul: catalog is closed, a message is dropped")

    def close(self) -> None:
        """Stop the threads; calls that have not begun are dropped."""
        with self._lock:
            if self._repeat is not None:
                self._repeat.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _return(self, lease: LeaseId) -> None:
        self.give_back(lambda: self._store.release([lease], timeout_s=_SEND_TIMEOUT_S))

    def _give_back_each(self, owed: Sequence[tuple[Callable[[], object], float]]) -> None:
        """Up to the first call that the store does not answer: lookups need the threads, too."""
        for done, (call, _) in enumerate(owed):
            try:
                call()
            except StoreUnavailable as error:
                _log(error)
                self._owe(owed[done:])
                return
            except Exception as error:
                _log(error)

    def _owe(self, calls: Sequence[tuple[Callable[[], object], float]]) -> None:
        now = self._clock()
        with self._lock:
            self._owed.extend((call, until) for call, until in calls if now < until)
            if self._owed and self._repeat is None:
                self._repeat = threading.Timer(_REPEAT_S, self._give_back_owed)
                self._repeat.daemon = True
                self._repeat.start()

    def _give_back_owed(self) -> None:
        with self._lock:
            owed = list(self._owed)
            self._owed.clear()
            self._repeat = None
        self.send(lambda: self._give_back_each(owed))

    @staticmethod
    def _guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            _log(error)

    def _lookup(self, boundary_hashes: list[bytes], pending: _Pending, repeat: bool) -> Answer:
        options = self._options
        try:
            if not self._domain_known:
                self._store.open_domain(self._record, timeout_s=options.lookup_timeout_s)
                self._domain_known = True
            asked = self._clock()
            result = self._store.lookup(
                self._domain,
                boundary_hashes,
                lease_s=options.lease_s,
                wait_s=options.publication_wait_s,
                repeat=repeat,
                timeout_s=options.lookup_timeout_s + options.publication_wait_s,
            )
        except StoreError as error:
            logger.debug("backhaul: lookup failed: %s", error)
            if isinstance(error, LookupUnanswered):
                self._return(LeaseId(error.lease))
            denied = isinstance(error, StoreDenied)
            reason = Reason.DENIED if denied else Reason.UNREACHABLE
            return Answer(LookupResult(), reason, float("inf"))
        except Exception:
            logger.exception("backhaul: unexpected error in a lookup")
            return Answer(LookupResult(), Reason.INTERNAL, float("inf"))
        pending.own = own = self._answer(result, None, asked)
        left_s = pending.deadline - self._clock() - _MARGIN_S
        if left_s <= 0:
            return own
        try:
            result, foreign = self._convertible.extend(
                result, boundary_hashes, lease_s=options.lease_s, timeout_s=left_s
            )
        except Exception:
            logger.exception("backhaul: unexpected error in a lookup of another domain")
            return own
        return self._answer(result, foreign, asked)

    def _answer(self, result: LookupResult, foreign: Foreign | None, asked: float) -> Answer:
        """What a store that was asked at ``asked`` found; its leases count from now on."""
        answer = Answer(result, None, float("inf"), self._clock() - asked, foreign)
        if answer.leases:
            with self._lock:
                self._leases.update(answer.leases)
            # Half the lease is left for the load that follows.
            answer.expires = asked + self._options.lease_s / 2
        return answer

    def _abandon(self, pending: _Pending, *, keeping: Answer | None = None) -> None:
        """Release the leases of a lookup for which nobody waits any more, but for those of the
        answer that was taken instead."""
        kept = keeping.leases if keeping else []

        def on_done(future: Future[Answer]) -> None:
            for lease in () if future.cancelled() else future.result().leases:
                if lease not in kept:
                    self.release(lease)

        pending.future.add_done_callback(on_done)


def _log(error: Exception) -> None:
    """Of a call for which nobody waits."""
    if isinstance(error, StoreError):
        logger.debug("backhaul: %s", error)
    else:
        logger.error("backhaul: unexpected error in a catalog call", exc_info=error)
