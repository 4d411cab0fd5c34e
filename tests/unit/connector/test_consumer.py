"""What is offered, which pages are to be filled, and whose lease a load takes: the scheduler half
of loading over a catalog that answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from backhaul.connector import consumer as module
from backhaul.connector.catalog import Answer, Catalog
from backhaul.connector.consumer import Consumer
from backhaul.connector.hints import RequestHints
from backhaul.connector.jobs import BlockHolds, JobBook
from backhaul.connector.messages import LoadJob
from backhaul.connector.stats import StatsRecorder
from backhaul.connector.tracking import TrackedRequest
from backhaul.protocols.checkpoint import CheckpointKind, CheckpointMatch, DomainId, LeaseId
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout
from backhaul.protocols.options import Options
from backhaul.transfer.base import LookupResult
from backhaul.transfer.foreign import Foreign

UNIT, GRID = 4, 16
LAYOUT = CacheLayout(
    groups=(
        GroupLayout(index=0, kind=GroupKind.FULL, block_tokens=8),
        GroupLayout(index=1, kind=GroupKind.WINDOW, block_tokens=4, window_tokens=27),
        GroupLayout(index=2, kind=GroupKind.CHUNK, block_tokens=8, window_tokens=40),
        GroupLayout(index=3, kind=GroupKind.RECURRENT, block_tokens=16),
    ),
    hash_tokens=UNIT,
)
BOUNDARIES = 8
PROMPT = BOUNDARIES * GRID + 1
OURS, THEIRS = LeaseId("ours"), LeaseId("theirs")
ELSEWHERE = cast(DomainRecord, SimpleNamespace(domain_id=DomainId("elsewhere")))


@dataclass
class FakeCatalog:
    """Answers what it was given; remembers what it was asked and what came back."""

    answer: Answer = field(default_factory=lambda: Answer(LookupResult(), None, float("inf")))
    asked: list[list[bytes]] = field(default_factory=list)
    pending: bool = False
    dropped: int = 0
    taken: list[LeaseId] = field(default_factory=list)

    def start(self, request_id: str, hashes: Sequence[bytes], *, repeat: bool = False) -> None:
        self.asked.append(list(hashes))
        self.pending = True

    def started(self, request_id: str) -> bool:
        return self.pending

    def poll(self, request_id: str) -> Answer | None:
        return self.answer

    def seconds(self, request_id: str) -> float | None:
        return None

    def take(self, request_id: str, *, foreign: bool = False) -> LeaseId | None:
        self.pending = False
        lease = self.answer.foreign.lease if self.answer.foreign else None
        self.taken.append(cast(LeaseId, lease if foreign else self.answer.result.lease))
        return self.taken[-1]

    def drop(self, request_id: str) -> None:
        self.dropped += self.pending
        self.pending = False


class Half:
    """One consumer and one request."""

    def __init__(
        self, *matches: CheckpointMatch, foreign: bool = False, min_load_tokens: int = 1
    ) -> None:
        self.catalog = FakeCatalog()
        self.found(*matches, foreign=foreign)
        self.now = 0.0
        self.stats = StatsRecorder()
        self.consumer = Consumer(
            options=Options(store="inprocess://", min_load_tokens=min_load_tokens),
            layout=LAYOUT,
            catalog=cast(Catalog, self.catalog),
            holds=BlockHolds(0),
            book=JobBook(1),
            stats=self.stats,
            clock=lambda: self.now,
        )
        request = SimpleNamespace(
            request_id="r", num_tokens=PROMPT, kv_transfer_params=None, num_preemptions=0,
            skip_reading_prefix_cache=False,
            block_hashes=[bytes([i]) for i in range(PROMPT // UNIT)],
        )  # fmt: skip
        self.tracked = TrackedRequest(request, RequestHints(), carries_prompt=True)

    def found(self, *matches: CheckpointMatch, foreign: bool = False) -> None:
        """What the store holds; ``foreign``: a convertible domain was asked, too."""
        other = Foreign(ELSEWHERE, THEIRS) if foreign else None
        result = LookupResult(matches=matches, lease=OURS)
        self.catalog.answer = Answer(result, None, float("inf"), foreign=other)

    def offered(self, local_tokens: int = 0) -> int:
        """The boundary that is offered to vLLM; 0: none."""
        offer = self.consumer.offer(self.tracked, local_tokens)
        assert offer.known
        return offer.load.boundary if offer.load else 0

    def accept(self, table: Sequence[Sequence[int]], external_tokens: int) -> list[LoadJob]:
        """vLLM allocated; the jobs that come of it."""
        self.consumer.accept(self.tracked, table, external_tokens)
        return self.consumer.take_jobs()

    def lookups(self) -> dict[str, Any]:
        """What the lookup was counted as."""
        report = self.stats.report({})
        assert report is not None
        counters = report.data["counters"]
        return {k.removeprefix("lookups|"): n for k, n in counters.items() if "lookups|" in k}


def match(boundary: int, **more: Any) -> CheckpointMatch:
    return CheckpointMatch(
        boundary=boundary, kinds=(CheckpointKind.DECODE_END,), consumable=True, **more
    )


def table(tokens: int = PROMPT) -> list[list[int]]:
    """A block for every position; ids tell group and index."""
    return [
        [1000 * group.index + i + 1 for i in range(-(-tokens // group.block_tokens))]
        for group in LAYOUT.groups
    ]


@given(st.data())
def test_a_load_fills_what_the_boundary_needs_above_the_local_hit(data: st.DataObject) -> None:
    """Each page from the object that is named by the last hash inside it; no page of the local hit,
    for other requests may read it."""
    boundary = GRID * data.draw(st.integers(1, BOUNDARIES), label="boundary")
    local = GRID * data.draw(st.integers(0, boundary // GRID - 1), label="local")
    half = Half(match(boundary))
    assert half.offered(local) == boundary
    (job,) = half.accept(table(), boundary - local)
    filled = {
        (block.group, block.block_id - 1000 * block.group - 1): block.block_hash[0]
        for block in job.blocks
    }
    assert len(filled) == len(job.blocks)
    chunk = boundary // 40 * 40
    first = {0: 0, 1: boundary - 26, 2: chunk, 3: boundary - 16}
    expected = {
        (group.index, i): ((i + 1) * group.block_tokens) // UNIT - 1
        for group in LAYOUT.groups
        for i in range(boundary // group.block_tokens)
        if (i + 1) * group.block_tokens > max(first[group.index], local)
    }
    assert filled == expected
    assert half.tracked.loading is not None
    assert sorted(half.tracked.loading.block_ids) == sorted(b.block_id for b in job.blocks)


@pytest.mark.parametrize("group", range(4))
@pytest.mark.parametrize("lost", ["dropped", "not there"])
def test_without_a_page_for_every_object_nothing_is_loaded(group: int, lost: str) -> None:
    """The ranks report a failed load of no blocks, and the request is recomputed."""
    half, blocks = Half(match(3 * GRID)), table(3 * GRID)
    blocks[group][-1:] = [0] if lost == "dropped" else []
    assert half.offered() == 3 * GRID
    (job,) = half.accept(blocks, 3 * GRID)
    assert job.blocks == () and job.lease == OURS


@pytest.mark.parametrize("boundary", [2, 3], ids=["one's own", "another domain's"])
def test_a_load_takes_the_lease_of_the_domain_that_it_reads(boundary: int) -> None:
    """The other domain's checkpoint is deeper, and may have failed before."""
    half = Half(match(3 * GRID, domain=ELSEWHERE.domain_id), match(2 * GRID), foreign=True)
    if boundary == 2:
        half.tracked.denied[3 * GRID] = module.Reason.LOAD_FAILED
    assert half.offered() == boundary * GRID
    (job,) = half.accept(table(), boundary * GRID)
    ours = boundary == 2
    assert (job.lease, job.source) == ((OURS, None) if ours else (THEIRS, ELSEWHERE))
    assert half.catalog.taken == [job.lease]


def test_what_no_lease_keeps_is_not_loaded() -> None:
    half = Half(match(3 * GRID, leased=False), match(2 * GRID))
    assert half.offered() == 2 * GRID


def test_the_shortest_gain_worth_a_load_is_counted_from_the_local_hit() -> None:
    for local, least in ((0, 3 * GRID), (GRID, 2 * GRID), (2 * GRID, GRID)):
        assert Half(match(3 * GRID), min_load_tokens=least).offered(local) == 3 * GRID
        assert Half(match(3 * GRID), min_load_tokens=least + 1).offered(local) == 0


def test_once_loads_are_over_the_answer_that_waited_is_given_back() -> None:
    """A load failed, and vLLM found no blocks for the next deepest one."""
    half = Half(match(3 * GRID), match(2 * GRID))
    half.tracked.denied[3 * GRID] = module.Reason.LOAD_FAILED
    assert half.offered() == 2 * GRID
    assert half.offered() == 0 and half.tracked.loads_over
    assert half.catalog.dropped == 1 and not half.catalog.pending


@pytest.mark.parametrize("taken", [0, GRID, 4 * GRID])
def test_tokens_that_vllm_took_from_another_connector_start_no_load(taken: int) -> None:
    """``MultiConnector`` takes the first offer and tells every connector how many it took."""
    half = Half(match(3 * GRID))
    assert half.offered(GRID) == 3 * GRID
    assert half.accept(table(), taken) == []
    assert half.tracked.loading is None and not half.consumer.busy
    assert not half.catalog.pending and half.catalog.dropped == 1 and not half.catalog.taken
    assert half.lookups() == {"not_taken": 1}


def test_a_lease_that_has_waited_for_blocks_too_long_is_given_back_and_another_asked_for() -> None:
    half = Half(match(3 * GRID))
    half.catalog.answer.expires = 10.0
    half.now = 9.9
    assert half.offered() == 3 * GRID  # and vLLM has no blocks for it
    half.now = 10.0
    assert not half.consumer.offer(half.tracked, 0).known
    assert half.catalog.dropped == 1 and len(half.catalog.asked) == 2
    half.catalog.answer.expires = 20.0
    assert half.offered() == 3 * GRID


def test_a_prefix_of_more_hashes_than_a_store_takes_is_asked_for_up_to_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit, asked in ((3, 3), (BOUNDARIES + 1, BOUNDARIES)):
        monkeypatch.setattr(module, "HASHES_MAX", limit)
        half = Half()
        half.consumer.prefetch(half.tracked)
        (hashes,) = half.catalog.asked
        ends = [(i + 1) * GRID // UNIT - 1 for i in range(asked)]
        assert hashes == [bytes([end]) for end in ends]
