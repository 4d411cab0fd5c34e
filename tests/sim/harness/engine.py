"""The scheduler side: one engine core over vLLM's real scheduler and cache manager."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any
from unittest.mock import patch

from sim_model import STOP_TOKEN, Prefix, cold_output
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from backhaul.connector import connector as connector_module
from backhaul.connector.connector import BackhaulConnector
from backhaul.transfer.base import Store
from backhaul.transfer.registry import open_store
from harness.configuration import make_config, transfer_config
from harness.groups import HYBRID, Group, cache_config
from harness.memory import KvMemory
from harness.runner import SimRunner

HANGS_S = 600.0
"""After which something hangs, seconds. A busy machine may take any time, so no less."""

_check_surface_once = cache(connector_module.require_vllm_surface)


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
        transfer = None
        if store is not None:
            transfer = transfer_config(store, name, role, policy, options or {}, sibling)
        self.config = make_config(
            groups,
            transfer,
            asynchronous=asynchronous,
            budget=budget,
            max_requests=max_requests,
            max_tokens=max_tokens,
            retention=retention,
            unit=unit,
            inside_blocks=inside_blocks,
            kv_events=kv_events,
            drafts=drafts,
            method=method,
            layout=layout,
            ranks=ranks,
        )
        self.drafts, self.accept, self.random = drafts, accept, random.Random(drafts)
        self.cache = cache_config(self.config, groups, num_blocks)
        self.config.cache_config.num_gpu_blocks = num_blocks
        specs = [group.kv_cache_spec for group in self.cache.kv_cache_groups]
        self.recurrent = [(i, s) for i, s in enumerate(specs) if isinstance(s, MambaSpec)]
        self.attention = [(i, s) for i, s in enumerate(specs) if not isinstance(s, MambaSpec)]
        resolved = self.config.cache_config.get_resolved_kv_cache_layout()
        self.memory = [KvMemory(self.cache, resolved, rank) for rank in range(ranks)]
        self.stop_at: dict[str, int] = {}
        self.says: dict[str, list[int]] = {}
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
        says: Sequence[int] = (),
        reads_cache: bool = True,
    ) -> str:
        """Queue a request that yields ``output`` tokens and then stops, or is cut off.

        ``handed_over`` is a last prompt token that a sibling connector is about to drop, ``keys``
        what vLLM's block hashes cover beside the tokens. ``says`` are the first tokens that the
        model yields for this prompt, as long as its cache holds what it should. Without
        ``reads_cache`` vLLM computes the whole prompt.
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
            skip_reading_prefix_cache=None if reads_cache else True,
        )
        request = Request(
            request_id=name,
            prompt_token_ids=[*prompt, *([] if handed_over is None else [handed_over])],
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.hasher,
            **(keys or {}),
        )
        self.says[name] = list(says)
        expected = cold_output(prompt, output, stops=stops, says=says)
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
        self.says.pop(name, None)

    def run(self, prompt: Sequence[int], output: int, **keywords: Any) -> Finished:
        """Run one request to its end, and the engine until it is idle."""
        name = self.submit(prompt, output, **keywords)
        self.drain()
        return self.finished[name]

    def drain(self, seconds: float = HANGS_S) -> None:
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

    def check_idle(self, seconds: float = HANGS_S) -> None:
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
