"""Facts about the running engine, read from vLLM's configuration: layout, domain, identity."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import UnsupportedError
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout

_PROBE_TOKENS = tuple(range(1, 17))
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What the connector needs to know of its engine.

    Attributes:
        engine_id: vLLM's id of this engine; names the producer of checkpoints.
        num_blocks: KV blocks per rank.
        object_bytes: group index -> bytes of one block of the group on one rank.
        drops_block: vLLM keeps a prompt's last recurrent state one block lower, because an EAGLE
            group gives up its last matched block.
    """

    layout: CacheLayout
    domain: DomainRecord
    engine_id: str
    num_blocks: int
    object_bytes: dict[int, int]
    drops_block: bool = False


def engine_facts(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """Read the facts. Raises ``UnsupportedError`` where the engine cannot take part."""
    layout = cache_layout(vllm_config, kv_cache_config)
    speculative = vllm_config.speculative_config
    return EngineFacts(
        layout=layout,
        domain=cache_domain(vllm_config, kv_cache_config, layout),
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        num_blocks=kv_cache_config.num_blocks,
        object_bytes={
            group.index: group.page_bytes
            * len(kv_cache_config.kv_cache_groups[group.index].layer_names)
            for group in layout.groups
        },
        drops_block=bool(
            layout.has_recurrent and speculative and speculative.use_eagle_block_drop()
        ),
    )


def cache_layout(vllm_config: Any, kv_cache_config: Any) -> CacheLayout:
    """Groups, hash unit and ranks of an engine."""
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedError(
            "prefix caching is off, so no block has a hash: start vLLM with --enable-prefix-caching"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(f"{name}={getattr(parallel, name)} is not supported; use 1")
    tensor = parallel.tensor_parallel_size
    groups = tuple(
        _group_layout(index, kv_cache_config.kv_cache_groups[index].kv_cache_spec, tensor)
        for index in range(len(kv_cache_config.kv_cache_groups))
    )
    outside = set(range(len(groups))) - set(kv_cache_config.prefix_cacheable_group_ids)
    if outside:
        raise UnsupportedError(
            f"KV cache groups {sorted(outside)} take no part in prefix caching; "
            "such a model's state cannot be restored from a store"
        )
    return CacheLayout(
        groups=groups,
        hash_tokens=kv_cache_config.hash_block_size or min(g.block_tokens for g in groups),
        ranks=parallel.world_size,
    )


def _group_layout(index: int, spec: Any, tensor: int) -> GroupLayout:
    from vllm.v1 import kv_cache_interface as kv

    members = [spec]
    if isinstance(spec, kv.UniformTypeKVCacheSpecs):
        members = list(spec.kv_cache_specs.values())
    inner = members[0]
    # Every tensor-parallel rank computes these in full: one latent for all heads, or a state that
    # is declared so.
    replicated = all(
        type(one) is kv.MLAAttentionSpec or getattr(one, "tp_replicated", False) for one in members
    )
    copies = tensor if replicated else 1
    if isinstance(inner, kv.MambaSpec):
        if inner.mamba_cache_mode != "align":
            raise UnsupportedError(
                f"mamba cache mode is {inner.mamba_cache_mode!r}: recurrent states exist on block "
                "boundaries only with --mamba-cache-mode align"
            )
        return GroupLayout(
            index=index,
            kind=GroupKind.RECURRENT,
            block_tokens=spec.block_size,
            page_bytes=inner.real_page_size_bytes,
            copies=copies,
        )
    window = 0
    if isinstance(inner, kv.SlidingWindowSpec):
        kind, window = GroupKind.WINDOW, inner.sliding_window
    elif isinstance(inner, kv.ChunkedLocalAttentionSpec):
        kind, window = GroupKind.CHUNK, inner.attention_chunk_size
    elif isinstance(inner, kv.FullAttentionSpec) and not isinstance(
        inner, kv.SinkFullAttentionSpec
    ):
        kind = GroupKind.FULL
    else:
        raise UnsupportedError(
            f"KV cache group {index} is a {type(inner).__name__}; supported are full attention, "
            "MLA, sliding-window, chunked-local and recurrent (align mode) groups"
        )
    return GroupLayout(
        index=index,
        kind=kind,
        block_tokens=spec.block_size,
        window_tokens=window,
        page_bytes=inner.real_page_size_bytes,
        copies=copies,
    )


def cache_domain(vllm_config: Any, kv_cache_config: Any, layout: CacheLayout) -> DomainRecord:
    """The engine's cache domain."""
    import vllm

    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    speculative = vllm_config.speculative_config
    return DomainRecord(
        model=_digest(_stable_config(model.hf_config)),
        weights=weights_fingerprint(str(model.model)),
        revision=str(model.revision or ""),
        quantization=str(model.quantization or ""),
        layout=layout,
        hash_function=str(cache.prefix_caching_hash_algo),
        hash_probe=_hash_probe(str(cache.prefix_caching_hash_algo)),
        kv_dtype="/".join(sorted({str(s.dtype) for s in specs if hasattr(s, "dtype")})),
        state_dtypes=tuple(
            str(dtype) for spec in specs if hasattr(spec, "dtypes") for dtype in spec.dtypes
        ),
        conv_layout=_conv_layout() if layout.has_recurrent else "",
        kv_layout=str(kv_cache_config.kv_cache_layout or ""),
        attention_backend=_attention_backend(vllm_config),
        platform=_platform(),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
        vllm=".".join(vllm.__version__.split(".")[:2]),
    )


def weights_fingerprint(model: str) -> str:
    """Digest that tells two sets of weights apart without reading all of them: of every
    safetensors file of a local model its name, size, header and three samples. For a model that
    is no local directory its name stands in; name a revision then."""
    folder = Path(model)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return _digest(model)
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            for position in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
                stream.seek(position)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _stable_config(hf_config: Any) -> dict[str, Any]:
    """The configuration without what differs between copies of one model."""
    config: dict[str, Any] = dict(hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return config


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hash_probe(algorithm: str) -> str:
    """Chained hash of a fixed token sequence, as the engine computes it."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    return bytes(hash_block_tokens(function, None, _PROBE_TOKENS, None)).hex()


def _conv_layout() -> str:
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return str(get_conv_state_layout())


def _attention_backend(vllm_config: Any) -> str:
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    return str(getattr(backend, "name", backend) or "auto")


def _platform() -> str:
    """Device family; on a CPU also the instruction set, which decides a page's interior."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return f"{current_platform.device_name}:{current_platform.get_device_name()}"
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        line = next(
            (x for x in cpuinfo.read_text().splitlines() if x.startswith(("flags", "Features"))), ""
        )
        flags = set(line.partition(":")[2].split())
    wide = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve") if f in flags]
    return f"cpu:{platform.machine()}:{'+'.join(wide)}"
