"""Where vLLM ends a prefill chunk by itself.

A chunk that ends at a checkpoint was cut for it only where vLLM would have gone on without it. vLLM
keeps no trace of that, so its rule (``Scheduler._mamba_block_aligned_split``) is asked once more,
after the pass and without the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backhaul.protocols.layout import CacheLayout


@dataclass(frozen=True, kw_only=True)
class ChunkRule:
    """What bounds a chunk of an engine with recurrent groups; all in tokens.

    Attributes:
        step: most that one pass schedules, over all requests.
        batch: most that one pass computes, with ``draft_slots`` more for each of its requests.
        long_prefill: most that one of several requests has of them; 0: no limit.
        adaptive: that limit is never below an equal share of ``batch``.
        grid: the boundary grid.
        hashed: per block hash.
        kept: a prompt's last state is kept at a multiple of this: ``hashed`` where vLLM can cache a
            part of a block, else ``grid``.
        drops_block: an EAGLE group gives up its last matched block.
        exported: kernels write a state from within a prompt's last chunk at multiples of this; None
            where they cannot.
    """

    step: int
    batch: int
    draft_slots: int
    long_prefill: int
    adaptive: bool
    grid: int
    hashed: int
    kept: int
    drops_block: bool
    exported: int | None

    def room(self, taken: int, before: int, requests: int) -> int:
        """What a request could have had in a pass in which the ``before`` requests ahead of it had
        ``taken``, of ``requests`` that run or wait."""
        left = min(self.step - taken, self.batch - taken - self.draft_slots * (before + 1))
        if not self.long_prefill or requests < 2:
            return left
        share = self.batch // requests if self.adaptive else 0
        return min(left, max(self.long_prefill, share))

    def end(self, *, start: int, room: int, prompt_tokens: int, tokens: int) -> int:
        """Position at which a chunk from ``start`` ends without a checkpoint to stop for.

        ``tokens`` are the request's known ones: more than its prompt after a preemption.
        """
        from vllm.v1 import kv_cache_interface as vllm_rule

        kept_position = vllm_rule.get_mamba_prefill_checkpoint_position
        end = min(start + room, tokens)
        prefill_end = max(prompt_tokens, tokens - 1)
        if end >= prefill_end:
            position = kept_position(prefill_end, self.kept, self.drops_block)
            if vllm_rule.is_mamba_prefill_checkpoint_valid(
                query_start=start,
                query_end=end,
                checkpoint_position=position,
                hash_block_size=self.hashed,
                mamba_block_size=self.grid,
                checkpoint_alignment=self.exported,
            ):
                return end
        elif end // self.grid * self.grid > start:
            end = end // self.grid * self.grid
        last = kept_position(tokens, self.grid, self.drops_block)
        tail = kept_position(prompt_tokens, self.kept, self.drops_block)
        stops = [-(-start // self.grid) * self.grid, last]
        stops += [tail] if last < tail < prompt_tokens else []
        return min((stop for stop in stops if start < stop < end), default=end)


def chunk_rule(
    vllm_config: Any, kv_cache_config: Any, layout: CacheLayout, *, drops_block: bool
) -> ChunkRule:
    """The engine's rule, as if vLLM could cache a part of a block."""
    from vllm.v1.kv_cache_interface import MambaSpec

    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    exports = states and all(spec.num_prefill_checkpoint_blocks > 0 for spec in states)
    return ChunkRule(
        step=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        batch=scheduler.max_num_batched_tokens,
        draft_slots=speculative.max_num_new_slots_for_drafting if speculative else 0,
        long_prefill=scheduler.long_prefill_token_threshold,
        adaptive=scheduler.long_prefill_token_threshold_adaptive,
        grid=layout.boundary_tokens,
        hashed=layout.hash_tokens,
        kept=layout.hash_tokens,
        drops_block=drops_block,
        exported=states[0].prefill_checkpoint_alignment if exports else None,
    )
