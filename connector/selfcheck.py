"""Startup check of every vLLM surface that Backhaul leans on and that is not its public API.

A missing or changed one is named at start, instead of failing somewhere later. What is checked is
what the code uses; see docs/architecture.md for why each is needed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from backhaul.protocols.errors import UnsupportedError

SUPPORTED = ("0.32", "0.33")
"""Minor versions of vLLM that were checked."""


class Surface(NamedTuple):
    """One thing that must be there; ``test`` says whether the imported object fits."""

    module: str
    name: str
    what: str
    test: Callable[[Any], bool]


@dataclass(frozen=True)
class Needs:
    """What a callable or class must show to fit; put together with ``&``.

    Attributes:
        names: parameters that it has.
        bare: it can be called without arguments (but for ``self``).
        fragments: text of its source.
        in_order: the fragments' first occurrences are in this order.
    """

    names: tuple[str, ...] = ()
    bare: bool = False
    fragments: tuple[str, ...] = ()
    in_order: bool = False

    def __call__(self, item: Any) -> bool:
        if (self.names or self.bare) and not self._takes(item):
            return False
        if not self.fragments:
            return True
        source = inspect.getsource(item)
        found = [source.find(fragment) for fragment in self.fragments]
        return -1 not in found and (not self.in_order or found == sorted(found))

    def __and__(self, other: Needs) -> Needs:
        return Needs(
            self.names + other.names,
            self.bare or other.bare,
            self.fragments + other.fragments,
            self.in_order or other.in_order,
        )

    def _takes(self, item: Any) -> bool:
        found = inspect.signature(item).parameters
        wanted = [
            name
            for name, one in found.items()
            if one.default is one.empty
            and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            and name != "self"
        ]
        return set(self.names) <= set(found) and not (self.bare and wanted)


def parameters(*names: str) -> Needs:
    """The callable has these parameters; with no names, it can be called without arguments."""
    return Needs(names=names, bare=not names)


def source_has(*fragments: str) -> Needs:
    """The source contains these fragments."""
    return Needs(fragments=fragments)


def _in_order(*fragments: str) -> Needs:
    """Each fragment occurs, the first occurrences in this order."""
    return Needs(fragments=fragments, in_order=True)


def is_property(item: Any) -> bool:
    """Read as an attribute, not called."""
    return isinstance(item, property)


_MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_HASHES = "vllm.v1.core.kv_cache_utils"

SURFACES: tuple[Surface, ...] = (
    Surface(
        _MULTI, "MultiConnector.__init__", "the roles of sibling connectors",
        parameters("vllm_config", "role", "kv_cache_config"),
    ),
    Surface(
        _BASE, "KVConnectorBase_V1.__init__", "three-argument constructor",
        parameters("vllm_config", "role", "kv_cache_config"),
    ),
    Surface(
        _BASE, "KVConnectorBase_V1.get_transfer_results", "transfer results",
        parameters("finished_req_ids"),
    ),
    Surface(
        _BASE, "KVConnectorBase_V1.bind_kv_cache_manager", "access to the cache manager",
        parameters("kv_cache_manager"),
    ),
    Surface(_BASE, "KVConnectorBase_V1.on_new_request", "arrival hook", parameters("request")),
    Surface(
        _BASE, "KVConnectorBase_V1.update_connector_output", "worker reports",
        parameters("connector_output"),
    ),
    Surface(
        _BASE, "KVConnectorBase_V1.build_connector_worker_meta", "worker reports", parameters()
    ),
    Surface(_BASE, "KVConnectorBase_V1.has_pending_push_work", "stepping on", parameters()),
    Surface(
        _BASE, "SupportsHMA.request_finished_all_groups", "hybrid finish hook",
        parameters("request", "block_ids"),
    ),
    Surface(
        "vllm.v1.request", "Request.__init__", "request attributes",
        source_has(
            "self.num_computed_tokens", "self.num_in_flight_tokens", "self.num_preemptions",
            "self.shared_prefix_boundary", "self.kv_transfer_params", "self.block_hashes",
            "self.skip_reading_prefix_cache", "self.prefill_stats",
        ),
    ),
    Surface(
        "vllm.v1.core.block_pool", "BlockPool.touch", "block references", parameters("blocks")
    ),
    Surface(
        "vllm.v1.core.block_pool", "BlockPool.free_blocks", "block references",
        parameters("ordered_blocks"),
    ),
    Surface(
        "vllm.v1.core.block_pool", "BlockPool.__init__", "block table", source_has("self.blocks")
    ),
    Surface(
        "vllm.v1.core.kv_cache_manager", "KVCacheManager.__init__",
        "names of groups in KV events, chunk ends inside blocks",
        source_has("self.kv_cache_event_metadata", "self.mamba_shared_prefix_checkpoint"),
    ),
    Surface(
        "vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys", "KV events",
        parameters("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
    ),
    Surface(
        "vllm.v1.core.kv_cache_utils", "to_event_extra_keys", "KV events",
        parameters("extra_keys"),
    ),
    Surface(
        "vllm.v1.core.kv_cache_utils", "maybe_convert_block_hash", "KV events",
        parameters("hash_bytes"),
    ),
    Surface(
        "vllm.v1.core.kv_cache_utils", "KVCacheBlock.block_hash_num_tokens",
        "prefix that a block is cached under", is_property,
    ),
    Surface(
        "vllm.config", "SpeculativeConfig.use_eagle_block_drop", "EAGLE block drop", parameters()
    ),
    Surface(
        "vllm.v1.core.kv_cache_manager", "KVCacheManager.free", "freeing a failed load",
        parameters("request"),
    ),
    Surface(
        "vllm.v1.core.kv_cache_manager", "KVCacheManager.reset_prefix_cache", "cache reset",
        parameters(),
    ),
    Surface(
        "vllm.v1.core.kv_cache_manager", "KVCacheManager.get_computed_blocks",
        "where the junction candidate is taken from",
        _in_order("self.coordinator.find_longest_cache_hit(", "shared_prefix_boundary = ("),
    ),
    Surface(
        "vllm.v1.core.kv_cache_coordinator", "HybridKVCacheCoordinator.find_longest_cache_hit",
        "the junction candidate",
        source_has(
            "block_hashes", "max_cache_hit_length", "                self.attention_groups\n",
            "return cache_hit_blocks, hit_length, num_uncached_common_prefix_tokens",
        ),
    ),
    Surface(
        "vllm.v1.core.kv_cache_coordinator", "SpecGroup", "groups by kind", source_has("spec: ")
    ),
    Surface(
        "vllm.v1.core.kv_cache_manager", "KVCacheBlocks.get_block_ids", "block ids", parameters()
    ),
    Surface(
        "vllm.v1.core.sched.output", "KVConnectorBlockState.get_block_ids", "block ids",
        parameters("req_id"),
    ),
    Surface(
        _SCHEDULER, "Scheduler._mamba_block_aligned_split", "forced chunk ends",
        source_has("shared_prefix_boundary"),
    ),
    Surface(
        _SCHEDULER, "Scheduler.schedule", "order of the boundary's assignment and the lookup",
        _in_order(
            "request.shared_prefix_boundary,",
            "self.connector.get_num_new_matched_tokens(",
            "self.connector.update_state_after_alloc(",
        ),
    ),
    Surface(
        _SCHEDULER, "Scheduler._update_from_kv_xfer_finished", "order of a load's completion",
        _in_order("update_connector_output(", "finished_recving_kv_req_ids.add("),
    ),
    Surface(
        "vllm.v1.kv_cache_interface", "MambaSpec", "align mode and what a state consists of",
        source_has("mamba_cache_mode", "mamba_type", "shapes", "dtypes", "tp_replicated"),
    ),
    Surface(
        "vllm.distributed.utils", "get_pp_indices", "layers of a pipeline stage",
        parameters("num_hidden_layers", "pp_rank", "pp_size"),
    ),
    Surface(
        "vllm.v1.kv_cache_interface", "KVCacheConfig", "hash unit and groups",
        source_has("hash_block_size", "prefix_cacheable_group_ids", "kv_cache_layout"),
    ),
    Surface(
        "vllm.v1.kv_cache_interface", "KVCacheGroupSpec", "draft groups",
        source_has("is_eagle_group", "layer_names", "kv_cache_spec"),
    ),
    Surface(
        "vllm.v1.kv_cache_interface", "AttentionSpec", "a page's interior",
        source_has(
            "num_kv_heads", "head_size_v", "kv_quant_mode", "num_head_slots",
            "state_content_bytes", "tokens_per_state", "real_page_size_bytes",
        ),
    ),
    Surface(
        "vllm.v1.kv_cache_interface", "get_mamba_prefill_checkpoint_position",
        "forced chunk ends", parameters("num_tokens", "hash_block_size", "drop_eagle_block"),
    ),
    Surface(
        "vllm.v1.kv_cache_interface", "is_mamba_prefill_checkpoint_valid", "forced chunk ends",
        parameters(
            "query_start", "query_end", "checkpoint_position", "hash_block_size",
            "mamba_block_size", "checkpoint_alignment",
        ),
    ),
    Surface(
        "vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator", "forced chunk ends",
        source_has("enable_partial_hash_hits"),
    ),
    Surface(
        "vllm.v1.kv_cache_interface", "RSWASpec", "groups that drop generated blocks",
        source_has("rswa_window"),
    ),
    Surface(
        _HASHES, "resolve_kv_cache_block_sizes", "derived block sizes",
        parameters("kv_cache_config", "vllm_config"),
    ),
    Surface(_HASHES, "resolve_none_hash_seed", "start of the hash chain", parameters("hash_fn")),
    Surface(
        _HASHES, "init_none_hash", "start of the hash chain",
        source_has("resolve_none_hash_seed(hash_fn)", "hash_fn(_NONE_HASH_SEED)"),
    ),
    Surface(
        _HASHES, "hash_block_tokens", "links of the hash chain",
        parameters("hash_function", "parent_block_hash", "curr_block_token_ids", "extra_keys"),
    ),
    Surface(
        "vllm.v1.attention.selector", "get_attn_backend", "choice of the attention backend",
        parameters("head_size", "dtype", "kv_cache_dtype", "use_mla", "has_sliding_window"),
    ),
    Surface(
        "vllm.model_executor.layers.mamba.mamba_utils", "get_conv_state_layout",
        "convolution layout", parameters(),
    ),
)  # fmt: skip


def missing_surfaces(surfaces: tuple[Surface, ...] = SURFACES) -> list[str]:
    """One line per surface that is missing or does not fit; empty when all is well."""
    problems = []
    for surface in surfaces:
        where = f"{surface.module}.{surface.name} ({surface.what})"
        try:
            item: Any = importlib.import_module(surface.module)
            for part in surface.name.split("."):
                item = getattr(item, part)
        except (ImportError, AttributeError) as error:
            problems.append(f"{where}: missing, {error}")
            continue
        try:
            fits = surface.test(item)
        except (OSError, TypeError, ValueError) as error:
            problems.append(f"{where}: cannot be examined, {error}")
            continue
        if not fits:
            problems.append(f"{where}: changed")
    return problems


def require_vllm_surface() -> None:
    """Raises ``UnsupportedError`` that names every private surface that is missing or changed."""
    import vllm

    problems = missing_surfaces()
    if problems:
        raise UnsupportedError(
            f"vLLM {vllm.__version__} lacks what Backhaul needs (checked with "
            f"{', '.join(SUPPORTED)}): " + "; ".join(problems)
        )
