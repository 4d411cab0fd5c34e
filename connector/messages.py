"""What the scheduler half and the worker half tell each other, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from backhaul.protocols.checkpoint import (
    CheckpointManifest,
    DomainId,
    LeaseId,
    PublicationId,
    Reason,
)
from backhaul.protocols.domain import DomainRecord


class BlockRef(NamedTuple):
    """One block of one group: which KV page, and the hash that names its content."""

    group: int
    block_id: int
    block_hash: bytes


class LoadJob(NamedTuple):
    """Fill ``blocks`` from the store under ``lease`` for one request. ``source`` is the domain
    that the bytes come from where they have to be converted."""

    job_id: int
    request_id: str
    lease: LeaseId
    blocks: tuple[BlockRef, ...]
    source: DomainRecord | None = None


class PublishJob(NamedTuple):
    """Send what the store lacks of ``blocks``; with a manifest, complete the checkpoint.

    The scheduler half holds a reference on every block until each rank has reported the job.
    """

    job_id: int
    publication: PublicationId
    domain: DomainId
    blocks: tuple[BlockRef, ...]
    manifest: CheckpointManifest | None


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler half to worker half. ``domain`` comes with the first step only; from ``cut_off`` on
    nothing is published."""

    loads: list[LoadJob] = field(default_factory=list)
    publishes: list[PublishJob] = field(default_factory=list)
    domain: DomainRecord | None = None
    cut_off: bool = False


class JobReport(NamedTuple):
    """One rank's news of one job.

    The first one has ``outcome`` True; ``reason`` None then means success. ``settled`` False says
    that the blocks may still be touched although the job is over; a second report, with only
    ``settled`` True, follows. ``state_bytes``: of a publication, bytes of the recurrent states
    that this rank stores.
    """

    job_id: int
    outcome: bool
    settled: bool
    reason: Reason | None = None
    nbytes: int = 0
    seconds: float = 0.0
    state_bytes: int = 0


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Worker half to scheduler half: the reports of every rank, in no particular order.

    ``cannot_convert``: some rank's pages are not those that the domain describes. Said once.
    ``transports``: rank -> ``Store.transports`` there, where it is another than before.
    """

    reports: list[JobReport] = field(default_factory=list)
    cannot_convert: bool = False
    transports: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Reports of both, of different ranks."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.reports + other.reports,
            self.cannot_convert or other.cannot_convert,
            self.transports | other.transports,
        )
