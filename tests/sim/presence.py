"""Put cached blocks into vLLM's block pool by hand, for tests of what a lookup makes of them."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id


def put(pool: Any, group: int, block_hash: Any, tokens: int) -> Any:
    """Cache one block under the hash of its first ``tokens``, as a finished request leaves it."""
    (block,) = pool.get_new_blocks(1)
    key = make_block_hash_with_group_id(block_hash, group)
    block.set_block_hash(key, num_tokens=tokens)
    pool.cached_block_hash_to_block.insert(key, block)
    pool.free_blocks([block])
    return block


def put_attention(pool: Any, group: int, hashes: Any, *, tokens: int, unit: int) -> None:
    """Cache a full-attention group's first ``tokens``, as seen at every hash unit.

    An entry inside a block is what a prompt that ended there left behind.
    """
    for end in range(unit, tokens + 1, unit):
        put(pool, group, hashes[end // unit - 1], end)


def put_state(pool: Any, group: int, hashes: Any, *, tokens: int, unit: int) -> None:
    """Cache a recurrent group's state after ``tokens``."""
    put(pool, group, hashes[tokens // unit - 1], tokens)
