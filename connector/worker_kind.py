"""Which part of requests this engine serves: what it was told, what stands beside it, what comes.

Whether decode's checkpoints have a way back hangs on it: an engine that loads but only decodes
brings no conversation on, so it is nobody's way back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from backhaul.protocols.options import WorkerKind

_OWN_SHARE_MAX = 0.1
"""Share of prompts that begin on an engine that otherwise decodes: probes of its health, and short
prompts that a proxy does not send through prefill."""


def sibling_roles() -> tuple[str, ...]:
    """``kv_role`` of every other connector of the ``MultiConnector`` that is being constructed; ()
    outside of one.

    Its children get a configuration in which their own entry stands in place of the whole, so the
    caller's frame is the only place where the others can be seen.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    code = MultiConnector.__init__.__code__
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ()
    whole: Any = frame.f_locals["vllm_config"].kv_transfer_config
    children = whole.kv_connector_extra_config.get("connectors", ())
    others = (one for one in children if one.get("kv_connector") != "BackhaulConnector")
    return tuple(str(one.get("kv_role")) for one in others)


def known_kind(told: WorkerKind | None, siblings: Iterable[str]) -> WorkerKind | None:
    """What is known at start; None: the requests will show. A sibling that hands prompts over does
    so from ``kv_producer`` to ``kv_consumer``; one with ``kv_both`` says nothing."""
    if told is not None:
        return told
    kinds = {"kv_producer": WorkerKind.PREFILL, "kv_consumer": WorkerKind.DECODE}
    found = {kinds[role] for role in siblings if role in kinds}
    return found.pop() if len(found) == 1 else None


class ObservedKind:
    """What the requests show where nobody said it. One thread calls it."""

    def __init__(self) -> None:
        self._own = 0
        self._handed_over = 0

    def saw(self, *, handed_over: bool) -> bool:
        """A request came, its prompt computed elsewhere or not: whether the engine only decodes."""
        self._handed_over += handed_over
        self._own += not handed_over
        return self._own <= _OWN_SHARE_MAX * (self._own + self._handed_over)
