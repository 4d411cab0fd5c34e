"""The junction bound: a shared-prefix candidate that every full-attention group can reuse.

vLLM takes the longest single-group hit as the position where a recurrent state is worth keeping.
With two full-attention groups of different specs (target and draft) that may lie beyond what the
other one holds::

    hits, tokens               vLLM's candidate    useful
    target 96  draft 80  state 80        96           -    (nothing is missing)
    target 96  draft 80  state 64        96          80

The first costs a chunk end and a retained state for nothing, the second puts them where nobody can
resume. Only the candidate is corrected: the hit itself and its blocks are vLLM's own.
"""

from __future__ import annotations

import copy
from typing import Any


def bounded_gap(hit: int, gap: int, attention_hit: int) -> int:
    """Tokens between the joint hit and the junction candidate; 0 where none is to be kept.

    Args:
        hit: the joint hit of all groups, in tokens.
        gap: vLLM's distance from there to the longest single-group hit.
        attention_hit: the joint hit of the full-attention groups alone.
    """
    return max(min(hit + gap, attention_hit) - hit, 0)


def bind_junction_bound(manager: Any) -> None:
    """Make vLLM's ``KVCacheManager`` bound its junction candidate.

    The full-attention groups' joint hit is found by the coordinator's own rules (EAGLE drop, hash
    unit), over a copy of the coordinator that knows these groups only, and only where it can
    differ: two or more full-attention specs, and a candidate to bound.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    coordinator = manager.coordinator
    groups = getattr(coordinator, "attention_groups", ())  # a single group has no list of them
    full = [group for group in groups if isinstance(group.spec, FullAttentionSpec)]
    if len(full) < 2:
        return
    attention = copy.copy(coordinator)
    attention.attention_groups = full
    find = coordinator.find_longest_cache_hit
    find_attention = attention.find_longest_cache_hit

    def find_longest_cache_hit(
        block_hashes: Any, max_cache_hit_length: int
    ) -> tuple[tuple[list[Any], ...], int, int]:
        blocks, hit, gap = find(block_hashes, max_cache_hit_length)
        if gap:
            _, attention_hit, _ = find_attention(block_hashes, max_cache_hit_length)
            gap = bounded_gap(hit, gap, attention_hit)
        return blocks, hit, gap

    coordinator.find_longest_cache_hit = find_longest_cache_hit
