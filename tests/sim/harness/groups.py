"""KV cache groups of a simulated engine, as vLLM's specs and allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

BLOCK = 8
KV_BYTES = 32  # per token and layer: 1 head, 8 elements of 2 bytes for K and for V


@dataclass(frozen=True)
class Group:
    """One KV cache group: at most one of ``recurrent``, ``window``, ``chunk``; none: full.

    ``draft`` marks an EAGLE/MTP group, ``wide`` another spec of the same page size, ``latent`` MLA,
    ``exports`` recurrent kernels that write a state from the middle of a prompt's last chunk.
    """

    layers: int = 1
    recurrent: bool = False
    exports: bool = False
    window: int = 0
    chunk: int = 0
    block: int = BLOCK
    draft: bool = False
    wide: bool = False
    latent: bool = False


FULL = Group(layers=2)
STATE = Group(layers=2, recurrent=True)
WINDOW = Group(layers=2, window=12)

HYBRID = (FULL, STATE, STATE)
ATTENTION = (FULL,)
MIXED = (FULL, STATE, WINDOW)


def make_spec(group: Group, drafts: int = 0, page_tokens: int = 0) -> Any:
    """vLLM's spec of a group. ``drafts``: speculative tokens; states are padded to the page of
    ``page_tokens`` tokens."""
    page = (page_tokens or group.block) * KV_BYTES
    if group.recurrent:
        return MambaSpec(
            block_size=group.block,
            shapes=((3, 8), (2, 4, 4)),
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=page,
            mamba_cache_mode="align",
            num_speculative_blocks=drafts,
            num_prefill_checkpoint_blocks=int(group.exports),
            prefill_checkpoint_alignment=1 if group.exports else None,
        )
    attention: dict[str, Any] = {
        "block_size": group.block,
        "num_kv_heads": 1,
        "head_size": 4 if group.wide else 8,
        "dtype": torch.float32 if group.wide else torch.bfloat16,
    }
    if group.latent:
        return MLAAttentionSpec(**attention | {"head_size": 16})
    if group.chunk:
        return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group.chunk)
    if group.window:
        return SlidingWindowSpec(**attention, sliding_window=group.window)
    return FullAttentionSpec(**attention)


def cache_config(config: VllmConfig, groups: Sequence[Group], num_blocks: int) -> KVCacheConfig:
    """Groups laid over one allocation, as vLLM's own planning does it."""
    drafts = config.num_speculative_tokens
    largest = max(group.block for group in groups)
    named = [
        KVCacheGroupSpec(
            [f"group{i}.layer{j}" for j in range(group.layers)],
            make_spec(group, drafts, largest),
            is_eagle_group=group.draft,
        )
        for i, group in enumerate(groups)
    ]
    config.cache_config.num_gpu_blocks_override = num_blocks
    made = get_kv_cache_config_from_groups(config, named, available_memory=1 << 30)
    assert made.num_blocks == num_blocks
    made.kv_cache_layout = config.cache_config.kv_cache_layout
    return made
