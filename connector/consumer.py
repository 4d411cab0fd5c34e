"""Loading, scheduler side: ask the catalog, offer vLLM the deepest joint hit, survive failures.

A failed load is repaired here and not through ``failed_recving``, because vLLM's default
``kv_load_failure_policy`` would end the request: the request's blocks are freed, its computed
count is set to 0, and vLLM schedules it afresh, with the bad checkpoint on a denylist.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from backhaul.connector.catalog import Catalog
from backhaul.connector.jobs import BlockHolds, Job, JobBook
from backhaul.connector.messages import BlockRef, LoadJob
from backhaul.connector.outcome import Answered, producer_age, reuse_of
from backhaul.connector.stats import StatsRecorder
from backhaul.connector.tracking import Load, TrackedRequest
from backhaul.protocols.candidates import Limits, deepest_usable
from backhaul.protocols.checkpoint import LookupOutcome, NotAsked, Reason, primary_kind
from backhaul.protocols.layout import CacheLayout, GroupKind, block_hash_index, required_blocks
from backhaul.protocols.options import Options
from backhaul.transfer.entries import HASHES_MAX

logger = logging.getLogger("vllm.backhaul")

BlockTable = Sequence[Sequence[int]]


class Offer(NamedTuple):
    """``known`` False: ask again in the next pass. ``load`` None: nothing to load."""

    known: bool
    load: Load | None = None


class Consumer:
    """Scheduler half of loading. Called from the scheduler's thread only; never blocks."""

    def __init__(
        self,
        *,
        options: Options,
        layout: CacheLayout,
        catalog: Catalog,
        holds: BlockHolds,
        book: JobBook,
        stats: StatsRecorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._layout = layout
        self._grid = layout.boundary_tokens
        self._catalog = catalog
        self._holds = holds
        self._book = book
        self._stats = stats
        self._clock = clock
        self._outbox: list[LoadJob] = []
        self._open: dict[int, Load] = {}  # dispatched and not settled, by job
        self._cut_off = False

    @property
    def busy(self) -> bool:
        """A load waits to be dispatched or to be reported."""
        return bool(self._outbox) or any(not load.job.finished for load in self._open.values())

    def owns(self, job_id: int) -> bool:
        """Whether a job is a load."""
        return job_id in self._open

    def take_jobs(self) -> list[LoadJob]:
        """Jobs for the next step's metadata."""
        jobs, self._outbox = self._outbox, []
        return jobs

    # -- lookup -------------------------------------------------------------------------------

    def prefetch(self, tracked: TrackedRequest) -> None:
        """Begin the lookup of a request that may be able to load."""
        if not self._eligible(tracked):
            return
        request = tracked.request
        # At least one token must remain to be computed.
        count = min(max(request.num_tokens - 1, 0) // self._grid, HASHES_MAX)
        step = self._grid // self._layout.hash_tokens
        hashes = [bytes(request.block_hashes[(i + 1) * step - 1]) for i in range(count)]
        if hashes:
            self._catalog.start(tracked.request_id, hashes, repeat=tracked.asked)
            tracked.asked = True

    def offer(self, tracked: TrackedRequest, local_tokens: int) -> Offer:
        """What to offer on top of a local hit."""
        if tracked.offered is not None and tracked.denied:
            # vLLM still reserves the room of the load that failed, even against this request, so
            # it may never find blocks for another load; without one it will.
            tracked.loads_over = True
        tracked.offered = None
        tracked.local_tokens = local_tokens
        if not self._eligible(tracked):
            self._catalog.drop(tracked.request_id)
            if self._cut_off and self._may_load(tracked):
                tracked.miss = Reason.CACHE_RESET
            return Offer(known=True)
        if not self._catalog.started(tracked.request_id):
            self.prefetch(tracked)
            if not self._catalog.started(tracked.request_id):
                return Offer(known=True)
        answer = self._catalog.poll(tracked.request_id)
        if answer is None:
            return Offer(known=False)
        if self._clock() >= answer.expires:  # waited too long for blocks: the lease runs out
            self._catalog.drop(tracked.request_id)
            self.prefetch(tracked)
            return Offer(known=False)
        found = answer.result
        tracked.answered = Answered(
            found.matches, found.attention_tokens, found.recurrent_tokens, answer.reason
        )
        if tracked.reuse is None:
            tracked.reuse = reuse_of(found.matches)
        usable = {m.boundary: m for m in found.matches if m.consumable and m.leased}
        boundary = deepest_usable(
            usable,
            local_tokens=local_tokens + self._options.min_load_tokens - 1,
            limit_tokens=tracked.request.num_tokens - 1,
            denied=frozenset(tracked.denied),
        )
        if not boundary:
            # What lies within the local hit was not missed.
            missed = (
                m.reason for m in found.matches if not m.consumable and m.boundary > local_tokens
            )
            failed = tracked.miss if tracked.denied else None
            tracked.miss = answer.reason or next(missed, None) or failed
            return Offer(known=True)
        match = usable[boundary]
        source = answer.foreign.record if match.domain and answer.foreign else None
        tracked.offered = Load(
            boundary,
            local_tokens,
            match.kinds,
            match.age_s,
            match.producer,
            producer_age(found.matches, match),
            source,
        )
        return Offer(known=True, load=tracked.offered)

    def accept(self, tracked: TrackedRequest, table: BlockTable, external_tokens: int) -> None:
        """vLLM allocated blocks: start the load if it took our offer, else let it go."""
        load, tracked.offered = tracked.offered, None
        if load is None or external_tokens != load.boundary - load.local_tokens:
            if self._catalog.started(tracked.request_id):
                outcome = LookupOutcome.NOT_TAKEN if load else _unused(tracked.answered)
                self._count_lookup(tracked, outcome)
                self._catalog.drop(tracked.request_id)
            elif self._cut_off and self._may_load(tracked):
                self._count_lookup(tracked, LookupOutcome.CACHE_RESET)
            return
        self._count_lookup(tracked, LookupOutcome.HIT)
        lease = self._catalog.take(tracked.request_id, foreign=load.source is not None)
        assert lease is not None  # granted with every consumable match
        blocks = tuple(self._blocks_to_fill(tracked, load, table))
        load.lease = lease
        load.block_ids = tuple(block.block_id for block in blocks)
        load.job = self._book.open(tracked.request_id, ())
        load.started = self._clock()
        tracked.loading = load
        self._open[load.job.job_id] = load
        self._outbox.append(
            LoadJob(load.job.job_id, tracked.request_id, lease, blocks, load.source)
        )

    def drop(self, tracked: TrackedRequest) -> None:
        """The request ended: forget its lookup. A running load goes on until it is reported."""
        tracked.offered = None
        self._catalog.drop(tracked.request_id)

    def cut_off(self, requests: Iterable[TrackedRequest], manager: Any) -> None:
        """Load nothing from now on: what is under way, or arrived for a request that vLLM has not
        taken up again, is recomputed.

        Args:
            requests: all that have not ended.
            manager: vLLM's KVCacheManager.
        """
        self._cut_off = True
        # The ranks still have to report them, for vLLM waits; without blocks nothing is read.
        self._outbox = [job._replace(blocks=()) for job in self._outbox]
        for tracked in requests:
            self._catalog.drop(tracked.request_id)
            tracked.offered = None
            if tracked.outcome is None:
                tracked.answered = None
            status, load = tracked.request.status, tracked.loaded
            if load is not None and status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                tracked.loaded = None
                self.repair(tracked, load, Reason.CACHE_RESET, manager)

    def limits(self, tracked: TrackedRequest) -> Limits:
        """What decided which candidate a request may use."""
        return Limits(
            local_tokens=tracked.local_tokens,
            limit_tokens=tracked.request.num_tokens - 1,
            min_gain_tokens=self._options.min_load_tokens,
            denied=tracked.denied,
            loads_over=tracked.loads_over,
        )

    # -- completion ---------------------------------------------------------------------------

    def on_job(self, job: Job, *, finished: bool, settled: bool) -> None:
        """A rank reported one of this half's jobs."""
        load = self._open[job.job_id]
        if finished:
            self._catalog.release(load.lease)
            self._stats.observe("load_seconds", self._clock() - load.started)
            self._stats.count("load_bytes", n=job.nbytes)
            if (reason := self._failure(job)) is not None:
                self._stats.count("load_failures", reason)
        if settled:
            del self._open[job.job_id]
            self._holds.give_back(job.blocks)

    def on_received(self, tracked: TrackedRequest, manager: Any, *, waiting: bool) -> None:
        """vLLM learns in this pass that the load is over on every rank.

        Args:
            manager: vLLM's KVCacheManager.
            waiting: the request still waits for the load (it was not aborted meanwhile).
        """
        load, tracked.loading = tracked.loading, None
        assert load is not None
        job, reason = load.job, self._failure(load.job)
        if reason is None:
            if waiting:
                tracked.loaded = load
                kind = primary_kind(load.kinds)
                self._stats.count("loads", kind)
                self._stats.count("loaded_tokens", kind, n=load.boundary - load.local_tokens)
            return
        if not tracked.request.num_preemptions:
            # vLLM counted them as cached with the blocks; it leaves preempted requests out.
            self._stats.count("failed_load_tokens", n=load.boundary - load.local_tokens)
        if job.settled < job.ranks:
            # The transfer may still write into these pages: keep them from being reused.
            self._holds.take(load.block_ids, force=True)
            job.blocks = load.block_ids
        if waiting:
            self.repair(tracked, load, reason, manager)

    @staticmethod
    def repair(tracked: TrackedRequest, load: Load, reason: Reason, manager: Any) -> None:
        """Send a request back to be scheduled from its local hit, never to try ``load`` again."""
        tracked.denied[load.boundary] = reason
        tracked.miss = reason
        manager.free(tracked.request)
        tracked.request.num_computed_tokens = 0

    # -- helpers ------------------------------------------------------------------------------

    def _count_lookup(self, tracked: TrackedRequest, outcome: LookupOutcome) -> None:
        self._stats.count("lookups", outcome)
        if tracked.outcome is None:  # the record is of what came before the prefill
            tracked.lookup = outcome
        seconds = self._catalog.seconds(tracked.request_id)
        if seconds is not None:
            self._stats.observe("lookup_seconds", seconds)

    def _failure(self, job: Job) -> Reason | None:
        return Reason.CACHE_RESET if self._cut_off else job.reason

    def _eligible(self, tracked: TrackedRequest) -> bool:
        return not self._cut_off and self._may_load(tracked)

    @staticmethod
    def _may_load(tracked: TrackedRequest) -> bool:
        return not tracked.loads_over and _excluded(tracked) is None

    def why_not_asked(self, tracked: TrackedRequest) -> NotAsked | None:
        """Why a request whose prefill begins had no lookup; None where it had one."""
        if tracked.asked or tracked.lookup is not None:
            return None
        return _excluded(tracked) or NotAsked.BELOW_GRID

    def _blocks_to_fill(
        self, tracked: TrackedRequest, load: Load, table: BlockTable
    ) -> list[BlockRef]:
        """Pages to fill: attention above the local hit, and the one state at the boundary.

        Empty where the table does not look as expected; the worker then reports a failed load.
        """
        hashes = tracked.request.block_hashes
        unit = self._layout.hash_tokens
        blocks: list[BlockRef] = []
        for group in self._layout.groups:
            ids = table[group.index]
            for i in required_blocks(group, load.boundary):
                local = (i + 1) * group.block_tokens <= load.local_tokens
                if local and group.kind is not GroupKind.RECURRENT:
                    continue
                if i >= len(ids) or not ids[i]:
                    logger.warning(
                        "backhaul: request %s has no block %d in group %d for a load to %d tokens; "
                        "it is recomputed",
                        tracked.request_id, i, group.index, load.boundary,
                    )  # fmt: skip
                    return []
                name = bytes(hashes[block_hash_index(group, i, unit)])
                blocks.append(BlockRef(group.index, ids[i], name))
        return blocks


def _excluded(tracked: TrackedRequest) -> NotAsked | None:
    """Why a request may load nothing, whatever the store has."""
    request = tracked.request
    params = request.kv_transfer_params
    if isinstance(params, dict) and params.get("do_remote_prefill"):
        return NotAsked.HANDED_OVER  # another connector fetches this request's own cache
    if not tracked.hints.load:
        return NotAsked.OPTED_OUT
    return NotAsked.NO_CACHE_READ if request.skip_reading_prefix_cache else None


def _unused(answered: Answered | None) -> LookupOutcome:
    """What a lookup came to that led to no offer."""
    if answered is None:
        return LookupOutcome.MISS
    if answered.reason is not None:
        return LookupOutcome(answered.reason)
    found = any(match.consumable for match in answered.matches)
    return LookupOutcome.PASSED_OVER if found else LookupOutcome.MISS
