"""vLLM's real scheduler and cache manager over a model without weights.

A :class:`SimEngine` is one engine core: the real ``Scheduler`` (or ``AsyncScheduler`` two steps
deep), KV tensors as vLLM allocates them, the connector's scheduler half and one worker half per
rank, and in place of the model runner a forward pass that follows V1's block tables and align-mode
copies but computes with :mod:`sim_model`.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from sim_model import STOP_TOKEN, Prefix, cold_output, disturb, draw, expand, extend
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
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from backhaul.connector import connector as connector_module
from backhaul.connector.connector import BackhaulConnector
from backhaul.connector.plugin import register
from backhaul.connector.regions import GroupRegions, memory_regions
from backhaul.protocols.checkpoint import ObjectKey
from backhaul.protocols.layout import required_blocks
from backhaul.transfer.base import LoadItem, Store
from backhaul.transfer.registry import open_store

BLOCK = 8
_KV_BYTES = 32  # per token and layer: 1 head, 8 elements of 2 bytes for K and for V
_names = count(1)


@dataclass(frozen=True)
class Group:
    """One KV cache group: at most one of ``recurrent``, ``window``, ``chunk``; none: full.

    ``draft`` marks an EAGLE/MTP group, ``wide`` another spec of the same page size, ``latent`` MLA,
    ``exports`` recurrent kernels that write a state from the middle of a prompt's last chunk.
    """

    layers: int = 1
    recurrent: bool = False
    exports: bool = False
    window: int = 0
    chunk: int = 0
    block: int = BLOCK
    draft: bool = False
    wide: bool = False
    latent: bool = False


FULL = Group(layers=2)
STATE = Group(layers=2, recurrent=True)
WINDOW = Group(layers=2, window=12)

HYBRID = (FULL, STATE, STATE)
ATTENTION = (FULL,)
MIXED = (FULL, STATE, WINDOW)


_check_surface_once = cache(connector_module.require_vllm_surface)


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


def make_spec(group: Group, drafts: int = 0, page_tokens: int = 0) -> Any:
    """vLLM's spec of a group. ``drafts``: speculative tokens; states are padded to the page of
    ``page_tokens`` tokens."""
    page = (page_tokens or group.block) * _KV_BYTES
    if group.recurrent:
        return MambaSpec(
            block_size=group.block,
            shapes=((3, 8), (2, 4, 4)),
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=page,
            mamba_cache_mode="align",
            num_speculative_blocks=drafts,
            num_prefill_checkpoint_blocks=int(group.exports),
            prefill_checkpoint_alignment=1 if group.exports else None,
        )
    attention: dict[str, Any] = {
        "block_size": group.block,
        "num_kv_heads": 1,
        "head_size": 4 if group.wide else 8,
        "dtype": torch.float32 if group.wide else torch.bfloat16,
    }
    if group.latent:
        return MLAAttentionSpec(**attention | {"head_size": 16})
    if group.chunk:
        return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group.chunk)
    if group.window:
        return SlidingWindowSpec(**attention, sliding_window=group.window)
    return FullAttentionSpec(**attention)


class KvMemory:
    """One rank's KV tensors, by group and block."""

    def __init__(self, config: KVCacheConfig, layout: Any, rank: int) -> None:
        self.rank = rank
        self.tensors = allocate_kv_cache(config, torch.device("cpu"), layout)
        self.groups = [
            [
                # Every rank computes the same latent.
                (
                    name if isinstance(group.kv_cache_spec, MLAAttentionSpec) else f"{name}.{rank}",
                    self.tensors[name].view(torch.uint8).numpy(),
                )
                for name in group.layer_names
            ]
            for group in config.kv_cache_groups
        ]

    def zero(self, block: int) -> None:
        """Clear a block of every group's layers."""
        for layers in self.groups:
            for _, pages in layers:
                pages[block] = 0

    def copy(self, source: int, target: int) -> None:
        """Copy a block's bytes, whichever group owns it."""
        for layers in self.groups:
            for _, pages in layers:
                pages[target] = pages[source].copy()

    def read_state(self, group: int, block: int) -> bytes:
        """The states of every layer of a recurrent group."""
        return b"".join(pages[block].tobytes() for _, pages in self.groups[group])

    def expected_state(self, group: int, digest: bytes) -> bytes:
        """What ``read_state`` should give after a prefix."""
        return b"".join(expand(digest, name, pages[0].nbytes) for name, pages in self.groups[group])

    def write_state(self, group: int, block: int, digest: bytes) -> None:
        """Write every layer's state."""
        for name, pages in self.groups[group]:
            page = pages[block]
            data = np.frombuffer(expand(digest, name, page.nbytes), np.uint8)
            page[...] = data.reshape(page.shape)

    def read_tokens(self, group: int, block: int, start: int, end: int) -> bytes:
        """KV of positions ``start`` ... ``end`` - 1 inside a block, of every layer."""
        return b"".join(pages[block, :, start:end].tobytes() for _, pages in self.groups[group])

    def expected_tokens(self, group: int, digests: Sequence[bytes]) -> bytes:
        """What ``read_tokens`` should give; ``digests[i]`` covers the i-th position as well."""
        return b"".join(
            expand(digest, name, _KV_BYTES) for name, _ in self.groups[group] for digest in digests
        )

    def write_tokens(self, group: int, block: int, start: int, digests: Sequence[bytes]) -> None:
        """Write KV of consecutive positions inside a block."""
        for name, pages in self.groups[group]:
            data = b"".join(expand(digest, name, _KV_BYTES) for digest in digests)
            view = pages[block, :, start : start + len(digests)]
            view[...] = np.frombuffer(data, np.uint8).reshape(view.shape)


@dataclass
class _RunnerRequest:
    """What V1's model runner remembers of a request."""

    tokens: list[int]
    prompt_tokens: int
    prefix: Prefix
    stop_at: int
    tables: list[list[int]]
    computed: int = 0
    """Tokens whose output is known to be right; with drafts the scheduler may be ahead of it."""
    accepted: int = 1
    """Tokens that the last step sampled: the running state lies that many columns, less one,
    behind the running block."""
    drafts: list[int] = field(default_factory=list)


@dataclass
class _Query:
    """One request's pass: tokens [start, end), of which those from ``known`` on are drafts."""

    start: int
    known: int
    tokens: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class SimRunner:
    """The model runner: block tables, align-mode copies, one forward pass per step."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._requests: dict[str, _RunnerRequest] = {}
        self._state_index: dict[str, int] = {}
        self.violations: list[str] = []
        """Every read of bytes that are not those of the request's own prefix."""
        self.checked_bytes = 0
        self.accepted_drafts = 0
        self.rejected_drafts = 0

    def execute(self, step: Any) -> ModelRunnerOutput:
        """One step on every rank, in the order of V1's model runner."""
        engine = self._engine
        for connector in engine.workers:
            if step.preempted_req_ids:
                connector.handle_preemptions(step.kv_connector_metadata)
        self._update_states(step)
        sampled = self._forward(step) if step.total_num_scheduled_tokens else []
        output = ModelRunnerOutput(
            req_ids=list(step.num_scheduled_tokens),
            req_id_to_index={name: i for i, name in enumerate(step.num_scheduled_tokens)},
            sampled_token_ids=sampled,
        )
        outputs = []
        for connector in engine.workers:
            one = copy(output)
            one.kv_connector_output = _connector_output(connector, step)
            outputs.append(one)
        return engine.aggregator.aggregate(outputs) if outputs else output

    def _update_states(self, step: Any) -> None:
        for name in step.finished_req_ids:
            self._requests.pop(name, None)
        for block in step.new_block_ids_to_zero or ():
            for memory in self._engine.memory:
                memory.zero(block)
        for source, target in step.kv_cache_block_copies or ():
            for memory in self._engine.memory:
                memory.copy(source, target)
        for new in step.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids)
            self._requests[new.req_id] = _RunnerRequest(
                tokens,
                len(tokens),
                Prefix(tokens),
                self._engine.stop_at.get(new.req_id, 0),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
            )
        cached = step.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            request, ids = self._requests[name], cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                request.tables = [list(group) for group in ids]
            elif ids is not None:
                for table, fresh in zip(request.tables, ids, strict=True):
                    table.extend(fresh)
            known = request.prompt_tokens + cached.num_output_tokens[i]
            if known < len(request.tokens) and name in cached.resumed_req_ids:
                del request.tokens[known:]
                request.prefix.cut(known)
            if name in cached.resumed_req_ids:
                request.computed = cached.num_computed_tokens[i]
                request.accepted, request.drafts = 1, []
        for name in (
            *step.finished_req_ids,
            *(step.preempted_req_ids or ()),
            *cached.resumed_req_ids,
        ):
            self._state_index.pop(name, None)

    def _forward(self, step: Any) -> list[list[int]]:
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        queries = {
            name: self._query(step, name, computed[name], n)
            for name, n in step.num_scheduled_tokens.items()
        }
        for name, query in queries.items():
            self._precopy(name, query)
        chains = {name: self._compute(name, query) for name, query in queries.items()}
        return [self._sample(name, query, chains[name]) for name, query in queries.items()]

    def _query(self, step: Any, name: str, computed: int, tokens: int) -> _Query:
        """The positions of one request's pass. The scheduler's count may include drafts that were
        rejected since; the runner corrects it, as V1's does."""
        request = self._requests[name]
        scheduled = step.scheduled_spec_decode_tokens.get(name, ())
        start = computed
        if self._engine.drafts and request.computed < computed:
            assert self._engine.asynchronous, f"{name}: {computed} tokens, not {request.computed}"
            start = request.computed
        drafts = [token if token >= 0 else 0 for token in scheduled]
        if self._engine.asynchronous:
            drafts = (request.drafts + [0] * len(drafts))[: len(drafts)]
        known = start + tokens - len(drafts)
        assert known <= len(request.tokens), f"{name}: {known} of {len(request.tokens)} tokens"
        return _Query(start, known, [*request.tokens[start:known], *drafts])

    def _precopy(self, name: str, query: _Query) -> None:
        """``mamba_utils.preprocess_mamba``: carry the running state into the running block."""
        if not self._engine.recurrent:
            return
        request = self._requests[name]
        size = self._engine.recurrent[0][1].block_size
        before = self._state_index.get(name, (query.start - 1) // size)
        after = (query.end - 1) // size
        if before not in (-1, after):
            self._copy_state(request, before + request.accepted - 1, after)
            request.accepted = 1
        self._state_index[name] = after

    def _copy_state(self, request: _RunnerRequest, source: int, target: int) -> None:
        for group, _ in self._engine.recurrent:
            table = request.tables[group]
            for memory in self._engine.memory:
                for _, pages in memory.groups[group]:
                    pages[table[target]] = pages[table[source]]

    def _compute(self, name: str, query: _Query) -> list[list[bytes]]:
        """One request's pass over its query. Per rank: the digest after each query token."""
        request, start = self._requests[name], query.start
        results = []
        for memory in self._engine.memory:
            digest = self._found(memory, request, name, query)
            chain = []
            for token in query.tokens:
                digest = extend(digest, token)
                chain.append(digest)
            # The running state, and with drafts one more block for the state after each of them.
            for group, spec in self._engine.recurrent:
                column = (query.end - 1) // spec.block_size
                for i, state in enumerate(chain[query.known - start - 1 :]):
                    memory.write_state(group, request.tables[group][column + i], state)
                if spec.num_prefill_checkpoint_blocks and query.known == query.end:
                    self._export(memory, group, spec, request, query, chain)
            for group, spec in self._engine.attention:
                size = spec.block_size
                position = start
                while position < query.end:
                    upto = min((position // size + 1) * size, query.end)
                    block = request.tables[group][position // size]
                    if block:
                        memory.write_tokens(
                            group, block, position % size, chain[position - start : upto - start]
                        )
                    position = upto
            results.append(chain)
        return results

    def _export(
        self,
        memory: KvMemory,
        group: int,
        spec: MambaSpec,
        request: _RunnerRequest,
        query: _Query,
        chain: list[bytes],
    ) -> None:
        """The state at the last hash boundary of a prefill chunk, into the block before its own."""
        coordinator = self._engine.scheduler.kv_cache_manager.coordinator
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [query.end],
            [len(query.tokens)],
            self._engine.cache.hash_block_size,
            spec.block_size,
            spec.prefill_checkpoint_alignment,
            False,
            coordinator._cache_hit_alignment_tokens,
        )
        if offset and (block := request.tables[group][column]):
            memory.write_state(group, block, chain[offset - 1])

    def _found(self, memory: KvMemory, request: _RunnerRequest, name: str, query: _Query) -> bytes:
        """The digest of what the cache holds below the query."""
        start = query.start
        digest = request.prefix[start]
        if not start:
            return digest
        for group, spec in self._engine.recurrent:
            column = (query.end - 1) // spec.block_size + request.accepted - 1
            block = request.tables[group][column]
            found = memory.read_state(group, block)
            digest = self._compare(
                digest, found, memory.expected_state(group, request.prefix[start]),
                f"{name}: state of group {group} after {start} tokens in block {block}",
            )  # fmt: skip
        for group, spec in self._engine.attention:
            size = spec.block_size
            window = getattr(spec, "sliding_window", None)
            chunk = getattr(spec, "attention_chunk_size", None)
            first = max(start - window + 1, 0) if window else 0
            if chunk:
                first = start // chunk * chunk
            for index in range(first // size, -(-start // size)):
                low, high = max(index * size, first), min((index + 1) * size, start)
                block = request.tables[group][index]
                found = memory.read_tokens(group, block, low - index * size, high - index * size)
                expected = self._engine.expected_block(memory, group, request.prefix, low, high)
                digest = self._compare(
                    digest, found, expected,
                    f"{name}: KV of group {group} at {low}-{high} in block {block}",
                )  # fmt: skip
        return digest

    def _compare(self, digest: bytes, found: bytes, expected: bytes, what: str) -> bytes:
        self.checked_bytes += len(found)
        if found == expected:
            return digest
        self.violations.append(what)
        return disturb(digest, found)

    def _sample(self, name: str, query: _Query, chains: Sequence[list[bytes]]) -> list[int]:
        """Verify the drafts and sample one token more, then propose the next drafts."""
        request = self._requests[name]
        sampled: list[int] = []
        if query.known >= len(request.tokens):
            drafts = query.tokens[query.known - query.start :]
            for i in range(len(drafts) + 1):
                position = query.known + i
                digest = chains[0][position - query.start - 1]
                for other in chains[1:]:
                    found = other[position - query.start - 1]
                    digest = digest if found == digest else disturb(digest, found)
                produced = position - request.prompt_tokens
                stops = produced + 1 == request.stop_at
                sampled.append(STOP_TOKEN if stops else draw(digest))
                if i < len(drafts) and drafts[i] != sampled[-1]:
                    break
            self.accepted_drafts += len(sampled) - 1
            self.rejected_drafts += len(drafts) + 1 - len(sampled)
            request.tokens.extend(sampled)
            request.prefix.extend(sampled)
        request.computed = query.known + max(len(sampled) - 1, 0)
        if self._engine.drafts:
            self._postprocess(name, query, max(len(sampled), 1))
            request.drafts = self._propose(request) if sampled else []
        return sampled

    def _postprocess(self, name: str, query: _Query, accepted: int) -> None:
        """``mamba_utils.postprocess_mamba_fused_kernel``: put the state of the deepest accepted
        boundary where prefix caching expects it."""
        request = self._requests[name]
        request.accepted = accepted
        for _, spec in self._engine.recurrent[:1]:
            boundary = request.computed // spec.block_size * spec.block_size
            if boundary < query.known:
                continue
            source, target = self._state_index[name], boundary // spec.block_size - 1
            if source != target or boundary != query.known:
                self._copy_state(request, source + boundary - query.known, target)
            if source == target:
                request.accepted = 1

    def _propose(self, request: _RunnerRequest) -> list[int]:
        """Draft tokens: each the model's own with the engine's chance, else another."""
        prefix, drafts = request.prefix[len(request.prefix)], []
        for i in range(self._engine.drafts):
            produced = len(request.tokens) + i - request.prompt_tokens
            token = STOP_TOKEN if produced + 1 == request.stop_at else draw(prefix)
            if self._engine.random.random() >= self._engine.accept:
                token = token % 900 + 2
            drafts.append(token)
            prefix = extend(prefix, token)
        return drafts

    def drafts_of(self, names: Sequence[str]) -> DraftTokenIds:
        """What a synchronous engine core takes to the scheduler after a step."""
        known = [name for name in names if name in self._requests]
        return DraftTokenIds(known, [list(self._requests[name].drafts) for name in known])


def _connector_output(connector: Any, step: Any) -> KVConnectorOutput:
    """``KVConnectorModelRunnerMixin._get_kv_connector_output``."""
    output = KVConnectorOutput()
    connector.bind_connector_metadata(step.kv_connector_metadata)
    connector.start_load_kv(None)
    connector.wait_for_save()
    results = connector.get_transfer_results(step.finished_req_ids)
    output.finished_sending = results.finished_sending
    output.finished_recving = results.finished_recving
    output.failed_recving = results.failed_recving
    output.invalid_block_ids = connector.get_block_ids_with_load_errors()
    output.kv_connector_stats = connector.get_kv_connector_stats()
    output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
    output.kv_connector_worker_meta = connector.build_connector_worker_meta()
    connector.clear_connector_metadata()
    return output


@dataclass
class Finished:
    """One request's end, as a client sees it."""

    name: str
    prompt: list[int]
    output: list[int]
    reason: str
    params: dict[str, Any]
    expected: list[int]
    prefill: Any = None
    """vLLM's own ``PrefillStats``; None where no token was ever sampled."""

    @property
    def history(self) -> list[int]:
        """Prompt and output, as the next turn replays them."""
        return self.prompt + self.output

    @property
    def loaded(self) -> int:
        """Tokens that the connector loaded."""
        return int(self.params.get("backhaul", {}).get("loaded_tokens", 0))

    @property
    def resumed(self) -> int:
        """Where the prefill began: after the local hit and the load."""
        return int(self.params.get("backhaul", {}).get("local_tokens", 0)) + self.loaded


@dataclass
class _Live:
    prompt: list[int]
    expected: list[int]
    output: list[int] = field(default_factory=list)
    prefill: Any = None


class SimEngine:
    """One engine core. Not thread-safe; the connector's own threads run for real."""

    def __init__(
        self,
        store: str | None,
        *,
        name: str = "engine",
        role: str = "kv_both",
        groups: Sequence[Group] = HYBRID,
        num_blocks: int = 128,
        asynchronous: bool = False,
        late: bool = False,
        budget: int = 64,
        max_requests: int = 16,
        max_tokens: int = 1024,
        options: dict[str, Any] | None = None,
        policy: str = "fail",
        layout: str = "LBHNC",
        ranks: int = 1,
        retention: int | None = 0,
        unit: int | None = None,
        wrap: Callable[[Store], Store] = lambda store: store,
        sibling: bool | str = False,
        kv_events: bool = False,
        drafts: int = 0,
        method: str = "ngram",
        accept: float = 0.7,
        inside_blocks: bool = False,
    ) -> None:
        """
        Args:
            store: the store's address; None runs without a connector.
            asynchronous: two steps in flight, as with vLLM's asynchronous scheduling.
            late: a step runs only when its output is wanted, so that the next one is scheduled
                before its bytes are written.
            budget: tokens per step.
            policy: ``kv_load_failure_policy``.
            ranks: workers, each with its own share of every block.
            unit: ``--prefix-match-unit``, tokens per block hash.
            wrap: put around every store that the connector opens.
            kv_events: the user enabled vLLM's KV events.
            sibling: another connector hands prompts over, both inside ``MultiConnector``; a text
                is its ``kv_role``, ours by default.
            drafts: speculative tokens per step, proposed by ``method``.
            accept: chance of each draft to be the model's own token.
            inside_blocks: ``--enable-mamba-shared-prefix-checkpoint``, for junctions in a block.
        """
        self.name = name
        self.asynchronous, self.late = asynchronous, late
        # A busy machine must not look like a slow store.
        extra = {"store": store, "stream_min_bytes": 1, "lookup_timeout_s": 5.0, **(options or {})}
        self.config = VllmConfig(
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
            kv_transfer_config=None
            if store is None
            else KVTransferConfig(
                kv_role=role,
                engine_id=f"{name}-{next(_names)}",
                kv_load_failure_policy=policy,
                **_connectors(role, policy, extra, sibling=sibling),
            ),
        )
        if kv_events:
            self.config.kv_events_config = KVEventsConfig(
                enable_kv_cache_events=True, publisher="null"
            )
        if drafts:
            # After VllmConfig's own checks, which want a draft model on disk.
            speculative = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=drafts,
                target_model_config=self.config.model_config,
                target_parallel_config=self.config.parallel_config,
            )
            speculative.method = method
            self.config.speculative_config = speculative
        self.drafts, self.accept, self.random = drafts, accept, random.Random(drafts)
        self.config.cache_config.kv_cache_layout = layout
        self.config.parallel_config.world_size = ranks
        self.config.parallel_config.tensor_parallel_size = ranks
        self.cache = _cache_config(self.config, groups, num_blocks)
        self.config.cache_config.num_gpu_blocks = num_blocks
        specs = [group.kv_cache_spec for group in self.cache.kv_cache_groups]
        self.recurrent = [(i, s) for i, s in enumerate(specs) if isinstance(s, MambaSpec)]
        self.attention = [(i, s) for i, s in enumerate(specs) if not isinstance(s, MambaSpec)]
        resolved = self.config.cache_config.get_resolved_kv_cache_layout()
        self.memory = [KvMemory(self.cache, resolved, rank) for rank in range(ranks)]
        self.stop_at: dict[str, int] = {}
        self._blocks: dict[tuple[int, int, bytes, int], bytes] = {}
        self._live: dict[str, _Live] = {}
        self._queue: deque[tuple[Any, ModelRunnerOutput | None]] = deque()
        self._sequence = count(1)
        self.finished: dict[str, Finished] = {}
        self._unchecked: list[Finished] = []
        self.counters: Counter[str] = Counter()
        """The connector's counters as vLLM's statistics carry them, ``name|label``."""
        self.observed: Counter[str] = Counter()
        """How often each of its histograms was observed, by the same names."""
        self.shown: dict[str, int] = {}
        """The gauges that statistics have carried so far, as /metrics shows them."""
        self.steps = 0
        self._start(ranks, wrap, store is not None)

    def _start(self, ranks: int, wrap: Callable[[Store], Store], connected: bool) -> None:
        def opened(uri: str, **keywords: Any) -> Store:
            return wrap(open_store(uri, **keywords))

        algorithm = self.config.cache_config.prefix_caching_hash_algo
        hash_function = get_hash_fn_by_name(algorithm)
        init_none_hash(hash_function)
        block, hash_block = resolve_kv_cache_block_sizes(self.cache, self.config)
        self.cache.hash_block_size = hash_block
        self.hasher = get_request_block_hasher(hash_block, hash_function)
        self.grid = block
        scheduler_class = AsyncScheduler if self.asynchronous else Scheduler
        with (
            patch.object(connector_module, "open_store", opened),
            patch.object(connector_module, "require_vllm_surface", _check_surface_once),
        ):
            self.scheduler = scheduler_class(
                vllm_config=self.config,
                kv_cache_config=self.cache,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=block,
                hash_block_size=hash_block,
                log_stats=True,
            )
            self.workers = []
            for rank in range(ranks if connected else 0):
                config = copy(self.config)
                config.parallel_config = copy(self.config.parallel_config)
                config.parallel_config.rank = rank
                worker = KVConnectorFactory.create_connector(
                    config=config, role=KVConnectorRole.WORKER, kv_cache_config=self.cache
                )
                worker.register_kv_caches(self.memory[rank].tensors)
                for child in getattr(worker, "_connectors", [worker]):
                    if hasattr(child, "attach"):
                        child.attach(self, rank)
                self.workers.append(worker)
        self.aggregator = KVOutputAggregator(ranks)
        self.runner = SimRunner(self)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.initially_free = self.pool.get_num_free_blocks()
        self.requests: dict[str, Request] = {}

    # -- requests -----------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        output: int,
        *,
        stops: bool = True,
        u_end: int | None = None,
        params: dict[str, Any] | None = None,
        name: str | None = None,
        handed_over: int | None = None,
        keys: dict[str, Any] | None = None,
    ) -> str:
        """Queue a request that yields ``output`` tokens and then stops, or is cut off.

        ``handed_over`` is a last prompt token that a sibling connector is about to drop, ``keys``
        what vLLM's block hashes cover beside the tokens.
        """
        name = name or f"{self.name}-{next(self._sequence)}"
        transfer = dict(params or {})
        if u_end is not None:
            transfer["backhaul"] = {"u_end": u_end}
        if stops:
            self.stop_at[name] = output
        sampling = SamplingParams(
            max_tokens=output + 1 if stops else output,
            stop_token_ids=[STOP_TOKEN],
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        request = Request(
            request_id=name,
            prompt_token_ids=[*prompt, *([] if handed_over is None else [handed_over])],
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.hasher,
            **(keys or {}),
        )
        expected = cold_output(prompt, output, stops=stops)
        self._live[name] = _Live(list(prompt), expected)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        """A client went away."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        live = self._live.pop(name, None)
        if live is not None:
            self._end(name, live, "abort", {})

    @property
    def live(self) -> list[str]:
        """Requests that have not ended."""
        return list(self._live)

    def status(self, name: str) -> RequestStatus:
        """A request's status in the scheduler."""
        return self.requests[name].status

    # -- stepping -----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """The engine core would go on stepping."""
        return self.scheduler.has_requests() or bool(self._queue)

    def step(self) -> bool:
        """One turn of the engine core's loop. False where it would sleep."""
        if not self.busy:
            return False
        self.steps += 1
        if self.asynchronous:
            self._step_deep()
        else:
            step = self.scheduler.schedule()
            self._update(step, self.runner.execute(step))
            if self.drafts:
                self.scheduler.update_draft_token_ids(
                    self.runner.drafts_of(list(step.num_scheduled_tokens))
                )
        return True

    def _step_deep(self) -> None:
        """``EngineCore.step_with_batch_queue`` with two batches."""
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            ready = None if self.late else self.runner.execute(step)
            self._queue.append((step, ready))
            if len(self._queue) < 2 and (
                step.total_num_scheduled_tokens or self.scheduler.has_requests()
            ):
                return
        step, ready = self._queue.popleft()
        self._update(step, self.runner.execute(step) if ready is None else ready)

    def _update(self, step: Any, output: ModelRunnerOutput) -> None:
        results = self.scheduler.update_from_output(step, output)
        for batch in results.values():
            if batch.scheduler_stats is not None:
                self._count(batch.scheduler_stats.kv_connector_stats or {})
            for one in batch.outputs:
                live = self._live.get(one.request_id)
                if live is None:
                    continue
                live.output.extend(one.new_token_ids)
                live.prefill = one.prefill_stats or live.prefill
                if one.finish_reason is not None:
                    del self._live[one.request_id]
                    self._end(
                        one.request_id,
                        live,
                        str(one.finish_reason),
                        dict(one.kv_transfer_params or {}),
                    )
        if not step.total_num_scheduled_tokens:
            time.sleep(0.0005)  # as the engine core does: lets transfer threads run

    def _count(self, stats: dict[str, Any]) -> None:
        stats = stats.get("BackhaulConnector", stats)  # inside MultiConnector
        for name, value in stats.get("counters", {}).items():
            assert value >= 0, f"{name} falls by {-value}"
            self.counters[name] += value
        self.shown.update(stats.get("gauges", {}))
        for name, values in stats.get("observations", {}).items():
            assert all(value >= 0 for value in values), name
            self.observed[name] += len(values)

    def _end(self, name: str, live: _Live, reason: str, params: dict[str, Any]) -> None:
        expected = live.expected if reason != "abort" else live.expected[: len(live.output)]
        self.finished[name] = one = Finished(
            name, live.prompt, live.output, reason, params, expected, live.prefill
        )
        self._unchecked.append(one)
        self.stop_at.pop(name, None)

    def run(self, prompt: Sequence[int], output: int, **keywords: Any) -> Finished:
        """Run one request to its end, and the engine until it is idle."""
        name = self.submit(prompt, output, **keywords)
        self.drain()
        return self.finished[name]

    def drain(self, seconds: float = 60.0) -> None:
        """Step until the engine core would sleep."""
        deadline = time.monotonic() + seconds
        while self.step():
            assert time.monotonic() < deadline, (
                f"{self.name} does not come to rest: live {self.live}, gauges {self.gauges()}"
            )

    # -- checks -------------------------------------------------------------------------------

    @property
    def backhaul(self) -> BackhaulConnector:
        """The connector's scheduler half."""
        connector = self.scheduler.connector
        for child in getattr(connector, "_connectors", [connector]):
            if isinstance(child, BackhaulConnector):
                return child
        raise AssertionError("no Backhaul connector")

    def gauges(self) -> dict[str, int]:
        """What must return to zero."""
        if self.scheduler.connector is None:
            return {}
        return self.backhaul._half.gauges()

    def expected_block(
        self, memory: KvMemory, group: int, prefix: Prefix, low: int, high: int
    ) -> bytes:
        """KV of positions ``low`` ... ``high`` - 1 of a prefix, remembered."""
        key = (memory.rank, group, prefix[high], high - low)
        found = self._blocks.get(key)
        if found is None:
            digests = prefix.digests[low + 1 : high + 1]
            found = self._blocks[key] = memory.expected_tokens(group, digests)
        return found

    def check(self) -> None:
        """What must hold after every step."""
        assert not self.runner.violations, self.runner.violations[:3]
        assert min(self.gauges().values(), default=0) >= 0, self.gauges()
        unchecked, self._unchecked = self._unchecked, []
        for one in unchecked:
            assert one.reason != "error", f"{one.name} ended with an error"
            assert one.output == one.expected, (
                f"{one.name} ({one.reason}): {one.output} instead of {one.expected}"
            )

    def check_idle(self, seconds: float = 5.0) -> None:
        """What must hold, or soon hold, once nothing is left to do."""
        self.check()
        deadline = time.monotonic() + seconds
        while any(self.gauges().values()) and time.monotonic() < deadline:
            self.step()
            time.sleep(0.001)
        assert not any(self.gauges().values()), self.gauges()
        assert not self.live
        assert self.pool.get_num_free_blocks() == self.initially_free, (
            f"{self.initially_free - self.pool.get_num_free_blocks()} blocks are not free"
        )
        assert not self.scheduler.requests

    def close(self) -> None:
        """Shut both halves down."""
        if self.scheduler.connector is not None:
            self.scheduler.connector.shutdown()
        for worker in self.workers:
            worker.shutdown()


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


def _with_length(tokens: int) -> ModelConfig:
    config = copy(_model_config())
    config.max_model_len = tokens
    return config


def _cache_config(config: VllmConfig, groups: Sequence[Group], num_blocks: int) -> KVCacheConfig:
    """Groups laid over one allocation, as vLLM's own planning does it."""
    drafts = config.num_speculative_tokens
    largest = max(group.block for group in groups)
    named = [
        KVCacheGroupSpec(
            [f"group{i}.layer{j}" for j in range(group.layers)],
            make_spec(group, drafts, largest),
            is_eagle_group=group.draft,
        )
        for i, group in enumerate(groups)
    ]
    config.cache_config.num_gpu_blocks_override = num_blocks
    made = get_kv_cache_config_from_groups(config, named, available_memory=1 << 30)
    assert made.num_blocks == num_blocks
    made.kv_cache_layout = config.cache_config.kv_cache_layout
    return made


# -- the store, read back ---------------------------------------------------------------------


def check_store(uri: str, engine: SimEngine, *, settle_s: float = 5.0) -> int:
    """Read every checkpoint back and compare it with its key's tokens. Returns their number.

    Every key must belong to a request that ``engine`` or its peers have seen; nothing may be
    leased or half published any more.
    """
    store = open_store(uri, client_name="check")
    deadline = time.monotonic() + settle_s
    while True:
        stats = store.stats(timeout_s=1)
        if not (stats.leases or stats.publications) or time.monotonic() > deadline:
            break
        time.sleep(0.002)
    assert not stats.leases, f"{stats.leases} leases are left"
    assert not stats.publications, f"{stats.publications} publications are left"
    known: dict[bytes, tuple[Request, int]] = {}
    for one in SIMULATED:
        for request in one.requests.values():
            for i, value in enumerate(request.block_hashes):
                known[bytes(value)] = (request, (i + 1) * one.cache.hash_block_size)
    layout = engine.backhaul._half._facts.layout
    domain = engine.backhaul._half._facts.domain.domain_id
    resolved = engine.config.cache_config.get_resolved_kv_cache_layout()
    scratch = [KvMemory(engine.cache, resolved, m.rank) for m in engine.memory]
    store.attach([region for memory in scratch for region in memory_regions(memory.tensors)])
    found = store.list_checkpoints(timeout_s=1)
    for info in found:
        assert info.domain == domain
        assert bytes(info.block_hash) in known, f"unknown prefix of {info.boundary} tokens"
        request, tokens = known[bytes(info.block_hash)]
        assert tokens == info.boundary, f"{tokens} tokens stored as {info.boundary}"
        prefix = Prefix(request.all_token_ids[:tokens])
        unit = layout.hash_tokens
        hashes = [bytes(value) for value in request.block_hashes[: tokens // unit]]
        step = layout.boundary_tokens // unit
        answer = store.lookup(domain, hashes[step - 1 :: step], lease_s=10, timeout_s=1)
        assert answer.lease is not None
        for memory in scratch:
            _check_checkpoint(store, answer.lease, engine, memory, prefix, hashes, info)
        store.release([answer.lease], timeout_s=1)
    store.close()
    return len(found)


def _check_checkpoint(
    store: Store,
    lease: Any,
    engine: SimEngine,
    memory: KvMemory,
    prefix: Prefix,
    hashes: list[bytes],
    info: Any,
) -> None:
    layout = engine.backhaul._half._facts.layout
    unit = layout.hash_tokens
    for group in layout.groups:
        names = engine.cache.kv_cache_groups[group.index].layer_names
        regions = GroupRegions([memory.tensors[n] for n in names], engine.cache.num_blocks)
        size = group.block_tokens
        for index in required_blocks(group, info.boundary):
            key = ObjectKey(
                group.owner(memory.rank), group.index, hashes[(index + 1) * size // unit - 1]
            )
            memory.zero(1)
            read = store.read(lease, [LoadItem(key, regions.segments(1))], verify=True, timeout_s=5)
            assert read.ok, f"{key} of the checkpoint at {info.boundary}: {read.reason}"
            low, high = index * size, (index + 1) * size
            if group.index in dict(engine.recurrent):
                got = memory.read_state(group.index, 1)
                want = memory.expected_state(group.index, prefix[high])
            else:
                got = memory.read_tokens(group.index, 1, 0, size)
                want = engine.expected_block(memory, group.index, prefix, low, high)
            assert got == want, f"group {group.index}, tokens {low}-{high} at {info.boundary}"


SIMULATED: list[SimEngine] = []
"""Engines whose requests ``check_store`` knows; see the fixture of the same purpose."""


@dataclass
class Pair:
    """Engines that share one store."""

    uri: str
    engines: list[SimEngine] = field(default_factory=list)

    def engine(self, **keywords: Any) -> SimEngine:
        """One more engine."""
        engine = SimEngine(self.uri, **keywords)
        self.engines.append(engine)
        SIMULATED.append(engine)
        return engine

    def check_idle(self) -> None:
        """Everything is given back, and what is stored is right."""
        for engine in self.engines:
            engine.check_idle()
        self.checkpoints()

    def checkpoints(self) -> int:
        """Read the store back; the number of checkpoints in it."""
        connected = [e for e in self.engines if e.scheduler.connector is not None]
        return check_store(self.uri, connected[0]) if connected else 0

    def close(self) -> None:
        """Stop every engine."""
        for engine in self.engines:
            engine.close()
            SIMULATED.remove(engine)


def new_uri(capacity: str = "64MiB") -> str:
    """The address of a store of its own."""
    return f"inprocess://sim-{next(_names)}?capacity={capacity}"
