"""The engine configuration of a simulated engine, validated by vLLM itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from copy import copy
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)

from backhaul.connector.plugin import register
from harness.groups import Group

_names = count(1)


MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@cache
def _model_directory() -> str:
    # The scheduler asks a model for little more than its length; groups are made by hand.
    folder = Path(tempfile.mkdtemp(prefix="sim-model-"))
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return str(folder)


@cache
def _model_config() -> ModelConfig:
    folder = _model_directory()
    return ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0
    )


def _with_length(tokens: int) -> ModelConfig:
    config = copy(_model_config())
    config.max_model_len = tokens
    return config


def make_config(
    groups: Sequence[Group],
    transfer: KVTransferConfig | None,
    *,
    asynchronous: bool,
    budget: int,
    max_requests: int,
    max_tokens: int,
    retention: int | None,
    unit: int | None,
    inside_blocks: bool,
    kv_events: bool,
    drafts: int,
    method: str,
    layout: str,
    ranks: int,
) -> VllmConfig:
    """An engine's whole configuration; the arguments are those of :class:`SimEngine`."""
    config = VllmConfig(
        model_config=_with_length(max_tokens),
        cache_config=CacheConfig(
            block_size=max(group.block for group in groups),
            enable_prefix_caching=True,
            mamba_cache_mode="align" if any(g.recurrent for g in groups) else "none",
            prefix_cache_retention_interval=retention,
            prefix_match_unit=unit,
            enable_mamba_shared_prefix_checkpoint=inside_blocks,
        ),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_requests,
            max_model_len=max_tokens,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        parallel_config=ParallelConfig(),
        kv_transfer_config=transfer,
    )
    if kv_events:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    # Set after VllmConfig's own checks, which want a draft model on disk and as many devices as
    # ranks.
    if drafts:
        config.speculative_config = _speculation(config, drafts, method)
    config.cache_config.kv_cache_layout = layout
    config.parallel_config.world_size = ranks
    config.parallel_config.tensor_parallel_size = ranks
    return config


def _speculation(config: VllmConfig, drafts: int, method: str) -> SpeculativeConfig:
    speculative = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=drafts,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    speculative.method = method
    return speculative


# A busy machine must not look like a slow store.
_PATIENT = {
    "lookup_timeout_s": 600.0,
    "load_timeout_s": 600.0,
    "publish_timeout_s": 600.0,
    "lease_s": 2000.0,
}


def transfer_config(
    store: str, name: str, role: str, policy: str, options: dict[str, Any], sibling: bool | str
) -> KVTransferConfig:
    """What ``--kv-transfer-config`` would say; the arguments are those of :class:`SimEngine`."""
    extra = {"store": store, "stream_min_bytes": 1, **_PATIENT, **options}
    return KVTransferConfig(
        kv_role=role,
        engine_id=f"{name}-{next(_names)}",
        kv_load_failure_policy=policy,
        **_connectors(role, policy, extra, sibling=sibling),
    )


def _connectors(
    role: str, policy: str, extra: dict[str, Any], *, sibling: bool | str
) -> dict[str, Any]:
    """The part of ``KVTransferConfig`` that names the connectors."""
    if not sibling:
        return {
            "kv_connector": "BackhaulConnector",
            "kv_connector_module_path": "backhaul.connector.connector",
            "kv_connector_extra_config": extra,
        }
    register()
    common = {"kv_load_failure_policy": policy}
    other = {"kv_connector": "SimHandover", "kv_connector_module_path": "sim_handover"}
    ours = {"kv_connector": "BackhaulConnector", "kv_connector_extra_config": extra}
    children = [
        {**other, **common, "kv_role": sibling if isinstance(sibling, str) else role},
        {**ours, **common, "kv_role": role},
    ]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
