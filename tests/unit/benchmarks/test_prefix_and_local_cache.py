"""Boundary hashes stand for whole blocks of content; the local cache keeps within its pages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.benchmarks.reuse.local_cache import LocalCache
from backhaul.benchmarks.reuse.prefix import BoundaryHashes
from backhaul.benchmarks.reuse.trace import Span, length, shared_prefix

GRID = 8

spans = st.lists(
    st.builds(
        lambda source, start, tokens: Span(source, start, start + tokens),
        st.sampled_from("abc"),
        st.sampled_from([0, 3, 8]),
        st.integers(0, 20),
    ),
    max_size=6,
)


@given(one=spans, other=spans)
@settings(max_examples=200)
def test_hashes_agree_exactly_as_far_as_the_content(one: list[Span], other: list[Span]) -> None:
    hashes = BoundaryHashes(GRID)
    a, b = hashes.of(one), hashes.of(other)
    assert len(a) == length(one) // GRID
    common = shared_prefix(one, other) // GRID
    agree = [x == y for x, y in zip(a, b, strict=False)]
    assert agree == [i < common for i in range(len(agree))]


@given(contents=st.lists(spans, max_size=5))
@settings(max_examples=100)
def test_what_is_remembered_changes_no_hash(contents: list[list[Span]]) -> None:
    remembering, fresh = BoundaryHashes(GRID, chains_max=2), BoundaryHashes(GRID)
    for i, content in enumerate(contents):
        assert remembering.of(content, f"c{i % 3}") == fresh.of(content)


def test_a_growing_conversation_is_hashed_once() -> None:
    hashes = BoundaryHashes(GRID)
    content: list[Span] = []
    for turn in range(50):
        content.append(Span(f"t{turn}", 0, 4 * GRID))
        hashes.of(content, "c")
    assert hashes.hashed_blocks == 50 * 4


requests = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.booleans()), max_size=20)


@given(requests=requests, pages=st.integers(8, 40))
@settings(max_examples=100)
def test_pages_are_never_overdrawn(requests: list[tuple[int, int, bool]], pages: int) -> None:
    cache = LocalCache(GRID, pages=pages, state_pages=2)
    running: list[tuple[list[bytes], int, int]] = []
    for family, blocks, finish_first in requests:
        if finish_first and running:
            hashes, hit, took = running.pop(0)
            depth = len(hashes) * GRID
            cache.end(hashes, hit, took, computed_tokens=depth, states=[depth])
            cache.check()
        hashes = [bytes([family, i]) for i in range(blocks)]
        found = cache.hit(hashes, blocks * GRID - 1)
        assert found.joint <= found.attention <= blocks * GRID
        need = blocks - found.joint // GRID
        if cache.begin(hashes, found.joint, need):
            running.append((hashes, found.joint, need))
        cache.check()


def test_a_chain_is_shortened_from_its_end() -> None:
    cache = LocalCache(GRID, pages=8, state_pages=2)
    hashes = [bytes([i]) for i in range(4)]
    assert cache.begin(hashes, 0, 6)
    cache.end(hashes, 0, 6, computed_tokens=4 * GRID, states=[2 * GRID, 4 * GRID])
    assert cache.hit(hashes, 4 * GRID).joint == 4 * GRID
    # First the early state goes, then the tail of the attention.
    assert cache.begin([b"x"], 0, 2)
    assert cache.hit(hashes, 4 * GRID) == (4 * GRID, 4 * GRID)
    assert cache.hit(hashes, 3 * GRID) == (0, 3 * GRID)
    assert cache.begin([b"y"], 0, 1)
    assert cache.hit(hashes, 4 * GRID) == (0, 3 * GRID)
    cache.check()
