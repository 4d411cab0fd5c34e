"""vLLM worker extension of the end-to-end tests: looks at KV pages, and lets a test hold or spoil
a transfer at a chosen moment. Loaded with ``--worker-extension-cls backhaul_probe.Probe``.

Faults of the store itself are made by killing or stopping its real process; what is injected here
cannot be had from a real one: wrong bytes that pass every check, and a stop at one exact line.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import xxhash


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

    def probe_close_gate(self, operation: str) -> bool:
        """Hold every further ``read``, ``reserve`` or ``commit`` of this worker's store."""
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
        gate, original = _GATES.pop(operation)
        setattr(_half()._store, operation, original)
        gate.set()
        return True

    def probe_tamper(self, mode: str) -> bool:
        """Spoil what further loads put into recurrent blocks: ``zeros``, ``other`` (keeps the
        bytes of the former load's state) or ``off``. ``shift``: swap two attention blocks."""
        worker = _half()
        original = _TAMPER.setdefault("original", worker._load)
        if mode == "off":
            worker._load = original
            return True

        def tampered(job: Any) -> Any:
            result = original(job)
            blocks = {b.group: [x for x in job.blocks if x.group == b.group] for b in job.blocks}
            for group, members in blocks.items():
                if len(members) == 1:
                    self._spoil_state(group, members[0].block_id, mode)
                elif mode == "shift":
                    self._swap(group, members[0].block_id, members[-1].block_id)
            return result

        worker._load = tampered
        return True

    def _spoil_state(self, group: int, block: int, mode: str) -> None:
        for index, (address, nbytes) in enumerate(_segments(group, block)):
            if mode == "zeros":
                ctypes.memset(address, 0, nbytes)
            elif mode in ("other", "record"):
                key = ("state", group, index)
                former = _TAMPER.get(key)
                if mode == "record" or former is None:
                    _TAMPER[key] = ctypes.string_at(address, nbytes)
                else:
                    ctypes.memmove(address, former, nbytes)

    def _swap(self, group: int, a: int, b: int) -> None:
        for (left, nbytes), (right, _) in zip(
            _segments(group, a), _segments(group, b), strict=True
        ):
            held = ctypes.string_at(left, nbytes)
            ctypes.memmove(left, right, nbytes)
            ctypes.memmove(right, held, nbytes)


_GATES: dict[str, Any] = {}
_TAMPER: dict[Any, Any] = {}


def _segments(group: int, block: int) -> list[tuple[int, int]]:
    return [(int(a), int(n)) for a, n in _half()._groups[group].segments(block).tolist()]


def _half() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    for child in getattr(connector, "sub_connectors", [connector]):
        if type(child).__name__ == "BackhaulConnector":
            return child._worker
    raise RuntimeError("this worker runs no BackhaulConnector")
