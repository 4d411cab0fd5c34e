"""The worker side: V1's model runner over :mod:`sim_model`.

It follows the scheduler's block tables, does align mode's copies of states, and calls every rank's
connector in the order of V1's own runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sim_model import STOP_TOKEN, Prefix, disturb, draw, extend
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from harness.memory import KvMemory

if TYPE_CHECKING:
    from harness.engine import SimEngine


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
            one.kv_connector_output = connector_output(connector, step)
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
                sampled.append(self._next(name, request, position, digest))
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

    def _next(self, name: str, request: _RunnerRequest, position: int, digest: bytes) -> int:
        produced = position - request.prompt_tokens
        if produced + 1 == request.stop_at:
            return STOP_TOKEN
        says = self._engine.says.get(name, [])
        right = produced < len(says) and digest == request.prefix[position]
        return says[produced] if right else draw(digest)

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


def connector_output(connector: Any, step: Any) -> KVConnectorOutput:
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
