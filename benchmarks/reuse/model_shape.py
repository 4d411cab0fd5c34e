"""What a model's shape costs: bytes per token and per state, FLOPs of a prefill, boundary grid.

Derived from published dimensions by these rules (bytes per rank summed over ranks):

- attention KV per token and layer: 2 * kv_heads * head_dim elements, or for MLA one latent of
  kv_lora_rank + rope_dim elements;
- recurrent state per layer: the matrix state heads * key_dim * value_dim, and the convolution's
  last (kernel - 1) inputs;
- grid: vLLM's align mode lengthens the attention block until one layer's page holds one layer's
  recurrent state, in steps of the kernel's block;
- work: 2 FLOPs per active parameter and token, and for each pair of a token and one before it
  2 * heads * (query-key dim + value dim) per attention layer; the recurrent layers' own scan is
  linear in tokens and small against their projections, and left out.
"""

from __future__ import annotations

import msgspec

from backhaul.protocols.checkpoint import PrefillWork
from backhaul.protocols.errors import ConfigError


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """One model.

    Attributes:
        kv_bytes: attention KV of one token, all layers.
        state_bytes: one checkpoint's recurrent states, all layers.
        active_parameters: parameters that one token passes through.
        pair_flops: work for one token and one token before it, all attention layers.
        grid: boundary grid, tokens.
        state_pages: pages of the size of one attention block that one state takes in an engine's
            own cache: one per group of as many recurrent layers as there are attention layers.
        source: where the dimensions were published.
        assumed: what was not published, or simplified.
    """

    name: str
    kv_bytes: int
    state_bytes: int
    active_parameters: float
    pair_flops: float
    grid: int
    state_pages: int
    source: str = ""
    assumed: str = ""

    @property
    def block_bytes(self) -> int:
        """One attention block, all layers."""
        return self.kv_bytes * self.grid

    @property
    def work(self) -> PrefillWork:
        """What publications say of the model's work."""
        return PrefillWork(2 * self.active_parameters, self.pair_flops)

    def prefill_flops(self, start: int, stop: int) -> float:
        """Work to compute tokens ``start`` ... ``stop`` - 1 of a prompt."""
        return self.work.saved_work(start, stop)


class Dimensions(msgspec.Struct, frozen=True, kw_only=True):
    """Published dimensions. Element sizes in bytes; see the module's rules.

    ``qk_dim`` and ``value_dim`` are those of one attention head while prefilling; ``kv_elements``
    of one token and layer in the cache; ``conv_channels`` of one recurrent layer.
    """

    attention_layers: int
    recurrent_layers: int
    heads: int
    qk_dim: int
    value_dim: int
    kv_elements: int
    state_elements: int
    conv_channels: int
    conv_kernel: int = 4
    kv_size: int = 2
    state_size: int = 4
    conv_size: int = 2
    kernel_block: int = 16

    @property
    def state_page(self) -> int:
        """Bytes of one recurrent layer's state."""
        conv = self.conv_channels * (self.conv_kernel - 1) * self.conv_size
        return self.state_elements * self.state_size + conv

    @property
    def grid(self) -> int:
        """Tokens of an attention block whose page holds one layer's state."""
        token = self.kv_elements * self.kv_size
        return -(-self.state_page // (token * self.kernel_block)) * self.kernel_block


def shape(
    name: str, dimensions: Dimensions, *, active_parameters: float, source: str, assumed: str
) -> ModelShape:
    """A shape from published dimensions."""
    d = dimensions
    return ModelShape(
        name=name,
        kv_bytes=d.kv_elements * d.kv_size * d.attention_layers,
        state_bytes=d.state_page * d.recurrent_layers,
        active_parameters=active_parameters,
        pair_flops=2.0 * d.heads * (d.qk_dim + d.value_dim) * d.attention_layers,
        grid=d.grid,
        state_pages=-(-d.recurrent_layers // d.attention_layers),
        source=source,
        assumed=assumed,
    )


PRESETS = {
    one.name: one
    for one in (
        shape(
            "qwen3.5-35b-a3b",
            Dimensions(
                attention_layers=10,
                recurrent_layers=30,
                heads=16,
                qk_dim=256,
                value_dim=256,
                kv_elements=2 * 2 * 256,
                state_elements=32 * 128 * 128,
                conv_channels=2 * 16 * 128 + 32 * 128,
            ),
            active_parameters=3e9,
            source="defaults of Qwen3_5MoeTextConfig in transformers: 40 layers, every fourth full "
            "attention (16 heads of 256, 2 KV heads), gated delta net with 32 value and 16 key "
            "heads of 128, convolution over 4 tokens",
            assumed="bfloat16 KV and convolution state, float32 recurrent state (mamba_ssm_dtype "
            "of the family's configs); 3e9 active parameters as in the model's name",
        ),
        shape(
            "kimi-k3-like",
            Dimensions(
                attention_layers=7,
                recurrent_layers=20,
                heads=32,
                qk_dim=128 + 64,
                value_dim=128,
                kv_elements=512 + 64,
                state_elements=32 * 128 * 128,
                conv_channels=3 * 32 * 128,
                kernel_block=64,
            ),
            active_parameters=3e9,
            source="config.json of Kimi-Linear-48B-A3B, the published model of that family: 27 "
            "layers, 20 of them KDA (32 heads of 128, convolutions over 4 tokens on q, k and v), "
            "7 MLA (kv_lora_rank 512, rope dim 64, 32 heads)",
            assumed="stands for larger KDA/MLA hybrids by its ratios, not by its size; bfloat16 KV "
            "and convolution state, float32 recurrent state; value heads of 128; 3e9 active "
            "parameters as in the model's name",
        ),
        shape(
            "nemotron-3-nano-30b-a3b",
            Dimensions(
                attention_layers=6,
                recurrent_layers=23,
                heads=32,
                qk_dim=128,
                value_dim=128,
                kv_elements=2 * 2 * 128,
                state_elements=64 * 64 * 128,
                conv_channels=64 * 64 + 2 * 8 * 128,
            ),
            active_parameters=3.5e9,
            source="model page of Nemotron 3 Nano 30B-A3B: 52 layers, 23 Mamba-2, 6 attention (32 "
            "heads, 2 KV heads), 3.5e9 active parameters; head dim 128, state size 128, 8 groups, "
            "kernel 4 and float32 state cache as in NemotronHConfig's defaults",
            assumed="64 Mamba heads of 64; bfloat16 KV and convolution state",
        ),
        shape(
            "tiny-hybrid",
            Dimensions(
                attention_layers=1,
                recurrent_layers=3,
                heads=4,
                qk_dim=192,
                value_dim=192,
                kv_elements=2 * 2 * 192,
                state_elements=2 * 64 * 64,
                conv_channels=3 * 2 * 64,
                kernel_block=32,
            ),
            active_parameters=1.2e6,
            source="deploy/tiny_model.py: what `backhaul demo` and the tests run",
            assumed="parameters counted once; experts that a token does not pass are few",
        ),
    )
}
"""By name."""


def preset(name: str) -> ModelShape:
    """The preset of that name. Raises ``ConfigError`` naming the known ones."""
    if name not in PRESETS:
        raise ConfigError(f"unknown model {name!r}; presets: {', '.join(PRESETS)}")
    return PRESETS[name]
