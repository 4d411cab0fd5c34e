"""The presets against what is published of the models: dimensions, parameters, bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import KimiLinearConfig, NemotronHConfig, PretrainedConfig, Qwen3_5MoeTextConfig

from backhaul.benchmarks.reuse.model_shape import (
    KIMI_K3,
    KIMI_LINEAR,
    NEMOTRON_3_NANO,
    PRESETS,
    QWEN_3_5,
    TINY,
    preset,
)
from backhaul.deploy.tiny_model import SHAPE, config_of
from backhaul.protocols.work import model_layers, model_work


@pytest.mark.parametrize(
    ("name", "config", "billions"),
    [
        ("qwen3.5-35b-a3b", QWEN_3_5, 3.0),
        ("kimi-linear-48b-a3b", KIMI_LINEAR, 3.1),
        ("kimi-k3", KIMI_K3, 104.0),
        ("nemotron-3-nano-30b-a3b", NEMOTRON_3_NANO, 3.2),
    ],
)
def test_work_agrees_with_the_published_active_parameters(
    name: str, config: Mapping[str, Any], billions: float
) -> None:
    """2 FLOPs a parameter that a token passes, but for the head, of which a prompt needs one row;
    scans and convolutions come on top, a few percent."""
    head = config["vocab_size"] * config["hidden_size"]
    active = preset(name).prefill.per_token / 2 + head
    assert active == pytest.approx(billions * 1e9, rel=0.04)


@pytest.mark.parametrize(
    ("ours", "published"),
    [
        # What these classes take unless told otherwise are the dimensions of these checkpoints.
        (QWEN_3_5, Qwen3_5MoeTextConfig()),
        (KIMI_LINEAR, KimiLinearConfig(layer_types=None)),
        (NEMOTRON_3_NANO, NemotronHConfig(**NEMOTRON_3_NANO)),
    ],
    ids=["qwen3.5", "kimi-linear", "nemotron-3"],
)
def test_dimensions_are_those_that_the_models_code_has(
    ours: dict[str, Any], published: PretrainedConfig
) -> None:
    config = published.to_dict()
    if "full_attn_layers" in ours.get("linear_attn_config", {}):
        # The class spaces the attention layers evenly, which moves some and adds none.
        assert model_layers(config).count(model_layers(ours)[3]) in (6, 7)
        config["layer_types"] = [
            "full_attention" if layer + 1 in ours["linear_attn_config"]["full_attn_layers"]
            else "linear_attention" for layer in range(27)
        ]  # fmt: skip
    assert model_work(config) == model_work(ours)
    assert model_layers(config) == model_layers(ours)


def test_the_tiny_model_is_what_is_built() -> None:
    built = config_of(SHAPE)
    assert model_work(built) == model_work(TINY) == preset("tiny-hybrid").prefill
    assert model_layers(built) == model_layers(TINY)


def test_bytes_worked_out_by_hand() -> None:
    """69 layers of 96 heads' 128 x 128 states in float32 and 3 inputs of 3 * 12,288 channels in
    bfloat16; 24 latents of 512 + 64 in bfloat16. A rank of eight has an eighth of the state and
    the whole latent."""
    one = preset("kimi-k3")
    layer = 96 * 128 * 128 * 4 + 3 * 3 * 12288 * 2
    assert one.state_bytes == 69 * layer
    assert one.kv_bytes == 24 * 576 * 2
    assert one.grid == -(-layer // 8 // (576 * 2 * 64)) * 64
    assert preset("tiny-hybrid").grid == 32


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_where_it_is_from(name: str) -> None:
    one = preset(name)
    assert one.source
    # What publications carry is the same figure: there is one count of FLOPs.
    assert one.work.saved_work(100, 5000) == pytest.approx(one.prefill_flops(100, 5000))
