"""The joint hit over any mix of groups: ours against vLLM's coordinator, and through the engine."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness import (
    BLOCK,
    FULL,
    HYBRID,
    STATE,
    WINDOW,
    Group,
    Pair,
    make_spec,
    new_uri,
)
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from presence import put
from test_turns import tokens
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from backhaul.connector.engine import _group_layout
from backhaul.protocols.layout import CacheLayout, checkpoint_objects, joint_hit

B = BLOCK
ONE_RANK = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))
"""As much of a ``VllmConfig`` as decides where prefixes match."""


def coordinator_of(groups: tuple[Group, ...], unit: int) -> tuple[Any, CacheLayout]:
    """vLLM's coordinator over empty groups, and our layout of the same ones."""
    config = KVCacheConfig(
        num_blocks=600,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer{i}"], make_spec(group), is_eagle_group=group.draft)
            for i, group in enumerate(groups)
        ],
    )
    grid = math.lcm(*(group.block for group in groups))
    coordinator = get_kv_cache_coordinator(
        config,
        max_model_len=4096,
        max_in_flight_tokens=4096,
        use_eagle=any(group.draft for group in groups),
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=grid,
        hash_block_size=unit,
    )
    layouts = tuple(
        _group_layout(i, group, ONE_RANK, "") for i, group in enumerate(config.kv_cache_groups)
    )
    return coordinator, CacheLayout(groups=layouts, hash_tokens=unit)


@st.composite
def layouts(draw: st.DrawFn, *, drafts: bool = False) -> tuple[tuple[Group, ...], int]:
    """Groups and a hash unit."""
    chunked = draw(st.booleans()) and not drafts
    # vLLM has no chunked local attention beside other block sizes, finer hashes or EAGLE.
    sizes = (
        st.just(4) if chunked else st.sampled_from([4, 8, 16] if draw(st.booleans()) else [4, 8])
    )
    kinds = ["full", "latent", "window", "state"] + ["chunk"] * chunked
    groups = []
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=4)):
        block = draw(sizes)
        groups.append(
            Group(
                block=block,
                recurrent=kind == "state",
                latent=kind == "latent",
                window=draw(st.integers(2, 40)) if kind == "window" else 0,
                chunk=4 * draw(st.integers(1, 8)) if kind == "chunk" else 0,
                wide=kind in ("full", "window") and draw(st.booleans()),
                draft=drafts and kind in ("full", "window") and draw(st.booleans()),
            )
        )
    unit = math.gcd(*(group.block for group in groups))
    if not chunked and draw(st.booleans()):
        unit = draw(st.sampled_from([u for u in (2, 4) if unit % u == 0]))
    return tuple(groups), unit


def lookups(
    groups: tuple[Group, ...], unit: int, seed: int, missing: float, count: int, limit: int
) -> tuple[int, int, int, bool]:
    """The same random presence for both. Returns our hit, vLLM's, the grid, partial hits or not."""
    generator = random.Random(seed)
    coordinator, layout = coordinator_of(groups, unit)
    hashes = [generator.randbytes(32) for _ in range(count)]
    present: set[tuple[int, bytes]] = set()
    for group in layout.groups:
        gone = missing * generator.choice([0.0, 0.3, 1.0, 2.0])
        scale = group.block_tokens // unit
        for end in range(scale, count + 1, scale):
            if generator.random() >= gone:
                name = hashes[end - 1]
                present.add((group.index, name))
                put(coordinator.block_pool, group.index, name, end * unit)
    if generator.random() < 0.5:  # a whole checkpoint, so that hits are not rare
        boundary = layout.floor_boundary(generator.randrange(count * unit + 1))
        for index, name in checkpoint_objects(layout, boundary, hashes) if boundary else ():
            if (index, name) not in present:
                present.add((index, name))
                put(coordinator.block_pool, index, name, boundary)
    _, theirs, _ = coordinator.find_longest_cache_hit(hashes, limit)
    ours = joint_hit(layout, hashes, lambda g, h: (g, h) in present, limit)
    return ours, theirs, layout.boundary_tokens, coordinator.enable_partial_hash_hits


PRESENCE = {
    "seed": st.integers(0, 1 << 32),
    "missing": st.sampled_from([0.02, 0.1, 0.4]),
    "count": st.integers(1, 60),
    "limit": st.integers(0, 200),
}
MANY = settings(
    max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@MANY
@given(shape=layouts(), **PRESENCE)
def test_our_joint_hit_is_vllm_s(
    shape: Any, seed: int, missing: float, count: int, limit: int
) -> None:
    groups, unit = shape
    limit = min(limit, count * unit)
    ours, theirs, grid, partial = lookups(groups, unit, seed, missing, count, limit)
    event(f"hit: {bool(ours)}, partial hits: {partial}")
    if theirs % grid == 0:
        assert ours == theirs
    else:  # inside a coarser group's block: the next checkpoint below is ours
        assert partial
        assert ours < theirs


@settings(MANY, max_examples=600)
@given(shape=layouts(drafts=True), **PRESENCE)
def test_an_eagle_group_only_lowers_vllm_s_hit(
    shape: Any, seed: int, missing: float, count: int, limit: int
) -> None:
    groups, unit = shape
    limit = min(limit, count * unit)
    ours, theirs, grid, _ = lookups(groups, unit, seed, missing, count, limit)
    assert theirs // grid * grid <= ours


# -- through the engine -----------------------------------------------------------------------

CHUNK = Group(layers=2, chunk=3 * B)
LATENT = Group(layers=2, latent=True)

MIXES = {
    "chunked": (FULL, CHUNK),
    "chunked at a block": (FULL, Group(chunk=B)),
    "latent and state": (LATENT, STATE),
    "everything of one size": (FULL, LATENT, STATE, WINDOW, CHUNK),
    "wide window": (FULL, STATE, Group(window=5 * B + 3)),
    "only windows": (Group(window=12), Group(window=3 * B, wide=True)),
    "finer windows": (Group(block=2 * B), Group(block=2 * B, recurrent=True), Group(window=B)),
    "finer attention": (FULL, Group(block=2 * B, recurrent=True), Group(window=20, wide=True)),
    "three sizes": (Group(block=4 * B), Group(block=4 * B, recurrent=True), Group(), WINDOW),
}
SIZES = {"finer windows", "finer attention", "three sizes"}


@pytest.fixture
def pair() -> Iterator[Pair]:
    one = Pair(new_uri())
    yield one
    one.close()


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("mode", ["sync", "async", "late"])
def test_any_mix_of_groups_round_trips(pair: Pair, mix: str, mode: str) -> None:
    keywords: dict[str, Any] = {
        "groups": MIXES[mix],
        "layout": "BLHNC" if mix in SIZES else "LBHNC",
        "num_blocks": 200,
    }
    decode = pair.engine(
        name="decode", **keywords, asynchronous=mode != "sync", late=mode == "late"
    )
    prefill = pair.engine(name="prefill", **keywords)
    grid = max(group.block for group in MIXES[mix])
    for seed, (prompt, output) in enumerate([(3, 70), (5 * B, B), (9 * B + 1, 1), (70, 30)]):
        first = decode.run(tokens(prompt, seed), output)
        second = prefill.run(first.history + tokens(9, 2), 6)
        assert second.resumed == (len(first.history) - 1) // grid * grid
        third = decode.run(second.history + tokens(2 * B, 3), 3)
        # What the engine holds itself, vLLM also finds inside a block of the largest group.
        assert third.resumed // grid == (len(second.history) - 1) // grid
    pair.check_idle()


def test_windows_are_pinned_beyond_vllm_s_own_hold(pair: Pair) -> None:
    """A window moves on and frees its blocks while the last boundary is not yet published."""
    groups = (FULL, STATE, Group(window=4))
    decode = pair.engine(groups=groups, options={"stream_ahead": False})
    first = decode.run(tokens(3, 1), 3 * B + B - 2)  # the end is far behind the window
    prefill = pair.engine(groups=groups)
    second = prefill.run(first.history + tokens(9, 2), 6)
    assert second.loaded == (len(first.history) - 1) // B * B == 4 * B
    pair.check_idle()


def test_a_sub_block_unit_resumes_on_the_block_grid(pair: Pair) -> None:
    decode, prefill = (pair.engine(groups=HYBRID, unit=B // 2) for _ in range(2))
    first = decode.run(tokens(3 * B + B // 2 + 1, 1), B)
    second = prefill.run(first.history + tokens(9, 2), 6)
    assert second.loaded == (len(first.history) - 1) // B * B
    pair.check_idle()


@pytest.mark.parametrize("unit", [B, B // 4], ids=["coarse", "fine"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_state_exported_from_inside_a_chunk_counts_at_its_own_length(
    pair: Pair, unit: int, asynchronous: bool
) -> None:
    """Some kernels write the state at a prompt's last hash boundary into the block before the
    chunk's own: on a fine grid that is not the state at that block's end."""
    groups = (FULL, Group(layers=2, recurrent=True, exports=True))
    keywords: dict[str, Any] = {"groups": groups, "unit": unit, "asynchronous": asynchronous}
    decode, prefill = (pair.engine(name=name, **keywords) for name in ("decode", "prefill"))
    for prompt in range(3 * B, 5 * B):
        first = decode.run(tokens(prompt, prompt), 1)
        second = prefill.run(first.history + tokens(9, 2), 6)
        end = (prompt - 1) // B * B
        exported = unit == B or (prompt - 1) // unit * unit == end or prompt == end + 1
        if exported:
            assert second.resumed >= end
        third = decode.run(second.history + tokens(3, 2), 2 * B)
        fourth = prefill.run(third.history + tokens(9, 2), 6)
        assert fourth.resumed == (len(third.history) - 1) // B * B
    assert decode.runner.checked_bytes > 10_000
    pair.check_idle()
