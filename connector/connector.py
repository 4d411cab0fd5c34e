"""vLLM's view of Backhaul: one class, of which each process uses one half.

Scheduler half: decides, in the engine-core process. Worker half: moves bytes, one per rank. They
talk once per engine step, through vLLM (see messages.py), and share nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from backhaul.connector.engine import cache_layout, engine_facts
from backhaul.connector.fingerprints import hashes_are_private
from backhaul.connector.messages import StepMetadata
from backhaul.connector.scheduler import SchedulerHalf
from backhaul.connector.selfcheck import require_vllm_surface
from backhaul.connector.stats import BackhaulPromMetrics, BackhaulStats
from backhaul.connector.worker import WorkerHalf
from backhaul.connector.worker_kind import known_kind, sibling_roles
from backhaul.protocols.options import WorkerKind, parse_options
from backhaul.transfer.registry import open_store

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# vLLM configures handlers for its own logger tree only.
logger = init_logger("vllm.backhaul")


class BackhaulConnector(KVConnectorBase_V1, SupportsHMA):
    """Publishes finalized checkpoints to a store and loads them at the next turn.

    Roles: ``kv_producer`` publishes, ``kv_consumer`` loads, ``kv_both`` does both. Raises
    ``ConfigError`` or ``UnsupportedError`` at start where an option, the engine's layout or vLLM
    itself does not fit; from then on no fault of the store fails a request.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_vllm_surface()
        transfer = vllm_config.kv_transfer_config
        options = parse_options(transfer.kv_connector_extra_config)
        store = open_store(options.store, client_name=f"{transfer.engine_id}:{role.name.lower()}")
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            facts = engine_facts(vllm_config, kv_cache_config)
            events = vllm_config.kv_events_config
            siblings = sibling_roles()
            kind = known_kind(options.worker_kind, siblings)
            self._scheduler = SchedulerHalf(
                facts,
                options,
                store,
                loads=transfer.is_kv_consumer,
                publishes=transfer.is_kv_producer,
                kind=kind,
                kv_events=bool(events and events.enable_kv_cache_events),
            )
            logger.info(
                "backhaul: engine %s, store %s, policy %s, role %s, worker kind %s, boundary grid "
                "%d tokens, domain %s",
                facts.engine_id,
                options.store,
                options.policy,
                transfer.kv_role,
                kind or "as requests show",
                facts.layout.boundary_tokens,
                facts.domain.domain_id,
            )
            self._say_what_cannot_be_shared(vllm_config, kind)
            if siblings and kind is None:
                logger.info(
                    "backhaul: kv_role %s of the connectors beside this one does not say whether "
                    "this engine prefills or decodes, so only its requests will show whether "
                    "replies have a way back; set worker_kind (prefill, decode, both), or there "
                    "kv_producer for prefill and kv_consumer for decode",
                    ", ".join(dict.fromkeys(siblings)),
                )
        else:
            layout = cache_layout(vllm_config, kv_cache_config)  # an unfit engine fails here
            parallel = vllm_config.parallel_config
            rank = parallel.rank % parallel.world_size
            self._worker = WorkerHalf(options, store, rank, kv_cache_config, layout)

    @staticmethod
    def _say_what_cannot_be_shared(vllm_config: VllmConfig, kind: WorkerKind | None) -> None:
        """What is known at start without asking anybody; see ``Presence`` for the rest."""
        transfer, algorithm = (
            vllm_config.kv_transfer_config,
            vllm_config.cache_config.prefix_caching_hash_algo,
        )
        if not transfer.is_kv_producer:
            logger.log(
                logging.WARNING if kind is WorkerKind.DECODE else logging.INFO,
                "backhaul: no publication path from here: kv_role %s publishes nothing; right for "
                "prefill engines without U_end, for others use kv_both",
                transfer.kv_role,
            )
        if not transfer.is_kv_consumer and kind is WorkerKind.PREFILL:
            logger.warning(
                "backhaul: no publication path to here: kv_role %s loads nothing, so no prompt of "
                "this prefill engine goes on from what decode publishes; use kv_both",
                transfer.kv_role,
            )
        if hashes_are_private(algorithm):
            logger.warning(
                "backhaul: no publication path: %s hashes with a random seed, so no other engine "
                "can match them; use --prefix-caching-hash-algo sha256 or set PYTHONHASHSEED",
                algorithm,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost publication is a future cache miss, nothing more."""
        return False

    def shutdown(self) -> None:
        """Stop threads and close the store."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.shutdown()

    # -- worker -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register vLLM's cache tensors with the store's transport."""
        assert self._worker is not None
        self._worker.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads are asynchronous and start in ``wait_for_save``."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no layer ever waits for a load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole blocks are sent once they are final."""

    def wait_for_save(self) -> None:
        """Once per step, after the forward was launched: hand this step's jobs to the threads."""
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self._worker.submit(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose load is over. Failures go through the worker report (see consumer.py)."""
        assert self._worker is not None
        received, _ = self._worker.drain()
        return KVConnectorTransferResults(finished_recving=received)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What this rank has to tell the scheduler half."""
        assert self._worker is not None
        return self._worker.take_report()

    # -- scheduler ----------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """vLLM's cache manager exists now."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._half.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """A request arrived."""
        self._half.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that the store can add to the local hit, always loaded asynchronously."""
        return self._half.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks were allocated for a request."""
        self._half.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """This step's jobs."""
        return self._half.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the ranks reported."""
        self._half.update_connector_output(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended. Never asks vLLM to keep its blocks: what is still needed is held."""
        return self._half.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Keep an idle engine stepping while publications are under way."""
        return self._half.has_pending_push_work()

    def reset_cache(self) -> bool | None:
        """Asked for where weights change: load and publish nothing from now on."""
        self._half.reset_cache()
        return True

    # -- metrics ------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> BackhaulStats | None:
        """Increments since the last call; only the scheduler half has any."""
        return self._scheduler.take_stats() if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BackhaulStats | None:
        """Rebuild stats that crossed a process boundary."""
        return BackhaulStats(data=data) if data is not None else BackhaulStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> BackhaulPromMetrics:
        """Register backhaul:* with vLLM's /metrics."""
        return BackhaulPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler hook was called on a worker"
        return self._scheduler

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What this engine published, and what it saw to be gone, where KV events are enabled."""
        return self._half.take_events()
