"""How much computing a prefill is: floating-point operations from a model's shape.

A multiply-add counts as 2. Counted are matrix products, attention scores and values, recurrences
and short convolutions; left out are normalisation, activations, softmax and positional encoding
(below a percent), and the language-model head, of which a prefill needs one row at any length.

Per token and layer, with hidden size D, beside 2 per weight of the projections:

- attention (Hoffmann et al. 2022, arXiv 2203.15556, appendix F, but causal): 4qd for each key in
  sight, for scores and values; q: query heads, d: their width.
- gated delta rule (Yang et al. 2024, arXiv 2412.06464): S <- aS + k(b(v - (aS)'k))', o = S'q:
  decay, retrieval, rank-one update and output of a d x v state are 7dv per value head. Kimi delta
  attention (arXiv 2510.26692) decays each channel by itself, which costs the same.
- Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): h <- ah + (dt x)B', y = hC: decay, update and output
  of a head's p x n state are 5pn.
- MLP: 6Df for the three matrices of a gated one, 4Df without a gate; of experts those that a token
  is routed to, between the projections to their own width where they have one (latent experts,
  arXiv 2601.18089).

Recurrences are counted in this step-by-step form. Kernels that work in chunks spend more operations
and less time, so figures compare lengths and models, not hardware.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None


class Kept(NamedTuple):
    """What a layer of one kind keeps of the tokens before, of all ranks together; elements.

    Attributes:
        kv: in the cache for each token; MLA keeps one latent for all heads.
        state: of the recurrence; ``conv`` channels times ``taps`` - 1 inputs of the convolution.
    """

    kv: int = 0
    state: int = 0
    conv: int = 0
    taps: int = 1


def model_layers(config: Mapping[str, Any]) -> list[Kept]:
    """What each layer that mixes tokens keeps, in the order of the layers. Raises ``ValueError``
    and the like where the configuration is not understood."""
    return _Shape(config).layers()


class _Shape:
    """Reads a configuration; raises where it lacks or misuses what is needed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._linear: Mapping[str, Any] = config.get("linear_attn_config") or {}
        self._hidden = self._number("hidden_size")
        self._heads = self._number("num_attention_heads")
        self._names = self._layer_types()
        # Nemotron-H's MLPs are layers of their own, and are not gated.
        self._alone = config.get("model_type") == "nemotron_h"
        self._matrices = 2 if self._alone else 3

    def work(self) -> ModelWork:
        per_token, per_key = 0, Counter[int]()
        for index, name in enumerate(self._names):
            if name in ("mlp", "moe"):
                per_token += self._experts() if name == "moe" else self._dense()
                continue
            if not self._alone:
                per_token += self._mlp(index)
            if self._is_attention(name):
                window = self._number("sliding_window") if name == "sliding_attention" else FULL
                projections, pair = self._attention()
                per_token += projections
                per_key[window] += pair
            else:
                per_token += self._recurrence(name)[0]
        return ModelWork(per_token, tuple(sorted(per_key.items())))

    def layers(self) -> list[Kept]:
        """See ``model_layers``."""
        names = [name for name in self._names if name not in ("mlp", "moe")]
        return [
            Kept(kv=self._kept()) if self._is_attention(name) else self._recurrence(name)[1]
            for name in names
        ]

    def _is_attention(self, name: str) -> bool:
        if name in ("full_attention", "attention", "sliding_attention"):
            return True
        if name not in ("mamba", "linear_attention"):
            raise ValueError(f"layer type {name!r}")
        return False

    def _recurrence(self, name: str) -> tuple[int, Kept]:
        """(FLOPs per token, what is kept)."""
        if name == "mamba" or self._alone:
            return self._mamba()
        if self._config.get("linear_num_key_heads") is not None:
            return self._delta_rule()
        return self._kimi_delta()

    def _number(self, *names: str, default: int | None = None) -> int:
        """The first of the fields that is set."""
        return _number(self._config, names, default)

    def _layer_types(self) -> list[str]:
        names = self._config.get("layer_types") or self._config.get("layers_block_type")
        pattern = self._config.get("hybrid_override_pattern")
        if names is None and pattern is not None:
            names = [_PATTERN[letter] for letter in pattern]
        layers = self._number("num_hidden_layers", default=len(names) if names else None)
        if names is not None:
            if len(names) != layers:
                raise ValueError(f"{len(names)} layer types of {layers} layers")
            return [str(name) for name in names]
        if self._linear:
            recurrent, attention = self._linear["kda_layers"], self._linear["full_attn_layers"]
            if sorted((*recurrent, *attention)) != list(range(1, layers + 1)):
                raise ValueError(f"{recurrent} and {attention} are not the {layers} layers")
            return [
                "full_attention" if index + 1 in attention else "linear_attention"
                for index in range(layers)
            ]
        interval = self._number("full_attention_interval", default=0)
        if interval:
            return [
                "linear_attention" if (index + 1) % interval else "full_attention"
                for index in range(layers)
            ]
        others = ("ssm_cfg", "mamba_d_state", "ssm_state_size", "conv_L_cache")
        if any(self._config.get(name) is not None for name in others):
            raise ValueError("recurrent layers in an order that is not understood")
        sliding = self._config.get("sliding_window") and self._config.get(
            "use_sliding_window", True
        )
        return ["sliding_attention" if sliding else "full_attention"] * layers

    def _kept(self) -> int:
        """Elements in the cache for one token of one attention layer."""
        if self._config.get("kv_lora_rank") is not None:
            return self._number("kv_lora_rank") + self._number("qk_rope_head_dim")
        heads, width = self._key_values()
        return 2 * heads * width

    def _key_values(self) -> tuple[int, int]:
        """(heads, width of one)."""
        width = self._number("head_dim", default=self._hidden // self._heads)
        return self._number("num_key_value_heads", default=self._heads), width

    def _attention(self) -> tuple[int, int]:
        """(projections per token, FLOPs per key in sight)."""
        hidden, heads = self._hidden, self._heads
        if self._config.get("kv_lora_rank") is not None:
            return self._latent_attention()
        kv_heads, width = self._key_values()
        matrices = hidden * width * (2 * heads + 2 * kv_heads)
        if self._config.get("attn_output_gate") or self._config.get("model_type") in _GATED:
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
        if self._config.get("mla_use_output_gate"):
            matrices += hidden * heads * value
        return 2 * matrices, 2 * heads * (plain + rotary + value)

    def _delta_rule(self) -> tuple[int, Kept]:
        width = self._number("linear_key_head_dim")
        keys = self._number("linear_num_key_heads") * width
        values = self._number("linear_num_value_heads") * self._number("linear_value_head_dim")
        heads, taps = self._number("linear_num_value_heads"), self._number("linear_conv_kernel_dim")
        matrices = self._hidden * (2 * keys + 2 * values + 2 * heads + values)
        channels, state = 2 * keys + values, values * width
        work = 2 * (matrices + taps * channels) + 7 * state
        return work, Kept(state=state, conv=channels, taps=taps)

    def _kimi_delta(self) -> tuple[int, Kept]:
        """Queries, keys and values alike; decay and, unless of full rank, gate go through one
        head's width."""
        linear = self._linear or self._config
        own = not self._linear
        heads = _number(linear, ("linear_num_heads" if own else "num_heads",))
        width = _number(linear, ("linear_head_dim" if own else "head_dim",))
        taps = _number(linear, ("linear_conv_kernel_dim" if own else "short_conv_kernel_size",))
        hidden, all_heads = self._hidden, heads * width
        low_rank = width * (hidden + all_heads)
        gate = hidden * all_heads if linear.get("use_full_rank_gate") else low_rank
        matrices = 4 * hidden * all_heads + hidden * heads + low_rank + gate
        channels, state = 3 * all_heads, all_heads * width
        work = 2 * (matrices + taps * channels) + 7 * state
        return work, Kept(state=state, conv=channels, taps=taps)

    def _mamba(self) -> tuple[int, Kept]:
        heads = self._number("mamba_n_heads", "mamba_num_heads")
        width = self._number("mamba_d_head", "mamba_head_dim")
        groups = self._number("mamba_n_groups", "n_groups")
        states = self._number("mamba_d_state", "ssm_state_size")
        taps = self._number("mamba_d_conv", "conv_kernel")
        inner = heads * width
        channels = inner + 2 * groups * states
        matrices = self._hidden * (inner + channels + heads + inner)
        work = 2 * (matrices + taps * channels) + 5 * inner * states
        return work, Kept(state=inner * states, conv=channels, taps=taps)

    def _mlp(self, index: int) -> int:
        return self._experts() if self._is_sparse(index) else self._dense()

    def _dense(self) -> int:
        return 2 * self._matrices * self._hidden * self._number("intermediate_size")

    def _experts(self) -> int:
        hidden = self._hidden
        width = self._number("moe_intermediate_size", "intermediate_size")
        shared = self._number(
            "shared_expert_intermediate_size", "shared_intermediate_size", default=0
        )
        if not shared:
            one = self._number("moe_shared_expert_intermediate_size", default=width)
            shared = one * self._number("n_shared_experts", "num_shared_experts", default=0)
        latent = self._number("moe_latent_size", "routed_expert_hidden_size", default=0)
        routed = self._number("num_experts_per_tok", "num_experts_per_token") * width
        matrices = self._matrices * (routed * (latent or hidden) + shared * hidden)
        return 2 * (matrices + hidden * self._number(*_EXPERTS) + 2 * hidden * latent)

    def _is_sparse(self, index: int) -> bool:
        if not self._number(*_EXPERTS, default=0):
            return False
        kinds = self._config.get("mlp_layer_types")
        if kinds is not None:
            return bool(kinds[index] == "sparse")
        step = self._number("decoder_sparse_step", "moe_layer_freq", default=1)
        if index in (self._config.get("mlp_only_layers") or ()):
            return False
        if "moe_layer_freq" in self._config or "first_k_dense_replace" in self._config:
            return index >= self._number("first_k_dense_replace", default=0) and index % step == 0
        return (index + 1) % step == 0


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Models whose attention has a gate that no field names."""
_PATTERN = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
"""Nemotron-H's letters."""


def _number(config: Mapping[str, Any], names: Iterable[str], default: int | None = None) -> int:
    """The first of the fields that is set."""
    first = ""
    for name in names:
        first = first or name
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}")
            return value
    if default is None:
        raise KeyError(first)
    return default
