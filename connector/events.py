"""KV events of store checkpoints, in vLLM's own form, for routers that index where KV is.

Collected only where the user enabled KV events. Only the scheduler half emits them, once for all
ranks. What this engine published and the store committed is *stored*; a state of which a lookup
says that it was evicted is *removed* (attention blocks are shared, so that nothing follows for
them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored

from backhaul.protocols.layout import (
    CacheLayout,
    GroupKind,
    GroupLayout,
    block_hash_index,
    required_blocks,
)

MEDIUM = "BACKHAUL"
"""Tells the store's blocks from those in an engine's own memory (``GPU``, ``CPU``)."""
_LOCALITY = "REMOTE"

_EVENTS_MAX = 65_536
"""Kept until vLLM takes them, which it does every step."""


class KvEvents:
    """Events between two steps. Called from the scheduler's thread only."""

    def __init__(self, layout: CacheLayout, *, enabled: bool) -> None:
        self._layout = layout
        self._spec_kinds: dict[int, str] = {}
        self.enabled = enabled
        self._events: list[BlockStored | BlockRemoved] = []

    def bind(self, manager: Any) -> None:
        """vLLM's cache manager knows how its own events name each group."""
        metadata = manager.kv_cache_event_metadata
        self._spec_kinds = {group.index: metadata[group.index][0] for group in self._layout.groups}

    def stored(self, request: Any, boundary: int, *, above: int = 0) -> None:
        """The checkpoint at ``boundary`` is in the store; its attention blocks up to ``above``
        tokens came from there, so that they were announced by somebody else."""
        if not self.enabled:
            return
        for group in self._layout.groups:
            blocks = required_blocks(group, boundary)
            if group.kind is GroupKind.FULL:
                blocks = range(max(blocks.start, above // group.block_tokens), blocks.stop)
            if blocks:
                self._add(self._stored(request, group, blocks))

    def removed(self, request: Any, boundary: int) -> None:
        """The checkpoint at ``boundary`` of the request's prefix was evicted."""
        if not self.enabled:
            return
        for group in self._layout.groups:
            if group.kind is GroupKind.RECURRENT:
                last = required_blocks(group, boundary)
                self._add(
                    BlockRemoved(
                        block_hashes=self._hashes(request, group, last),
                        medium=MEDIUM,
                        group_idx=group.index,
                        locality=_LOCALITY,
                    )
                )

    def take(self) -> Sequence[BlockStored | BlockRemoved]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def _add(self, event: BlockStored | BlockRemoved) -> None:
        if len(self._events) < _EVENTS_MAX:
            self._events.append(event)

    def _hashes(self, request: Any, group: GroupLayout, blocks: range) -> list[Any]:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        unit = self._layout.hash_tokens
        return [
            maybe_convert_block_hash(request.block_hashes[block_hash_index(group, i, unit)])
            for i in blocks
        ]

    def _stored(self, request: Any, group: GroupLayout, blocks: range) -> BlockStored:
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

        size = group.block_tokens
        before = range(blocks.start - 1, blocks.start)
        keys: list[Any] = []
        position = 0
        for i in blocks:
            key, position = generate_block_hash_extra_keys(
                request, i * size, (i + 1) * size, position
            )
            keys.append(key)
        lora = request.lora_request
        return BlockStored(
            block_hashes=self._hashes(request, group, blocks),
            parent_block_hash=self._hashes(request, group, before)[0] if blocks.start else None,
            token_ids=list(request.all_token_ids[blocks.start * size : blocks.stop * size]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(keys),
            group_idx=group.index,
            kv_cache_spec_kind=self._spec_kinds.get(group.index),
            kv_cache_spec_sliding_window=group.window_tokens or None,
            locality=_LOCALITY,
            session_id=request.session_id,
        )
