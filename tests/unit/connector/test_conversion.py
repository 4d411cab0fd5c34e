"""Checkpoints published by workers of one tensor-parallel size and number of pipeline stages and
loaded by those of another: through the real worker halves and a real store, over cache tensors as
vLLM lays them out."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

pytest.importorskip("vllm")

import torch

from backhaul.connector.catalog import Catalog
from backhaul.connector.conversion import unlike_groups
from backhaul.connector.messages import (
    BlockRef,
    LoadJob,
    PublishJob,
    StepMetadata,
    WorkerReport,
)
from backhaul.connector.worker import WorkerHalf
from backhaul.protocols.candidates import Limits, tag_candidates
from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointManifest,
    CheckpointMatch,
    DomainId,
    LeaseId,
    ObjectKey,
    PassedOver,
    PublicationId,
    Reason,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreUnavailable
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout, checkpoint_objects
from backhaul.protocols.options import Options
from backhaul.protocols.sharding import Part, Rows, page_bytes
from backhaul.transfer.backends.inprocess import InProcessPool, InProcessStore
from backhaul.transfer.base import LookupResult, TransferResult, Written
from backhaul.transfer.foreign import largest_sources

BLOCKS, TOKENS, KERNEL_BLOCKS = 6, 8, 2
HEADS, CONTENT = 4, 10
UNIT = 6  # bytes per head of a state
PADDING = 32  # bytes after each state
ATTENTION = {
    **dict.fromkeys(("LBHNC", "BLHNC"), (Rows(1, (Part(HEADS, TOKENS * CONTENT * 2),)),)),
    **dict.fromkeys(("LBNHC", "BLNHC"), (Rows(TOKENS, (Part(HEADS, CONTENT * 2),)),)),
}
"""A page of attention by vLLM's name of the order of its dimensions."""
STATE = (Rows(2, (Part(HEADS, UNIT), Part(2 * HEADS, UNIT))), Rows(1, (Part(HEADS, 3 * UNIT),)))
NUMBERS = {"s": 0, "a": 1, "t": 2, "b": 3, "c": 4}
LAYERS = ("a", "b", "c"), ("s", "t")
CUTS = {1: (5,), 2: (2, 3)}
BOUNDARY = 3 * TOKENS
HASHES = tuple(bytes([i]) * 32 for i in range(3))


class Size(NamedTuple):
    """How a model is spread over ranks."""

    tensor: int
    stages: int = 1

    def __str__(self) -> str:
        return f"TP {self.tensor} PP {self.stages}" if self.stages > 1 else f"TP {self.tensor}"


SIZES = [
    *((Size(a), Size(b)) for a, b in ((1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1))),
    (Size(1, 2), Size(2)), (Size(2), Size(1, 2)), (Size(1, 2), Size(1)), (Size(1), Size(1, 2)),
    (Size(2, 2), Size(4)), (Size(4), Size(2, 2)), (Size(2, 2), Size(1, 2)),
    (Size(1, 2), Size(2, 2)),
]  # fmt: skip


def held(stages: int, stage: int) -> tuple[tuple[str, ...], ...]:
    """Names of a stage's layers, by group."""
    start = sum(CUTS[stages][:stage])
    numbers = range(start, start + CUTS[stages][stage])
    return tuple(tuple(name for name in group if NUMBERS[name] in numbers) for group in LAYERS)


def record(tensor: int, stages: int = 1, kv_layout: str = "LBHNC") -> DomainRecord:
    names = held(stages, 0)
    groups = tuple(
        GroupLayout(
            index=index, kind=kind, block_tokens=TOKENS, layers=len(names[index]), page=page,
            numbers=tuple(NUMBERS[name] for name in names[index]), members=str(names[index]),
            page_bytes=page_bytes(page, tensor),
        )
        for index, (kind, page) in enumerate(
            ((GroupKind.FULL, ATTENTION[kv_layout]), (GroupKind.RECURRENT, STATE))
        )
    )  # fmt: skip
    return DomainRecord(
        model="m", weights="w",
        layout=CacheLayout(groups=groups, hash_tokens=TOKENS, ranks=tensor * stages),
        hash_function="sha256", hash_probe="00", kv_dtype="bfloat16", kv_layout=kv_layout,
        platform="cpu", tensor_parallel=tensor, pipeline_parallel=stages, vllm="0.32",
        pipeline_layers=",".join(map(str, CUTS[stages])) if stages > 1 else "",
    )  # fmt: skip


def attention_caches(names: Sequence[str], heads: int, kv_layout: str) -> dict[str, torch.Tensor]:
    """Tensors (blocks, heads, tokens, content) of layers, as views of memory in another order."""
    sizes = {
        "L": len(names), "B": BLOCKS * KERNEL_BLOCKS, "H": heads, "N": TOKENS // KERNEL_BLOCKS,
        "C": CONTENT,
    }  # fmt: skip
    memory = torch.zeros(*(sizes[one] for one in kv_layout), dtype=torch.bfloat16)
    view = memory.permute(*(kv_layout.index(one) for one in "LBHNC"))
    return dict(zip(names, view, strict=True))


class Rank:
    """One worker with its cache tensors."""

    def __init__(
        self,
        pool: InProcessPool,
        tensor: int,
        rank: int,
        stages: int = 1,
        kv_layout: str = "LBHNC",
        **options: Any,
    ) -> None:
        self.tensor, self.domain = tensor, record(tensor, stages, kv_layout)
        stage, self.tensor_rank = divmod(rank, tensor)
        self.names = held(stages, stage)
        self.caches: dict[str, torch.Tensor] = attention_caches(
            self.names[0], HEADS // tensor, kv_layout
        )
        size = page_bytes(STATE, tensor)
        for name in self.names[1]:
            padded = torch.zeros(BLOCKS, 1, 1, size + PADDING, dtype=torch.int8)
            self.caches[name] = padded[..., :size]
        config = SimpleNamespace(
            prefix_cacheable_group_ids=(0, 1),
            kv_cache_groups=[SimpleNamespace(layer_names=names) for names in self.names],
            num_blocks=BLOCKS,
        )
        self.half = WorkerHalf(
            Options(store="inprocess://", **options), InProcessStore(pool), rank, config,
            self.domain.layout,
        )  # fmt: skip
        self.half.register_kv_caches(self.caches)
        self.half.submit(StepMetadata(domain=self.domain))

    def fill(self) -> None:
        """This rank's shard of what all models of this test hold in blocks 1 ... 3."""
        for block, name in product((1, 2, 3), self.names[0]):
            whole = values(f"{name}{block}", HEADS, KERNEL_BLOCKS, -1, CONTENT)
            share = self._share(whole).transpose(0, 1)
            kernel = slice(block * KERNEL_BLOCKS, (block + 1) * KERNEL_BLOCKS)
            self.caches[name][kernel] = share
        for name in self.names[1]:
            rows = [
                self._share(part).flatten()
                for row in range(2)
                for part in (
                    values(f"{name}q{row}", HEADS, UNIT),
                    values(f"{name}v{row}", 2 * HEADS, UNIT),
                )
            ]
            matrix = self._share(values(f"{name}m", HEADS, 3 * UNIT)).flatten()
            self.caches[name][3, 0, 0] = torch.cat([*rows, matrix]).to(torch.int8)

    def _share(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.tensor)[self.tensor_rank]

    def contents(self) -> list[bytes]:
        return [
            cache.contiguous().view(torch.uint8).numpy().tobytes() for cache in self.caches.values()
        ]


def values(name: str, *shape: int) -> torch.Tensor:
    """The same small whole numbers for the same name."""
    known = [n for n in shape if n > 0]
    count = TOKENS // KERNEL_BLOCKS if -1 in shape else 1
    for n in known:
        count *= n
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(-120, 120, (count,), generator=generator).view(*shape)


BLOCK_REFS = (
    *(BlockRef(0, block, HASHES[block - 1]) for block in (1, 2, 3)),
    BlockRef(1, 3, HASHES[2]),
)


@pytest.fixture
def pool() -> InProcessPool:
    return InProcessPool(1 << 20)


def publish(one: Rank) -> None:
    """Fill a rank's pages, publish the checkpoint from there, and end the rank."""
    manifest = CheckpointManifest(
        boundary=BOUNDARY, hashes=HASHES, kinds=(CheckpointKind.DECODE_END,)
    )
    one.half._store.open_domain(one.domain, timeout_s=1)
    one.fill()
    job = PublishJob(1, PublicationId("p"), one.domain.domain_id, BLOCK_REFS, manifest)
    assert one.half._publish(job).ok
    one.half.shutdown()


@pytest.fixture
def published(pool: InProcessPool, request: pytest.FixtureRequest) -> Iterator[Size]:
    """All ranks of one size publish the checkpoint; answers the size."""
    size: Size = request.param
    for rank in range(size.tensor * size.stages):
        publish(Rank(pool, size.tensor, rank, size.stages))
    yield size


def look_up(pool: InProcessPool, ours: DomainRecord, **options: Any) -> Any:
    options = {"lookup_timeout_s": 60.0} | options
    catalog = Catalog(InProcessStore(pool), ours, Options(store="inprocess://", **options))
    catalog.start("r", list(HASHES))
    try:
        while (answer := catalog.poll("r")) is None:
            time.sleep(0.001)
        return answer
    finally:
        catalog.close()


def load(rank: Rank, answer: Any, seconds: float = 60.0) -> TransferResult:
    assert answer.foreign is not None
    job = LoadJob(2, "r", answer.foreign.lease, BLOCK_REFS, answer.foreign.record)
    return rank.half._convert(job, until=time.monotonic() + seconds)


@pytest.mark.parametrize(
    ("published", "size"), SIZES, indirect=["published"], ids=[f"{a} to {b}" for a, b in SIZES]
)
@pytest.mark.parametrize("buffer", ["one block at a time", "all at once"])
def test_loaded_pages_are_those_of_the_unsharded_state(
    pool: InProcessPool, published: Size, size: Size, buffer: str
) -> None:
    ours = record(*size)
    least = largest_sources(ours, record(*published))
    options = {"convert_buffer_bytes": least if buffer == "one block at a time" else 1 << 16}
    answer = look_up(pool, ours, **options)
    assert [(m.boundary, m.consumable, m.domain) for m in answer.result.matches] == [
        (BOUNDARY, True, record(*published).domain_id)
    ]
    for rank in range(size.tensor * size.stages):
        one, expected = (Rank(pool, size.tensor, rank, size.stages, **options) for _ in range(2))
        expected.fill()
        result = load(one, answer)
        assert result.ok and result.unsettled is None
        assert one.contents() == expected.contents()
        one.half.shutdown()
        expected.half.shutdown()


@pytest.mark.parametrize("published", [Size(2)], indirect=True)
def test_only_the_ranks_that_hold_a_part_are_read(pool: InProcessPool, published: Size) -> None:
    one = Rank(pool, 4, 3)
    result = load(one, look_up(pool, record(4)))
    attention = page_bytes(ATTENTION["LBHNC"], 2)
    assert result.nbytes == 3 * 3 * attention + 2 * page_bytes(STATE, 2)
    one.half.shutdown()


@pytest.mark.parametrize("published", [Size(2)], indirect=True)
@pytest.mark.parametrize("buffer_bytes", [0, 100])
def test_without_room_to_convert_they_are_not_consumable(
    pool: InProcessPool, published: Size, buffer_bytes: int
) -> None:
    answer = look_up(pool, record(1), convert_buffer_bytes=buffer_bytes)
    (match,) = answer.result.matches
    assert (match.consumable, match.reason) == (False, Reason.DOMAIN_MISMATCH)
    assert (match.field, match.domain) == ("tensor_parallel", record(2).domain_id)
    assert answer.leases == []


@pytest.mark.parametrize("published", [Size(2)], indirect=True)
def test_an_object_that_was_damaged_is_not_used(pool: InProcessPool, published: Size) -> None:
    one = Rank(pool, 1, 0)
    empty = one.contents()
    answer = look_up(pool, record(1))
    pool.memory[:] ^= 1
    assert load(one, answer).reason is Reason.CORRUPT
    assert one.contents() == empty, "nothing is put into pages before it was checked"
    one.half.shutdown()


@pytest.mark.parametrize("published", [Size(2)], indirect=True)
def test_leases_that_are_not_used_are_given_back(pool: InProcessPool, published: Size) -> None:
    catalog = Catalog(InProcessStore(pool), record(1), Options(store="inprocess://"))
    for use in (lambda: catalog.drop("r"), lambda: catalog.release(taken())):

        def taken() -> LeaseId:
            lease = catalog.take("r", foreign=True)
            assert lease is not None
            return lease

        catalog.start("r", list(HASHES))
        while catalog.poll("r") is None:
            pass
        assert catalog.open_leases == 1
        use()
        assert catalog.open_leases == 0
    catalog.close()


@pytest.mark.parametrize("published", [Size(2)], indirect=True)
def test_a_buffer_that_a_lost_transfer_may_write_to_is_not_used(
    pool: InProcessPool, published: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Rank(pool, 1, 0)
    answer = look_up(pool, record(1))
    lost = SimpleNamespace(over=False)
    lost.settled = lambda: lost.over
    with monkeypatch.context() as patch:
        patch.setattr(
            one.half._store,
            "read",
            lambda *_, **__: TransferResult(ok=False, reason=Reason.TIMEOUT, unsettled=lost),
        )
        result = load(one, answer)
        assert result.reason is Reason.TIMEOUT
        assert result.unsettled is None, "it never writes into vLLM's pages"
    assert load(one, answer).reason is Reason.TIMEOUT
    lost.over = True
    assert load(one, answer).ok
    one.half.shutdown()


def hold(pool: InProcessPool, tensor: int, blocks: int) -> DomainId:
    """Let a domain have the checkpoint that ends with so many blocks, of any content."""
    store, domain = InProcessStore(pool), record(tensor)
    store.open_domain(domain, timeout_s=1)
    for rank in range(tensor):
        wants = [
            (ObjectKey(rank, group, block_hash), 64)
            for group, block_hash in checkpoint_objects(domain.layout, blocks * TOKENS, HASHES)
        ]
        grants = store.reserve(domain.domain_id, PublicationId(f"{tensor}"), wants, timeout_s=1)
        manifest = CheckpointManifest(
            boundary=blocks * TOKENS, hashes=HASHES[:blocks], kinds=(CheckpointKind.DECODE_END,)
        )
        written = [Written(one.key, one.token, 0) for one in grants]
        store.commit(
            domain.domain_id, PublicationId(f"{tensor}"), rank, written, manifest, timeout_s=1
        )
    return domain.domain_id


@pytest.mark.parametrize(("deep", "shallow"), [(1, 2), (2, 1)])
def test_of_several_domains_the_one_that_reaches_furthest_is_asked(
    pool: InProcessPool, deep: int, shallow: int
) -> None:
    furthest = hold(pool, deep, 3)
    hold(pool, shallow, 2)
    answer = look_up(pool, record(4))
    assert answer.foreign.record.domain_id == furthest
    assert [(m.boundary, m.domain) for m in answer.result.matches if m.leased] == [
        (3 * TOKENS, furthest)
    ]


def test_a_domain_s_deepest_checkpoint_decides_whether_it_is_asked(pool: InProcessPool) -> None:
    """It also holds one below that of one's own domain, which alone would be nothing to load."""
    ours = record(4)
    hold(pool, 4, 2)
    for blocks in (1, 3):
        other = hold(pool, 2, blocks)
    answer = look_up(pool, ours)
    assert answer.foreign is not None and answer.foreign.record.domain_id == other
    found = {m.boundary // TOKENS: (m.domain, m.leased) for m in answer.result.matches}
    assert found == {3: (other, True), 2: ("", True), 1: (other, False)}


def test_a_checkpoint_that_several_domains_hold_is_taken_from_one_that_can_be_converted(
    pool: InProcessPool,
) -> None:
    """Not every one of them fits into the buffer."""
    ours = record(4)
    large, small = hold(pool, 1, 3), hold(pool, 2, 3)
    answer = look_up(pool, ours, convert_buffer_bytes=largest_sources(ours, record(2)))
    assert answer.foreign.record.domain_id == small
    (match,) = InProcessStore(pool).lookup(ours.domain_id, HASHES, timeout_s=1).matches
    assert sorted((match.domain, *match.also_in)) == sorted((large, small))


def test_a_domain_that_cannot_be_asked_leaves_the_next_one(
    pool: InProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    furthest, next_one = hold(pool, 1, 3), hold(pool, 2, 2)
    lookup = InProcessStore.lookup

    def broken(store: InProcessStore, domain: DomainId, *args: Any, **more: Any) -> LookupResult:
        if domain == furthest:
            raise StoreUnavailable("gone")
        return lookup(store, domain, *args, **more)

    monkeypatch.setattr(InProcessStore, "lookup", broken)
    answer = look_up(pool, record(4))
    assert answer.foreign.record.domain_id == next_one
    assert max(m.boundary for m in answer.result.matches if m.consumable) == 2 * TOKENS
    assert [m.reason for m in answer.result.matches if not m.consumable] == [Reason.UNREACHABLE]


def test_a_checkpoint_that_is_gone_when_it_is_asked_for_is_evicted(
    pool: InProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    furthest = hold(pool, 1, 3)
    lookup = InProcessStore.lookup

    def late(store: InProcessStore, domain: DomainId, *args: Any, **more: Any) -> LookupResult:
        return LookupResult() if domain == furthest else lookup(store, domain, *args, **more)

    monkeypatch.setattr(InProcessStore, "lookup", late)
    answer = look_up(pool, record(4))
    assert answer.foreign is None
    (match,) = answer.result.matches
    assert (match.reason, match.retained, match.hash_matched) == (Reason.EVICTED, False, False)


@pytest.mark.parametrize("own", [1, 3])
def test_what_could_be_converted_and_is_not_needed_is_consumable_and_never_loaded(
    pool: InProcessPool, own: int
) -> None:
    """Beside one's own deeper one, and in a second domain beside a first one's deeper one."""
    ours = record(4)
    held = {hold(pool, 4, own), hold(pool, 2, 3 if own == 1 else 2), hold(pool, 1, 2)}
    answer = look_up(pool, ours)
    assert len(held) == 3
    by_boundary = {m.boundary // TOKENS: m for m in answer.result.matches}
    assert all(m.consumable and m.reason is None for m in by_boundary.values())
    assert by_boundary.keys() == ({1, 2, 3} if own == 1 else {2, 3})
    over = by_boundary[2]
    assert over.domain in held - {ours.domain_id}
    leased = {m.boundary // TOKENS for m in by_boundary.values() if m.leased}
    assert leased == ({1, 3} if own == 1 else {3})
    limits = Limits(local_tokens=0, limit_tokens=3 * TOKENS)
    tagged = {c.boundary: c for c in tag_candidates(answer.result.matches, 3 * TOKENS, limits)}
    assert tagged[2 * TOKENS].passed_over is PassedOver.SHALLOWER


@pytest.mark.parametrize("published", [Size(2)], indirect=True)
@pytest.mark.parametrize("unlike", [{"page": ()}, {"interior": "other"}, {"page_bytes": 1}])
def test_a_worker_whose_layers_differ_converts_nothing_and_says_so_once(
    pool: InProcessPool, published: Size, unlike: dict[str, Any]
) -> None:
    """The scheduler half was told of one layer only."""
    one = Rank(pool, 1, 0)
    empty = one.contents()
    first, *others = one.domain.layout.groups
    groups = (msgspec.structs.replace(first, **unlike), *others)
    one.half._layout = msgspec.structs.replace(one.domain.layout, groups=groups)
    one.half.submit(StepMetadata(domain=one.domain))
    result = load(one, look_up(pool, record(1)))
    assert not result.ok and one.contents() == empty
    reports = [one.half.take_report() for _ in range(2)]
    assert reports[0] is not None and reports[0].cannot_convert and reports[1] is None
    plain = WorkerReport([])
    assert plain.aggregate(reports[0]).aggregate(plain).cannot_convert  # type: ignore[attr-defined]
    one.half.shutdown()


def test_copies_on_other_ranks_are_other_pages() -> None:
    own = record(2).layout
    groups = (msgspec.structs.replace(own.groups[0], copies=2), *own.groups[1:])
    assert unlike_groups(own, own) == []
    assert unlike_groups(own, msgspec.structs.replace(own, groups=groups)) == [0]


@pytest.mark.parametrize("published", [Size(2)], indirect=True)
def test_a_conversion_takes_no_longer_than_is_left_to_it(
    pool: InProcessPool, published: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, given = Rank(pool, 1, 0), []
    answer = look_up(pool, record(1))

    def read(*_: Any, timeout_s: float, **__: Any) -> TransferResult:
        given.append(timeout_s)
        return TransferResult(ok=True)

    monkeypatch.setattr(one.half._store, "read", read)
    assert load(one, answer, seconds=7.0).ok
    assert given and all(timeout_s <= 7.0 for timeout_s in given)
    one.half.shutdown()


@pytest.mark.parametrize("published", [Size(2)], indirect=True)
def test_once_a_worker_cannot_convert_nothing_of_other_domains_is_offered(
    pool: InProcessPool, published: Size
) -> None:
    options = Options(store="inprocess://", lookup_timeout_s=60)
    catalog = Catalog(InProcessStore(pool), record(1), options)
    found = []
    for name in ("before", "after"):
        catalog.start(name, list(HASHES))
        while (answer := catalog.poll(name)) is None:
            time.sleep(0.001)
        found.append(answer)
        catalog.stop_converting()
    catalog.close()
    assert [m.consumable for m in found[0].result.matches] == [True]
    (match,) = found[1].result.matches
    assert (match.reason, match.field) == (Reason.DOMAIN_MISMATCH, "tensor_parallel")
    assert found[1].foreign is None


@pytest.mark.parametrize("kv_layout", list(ATTENTION))
@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (4, 1)])
def test_pages_are_put_together_in_any_order_of_their_dimensions(
    pool: InProcessPool, kv_layout: str, theirs: int, ours: int
) -> None:
    domain = record(theirs, 1, kv_layout)
    for rank in range(theirs):
        publish(Rank(pool, theirs, rank, kv_layout=kv_layout))
    answer = look_up(pool, record(ours, 1, kv_layout))
    assert answer.foreign is not None and answer.foreign.record == domain
    for rank in range(ours):
        one, expected = (Rank(pool, ours, rank, kv_layout=kv_layout) for _ in range(2))
        expected.fill()
        assert load(one, answer).ok
        assert one.contents() == expected.contents()
        one.half.shutdown()
        expected.half.shutdown()


@pytest.mark.parametrize("own", [0, 1])
def test_a_lookup_that_goes_on_in_another_domain_counts_once(
    pool: InProcessPool, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the store's counters, and in the traffic that lets publications in."""
    credited: list[int] = []
    monkeypatch.setattr(pool.index.admission, "credit", credited.append)
    hold(pool, 2, 3)
    if own:
        hold(pool, 4, own)
    before = dict(pool.index.counters)
    answer = look_up(pool, record(4))
    assert answer.foreign is not None and (answer.result.lease is not None) == bool(own)
    after = pool.index.counters
    for name in ("lookups", "lookups_matched", "hits"):
        assert after[name] - before[name] == 1, name
    assert after["candidates_known"] - before["candidates_known"] == 1 + own
    assert credited == [3 * TOKENS]


@pytest.mark.parametrize("published", [Size(2)], indirect=True)
def test_a_request_that_asks_again_is_counted_as_traffic_once(
    pool: InProcessPool, published: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    credited: list[int] = []
    monkeypatch.setattr(pool.index.admission, "credit", credited.append)
    catalog = Catalog(InProcessStore(pool), record(2), Options(store="inprocess://"))
    for repeat in (False, True):
        catalog.start("r", list(HASHES), repeat=repeat)
        while catalog.poll("r") is None:
            pass
        catalog.drop("r")
    catalog.close()
    assert len(credited) == 1


def test_loads_that_need_no_conversion_do_not_wait_for_those_that_do(
    pool: InProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversions take turns; each waits for its turn no longer than a load may take."""
    one = Rank(pool, 1, 0, transfer_threads=1, load_timeout_s=2.0)
    turn = threading.Event()

    def read(lease: LeaseId, *_: Any, **__: Any) -> TransferResult:
        return TransferResult(ok=lease == "own" or turn.wait(300))

    monkeypatch.setattr(one.half._store, "read", read)
    theirs = record(2)
    jobs = [LoadJob(i, f"{i}", LeaseId("theirs"), BLOCK_REFS, theirs) for i in range(3)]
    jobs.append(LoadJob(3, "3", LeaseId("own"), BLOCK_REFS))
    one.half.submit(StepMetadata(loads=jobs))
    ended: set[str] = set()
    while not ended:
        ended = one.half.drain()[0]
    assert ended == {"3"}
    time.sleep(2.1)
    turn.set()
    while len(ended) < len(jobs):
        ended |= one.half.drain()[0]
    report = one.half.take_report()
    assert report is not None
    reasons = {one.job_id: one.reason for one in report.reports}
    assert reasons == {3: None, 0: None, 1: Reason.TIMEOUT, 2: Reason.TIMEOUT}
    one.half.shutdown()


@pytest.mark.parametrize("published", [Size(2)], indirect=True)
def test_ones_own_checkpoints_come_first(pool: InProcessPool, published: Size) -> None:
    """Another domain is asked only for what is deeper."""
    ours = record(2)
    answer = look_up(pool, ours)
    assert answer.foreign is None and answer.result.lease is not None
    (match,) = answer.result.matches
    assert match.consumable and match.domain == ""


def test_a_match_keeps_its_reason_where_the_record_cannot_be_had(
    pool: InProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = InProcessStore(pool)
    ours = record(1)
    store.open_domain(ours, timeout_s=1)
    catalog = Catalog(store, ours, Options(store="inprocess://"))
    match = CheckpointMatch(
        boundary=BOUNDARY, kinds=(CheckpointKind.DECODE_END,), consumable=False,
        reason=Reason.DOMAIN_MISMATCH, domain=record(2).domain_id,
    )  # fmt: skip
    found = store.lookup(ours.domain_id, HASHES, timeout_s=1)
    shallower = msgspec.structs.replace(match, boundary=BOUNDARY - TOKENS)
    ask, asked = store.domain_record, []

    def counted(domain: DomainId, *, timeout_s: float) -> DomainRecord:
        asked.append(domain)
        return ask(domain, timeout_s=timeout_s)

    monkeypatch.setattr(store, "domain_record", counted)
    result, foreign = catalog._convertible.extend(
        replace(found, matches=(match, shallower)), HASHES, lease_s=1, timeout_s=1
    )
    assert foreign is None
    assert result.matches[0] == msgspec.structs.replace(match, field="(unknown)")
    assert asked == [match.domain], "once, however many of its checkpoints match"
    catalog.close()


@pytest.mark.parametrize("published", [Size(2)], indirect=True)
def test_a_fault_in_another_domain_leaves_the_lookup_as_it_was(
    pool: InProcessPool, published: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not reach the scheduler, which asks for the answer."""

    def broken(*_: Any, **__: Any) -> DomainRecord:
        raise RuntimeError("x")

    monkeypatch.setattr(InProcessStore, "domain_record", broken)
    answer = look_up(pool, record(1))
    assert answer.reason is None and answer.foreign is None
    assert [match.reason for match in answer.result.matches] == [Reason.DOMAIN_MISMATCH]


@pytest.mark.parametrize("published", [Size(2)], indirect=True)
def test_a_block_that_does_not_fit_is_a_failed_load(pool: InProcessPool, published: Size) -> None:
    """The scheduler half does not let it come to that; a worker that disagrees stays up."""
    one = Rank(pool, 1, 0, convert_buffer_bytes=100)
    answer = look_up(pool, record(1))
    job = LoadJob(2, "r", answer.foreign.lease, BLOCK_REFS, answer.foreign.record)
    one.half.submit(StepMetadata(loads=[job]))
    while not (ended := one.half.drain())[1]:
        pass
    assert ended[0] == {"r"}
    report = one.half.take_report()
    assert report is not None and report.reports[0].reason is Reason.INTERNAL
    one.half.shutdown()
