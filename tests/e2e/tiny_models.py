"""Tiny random-weight models of several families, one table over one builder.

Shapes and tensor names come from transformers' own model classes, so a family is a row of sizes.
Weights follow one set of rules, under which far-away tokens still decide the next one: a wrong
byte in the cache moves the output by more than another order of summation does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from backhaul.deploy.tiny_model import TOKEN_IDS, write_tokenizer


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        model_type: transformers' name.
        sizes: fields of its configuration beyond ``COMMON``.
        recurrent, windows: which KV cache groups vLLM makes of it beside full attention.
        norm: what a norm's weight must be to scale by 1 (0 where the model adds 1 itself).
        dtype: what the engine computes in. In float32 orders of summation differ by less than
            1e-4 nats.
        args, env: engine arguments and environment that this family needs.
    """

    model_type: str
    sizes: Mapping[str, Any]
    recurrent: bool = False
    windows: bool = False
    norm: float = 1.0
    dtype: str = "float32"
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def engine_args(self) -> tuple[str, ...]:
        """Also makes the engine keep every boundary's states locally, so that it holds those that
        it publishes; vLLM refuses the option where there is nothing to keep."""
        keep = ("--prefix-cache-retention-interval=32",)
        dtype = f"--dtype={self.dtype}"
        return (dtype, *self.args, *(keep if self.recurrent or self.windows else ()))


COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": TOKEN_IDS["<|im_end|>"],
    "pad_token_id": TOKEN_IDS["<|endoftext|>"],
}

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}

NO_PICTURES = str(Path(__file__).parent / "no_pictures")
"""Holds what the import of a model with pictures needs; see there."""

# A state page must not be larger than 32 tokens of attention KV: vLLM would make larger blocks.
FAMILIES = {
    "mamba-2": Family(
        "nemotron_h",
        {
            "hybrid_override_pattern": "M-M-M-*-", "ssm_state_size": 32, "mamba_num_heads": 4,
            "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 32,
        },
        # The CPU kernel cannot export a state from inside a chunk: no chunk longer than a block.
        recurrent=True, args=("--max-num-batched-tokens=32", "--max-num-seqs=4"),
    ),
    "short-convolution": Family(
        "lfm2",
        {
            "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_attention_heads": 2, "block_ff_dim": 256, "block_auto_adjust_ff_dim": False,
            "block_dim": 128, "conv_dim": 128, "conv_L_cache": 3, "tie_word_embeddings": True,
        },
        # vLLM's CPU kernel turns queries of three dimensions wrongly, and LFM2 passes such ones.
        recurrent=True, args=('--compilation-config={"custom_ops": ["all", "-rotary_embedding"]}',),
    ),
    "gated-delta-net": Family(
        "qwen3_5_text",
        {
            "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "head_dim": 192,
        },
        recurrent=True, norm=0.0, dtype="bfloat16", env={"PYTHONPATH": NO_PICTURES},
    ),
    "full-attention": Family(
        "qwen3",
        {"num_hidden_layers": 2},
        args=(f"--speculative-config={json.dumps(NGRAM)}",),
    ),
    "sliding-window": Family(
        "gemma3_text",
        {
            "num_hidden_layers": 4, "sliding_window": 100,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
        windows=True, norm=0.0,
    ),
}  # fmt: skip


def build(name: str, directory: Path, *, seed: int = 0) -> Path:
    """Write a family's model into a new ``directory``; equal seeds give equal bytes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type, **{**COMMON, **family.sizes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        key: _draw(key, shape, family, generator)
        for key, shape in ((k, tuple(v.shape)) for k, v in sorted(model.state_dict().items()))
        if not (config.tie_word_embeddings and key.startswith("lm_head"))
    }
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    settings = config.to_dict() | {
        "architectures": [type(model).__name__],
        "dtype": family.dtype,
    }
    (directory / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True))
    write_tokenizer(directory)
    return directory


_HEAD = 2.0
"""Deviation of the logits."""


def _draw(
    key: str, shape: tuple[int, ...], family: Family, generator: torch.Generator
) -> torch.Tensor:
    if key.endswith("A_log"):
        # Time constants in tokens, short to long over the heads, at a mean step of ln 2.
        spans = torch.logspace(math.log10(300), math.log10(4000), shape[0])
        return -(spans * math.log(2)).log()
    mean, deviation = _rule(key, family)
    if deviation is None:
        deviation = 1.0 / math.sqrt(shape[-1])
    noise = torch.randn(shape, generator=generator)
    return mean + deviation * noise


def _rule(key: str, family: Family) -> tuple[float, float | None]:
    """Mean and deviation (None: 1/sqrt(inputs)) of a tensor."""
    if "linear_attn.norm" in key:
        return 1.0, 0.0  # the one norm there to which nothing is added
    if re.search("(q|k)_norm", key):
        return family.norm + 0.8, 0.0  # attention falls on a few tokens
    if "norm" in key:
        return family.norm, 0.0
    if key.endswith(".D"):
        return 1.0, 0.0
    if key.endswith("bias"):
        return 0.0, 0.1
    tied = family.sizes.get("tie_word_embeddings", False)
    if "lm_head" in key or (tied and "embed_tokens" in key):
        return 0.0, _HEAD / math.sqrt(int(COMMON["hidden_size"]))
    if "embed" in key:
        return 0.0, 1.0
    return 0.0, None
