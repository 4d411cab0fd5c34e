"""vLLM worker extension of the end-to-end tests: looks at KV pages, and lets a test hold or spoil
a transfer at a chosen moment. Loaded with ``--worker-extension-cls backhaul_probe.Probe``.

Faults of the store itself are made by killing or stopping its real process; what is injected here
cannot be had from a real one: wrong bytes that pass every check, and a stop at one exact line.
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import Any

import xxhash

from backhaul.protocols.sharding import Rows, page_bytes


class Probe:
    """Methods are called through vLLM's ``/collective_rpc``; they return JSON-able values."""

    def probe_digests(self) -> list[str]:
        """xxh3 (hex) of the bytes of every block of every group, as an object would hold them."""
        worker = _half()
        found = set()
        for regions in worker._groups.values():
            for block in range(1, regions.num_blocks):
                digest = xxhash.xxh3_64()
                for address, nbytes in regions.segments(block).tolist():
                    digest.update(ctypes.string_at(address, nbytes))
                found.add(digest.hexdigest())
        return sorted(found)

    def probe_make_stage_buffers(self) -> bool:
        """What a later pipeline stage receives into. vLLM's CPU workers make it only while they
        warm up for compilation, which eager ones do not: their first step would fail."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        from vllm.distributed import get_pp_group

        if get_pp_group().is_first_rank:
            return False
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )
        return True

    def probe_state_bytes(self) -> int:
        """Bytes of one state on this rank, over all recurrent groups."""
        attention = _attention_group()
        groups = _half()._groups.items()
        return sum(regions.object_bytes for group, regions in groups if group != attention)

    def probe_zero(self) -> bool:
        """Zero every page; only while no request holds any."""
        for group, regions in _half()._groups.items():
            for block in range(1, regions.num_blocks):
                _zero(group, block)
        return True

    def probe_close_gate(self, operation: str, rank: int | None = None) -> bool:
        """Hold every further ``read``, ``reserve`` or ``commit`` of this worker's store; with a
        rank, of that worker's only."""
        if rank not in (None, _half()._rank):
            return False
        store, gate = _half()._store, threading.Event()
        original = getattr(store, operation)

        def held(*args: Any, **kwargs: Any) -> Any:
            gate.wait(60.0)
            return original(*args, **kwargs)

        setattr(store, operation, held)
        _GATES[operation] = (gate, original)
        return True

    def probe_open_gate(self, operation: str) -> bool:
        """Let held calls go on, and later ones pass."""
        if operation not in _GATES:
            return False
        gate, original = _GATES.pop(operation)
        setattr(_half()._store, operation, original)
        gate.set()
        return True

    def probe_tamper(self, mode: str) -> bool:
        """Spoil what further loads put into memory: ``zeros`` in every state, ``other`` for the
        state that ``record`` saw before, ``attention`` for zeros in every attention block;
        ``off`` ends it."""
        worker = _half()
        original = _TAMPER.setdefault("original", worker._load)
        if mode == "off":
            worker._load = original
            return True

        def tampered(job: Any) -> Any:
            result = original(job)
            blocks = {b.group: [x for x in job.blocks if x.group == b.group] for b in job.blocks}
            for group, members in blocks.items():
                attention = group == _attention_group()
                if mode == "attention" and attention:
                    for member in members:
                        _zero(group, member.block_id)
                elif mode != "attention" and not attention:
                    self._spoil_state(group, members[0].block_id, mode)
            return result

        worker._load = tampered
        return True

    def probe_convert(self, mode: str) -> bool:
        """Cut wrongly what further loads convert from another number of ranks, so that every byte
        is a published one and lies in the wrong place: ``heads`` and ``states`` take KV heads or
        state matrices from the wrong shard, ``projections`` exchanges q and k of the convolution;
        ``off`` ends it."""
        from backhaul.connector import conversion as module

        original = _TAMPER.setdefault("conversion", module.conversion)
        module.conversion = original if mode == "off" else partial(_miscut, original, mode)
        return True

    def _spoil_state(self, group: int, block: int, mode: str) -> None:
        if mode == "zeros":
            _zero(group, block)
            return
        for index, (address, nbytes) in enumerate(_segments(group, block)):
            if mode == "record":
                _TAMPER["state", group, index] = ctypes.string_at(address, nbytes)
            else:
                ctypes.memmove(address, _TAMPER["state", group, index], nbytes)


_GATES: dict[str, Any] = {}
_TAMPER: dict[Any, Any] = {}


def _miscut(original: Any, mode: str, page: Any, sources: int, ranks: int, rank: int) -> list[Any]:
    """``sharding.conversion``, wrong on purpose; of attention a page is one array, of a delta net
    the convolution's q, k, v and then the matrices."""
    runs = original(page, sources, ranks, rank)
    if (mode == "heads") is not (len(page) == 1):
        return list(runs)
    if mode == "projections":
        q, k = (page_bytes((Rows(1, (part,)),), ranks) for part in page[0].parts[:2])
        assert q == k
        moved = {True: q, False: -q}
        return [
            run._replace(offset=run.offset + moved[run.offset < q]) if run.offset < q + k else run
            for run in runs
        ]
    first = page_bytes(page[:1], ranks) if mode == "states" else 0
    others = original(page, sources, ranks, ranks - 1 - rank)
    return [
        other._replace(source=sources - 1 - other.source) if run.offset >= first else run
        for run, other in zip(runs, others, strict=True)
    ]


def _zero(group: int, block: int) -> None:
    for address, nbytes in _segments(group, block):
        ctypes.memset(address, 0, nbytes)


def _attention_group() -> int:
    from vllm.v1.kv_cache_interface import MambaSpec

    groups = _half()._kv_cache_config.kv_cache_groups
    return next(i for i, g in enumerate(groups) if not isinstance(g.kv_cache_spec, MambaSpec))


def _segments(group: int, block: int) -> list[tuple[int, int]]:
    return [(int(a), int(n)) for a, n in _half()._groups[group].segments(block).tolist()]


def _half() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    for child in getattr(connector, "sub_connectors", [connector]):
        if type(child).__name__ == "BackhaulConnector":
            return child._worker
    raise RuntimeError("this worker runs no BackhaulConnector")
