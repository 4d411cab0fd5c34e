"""How much computing a prefill is: floating-point operations from a model's shape.

A multiply-add counts as 2. Counted are matrix products, attention scores and values, recurrences
and short convolutions; left out are normalisation, activations, softmax and positional encoding
(below a percent), and the language-model head, of which a prefill needs one row at any length.

Per token and layer, with hidden size D, beside 2 per weight of the projections:

- attention (Hoffmann et al. 2022, arXiv 2203.15556, appendix F, but causal): 4qd for each key in
  sight, for scores and values; q: query heads, d: their width.
- gated delta rule (Yang et al. 2024, arXiv 2412.06464): S <- aS + k(b(v - (aS)'k))', o = S'q:
  decay, retrieval, rank-one update and output of a d x v state are 7dv per value head.
- Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): h <- ah + (dt x)B', y = hC: decay, update and output
  of a head's p x n state are 5pn.
- MLP: 6Df for the three matrices of a gated one; of experts those that a token is routed to.

Recurrences are counted in this step-by-step form. Kernels that work in chunks spend more operations
and less time, so figures compare lengths and models, not hardware.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backhaul.protocols.checkpoint import PrefillWork

FULL = 0
"""Window of a layer that sees every earlier token."""


@dataclass(frozen=True)
class ModelWork:
    """One model's work, all ranks together.

    Attributes:
        per_token: FLOPs that each token costs, wherever it stands.
        per_key: (window in tokens or ``FULL``, FLOPs per key in sight), one a kind of attention;
            a token sees itself.
    """

    per_token: int
    per_key: tuple[tuple[int, int], ...] = ()

    def flops(self, start: int, end: int) -> int:
        """Of prefilling tokens ``start`` ... ``end`` - 1 on top of the ``start`` before them."""
        if end <= start:
            return 0
        keys = sum(
            cost * (_keys(end, window) - _keys(start, window)) for window, cost in self.per_key
        )
        return (end - start) * self.per_token + keys

    def coarse(self) -> PrefillWork:
        """As a manifest carries it: a window is taken as full of keys from the first token on."""
        windows = sum(window * cost for window, cost in self.per_key if window != FULL)
        full = sum(cost for window, cost in self.per_key if window == FULL)
        return PrefillWork(float(self.per_token + windows), float(full))


def _keys(tokens: int, window: int) -> int:
    """Keys that the first ``tokens`` tokens see, added up."""
    if window == FULL or tokens <= window:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window


def model_work(config: Mapping[str, Any]) -> ModelWork | None:
    """From a text model's Hugging Face configuration. None where the shape is not understood."""
    try:
        return _Shape(config).work()
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None


class _Shape:
    """Reads a configuration; raises where it lacks or misuses what is needed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._hidden = self._number("hidden_size")
        self._layers = self._number("num_hidden_layers")
        self._heads = self._number("num_attention_heads")

    def work(self) -> ModelWork:
        per_token, per_key = 0, Counter[int]()
        for index, name in enumerate(self._layer_types()):
            per_token += self._mlp(index)
            if name == "mamba":
                per_token += self._mamba()
            elif name == "linear_attention":
                per_token += self._delta_rule()
            elif name in ("full_attention", "attention", "sliding_attention"):
                window = self._number("sliding_window") if name == "sliding_attention" else FULL
                projections, pair = self._attention()
                per_token += projections
                per_key[window] += pair
            else:
                raise ValueError(f"layer type {name!r}")
        return ModelWork(per_token, tuple(sorted(per_key.items())))

    def _number(self, *names: str, default: int | None = None) -> int:
        """The first of the fields that is set."""
        for name in names:
            value = self._config.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise ValueError(f"{name} is {value!r}")
                return value
        if default is None:
            raise KeyError(names[0])
        return default

    def _layer_types(self) -> list[str]:
        names = self._config.get("layer_types") or self._config.get("layers_block_type")
        if names is not None:
            if len(names) != self._layers:
                raise ValueError(f"{len(names)} layer types of {self._layers} layers")
            return [str(name) for name in names]
        interval = self._number("full_attention_interval", default=0)
        if interval:
            return [
                "linear_attention" if (index + 1) % interval else "full_attention"
                for index in range(self._layers)
            ]
        others = (
            "ssm_cfg",
            "mamba_d_state",
            "ssm_state_size",
            "linear_attn_config",
            "conv_L_cache",
        )
        if any(self._config.get(name) is not None for name in others):
            raise ValueError("recurrent layers in an order that is not understood")
        sliding = self._config.get("sliding_window") and self._config.get(
            "use_sliding_window", True
        )
        return ["sliding_attention" if sliding else "full_attention"] * self._layers

    def _attention(self) -> tuple[int, int]:
        """(projections per token, FLOPs per key in sight)."""
        hidden, heads = self._hidden, self._heads
        if self._config.get("kv_lora_rank") is not None:
            return self._latent_attention()
        width = self._number("head_dim", default=hidden // heads)
        kv_heads = self._number("num_key_value_heads", default=heads)
        matrices = hidden * width * (2 * heads + 2 * kv_heads)
        if self._config.get("attn_output_gate") or self._config.get("model_type") == "qwen3_next":
            matrices += hidden * width * heads  # a gate beside each query
        return 2 * matrices, 4 * heads * width

    def _latent_attention(self) -> tuple[int, int]:
        """MLA as DeepSeek-V2 (arXiv 2405.04434, section 2.1) defines it, not absorbed."""
        hidden, heads, latent = self._hidden, self._heads, self._number("kv_lora_rank")
        rotary, plain = self._number("qk_rope_head_dim"), self._number("qk_nope_head_dim")
        value, query = self._number("v_head_dim"), self._number("q_lora_rank", default=0)
        queries = heads * (plain + rotary)
        matrices = query * (hidden + queries) if query else hidden * queries
        matrices += hidden * (latent + rotary) + latent * heads * (plain + value)
        matrices += heads * value * hidden
        return 2 * matrices, 2 * heads * (plain + rotary + value)

    def _delta_rule(self) -> int:
        keys = self._number("linear_num_key_heads") * self._number("linear_key_head_dim")
        heads, width = self._number("linear_num_value_heads"), self._number("linear_value_head_dim")
        values = heads * width
        matrices = self._hidden * (2 * keys + 2 * values + 2 * heads + values)
        channels = 2 * keys + values
        state = values * self._number("linear_key_head_dim")
        return 2 * (matrices + self._number("linear_conv_kernel_dim") * channels) + 7 * state

    def _mamba(self) -> int:
        heads, width = self._number("mamba_n_heads"), self._number("mamba_d_head")
        groups, states = self._number("mamba_n_groups"), self._number("mamba_d_state")
        inner = heads * width
        channels = inner + 2 * groups * states
        matrices = self._hidden * (inner + channels + heads + inner)
        return 2 * (matrices + self._number("mamba_d_conv") * channels) + 5 * inner * states

    def _mlp(self, index: int) -> int:
        hidden = self._hidden
        experts = self._number("num_experts", "num_local_experts", "n_routed_experts", default=0)
        if not experts or not self._is_sparse(index):
            return 6 * hidden * self._number("intermediate_size")
        width = self._number("moe_intermediate_size", "intermediate_size")
        shared = self._number(
            "shared_expert_intermediate_size", "shared_intermediate_size", default=0
        )
        shared = shared or width * self._number("n_shared_experts", default=0)
        active = self._number("num_experts_per_tok") * width + shared
        return 6 * hidden * active + 2 * hidden * experts

    def _is_sparse(self, index: int) -> bool:
        step = self._number("decoder_sparse_step", "moe_layer_freq", default=1)
        if index in (self._config.get("mlp_only_layers") or ()):
            return False
        if "moe_layer_freq" in self._config or "first_k_dense_replace" in self._config:
            return index >= self._number("first_k_dense_replace", default=0) and index % step == 0
        return (index + 1) % step == 0
