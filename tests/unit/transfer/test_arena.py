from __future__ import annotations

import random

import pytest

from backhaul.transfer.arena import Arena


def test_offsets_are_aligned_and_do_not_overlap() -> None:
    arena = Arena(4096, alignment=256)
    offsets = [arena.allocate(size) for size in (1, 256, 257)]
    assert offsets == [0, 256, 512]
    assert arena.used_bytes == 256 + 256 + 512
    arena.check()


def test_capacity_is_rounded_down_to_the_alignment() -> None:
    arena = Arena(1000, alignment=256)
    assert arena.capacity_bytes == 768
    assert arena.allocate(769) is None
    assert arena.allocate(768) == 0


def test_best_fit_takes_the_smallest_extent_that_is_long_enough() -> None:
    arena = Arena(256 * 10)
    rows = [arena.allocate(256 * blocks) for blocks in (3, 1, 2, 1, 3)]
    for row in (rows[0], rows[2], rows[4]):
        assert row is not None
        arena.free(row)
    assert arena.allocate(256 * 2) == rows[2]
    arena.check()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0)])
def test_freed_neighbours_become_one_extent(order: tuple[int, ...]) -> None:
    arena = Arena(256 * 3)
    offsets = [arena.allocate(256) for _ in range(3)]
    assert arena.allocate(1) is None
    for index in order:
        offset = offsets[index]
        assert offset is not None
        arena.free(offset)
        arena.check()
    assert arena.largest_free_bytes == 256 * 3
    assert arena.allocate(256 * 3) == 0


def test_scattered_free_space_does_not_fit() -> None:
    arena = Arena(256 * 3)
    offsets = [arena.allocate(256) for _ in range(3)]
    arena.free(0)
    arena.free(offsets[2] or 0)
    assert arena.capacity_bytes - arena.used_bytes == 512
    assert not arena.fits(512)
    assert arena.allocate(512) is None


def test_largest_gap_is_what_would_be_free_if_only_some_stayed() -> None:
    arena = Arena(256 * 6)
    offsets = [arena.allocate(256) or 0 for _ in range(6)]
    assert arena.largest_gap_bytes([]) == 256 * 6
    assert arena.largest_gap_bytes([offsets[3], offsets[1]]) == 256 * 2
    assert arena.largest_gap_bytes(offsets) == 0


@pytest.mark.parametrize("nbytes", [0, -1])
def test_allocating_nothing_is_a_mistake(nbytes: int) -> None:
    with pytest.raises(ValueError, match="cannot allocate"):
        Arena(4096).allocate(nbytes)


def test_freeing_twice_is_a_mistake() -> None:
    arena = Arena(4096)
    assert arena.allocate(10) == 0
    arena.free(0)
    with pytest.raises(ValueError, match="nothing is allocated at offset 0"):
        arena.free(0)


def test_too_small_a_capacity_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        Arena(255)


def test_check_finds_a_wrong_book() -> None:
    arena = Arena(4096)
    arena.allocate(256)
    arena.used_bytes += 1
    with pytest.raises(AssertionError, match="used_bytes 257"):
        arena.check()


def test_random_history_against_a_map_of_bytes() -> None:
    rng = random.Random(7)
    arena = Arena(256 * 64)
    owner: list[int | None] = [None] * 64
    live: dict[int, int] = {}
    for step in range(1500):
        if live and rng.random() < 0.5:
            offset = rng.choice(list(live))
            arena.free(offset)
            for unit in range(offset // 256, offset // 256 + live.pop(offset)):
                owner[unit] = None
        else:
            units = rng.randint(1, 9)
            free_run = max(len(run) for run in _runs(owner))
            offset_or_none = arena.allocate(units * 256 - rng.randint(0, 255))
            assert (offset_or_none is not None) == (units <= free_run)
            if offset_or_none is not None:
                live[offset_or_none] = units
                for unit in range(offset_or_none // 256, offset_or_none // 256 + units):
                    assert owner[unit] is None
                    owner[unit] = step
        arena.check()
        assert arena.used_bytes == sum(live.values()) * 256
    for offset in live:
        arena.free(offset)
    assert arena.used_bytes == 0 and arena.largest_free_bytes == 256 * 64


def _runs(owner: list[int | None]) -> list[str]:
    return "".join("." if one is None else "x" for one in owner).split("x")
