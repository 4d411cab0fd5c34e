"""What a model's shape costs: bytes per token and per state, FLOPs of a prefill, boundary grid.

All of it follows from a published configuration. Work is that of ``protocols.work``, the same that
engines state in what they publish; bytes (of all ranks together) follow these rules:

- attention KV per token and layer: 2 * kv_heads * head_dim elements, or for MLA one latent of
  kv_lora_rank + rope_dim elements;
- recurrent state per layer: the recurrence's matrices, and the convolution's last (kernel - 1)
  inputs;
- grid: vLLM's align mode lengthens the attention block until one layer's page holds one layer's
  recurrent state, in steps of the kernel's block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backhaul.protocols.checkpoint import PrefillWork
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.work import Kept, ModelWork, model_layers, model_work

_KV_SIZE = 2
_STATE_SIZE = 4
_CONV_SIZE = 2
"""Bytes of an element: bfloat16 KV and convolution, float32 recurrence (``mamba_ssm_dtype`` and
``mamba_ssm_cache_dtype`` of the presets' configurations; Kimi's are read with vLLM's default)."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """One model.

    Attributes:
        kv_bytes: attention KV of one token, all layers.
        state_bytes: one checkpoint's recurrent states, all layers.
        prefill: FLOPs.
        grid: boundary grid, tokens.
        state_pages: pages of the size of one attention block that one state takes in an engine's
            own cache: one per group of as many recurrent layers as there are attention layers.
        state_ranks: over how many ranks of a worker a state is cut, while attention lies whole on
            each of them.
        source: where the configuration was published.
        assumed: what was not published, or simplified.
    """

    name: str
    kv_bytes: int
    state_bytes: int
    prefill: ModelWork
    grid: int
    state_pages: int
    state_ranks: int = 1
    source: str = ""
    assumed: str = ""

    @property
    def block_bytes(self) -> int:
        """One attention block, all layers."""
        return self.kv_bytes * self.grid

    @property
    def page_bytes(self) -> int:
        """One page of a worker's own cache, on all of its ranks."""
        return self.block_bytes * self.state_ranks

    @property
    def work(self) -> PrefillWork:
        """What publications say of the model's work."""
        return self.prefill.coarse()

    def prefill_flops(self, start: int, stop: int) -> float:
        """Work to compute tokens ``start`` ... ``stop`` - 1 of a prompt."""
        return float(self.prefill.flops(start, stop))


def shape(
    name: str,
    config: Mapping[str, Any],
    *,
    source: str,
    assumed: str = "",
    kernel_block: int = 16,
    state_ranks: int = 1,
) -> ModelShape:
    """A shape from a text model's Hugging Face configuration.

    ``kernel_block``: tokens, step of the attention block's length. ``state_ranks``: over how many
    ranks a state is cut whose attention latents lie on every rank, as MLA's do.
    """
    prefill = model_work(config)
    assert prefill is not None, f"{name}: the configuration is not understood"
    layers = model_layers(config)
    attention = [layer for layer in layers if layer.kv]
    recurrent = [layer for layer in layers if not layer.kv]
    page = max(map(_state_bytes, recurrent)) // state_ranks
    token = attention[0].kv * _KV_SIZE
    return ModelShape(
        name=name,
        kv_bytes=sum(layer.kv for layer in attention) * _KV_SIZE,
        state_bytes=sum(map(_state_bytes, recurrent)),
        prefill=prefill,
        grid=-(-page // (token * kernel_block)) * kernel_block,
        state_pages=-(-len(recurrent) // len(attention)),
        state_ranks=state_ranks,
        source=source,
        assumed=assumed,
    )


def _state_bytes(layer: Kept) -> int:
    return layer.state * _STATE_SIZE + layer.conv * (layer.taps - 1) * _CONV_SIZE


QWEN_3_5 = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
    "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "vocab_size": 248320,
}  # fmt: skip

_KIMI_MLA = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "vocab_size": 163840,
}  # fmt: skip

KIMI_LINEAR = _KIMI_MLA | {
    "model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27,
    "num_attention_heads": 32, "intermediate_size": 9216, "num_experts": 256,
    "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
    },
}  # fmt: skip

KIMI_K3 = _KIMI_MLA | {
    "model_type": "kimi_linear", "hidden_size": 7168, "num_hidden_layers": 93,
    "num_attention_heads": 96, "q_lora_rank": 1536, "mla_use_output_gate": True,
    "intermediate_size": 33792, "num_experts": 896, "num_experts_per_token": 16,
    "num_shared_experts": 2, "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584,
    "linear_attn_config": {
        "full_attn_layers": [*range(4, 93, 4), 93],
        "kda_layers": [layer for layer in range(1, 93) if layer % 4],
        "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
    },
}  # fmt: skip

NEMOTRON_3_NANO = {
    "model_type": "nemotron_h", "hidden_size": 2688, "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
    "conv_kernel": 4, "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "vocab_size": 131072,
}  # fmt: skip

TINY = {
    "model_type": "qwen3_next", "hidden_size": 256, "num_hidden_layers": 4,
    "full_attention_interval": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 192, "linear_num_key_heads": 2, "linear_key_head_dim": 64,
    "linear_num_value_heads": 2, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
    "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "vocab_size": 320,
}  # fmt: skip

PRESETS = {
    one.name: one
    for one in (
        shape(
            "qwen3.5-35b-a3b",
            QWEN_3_5,
            source="config.json of Qwen3.5-35B-A3B; the defaults of transformers' "
            "Qwen3_5MoeTextConfig",
        ),
        shape(
            "kimi-linear-48b-a3b",
            KIMI_LINEAR,
            kernel_block=64,
            source="config.json of Kimi-Linear-48B-A3B-Instruct; the defaults of transformers' "
            "KimiLinearConfig",
        ),
        shape(
            "kimi-k3",
            KIMI_K3,
            kernel_block=64,
            state_ranks=8,
            source="text_config of config.json of Kimi-K3",
            assumed="tensor parallelism over 8 ranks, which sets the grid; all ranks of a worker "
            "as one",
        ),
        shape(
            "nemotron-3-nano-30b-a3b",
            NEMOTRON_3_NANO,
            source="config.json of NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        ),
        shape(
            "tiny-hybrid",
            TINY,
            kernel_block=32,
            source="deploy/tiny_model.py: what `backhaul demo` and the tests run",
        ),
    )
}
"""By name."""


def preset(name: str) -> ModelShape:
    """The preset of that name. Raises ``ConfigError`` naming the known ones."""
    if name not in PRESETS:
        raise ConfigError(f"unknown model {name!r}; presets: {', '.join(PRESETS)}")
    return PRESETS[name]
