"""Block references are bounded and always balanced; jobs end when every rank has settled."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from backhaul.connector.jobs import BlockHolds, JobBook
from backhaul.connector.messages import JobReport
from backhaul.protocols.checkpoint import Reason


@dataclass
class Pool:
    """Counts references like vLLM's block pool."""

    refs: list[int] = field(default_factory=lambda: [0] * 32)
    freed: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        return list(range(len(self.refs)))

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] += 1

    def free_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] -= 1
            self.freed.append(block)


def holds(limit: int) -> tuple[BlockHolds, Pool]:
    pool, books = Pool(), BlockHolds(limit)
    books.bind(pool)
    return books, pool


def test_the_limit_counts_distinct_blocks_and_refuses_whole_requests() -> None:
    books, pool = holds(3)
    assert books.take([1, 2])
    assert books.take([2, 3]), "block 2 counts once"
    assert not books.take([4]), "a fourth block is refused"
    assert pool.refs[4] == 0, "and nothing was taken of it"
    assert books.held == 3


def test_a_forced_hold_passes_the_limit() -> None:
    books, pool = holds(0)
    assert books.take([5], force=True)
    assert pool.refs[5] == 1


def test_the_null_block_cannot_be_held() -> None:
    books, pool = holds(8)
    with pytest.raises(ValueError, match="null block"):
        books.take([1, 0])
    assert sum(pool.refs) == 0


def test_blocks_go_back_deepest_first() -> None:
    books, pool = holds(8)
    books.take([3, 4, 5])
    books.give_back([3, 4, 5])
    assert pool.freed == [5, 4, 3]


@given(st.lists(st.lists(st.integers(1, 20), max_size=6), max_size=20), st.integers(0, 20))
def test_whatever_is_taken_comes_back(requests: list[list[int]], limit: int) -> None:
    books, pool = holds(limit)
    taken = [ids for ids in requests if books.take(ids)]
    assert books.held == len({block for ids in taken for block in ids}) <= limit
    for ids in taken:
        books.give_back(ids)
    assert books.held == 0
    assert sum(pool.refs) == 0


def test_a_job_is_finished_by_the_last_rank_and_keeps_the_first_failure() -> None:
    book = JobBook(ranks=2)
    job = book.open("r", [1])
    assert book.apply(JobReport(job.job_id, True, True, Reason.TIMEOUT, 10)) == (job, False, False)
    assert book.apply(JobReport(job.job_id, True, True, None, 5)) == (job, True, True)
    assert (job.reason, job.nbytes) == (Reason.TIMEOUT, 15)
    assert not book.jobs


def test_a_job_that_is_over_but_not_settled_stays_in_the_book() -> None:
    book = JobBook(ranks=2)
    job = book.open("r", [1])
    assert book.apply(JobReport(job.job_id, True, False, Reason.TIMEOUT)) == (job, False, False)
    # The first rank settles before the second one has an outcome: that is no outcome.
    assert book.apply(JobReport(job.job_id, False, True)) == (job, False, False)
    assert book.apply(JobReport(job.job_id, True, True)) == (job, True, True)


def test_a_report_of_an_unknown_job_is_ignored() -> None:
    assert JobBook(ranks=1).apply(JobReport(99, True, True)) == (None, False, False)
