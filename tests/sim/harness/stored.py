"""What a store holds, read back and compared with the tokens of its keys."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from sim_model import Prefix
from vllm.v1.request import Request

from backhaul.connector.regions import GroupRegions, memory_regions
from backhaul.protocols.checkpoint import ObjectKey
from backhaul.protocols.layout import required_blocks
from backhaul.transfer.base import LoadItem, Store
from backhaul.transfer.registry import open_store
from harness.engine import SimEngine
from harness.memory import KvMemory


def check_store(
    uri: str, engine: SimEngine, asked: Iterable[SimEngine], *, settle_s: float = 300.0
) -> int:
    """Read every checkpoint back and compare it with its key's tokens. Returns their number.

    Every key must belong to a request that one of the engines ``asked`` has seen; nothing may be
    leased or half published any more. ``engine`` lends its domain and its layout.
    """
    store = open_store(uri, client_name="check")
    deadline = time.monotonic() + settle_s
    while True:
        stats = store.stats(timeout_s=300)
        if not (stats.leases or stats.publications) or time.monotonic() > deadline:
            break
        time.sleep(0.002)
    assert not stats.leases, f"{stats.leases} leases are left"
    assert not stats.publications, f"{stats.publications} publications are left"
    known: dict[bytes, tuple[Request, int]] = {}
    for one in asked:
        for request in one.requests.values():
            size = one.cache.hash_block_size
            hashes = list(request.block_hashes)
            if (request.kv_transfer_params or {}).get("_p_side_truncated"):
                # Hashed with the token that the hand-over dropped, and another one was sampled.
                del hashes[request.num_prompt_tokens // size :]
            for i, value in enumerate(hashes):
                known[bytes(value)] = (request, (i + 1) * size)
    layout = engine.backhaul._half._facts.layout
    domain = engine.backhaul._half._facts.domain.domain_id
    resolved = engine.config.cache_config.get_resolved_kv_cache_layout()
    scratch = [KvMemory(engine.cache, resolved, m.rank) for m in engine.memory]
    store.attach([region for memory in scratch for region in memory_regions(memory.tensors)])
    found = store.list_checkpoints(timeout_s=300)
    for info in found:
        assert info.domain == domain
        assert bytes(info.block_hash) in known, f"unknown prefix of {info.boundary} tokens"
        request, tokens = known[bytes(info.block_hash)]
        assert tokens == info.boundary, f"{tokens} tokens stored as {info.boundary}"
        prefix = Prefix(request.all_token_ids[:tokens])
        unit = layout.hash_tokens
        hashes = [bytes(value) for value in request.block_hashes[: tokens // unit]]
        step = layout.boundary_tokens // unit
        answer = store.lookup(domain, hashes[step - 1 :: step], lease_s=600, timeout_s=300)
        assert answer.lease is not None
        for memory in scratch:
            _check_checkpoint(store, answer.lease, engine, memory, prefix, hashes, info)
        store.release([answer.lease], timeout_s=300)
    store.close()
    return len(found)


def _check_checkpoint(
    store: Store,
    lease: Any,
    engine: SimEngine,
    memory: KvMemory,
    prefix: Prefix,
    hashes: list[bytes],
    info: Any,
) -> None:
    layout = engine.backhaul._half._facts.layout
    unit = layout.hash_tokens
    for group in layout.groups:
        names = engine.cache.kv_cache_groups[group.index].layer_names
        regions = GroupRegions([memory.tensors[n] for n in names], engine.cache.num_blocks)
        size = group.block_tokens
        for index in required_blocks(group, info.boundary):
            key = ObjectKey(
                group.owner(memory.rank), group.index, hashes[(index + 1) * size // unit - 1]
            )
            memory.zero(1)
            read = store.read(
                lease, [LoadItem(key, regions.segments(1))], verify=True, timeout_s=300
            )
            assert read.ok, f"{key} of the checkpoint at {info.boundary}: {read.reason}"
            low, high = index * size, (index + 1) * size
            if group.index in dict(engine.recurrent):
                got = memory.read_state(group.index, 1)
                want = memory.expected_state(group.index, prefix[high])
            else:
                got = memory.read_tokens(group.index, 1, 0, size)
                want = engine.expected_block(memory, group.index, prefix, low, high)
            assert got == want, f"group {group.index}, tokens {low}-{high} at {info.boundary}"
