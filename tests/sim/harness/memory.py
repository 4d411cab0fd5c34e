"""One rank's KV tensors, read and written as the model of :mod:`sim_model` fills them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sim_model import expand
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec
from vllm.v1.worker.utils import allocate_kv_cache

from harness.groups import KV_BYTES


class KvMemory:
    """One rank's KV tensors, by group and block."""

    def __init__(self, config: KVCacheConfig, layout: Any, rank: int) -> None:
        self.rank = rank
        self.tensors = allocate_kv_cache(config, torch.device("cpu"), layout)
        self.groups = [
            [
                # Every rank computes the same latent.
                (
                    name if isinstance(group.kv_cache_spec, MLAAttentionSpec) else f"{name}.{rank}",
                    self.tensors[name].view(torch.uint8).numpy(),
                )
                for name in group.layer_names
            ]
            for group in config.kv_cache_groups
        ]

    def zero(self, block: int) -> None:
        """Clear a block of every group's layers."""
        for layers in self.groups:
            for _, pages in layers:
                pages[block] = 0

    def copy(self, source: int, target: int) -> None:
        """Copy a block's bytes, whichever group owns it."""
        for layers in self.groups:
            for _, pages in layers:
                pages[target] = pages[source].copy()

    def read_state(self, group: int, block: int) -> bytes:
        """The states of every layer of a recurrent group."""
        return b"".join(pages[block].tobytes() for _, pages in self.groups[group])

    def expected_state(self, group: int, digest: bytes) -> bytes:
        """What ``read_state`` should give after a prefix."""
        return b"".join(expand(digest, name, pages[0].nbytes) for name, pages in self.groups[group])

    def write_state(self, group: int, block: int, digest: bytes) -> None:
        """Write every layer's state."""
        for name, pages in self.groups[group]:
            page = pages[block]
            data = np.frombuffer(expand(digest, name, page.nbytes), np.uint8)
            page[...] = data.reshape(page.shape)

    def read_tokens(self, group: int, block: int, start: int, end: int) -> bytes:
        """KV of positions ``start`` ... ``end`` - 1 inside a block, of every layer."""
        return b"".join(pages[block, :, start:end].tobytes() for _, pages in self.groups[group])

    def expected_tokens(self, group: int, digests: Sequence[bytes]) -> bytes:
        """What ``read_tokens`` should give; ``digests[i]`` covers the i-th position as well."""
        return b"".join(
            expand(digest, name, KV_BYTES) for name, _ in self.groups[group] for digest in digests
        )

    def write_tokens(self, group: int, block: int, start: int, digests: Sequence[bytes]) -> None:
        """Write KV of consecutive positions inside a block."""
        for name, pages in self.groups[group]:
            data = b"".join(expand(digest, name, KV_BYTES) for digest in digests)
            view = pages[block, :, start : start + len(digests)]
            view[...] = np.frombuffer(data, np.uint8).reshape(view.shape)
