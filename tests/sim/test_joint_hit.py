"""The joint hit over any mix of groups: ours against vLLM's coordinator, and through the engine."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

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
)
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seed_of
from hypothesis import strategies as st
from presence import put
from sim_kit import tokens
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from backhaul.connector.engine import _group_layout
from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointManifest,
    ObjectKey,
    PublicationId,
)
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.layout import CacheLayout, GroupKind, required_blocks
from backhaul.transfer.base import GrantStatus, Written
from backhaul.transfer.index import BlockIndex

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
    # Of chunks alone a checkpoint may be empty, which the index refuses; no model is like that.
    mix = st.lists(st.sampled_from(kinds), min_size=2, max_size=4).filter(
        lambda found: set(found) != {"chunk"}
    )
    for kind in draw(mix):
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


class Catalog:
    """The store's index over one layout, and what vLLM may hold of the same prefix."""

    OBJECT_BYTES, CAPACITY_BYTES = 64, 1 << 20

    def __init__(self, layout: CacheLayout, hashes: list[bytes]) -> None:
        self.layout, self.hashes = layout, hashes
        self.index = BlockIndex(self.CAPACITY_BYTES, publication_ttl_s=60.0, lease_max_s=60.0)
        self.domain, self.other = (
            self.index.open_domain(
                DomainRecord(
                    model=model, weights="w", layout=layout, hash_function="sha256",
                    hash_probe="00", kv_dtype="bfloat16", platform="cpu", vllm="0.32",
                ),
                0.0,
            )
            for model in ("m", "other")
        )  # fmt: skip

    def store(self, present: set[tuple[int, bytes]]) -> None:
        """Objects, and a checkpoint at every boundary at which the index takes one."""
        name = PublicationId("all")
        wants = [(ObjectKey(0, *key), self.OBJECT_BYTES) for key in sorted(present)]
        grants = self.index.reserve(self.domain, name, wants, 0.0)
        written = [Written(grant.key, grant.token, checksum=1) for grant in grants]
        self.index.commit(self.domain, name, 0, written, None, 0.0)
        self.offer(name)
        self.index.abandon(name, 0.0)

    def offer(self, name: PublicationId) -> None:
        grid = self.layout.boundary_tokens
        reach = len(self.hashes) * self.layout.hash_tokens
        for boundary in range(grid, reach + 1, grid):
            hashes = tuple(self.hashes[: boundary // self.layout.hash_tokens])
            kinds = (CheckpointKind.DECODE_END,)
            manifest = CheckpointManifest(boundary=boundary, hashes=hashes, kinds=kinds)
            self.index.commit(self.domain, name, 0, [], manifest, 0.0)

    def evict(self, share: float) -> None:
        """Make room for something else."""
        used = self.index.stats().used_bytes
        wanted = int(self.CAPACITY_BYTES - used * (1 - share))
        name = PublicationId("other")
        key = ObjectKey(0, self.layout.groups[0].index, b"other")
        (grant,) = self.index.reserve(self.other, name, [(key, max(wanted, 1))], 0.0)
        assert grant.status is GrantStatus.GRANTED
        self.index.abandon(name, 0.0)

    def present(self) -> list[tuple[int, bytes]]:
        return [(key.group, key.block_hash) for key in self.index.domains[self.domain].objects]

    def hit(self, limit: int) -> int:
        """What production looks up: the deepest consumable checkpoint; 0 where there is none."""
        grid = self.layout.boundary_tokens
        step = grid // self.layout.hash_tokens
        ends = self.hashes[step - 1 :: step][: limit // grid]
        matches = self.index.lookup(self.domain, ends, 0, 0.0, 0.0).matches
        return max((match.boundary for match in matches if match.consumable), default=0)


def prompt_entries(
    layout: CacheLayout, end: int, hashes: list[bytes]
) -> tuple[set[tuple[int, bytes]], set[tuple[int, bytes]]]:
    """What a prompt with its last hash boundary at ``end`` leaves: whole blocks, entries inside."""
    whole, inside = set(), set()
    for group in layout.groups:
        size = group.block_tokens
        if group.kind is not GroupKind.RECURRENT:
            ends = {(block + 1) * size for block in required_blocks(group, end // size * size)}
            whole |= {(group.index, hashes[at // layout.hash_tokens - 1]) for at in ends}
        if group.kind in (GroupKind.FULL, GroupKind.RECURRENT) and end:
            entry = (group.index, hashes[end // layout.hash_tokens - 1])
            (inside if end % size else whole).add(entry)
    return whole, inside


class Hits(NamedTuple):
    """Of one presence: ours, vLLM's, vLLM's deepest one on our grid; vLLM's without drafts."""

    ours: int
    theirs: int
    on_grid: int
    without_drafts: int


def lookups(
    groups: tuple[Group, ...], unit: int, seed: int, missing: float, count: int, limit: int
) -> Hits:
    """The same random presence for both; where vLLM knows hits inside a block, it has entries
    there, too."""
    generator = random.Random(seed)
    coordinator, layout = coordinator_of(groups, unit)
    hashes = [generator.randbytes(32) for _ in range(count)]
    present: set[tuple[int, bytes]] = set()
    inside: set[tuple[int, bytes]] = set()
    for group in layout.groups:
        gone = missing * generator.choice([0.0, 0.3, 1.0, 2.0])
        scale = group.block_tokens // unit
        for end in range(scale, count + 1, scale):
            if generator.random() >= gone:
                present.add((group.index, hashes[end - 1]))
    for _ in range(generator.randrange(3)):  # prompts that ended here, so that hits are not rare
        whole, within = prompt_entries(layout, generator.randrange(count + 1) * unit, hashes)
        present |= whole
        inside |= within if coordinator.enable_partial_hash_hits else set()
    catalog = Catalog(layout, hashes)
    catalog.store(present)
    if generator.random() < 0.4:
        catalog.evict(generator.random())
    held = catalog.present()
    assert set(held) <= present
    before = catalog.hit(limit)
    # Eviction may take a checkpoint and leave all its objects to others, so offer each again.
    catalog.offer(PublicationId("again"))
    ours = catalog.hit(limit)
    assert before <= ours
    catalog.index.check()
    plain = tuple(replace(group, draft=False) for group in groups)
    bare = coordinator_of(plain, unit)[0] if plain != groups else coordinator
    position = {name: (at + 1) * unit for at, name in enumerate(hashes)}
    for pool in {id(one): one.block_pool for one in (coordinator, bare)}.values():
        for index, name in [*held, *sorted(inside)]:
            put(pool, index, name, position[name])
    grid = layout.boundary_tokens

    def hit(one: Any, *, aligned: bool = False) -> int:
        _, found, _ = one.find_longest_cache_hit(hashes, limit)
        while aligned and found % grid:
            _, found, _ = one.find_longest_cache_hit(hashes, found // grid * grid)
        assert isinstance(found, int)
        return found

    return Hits(ours, hit(coordinator), hit(coordinator, aligned=True), hit(bare, aligned=True))


PRESENCE = {
    "seed": st.integers(0, 1 << 32),
    "missing": st.sampled_from([0.02, 0.1, 0.4]),
    "count": st.integers(1, 60),
    "limit": st.integers(0, 200),
}
MANY = settings(
    max_examples=600, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@pytest.mark.parametrize("part", range(4))
def test_what_the_index_finds_is_vllm_s_joint_hit(part: int) -> None:
    """The deepest boundary at which vLLM's coordinator would resume from the same objects; never
    beyond what it finds inside the blocks."""
    seen: Counter[str] = Counter()

    @seed_of(part)
    @MANY
    @given(shape=layouts(), **PRESENCE)
    def compare(shape: Any, seed: int, missing: float, count: int, limit: int) -> None:
        groups, unit = shape
        limit = min(limit, count * unit)
        hits = lookups(groups, unit, seed, missing, count, limit)
        assert hits.ours == hits.on_grid <= hits.theirs
        seen["inside"] += hits.theirs != hits.on_grid
        seen["on the grid"] += hits.theirs == hits.on_grid > 0

    compare()
    assert seen["inside"] > 0
    assert seen["on the grid"] > 50


@pytest.mark.parametrize("part", range(2))
def test_an_eagle_group_only_lowers_vllm_s_hit(part: int) -> None:
    """Ours is at least vLLM's, and exactly what it would be if no group had a draft's proof."""
    lowered = 0

    @seed_of(part)
    @settings(MANY, max_examples=300)
    @given(shape=layouts(drafts=True), **PRESENCE)
    def compare(shape: Any, seed: int, missing: float, count: int, limit: int) -> None:
        nonlocal lowered
        groups, unit = shape
        limit = min(limit, count * unit)
        hits = lookups(groups, unit, seed, missing, count, limit)
        assert hits.on_grid <= hits.ours == hits.without_drafts
        lowered += hits.on_grid < hits.ours

    compare()
    assert lowered > 0


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
