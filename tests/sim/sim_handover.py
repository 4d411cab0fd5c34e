"""A stand-in for NIXL: hands a prompt's cache from the prefill engine to the decode engine.

As NIXL does for recurrent models, the prefill side drops the prompt's last token and the decode
side gets N - 1 tokens: the running state after them, which lies on no boundary, and their KV.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sim_model import Prefix
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass
class Handovers(KVConnectorMetadata):
    """What to fill in one step: request, its first N - 1 tokens, block ids, first missing token."""

    items: list[tuple[str, list[int], tuple[list[int], ...], int]] = field(default_factory=list)


class SimHandover(KVConnectorBase_V1, SupportsHMA):
    """Both halves; ``attach`` gives the worker half its memory."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._offers: dict[str, int] = {}
        self._handed: set[str] = set()
        self._outbox = Handovers()
        self._received: set[str] = set()

    # -- scheduler ----------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and not params.get("_p_side_truncated"):
            del request.prompt_token_ids[-1:]
            del request._all_token_ids[-1:]
            request.num_prompt_tokens -= 1
            request.max_tokens = 1
            params["_p_side_truncated"] = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        params = request.kv_transfer_params or {}
        missing = request.num_prompt_tokens - 1 - num_computed_tokens
        if (
            not params.get("do_remote_prefill")
            or missing <= 0
            or request.request_id in self._handed
        ):
            return 0, False
        self._offers[request.request_id] = num_computed_tokens
        return missing, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        local = self._offers.pop(request.request_id, None)
        if local is None or not num_external_tokens:
            return
        self._handed.add(request.request_id)
        tokens = list(request.all_token_ids[: request.num_prompt_tokens - 1])
        self._outbox.items.append((request.request_id, tokens, blocks.get_block_ids(), local))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        outbox, self._outbox = self._outbox, Handovers()
        return outbox

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        self._handed.discard(request.request_id)
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode"):
            return False, None
        # As NIXL's prefill side tells the decode side where the cache is.
        return False, {"do_remote_prefill": True, "remote_request_id": request.request_id}

    # -- worker -------------------------------------------------------------------------------

    def attach(self, engine: Any, rank: int) -> None:
        """The engine whose memory is filled."""
        self._engine, self._memory = engine, engine.memory[rank]

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        pass

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Handovers)
        for name, tokens, tables, local in metadata.items:
            self._fill(Prefix(tokens), tables, local)
            self._received.add(name)

    def _fill(self, prefix: Prefix, tables: tuple[list[int], ...], local: int) -> None:
        end = len(prefix)
        for group, spec in self._engine.recurrent:
            block = tables[group][(end - 1) // spec.block_size]
            self._memory.write_state(group, block, prefix[end])
        for group, spec in self._engine.attention:
            size = spec.block_size
            for low in range(local // size * size, end, size):
                high = min(low + size, end)
                if block := tables[group][low // size]:
                    digests = prefix.digests[low + 1 : high + 1]
                    self._memory.write_tokens(group, block, 0, digests)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, self._received = self._received, set()
        return KVConnectorTransferResults(finished_recving=received)
