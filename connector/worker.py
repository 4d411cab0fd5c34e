"""The worker half: moves bytes between this rank's KV pages and the store, on its own threads."""

from __future__ import annotations

import functools
import logging
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from backhaul.connector.conversion import Converter, unlike_groups
from backhaul.connector.messages import (
    BlockRef,
    JobReport,
    LoadJob,
    PublishJob,
    StepMetadata,
    WorkerReport,
)
from backhaul.connector.regions import GroupRegions, memory_regions
from backhaul.protocols.checkpoint import ObjectKey, Reason
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import (
    StoreDenied,
    StoreError,
    StoreFull,
    StoreRejected,
    StoreUnavailable,
)
from backhaul.protocols.layout import CacheLayout, GroupKind
from backhaul.protocols.options import Options
from backhaul.transfer.base import (
    GrantStatus,
    LoadItem,
    Store,
    TransferResult,
    Unsettled,
    WriteItem,
    Written,
)

logger = logging.getLogger("vllm.backhaul")

_BUSY_BACKOFF_S = (0.002, 0.1)
"""First and longest pause while another publication writes an object that we need too."""


class WorkerHalf:
    """One per rank. ``submit`` and ``drain`` are called from the model thread and never block."""

    def __init__(
        self, options: Options, store: Store, rank: int, kv_cache_config: Any, layout: CacheLayout
    ) -> None:
        self._options = options
        self._store = store
        self._rank = rank
        self._owners = {group.index: group.owner(rank) for group in layout.groups}
        self._kv_cache_config = kv_cache_config
        self._layout = layout
        self._states = {g.index for g in layout.groups if g.kind is GroupKind.RECURRENT}
        self._groups: dict[int, GroupRegions] = {}
        self._domain: DomainRecord | None = None
        self._converter: Converter | None = None
        self._unlike: list[int] = []
        self._tells_unlike = False
        self._event: Callable[[], Any] | None = None
        self._cut_off = False
        self._done: queue.SimpleQueue[tuple[JobReport, str | None, Unsettled | None]] = (
            queue.SimpleQueue()
        )
        self._unsettled: dict[int, Unsettled] = {}
        self._reports: list[JobReport] = []
        self._transports: tuple[str, ...] = ()
        threads = options.transfer_threads
        self._loads = ThreadPoolExecutor(threads, thread_name_prefix="backhaul-load")
        self._publishes = ThreadPoolExecutor(threads, thread_name_prefix="backhaul-publish")
        # Conversions take turns at one buffer, which must not keep the threads of other loads.
        self._conversions = ThreadPoolExecutor(1, thread_name_prefix="backhaul-convert")

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """vLLM allocated its cache, one tensor per layer: register it for transfers."""
        config = self._kv_cache_config
        layers = {
            index: [kv_caches[name] for name in config.kv_cache_groups[index].layer_names]
            for index in config.prefix_cacheable_group_ids
        }
        for index, tensors in layers.items():
            self._groups[index] = GroupRegions(tensors, config.num_blocks)
        regions = memory_regions(kv_caches)
        if self._options.convert_buffer_bytes:
            self._converter = Converter(
                self._store,
                self._rank,
                layers,
                config.num_blocks,
                self._options.convert_buffer_bytes,
            )
            regions.append(self._converter.region)
        self._store.attach(regions)
        if any(t.device.type == "cuda" for t in kv_caches.values()):
            self._event = _cuda_event

    def submit(self, meta: StepMetadata) -> None:
        """Start this step's jobs, behind everything that is already on the device's stream."""
        self._cut_off |= meta.cut_off
        if meta.domain is not None:
            domain = self._domain = meta.domain
            self._unlike = self._compare(domain)
            self._tells_unlike = bool(self._unlike)
            self._publishes.submit(self._open_domain, domain)
        if not (meta.loads or meta.publishes):
            return
        ready = self._event() if self._event is not None else None
        for load in meta.loads:
            if load.source is None:
                self._loads.submit(self._run, load, ready, self._load)
            else:
                until = time.monotonic() + self._options.load_timeout_s
                convert = functools.partial(self._convert, until=until)
                self._conversions.submit(self._run, load, ready, convert)
        for publish in meta.publishes:
            self._publishes.submit(self._run, publish, ready, self._publish)

    def drain(self) -> tuple[set[str], bool]:
        """Collect what ended since the last call; the reports wait for ``take_report``.

        Returns ids of requests whose load is over, well or not, and whether anything is new.
        """
        received: set[str] = set()
        while True:
            try:
                report, request_id, unsettled = self._done.get_nowait()
            except queue.Empty:
                break
            self._reports.append(report)
            if unsettled is not None:
                self._unsettled[report.job_id] = unsettled
            if request_id is not None:
                received.add(request_id)
        for job_id, transfer in list(self._unsettled.items()):
            if transfer.settled():
                del self._unsettled[job_id]
                self._reports.append(JobReport(job_id, outcome=False, settled=True))
        return received, bool(self._reports)

    def take_report(self) -> WorkerReport | None:
        """The reports collected by ``drain``; None where there is nothing to tell."""
        before, self._transports = self._transports, self._store.transports()
        changed = self._transports != before
        if not (self._reports or self._tells_unlike or changed):
            return None
        reports, self._reports = self._reports, []
        told, self._tells_unlike = self._tells_unlike, False
        transports = {self._rank: self._transports} if changed else {}
        if changed and self._transports:
            logger.info(
                "backhaul: rank %d's connection to the store's pool has lanes over %s",
                self._rank,
                ", ".join(self._transports),
            )
        return WorkerReport(reports, cannot_convert=told, transports=transports)

    def shutdown(self) -> None:
        """Stop the threads; running transfers end by their own deadline."""
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._conversions.shutdown(wait=False, cancel_futures=True)
        self._publishes.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _compare(self, domain: DomainRecord) -> list[int]:
        """Groups that keep this rank from converting into ``domain``, with a line about them."""
        if not all(group.page for group in domain.layout.groups):
            return []  # the scheduler half knows that nothing can be converted
        unlike = unlike_groups(domain.layout, self._layout)
        if unlike:
            logger.warning(
                "backhaul: layers of KV cache groups %s differ from the first one, so checkpoints "
                "of engines with other parallel sizes are not loaded",
                unlike,
            )
        return unlike

    # -- on the transfer threads --------------------------------------------------------------

    def _open_domain(self, domain: DomainRecord) -> None:
        try:
            self._store.open_domain(domain, timeout_s=self._options.publish_timeout_s)
        except StoreError as error:
            logger.warning("backhaul: %s; publications begin once the store answers", error)

    def _run(self, job: Any, ready: Any, work: Callable[[Any], TransferResult]) -> None:
        """Run one job and report it, whatever happens."""
        started = time.monotonic()
        try:
            if ready is not None:
                ready.synchronize()
            result = work(job)
        except StoreError as error:
            logger.debug("backhaul: job %d: %s", job.job_id, error)
            result = TransferResult(ok=False, reason=_reason_of(error))
        except Exception:
            logger.exception("backhaul: unexpected error in job %d", job.job_id)
            result = TransferResult(ok=False, reason=Reason.INTERNAL)
        report = JobReport(
            job.job_id,
            outcome=True,
            settled=result.unsettled is None,
            reason=None if result.ok else result.reason or Reason.INTERNAL,
            nbytes=result.nbytes,
            seconds=time.monotonic() - started,
            state_bytes=self._state_bytes(job) if isinstance(job, PublishJob) else 0,
        )
        request_id = job.request_id if isinstance(job, LoadJob) else None
        self._done.put((report, request_id, result.unsettled))

    def _state_bytes(self, job: PublishJob) -> int:
        """Bytes of the job's states that this rank stores."""
        return sum(
            self._groups[block.group].object_bytes
            for block in job.blocks
            if block.group in self._states and self._owners[block.group] == self._rank
        )

    def _load(self, job: LoadJob) -> TransferResult:
        if not job.blocks:
            return TransferResult(ok=False, reason=Reason.INTERNAL)
        items = [
            LoadItem(self._key(block), self._groups[block.group].segments(block.block_id))
            for block in job.blocks
        ]
        return self._store.read(
            job.lease,
            items,
            verify=self._options.verify_loads,
            timeout_s=self._options.load_timeout_s,
        )

    def _convert(self, job: LoadJob, until: float) -> TransferResult:
        """As ``_load``, from a domain of other parallel sizes; to be over by ``until``
        (``time.monotonic``), for it may have waited for others."""
        if not job.blocks or self._converter is None or self._domain is None or self._unlike:
            return TransferResult(ok=False, reason=Reason.INTERNAL)
        left_s = until - time.monotonic()
        if left_s <= 0:
            return TransferResult(ok=False, reason=Reason.TIMEOUT)
        return self._converter.load(
            job, self._domain, verify=self._options.verify_loads, timeout_s=left_s
        )

    def _publish(self, job: PublishJob) -> TransferResult:
        """reserve -> write -> commit until nothing is missing or the time is up."""
        deadline = time.monotonic() + self._options.publish_timeout_s
        # What another rank holds as well is sent by the first of them only.
        own = (block for block in job.blocks if self._owners[block.group] == self._rank)
        todo = {self._key(block): block for block in own}
        sent = 0
        pause = _BUSY_BACKOFF_S[0]
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return TransferResult(ok=False, reason=Reason.TIMEOUT, nbytes=sent)
            if self._cut_off:  # the store refuses it, unless it was restarted since
                return TransferResult(ok=False, reason=Reason.CACHE_RESET, nbytes=sent)
            result, busy = self._send(job, todo, remaining)
            sent += result.nbytes
            if not result.ok:
                return TransferResult(
                    ok=False, reason=result.reason, nbytes=sent, unsettled=result.unsettled
                )
            last = job.manifest if not busy else None
            commit = self._store.commit(
                job.domain,
                job.publication,
                self._rank,
                result.written,
                last,
                timeout_s=max(deadline - time.monotonic(), 0.001),
            )
            if not busy and not commit.missing:
                return TransferResult(ok=True, nbytes=sent)
            missing = [key for key in commit.missing if key not in todo]
            if missing:  # sent ahead and gone since, e.g. the store was restarted
                return TransferResult(ok=False, reason=Reason.EVICTED, nbytes=sent)
            time.sleep(pause)
            pause = min(pause * 2, _BUSY_BACKOFF_S[1])

    def _send(
        self, job: PublishJob, todo: Mapping[ObjectKey, BlockRef], timeout_s: float
    ) -> tuple[TransferResult, bool]:
        """One round of reserve and write. Returns the outcome, and whether objects are still
        being written by someone else."""
        started = time.monotonic()
        wants = [(key, self._groups[key.group].object_bytes) for key in todo]
        grants = self._store.reserve(job.domain, job.publication, wants, timeout_s=timeout_s)
        refused = {grant.status for grant in grants} & _REFUSALS.keys()
        if refused:
            return TransferResult(ok=False, reason=_REFUSALS[refused.pop()]), False
        items = [
            WriteItem(grant, self._groups[grant.key.group].segments(todo[grant.key].block_id))
            for grant in grants
            if grant.status is GrantStatus.GRANTED
        ]
        busy = any(grant.status is GrantStatus.BUSY for grant in grants)
        if not items:
            return TransferResult(ok=True, written=_NOTHING), busy
        left = max(timeout_s - (time.monotonic() - started), 0.001)
        return self._store.write(items, timeout_s=left), busy

    def _key(self, block: BlockRef) -> ObjectKey:
        return ObjectKey(self._owners[block.group], block.group, block.block_hash)


_NOTHING: tuple[Written, ...] = ()

_REFUSALS = {
    GrantStatus.FULL: Reason.STORE_FULL,
    GrantStatus.OVER_BUDGET: Reason.OVER_BUDGET,
}


def _reason_of(error: StoreError) -> Reason:
    if isinstance(error, StoreFull):
        return Reason.STORE_FULL
    if isinstance(error, StoreUnavailable):
        return Reason.UNREACHABLE
    if isinstance(error, StoreDenied):
        return Reason.DENIED
    if isinstance(error, StoreRejected):
        return Reason.UNCOMMITTED
    return Reason.INTERNAL


def _cuda_event() -> Any:
    """An event behind everything enqueued so far on the current stream."""
    import torch

    event = torch.cuda.Event()
    event.record()
    return event
