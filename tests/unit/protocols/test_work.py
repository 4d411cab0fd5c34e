"""FLOPs of a prefill against values worked out by hand, and the laws they obey."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.protocols.work import FULL, ModelWork, model_work

DENSE: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 3, "intermediate_size": 10,
}  # fmt: skip

LINEAR: dict[str, Any] = DENSE | {
    "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 4,
    "linear_num_value_heads": 4, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4,
}  # fmt: skip

MAMBA: dict[str, Any] = DENSE | {
    "layers_block_type": ["mamba", "attention"], "mamba_n_heads": 2, "mamba_d_head": 4,
    "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
}  # fmt: skip

KIMI: dict[str, Any] = DENSE | {
    "kv_lora_rank": 6, "qk_nope_head_dim": 2, "qk_rope_head_dim": 3, "v_head_dim": 5,
    "linear_attn_config": {
        "kda_layers": [1], "full_attn_layers": [2], "num_heads": 3, "head_dim": 4,
        "short_conv_kernel_size": 4,
    },
}  # fmt: skip

NEMOTRON: dict[str, Any] = DENSE | {
    "model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "ME*-",
    "mamba_num_heads": 2, "mamba_head_dim": 4, "n_groups": 1, "ssm_state_size": 16,
    "conv_kernel": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 7, "moe_shared_expert_intermediate_size": 9,
}  # fmt: skip

# One layer's parts. Attention: queries and output 8 x 12 each, keys and values 8 x 6 each; a key
# in sight costs 4 heads * 3 * (score 2 + value 2). MLP: three 8 x 10 matrices.
ATTENTION = 2 * (2 * 8 * 12 + 2 * 8 * 6)
PER_KEY = 48
MLP = 2 * 3 * 8 * 10
# Keys 8, values 20 wide: in 8 x (2*8 + 2*20 + 2*4), out 20 x 8, convolution 4 x (2*8 + 20); four
# states of 4 x 5, each 7 operations an element.
DELTA = 2 * (8 * 64 + 160 + 4 * 36) + 7 * 4 * 20
# Inner 8, B and C 16 each: in 8 x (2*8 + 2*16 + 2), out 8 x 8, convolution 4 x (8 + 32); two
# states of 4 x 16, each 5 operations an element.
MAMBA_LAYER = 2 * (8 * 50 + 64 + 4 * 40) + 5 * 2 * 64
LATENT = 2 * (160 + 72 + 168 + 160)
# Three heads 4 wide: queries, keys, values and output 8 x 12 each, strength 8 x 3, decay and gate
# 8 x 4 and 4 x 12 each, convolution 4 x 36; three states of 4 x 4.
KIMI_DELTA = 2 * (4 * 96 + 24 + 2 * 80 + 4 * 36) + 7 * 3 * 16


@pytest.mark.parametrize(
    ("config", "per_token", "per_key"),
    [
        (DENSE, 2 * (ATTENTION + MLP), ((FULL, 2 * PER_KEY),)),
        (LINEAR, ATTENTION + DELTA + 2 * MLP, ((FULL, PER_KEY),)),
        (
            LINEAR | {"attn_output_gate": True},
            ATTENTION + 2 * 8 * 12 + DELTA + 2 * MLP,
            ((FULL, PER_KEY),),
        ),
        (MAMBA, ATTENTION + MAMBA_LAYER + 2 * MLP, ((FULL, PER_KEY),)),
        (
            DENSE | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
            2 * (ATTENTION + MLP),
            ((FULL, PER_KEY), (5, PER_KEY)),
        ),
        # Two of six experts of width 7, one shared of width 9, a router of 8 x 6.
        (
            DENSE
            | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
            | {"shared_expert_intermediate_size": 9},
            2 * (ATTENTION + 6 * 8 * (2 * 7 + 9) + 2 * 8 * 6),
            ((FULL, 2 * PER_KEY),),
        ),
        # The first layer is dense, the second routes.
        (
            DENSE
            | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
            | {"n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1},
            2 * ATTENTION + MLP + 6 * 8 * (2 * 7 + 7) + 2 * 8 * 6,
            ((FULL, 2 * PER_KEY),),
        ),
        # Latent of 6: queries 8 x 4*(2+3), down 8 x (6+3), up 6 x 4*(2+5), out 4*5 x 8.
        (
            DENSE
            | {"kv_lora_rank": 6, "qk_nope_head_dim": 2, "qk_rope_head_dim": 3, "v_head_dim": 5},
            2 * (LATENT + MLP),
            ((FULL, 2 * 2 * 4 * (5 + 5)),),
        ),
        (KIMI, LATENT + KIMI_DELTA + 2 * MLP, ((FULL, 2 * 4 * (5 + 5)),)),
        # A gate of 8 x 12 instead of 8 x 4 and 4 x 12, and one of 8 x 20 after attention.
        (
            KIMI
            | {"linear_attn_config": KIMI["linear_attn_config"] | {"use_full_rank_gate": True}}
            | {"mla_use_output_gate": True},
            LATENT + KIMI_DELTA + 2 * (96 - 80 + 160) + 2 * MLP,
            ((FULL, 2 * 4 * (5 + 5)),),
        ),
        # Each layer one thing; two matrices an MLP.
        (
            NEMOTRON,
            MAMBA_LAYER + ATTENTION + 4 * 8 * 10 + 4 * 8 * (2 * 7 + 9) + 2 * 8 * 6,
            ((FULL, PER_KEY),),
        ),
        # Experts 3 wide inside, behind projections of 8 x 3 and 3 x 8.
        (
            NEMOTRON | {"moe_latent_size": 3},
            MAMBA_LAYER + ATTENTION + 4 * 8 * 10 + 4 * (3 * 2 * 7 + 8 * 9)
            + 2 * 8 * 6 + 2 * 2 * 8 * 3,
            ((FULL, PER_KEY),),
        ),
    ],
    ids=[
        *("dense", "delta", "gated", "mamba", "window", "experts", "mixed", "latent"),
        *("kimi", "kimi gates", "nemotron", "nemotron latent"),
    ],
)  # fmt: skip
def test_a_models_work(
    config: dict[str, Any], per_token: int, per_key: tuple[tuple[int, int], ...]
) -> None:
    assert model_work(config) == ModelWork(per_token, per_key)


@pytest.mark.parametrize(
    ("start", "end", "flops"),
    [
        (0, 1, 100 + 10 * 1 + 3 * 1),
        (0, 4, 400 + 10 * (1 + 2 + 3 + 4) + 3 * (1 + 2 + 2 + 2)),
        (2, 4, 200 + 10 * (3 + 4) + 3 * (2 + 2)),
        (4, 4, 0),
        (5, 4, 0),
    ],
)
def test_a_tokens_keys_are_those_in_sight(start: int, end: int, flops: int) -> None:
    assert ModelWork(100, ((FULL, 10), (2, 3))).flops(start, end) == flops


WORKS = st.builds(
    ModelWork,
    st.integers(1, 10**12),
    st.lists(st.tuples(st.sampled_from([FULL, 1, 7, 4096]), st.integers(0, 10**7))).map(tuple),
)


@given(WORKS, st.lists(st.integers(0, 10**6), min_size=3, max_size=3).map(sorted))
def test_work_adds_up_and_grows_with_depth(work: ModelWork, cuts: list[int]) -> None:
    a, b, c = cuts
    assert work.flops(a, b) + work.flops(b, c) == work.flops(a, c)
    assert work.flops(a, a + 100) <= work.flops(b, b + 100)
    assert work.flops(a, c) >= (c - a) * work.per_token


@given(WORKS, st.integers(0, 10**5), st.integers(0, 10**5))
def test_what_a_manifest_carries_is_the_same_but_for_windows(
    work: ModelWork, start: int, count: int
) -> None:
    coarse = work.coarse().saved_work(start, start + count)
    exact = work.flops(start, start + count)
    assert coarse >= exact * (1 - 1e-9)
    if start >= 4096 or all(window == FULL for window, _ in work.per_key):
        assert coarse == pytest.approx(exact)


VALUES = st.none() | st.integers(-3, 9) | st.booleans() | st.text(max_size=3) | st.lists(
    st.sampled_from(["mamba", "full_attention", "conv", 3]), max_size=3
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(sorted(DENSE | LINEAR | MAMBA | KIMI | NEMOTRON)), VALUES),
    st.sampled_from([LINEAR, MAMBA, KIMI, NEMOTRON]),
)
def test_any_configuration_is_understood_or_not(
    changes: dict[str, Any], config: dict[str, Any]
) -> None:
    work = model_work(config | changes)
    assert work is None or work.per_token >= 0


@pytest.mark.parametrize(
    "config",
    [
        {},
        DENSE | {"layer_types": ["conv", "full_attention"]},
        DENSE | {"layer_types": ["full_attention"]},
        DENSE | {"mamba_d_state": 16},
        DENSE | {"linear_attn_config": {"kda_layers": [1]}},
        KIMI | {"linear_attn_config": KIMI["linear_attn_config"] | {"kda_layers": [2]}},
        NEMOTRON | {"hybrid_override_pattern": "ME*?"},
    ],
)
def test_a_shape_that_is_not_understood_has_no_figure(config: dict[str, Any]) -> None:
    assert model_work(config) is None
