"""Facts about the running engine, read from vLLM's configuration: layout, domain, identity."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backhaul.connector.chunks import ChunkRule, chunk_rule
from backhaul.connector.fingerprints import (
    cpu_isa,
    digest,
    hash_probe,
    length_scaling,
    model_digest,
    platform_name,
    quantization_name,
    revision_of,
    weights_fingerprint,
)
from backhaul.connector.pages import describe_page, head_counts, is_replicated
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import UnsupportedError
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout
from backhaul.protocols.sharding import Page
from backhaul.protocols.work import ModelWork, model_work

logger = logging.getLogger("vllm.backhaul")


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What the connector needs to know of its engine.

    Attributes:
        engine_id: vLLM's id of this engine; names the producer of checkpoints.
        num_blocks: KV blocks per rank.
        object_bytes: group index -> bytes of one block of the group on one rank; where its layers
            differ, as if all were like the first.
        chunks: where vLLM ends a prefill chunk by itself.
        drops_block: vLLM keeps a prompt's last recurrent state one block lower, because an EAGLE
            group gives up its last matched block.
        work: what a prefill costs; None where the model's shape is not understood.
    """

    layout: CacheLayout
    domain: DomainRecord
    engine_id: str
    num_blocks: int
    object_bytes: dict[int, int]
    chunks: ChunkRule
    drops_block: bool = False
    work: ModelWork | None = None


def engine_facts(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """Read the facts. Raises ``UnsupportedError`` where the engine cannot take part."""
    layout = cache_layout(vllm_config, kv_cache_config)
    groups = kv_cache_config.kv_cache_groups
    speculative = vllm_config.speculative_config
    drops_block = bool(layout.has_recurrent and speculative and speculative.use_eagle_block_drop())
    return EngineFacts(
        layout=layout,
        domain=cache_domain(vllm_config, kv_cache_config, layout),
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        num_blocks=kv_cache_config.num_blocks,
        object_bytes={
            group.index: sum(s.real_page_size_bytes for s in _layer_specs(groups[group.index]))
            for group in layout.groups
        },
        chunks=chunk_rule(vllm_config, kv_cache_config, layout, drops_block=drops_block),
        drops_block=drops_block,
        work=_work(vllm_config.model_config),
    )


def _work(model: Any) -> ModelWork | None:
    work = model_work(model.hf_text_config.to_dict())
    if work is None:
        logger.info("backhaul: the model's shape is not understood, avoided FLOPs stay 0")
    return work


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
    groups = tuple(
        _group_layout(
            index,
            group,
            vllm_config,
            _kv_layout(vllm_config, kv_cache_config),
            _parts(group, kv_cache_config),
        )
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    outside = set(range(len(groups))) - set(kv_cache_config.prefix_cacheable_group_ids)
    if outside:
        raise UnsupportedError(
            f"KV cache groups {sorted(outside)} take no part in prefix caching; "
            "such a model's state cannot be restored from a store"
        )
    layout = CacheLayout(
        groups=groups,
        hash_tokens=_block_sizes(vllm_config, kv_cache_config)[1],
        ranks=parallel.world_size,
    )
    align = vllm_config.cache_config.mamba_cache_mode == "align"
    if align and not layout.has_recurrent and not vllm_config.use_v2_model_runner:
        raise UnsupportedError(
            "--mamba-cache-mode align, but no layer of this model is recurrent: vLLM's V1 model "
            "runner would end at the first request; leave the option out"
        )
    return layout


def _block_sizes(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """Tokens per scheduler block and per hash, as the engine core resolves them."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    scheduler_block, hash_block = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(scheduler_block), int(kv_cache_config.hash_block_size or hash_block)


def _layer_specs(group: Any) -> list[Any]:
    """One spec per layer of a group, in the layers' order. In the scheduler half it is the first
    layer's for all of them: see ``_parts``."""
    from vllm.v1 import kv_cache_interface as kv

    spec = group.kv_cache_spec
    if isinstance(spec, kv.UniformTypeKVCacheSpecs):
        return [spec.kv_cache_specs[name] for name in group.layer_names]
    return [spec] * len(group.layer_names)


def _parts(group: Any, kv_cache_config: Any) -> list[tuple[list[str], int]]:
    """The layers of a group by spec, and the bytes of a page of each. vLLM gives the scheduler half
    the first layer's spec for a whole group, but the tensors of its workers, one for each spec."""
    names = set(group.layer_names)
    return [
        (list(tensor.layers), min(int(tensor.layer_stride), int(tensor.block_stride)))
        for tensor in kv_cache_config.kv_cache_tensors
        if names.intersection(tensor.layers)
    ]


def _kv_layout(vllm_config: Any, kv_cache_config: Any) -> str:
    """vLLM's name of the order of an attention page's dimensions; "" where it has not said."""
    layout = kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout
    return str(getattr(layout, "name", layout) or "")


def _group_layout(
    index: int,
    group: Any,
    vllm_config: Any,
    kv_layout: str,
    parts: Sequence[tuple[list[str], int]] = (),
) -> GroupLayout:
    from vllm.v1 import kv_cache_interface as kv

    layers = _layer_specs(group)
    tensor = vllm_config.parallel_config.tensor_parallel_size
    if not layers:
        raise UnsupportedError(
            f"KV cache group {index} has no layer on one of the pipeline stages: set "
            "VLLM_PP_LAYER_PARTITION so that each stage has layers of every kind"
        )
    spec, window = layers[0], 0
    # Every tensor-parallel rank computes these in full: one latent for all heads, or a state that
    # is declared so.
    replicated = all(map(is_replicated, layers))
    if isinstance(spec, kv.MambaSpec):
        kind = GroupKind.RECURRENT
        if spec.mamba_cache_mode != "align":
            raise UnsupportedError(
                f"mamba cache mode is {spec.mamba_cache_mode!r}: recurrent states exist on block "
                "boundaries only with --mamba-cache-mode align"
            )
    elif isinstance(spec, kv.SlidingWindowSpec):
        kind, window = GroupKind.WINDOW, spec.sliding_window
    elif isinstance(spec, kv.ChunkedLocalAttentionSpec):
        kind, window = GroupKind.CHUNK, spec.attention_chunk_size
    elif isinstance(spec, kv.FullAttentionSpec) and not isinstance(
        spec, (kv.SinkFullAttentionSpec, kv.RSWASpec)
    ):
        kind = GroupKind.FULL
    else:
        raise UnsupportedError(
            f"KV cache group {index} is a {type(spec).__name__}; supported are full attention, "
            "MLA, sliding-window, chunked-local and recurrent (align mode) groups"
        )
    return GroupLayout(
        index=index,
        kind=kind,
        block_tokens=group.kv_cache_spec.block_size,
        window_tokens=window,
        page_bytes=spec.real_page_size_bytes,
        draft=bool(group.is_eagle_group),
        layers=len(layers),
        members=digest(list(group.layer_names)),
        numbers=_numbers(group.layer_names),
        interior=_interiors(layers, parts, vllm_config),
        copies=tensor if replicated else 1,
        page=_page(group, layers, vllm_config, kv_layout) if kv_layout and len(parts) < 2 else (),
    )


def _numbers(names: Sequence[str]) -> tuple[int, ...]:
    """The number in each layer's name, e.g. 3 of ``model.layers.3.self_attn.attn``; () unless all
    have exactly one."""
    found = [[int(part) for part in name.split(".") if part.isdecimal()] for name in names]
    return tuple(n for one in found for n in one) if all(len(one) == 1 for one in found) else ()


def _page(group: Any, layers: Sequence[Any], vllm_config: Any, kv_layout: str) -> Page:
    """How the pages of a group's layers are cut over ranks; () unless all are alike and known,
    those of other pipeline stages too."""
    from vllm.v1 import kv_cache_interface as kv

    model, stages = vllm_config.model_config, vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1 and isinstance(group.kv_cache_spec, kv.UniformTypeKVCacheSpecs):
        return ()
    pages = {
        describe_page(
            spec,
            config=model.hf_text_config,
            tensor=vllm_config.parallel_config.tensor_parallel_size,
            kv_heads=model.get_total_num_kv_heads(),
            other_heads=_other_heads(vllm_config),
            kv_layout=kv_layout,
            conv_first=_conv_layout() == "DS",
        )
        for spec in layers
    }
    return pages.pop() if len(pages) == 1 else ()


def _other_heads(vllm_config: Any) -> frozenset[int]:
    """Numbers of KV heads that a layer may have, of the target model or of one that drafts."""
    target, speculative = vllm_config.model_config, vllm_config.speculative_config
    found = head_counts(target.hf_text_config) | _layer_heads(target)
    draft = speculative.draft_model_config if speculative else None
    if draft is not None and draft is not target:
        found |= head_counts(draft.hf_text_config) | _layer_heads(draft)
        found.add(int(draft.get_total_num_kv_heads()))
    return frozenset(found)


def _layer_heads(model: Any) -> set[int]:
    """Numbers of KV heads of layers that vLLM knows to have others than the model as a whole."""
    layers = model.model_arch_config.per_layer_overrides or ()
    return {int(one["total_num_kv_heads"]) for one in layers if "total_num_kv_heads" in one}


_INTERIOR = (
    "num_kv_heads", "head_size", "head_size_v", "num_head_slots", "state_content_bytes",
    "tokens_per_state", "kv_quant_mode", "cache_dtype_str", "model_version", "alignment",
    "shapes", "mamba_type",
)  # fmt: skip
"""Fields of a spec that decide what lies where inside an unpadded page, but for the element types,
which the record names by themselves."""


def _interiors(
    layers: Sequence[Any], parts: Sequence[tuple[list[str], int]], vllm_config: Any
) -> str:
    """What the pages of a group's layers consist of, each kind once, in order of appearance; with
    several, also a digest of which layer has which."""
    each = [(_interior(spec), str(getattr(spec, "dtype", ""))) for spec in layers]
    text = "; ".join(dict.fromkeys(interior for interior, _ in each))
    if len(set(each)) > 1:
        return f"{text} #{digest(each)}"
    if len(parts) > 1:  # only the first is known: the rest by size, and by how a cache is quantised
        return f"{text} #{digest([*parts, _configured(vllm_config.cache_config.cache_dtype)])}"
    return text


def _interior(spec: Any) -> str:
    parts = [type(spec).__name__]
    for name in _INTERIOR:
        value = getattr(spec, name, None)
        if value is not None:
            parts.append(f"{name}={getattr(value, 'name', value)}")
    return " ".join(parts)


def cache_domain(vllm_config: Any, kv_cache_config: Any, layout: CacheLayout) -> DomainRecord:
    """The engine's cache domain. Raises ``UnsupportedError`` where it cannot be told."""
    import vllm

    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    specs = [s for group in kv_cache_config.kv_cache_groups for s in _layer_specs(group)]
    speculative = vllm_config.speculative_config
    scheduler_block = _block_sizes(vllm_config, kv_cache_config)[0]
    if scheduler_block != layout.boundary_tokens:
        raise UnsupportedError(
            f"vLLM schedules in blocks of {scheduler_block} tokens, its KV cache groups meet every "
            f"{layout.boundary_tokens}: unset --block-size and --mamba-block-size"
        )
    kv_layout = _kv_layout(vllm_config, kv_cache_config)
    if not kv_layout:
        raise UnsupportedError(
            "vLLM has not said how KV pages are laid out; set VLLM_KV_CACHE_LAYOUT"
        )
    algorithm = str(cache.prefix_caching_hash_algo)
    return DomainRecord(
        model=model_digest(model.hf_config),
        weights=_weights(model, vllm_config.load_config),
        revision=revision_of(model),
        quantization=quantization_name(model),
        compute_dtype=_dtype(model.dtype),
        length_scaling=length_scaling(model, speculative and speculative.draft_model_config),
        draft_model=_draft_model(speculative, model, vllm_config.load_config),
        layout=layout,
        scheduler_block_tokens=scheduler_block,
        hash_function=algorithm,
        hash_probe=hash_probe(algorithm),
        kv_dtype=_kv_dtype(specs, str(cache.cache_dtype)),
        state_dtypes=_state_dtypes(specs),
        conv_layout=_conv_layout() if layout.has_recurrent else "",
        kv_layout=kv_layout,
        attention_backend=_attention_backend(vllm_config, specs),
        platform=platform_name(),
        cpu_isa=cpu_isa(),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        pipeline_layers=_pipeline_layers(model, parallel.pipeline_parallel_size),
        speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
        vllm=".".join(vllm.__version__.split(".")[:2]),
    )


def _pipeline_layers(model: Any, stages: int) -> str:
    """Layers of each stage, e.g. ``12,12``; "" for a single one. The scheduler half sees the
    first stage's layers only."""
    from vllm.distributed.utils import get_pp_indices

    if stages == 1:
        return ""
    cuts = [get_pp_indices(model.get_total_num_hidden_layers(), i, stages) for i in range(stages)]
    return ",".join(str(end - start) for start, end in cuts)


def _weights(model: Any, load: Any) -> str:
    return weights_fingerprint(
        str(model.model),
        revision=model.revision,
        cache=load.download_dir,
        dummy=str(load.load_format) == "dummy",
    )


def _draft_model(speculative: Any, target: Any, load: Any) -> str:
    """Method, configuration, weights and quantisation of what drafts; "" where nothing does."""
    if speculative is None:
        return ""
    name = str(speculative.method or "")
    draft = speculative.draft_model_config
    if draft is None or draft is target:
        return name
    parts = (name, model_digest(draft.hf_config), _weights(draft, load), quantization_name(draft))
    return ":".join(parts).rstrip(":")


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _kv_dtype(specs: Sequence[Any], configured: str) -> str:
    """Element types of the attention layers. A quantised cache is stored as plain bytes, so what
    the bytes mean is added."""
    names = set()
    for spec in specs:
        if hasattr(spec, "dtype"):
            name = _dtype(spec.dtype)
            quantised = bool(int(getattr(spec, "kv_quant_mode", 0))) or name in ("uint8", "int8")
            meaning = _configured(configured) if quantised else ""
            names.add(f"{name}:{meaning}".rstrip(":"))
    return ", ".join(sorted(names))


def _configured(cache_dtype: str) -> str:
    """How a quantised cache is quantised, or ""."""
    return {"fp8": "fp8_e4m3", "auto": ""}.get(str(cache_dtype), str(cache_dtype))


def _state_dtypes(specs: Sequence[Any]) -> tuple[str, ...]:
    """Element types of a state's parts, of each kind of state once."""
    kinds = dict.fromkeys(tuple(map(_dtype, s.dtypes)) for s in specs if hasattr(s, "dtypes"))
    return tuple(name for kind in kinds for name in kind)


def _conv_layout() -> str:
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return str(get_conv_state_layout())


def _attention_backend(vllm_config: Any, specs: Sequence[Any]) -> str:
    """Names of the attention backends, as configured or else as vLLM chooses them. The layers
    themselves, which would tell, live in other processes. Raises ``UnsupportedError`` where vLLM
    does not say: of two that are not known it is not known either whether they are one."""
    from vllm.v1 import kv_cache_interface as kv

    attention = vllm_config.attention_config
    if attention.backend is not None:
        names = [attention.backend.name]
    else:
        chosen = [_chosen_backend(vllm_config, s) for s in specs if isinstance(s, kv.AttentionSpec)]
        names = sorted(set(chosen))
    kinds = sorted(f"{kind}={one.name}" for kind, one in attention.backend_per_kind.items())
    return ", ".join([*names, *kinds])


def _chosen_backend(vllm_config: Any, spec: Any) -> str:
    from vllm.config import set_current_vllm_config
    from vllm.v1 import kv_cache_interface as kv
    from vllm.v1.attention.selector import get_attn_backend

    try:
        with set_current_vllm_config(vllm_config):
            return str(
                get_attn_backend(
                    spec.head_size,
                    vllm_config.model_config.dtype,
                    vllm_config.cache_config.cache_dtype,
                    use_mla=isinstance(spec, (kv.MLAAttentionSpec, kv.SlidingWindowMLASpec)),
                    has_sliding_window=isinstance(spec, kv.SlidingWindowSpec),
                ).get_name()
            )
    except Exception as error:  # the choice is vLLM's business; it fails in many ways
        line = " ".join(str(error).split())[:200]
        raise UnsupportedError(
            f"which attention backend {type(spec).__name__} layers use cannot be told ({line}); "
            "name one with --attention-backend"
        ) from error
