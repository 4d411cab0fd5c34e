"""Books of what ranks still have to report, and of the KV blocks that are held meanwhile.

A *hold* is one reference in vLLM's block pool. Every hold is taken and given back here, so that
``held`` returning to zero proves that nothing leaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from backhaul.connector.messages import JobReport
from backhaul.protocols.checkpoint import Reason


class BlockHolds:
    """References on KV blocks, bounded by ``limit`` distinct blocks.

    ``pool`` is vLLM's ``BlockPool``; only ``blocks`` (and their
    ``block_hash_num_tokens``), ``touch`` and ``free_blocks`` are used.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pool: Any = None
        self._held: Counter[int] = Counter()

    def bind(self, pool: Any) -> None:
        """Set the pool, once vLLM has made it."""
        self._pool = pool

    @property
    def held(self) -> int:
        """Distinct blocks held now."""
        return len(self._held)

    def cached_tokens(self, block_id: int) -> int | None:
        """Tokens of the prefix that vLLM caches the block under; None where it does not."""
        tokens: int | None = self._pool.blocks[block_id].block_hash_num_tokens
        return tokens

    def has_room(self, block_ids: Iterable[int], *, without: Iterable[int] = ()) -> bool:
        """Whether these could be held, after one hold on each of ``without`` was given back."""
        gone = Counter(without)
        given_up = sum(self._held[block] <= times for block, times in gone.items())
        fresh = sum(self._held[block] <= gone[block] for block in set(block_ids))
        return len(self._held) - given_up + fresh <= self._limit

    def take(self, block_ids: Iterable[int], *, force: bool = False) -> bool:
        """Hold blocks, all or none. False where the limit would be passed (unless ``force``).

        Raises ``ValueError`` for the null block: it never carries content.
        """
        ids = list(block_ids)
        if 0 in ids:
            raise ValueError("block 0 is vLLM's null block and cannot be held")
        if not force and not self.has_room(ids):
            return False
        self._pool.touch([self._pool.blocks[block] for block in ids])
        self._held.update(ids)
        return True

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Drop one hold on each block."""
        ids = list(block_ids)
        for block in ids:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
        # Deepest first, so that vLLM evicts a chain from its tail.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(ids)])


@dataclass
class Job:
    """One job that every rank has to report.

    Attributes:
        blocks: held until ``settled`` by all ranks; empty where nothing is held.
        done: ranks that reported an outcome.
        settled: ranks that no longer touch the blocks.
        reason: the first failure, or None.
    """

    job_id: int
    ranks: int
    request_id: str
    blocks: tuple[int, ...] = ()
    done: int = 0
    settled: int = 0
    reason: Reason | None = None
    nbytes: int = 0
    seconds: float = 0.0
    state_bytes: int = 0

    @property
    def finished(self) -> bool:
        """Every rank has an outcome."""
        return self.done >= self.ranks


@dataclass
class JobBook:
    """Open jobs by id. A job stays until every rank has settled."""

    ranks: int
    jobs: dict[int, Job] = field(default_factory=dict)
    _next_id: int = 1

    def open(self, request_id: str, blocks: Iterable[int]) -> Job:
        """Start a job that holds ``blocks``."""
        job = Job(self._next_id, self.ranks, request_id, tuple(blocks))
        self.jobs[job.job_id] = job
        self._next_id += 1
        return job

    def apply(self, report: JobReport) -> tuple[Job | None, bool, bool]:
        """Enter one rank's report. Returns the job, whether this made it finished, and whether
        this made it settled (it is then closed). An unknown job gives (None, False, False)."""
        job = self.jobs.get(report.job_id)
        if job is None:
            return None, False, False
        if report.outcome:
            job.done += 1
            job.nbytes += report.nbytes
            job.state_bytes += report.state_bytes
            job.seconds = max(job.seconds, report.seconds)
            job.reason = job.reason or report.reason
        job.settled += report.settled
        settled = job.settled >= job.ranks
        if settled:
            del self.jobs[job.job_id]
        return job, job.finished and report.outcome, settled
