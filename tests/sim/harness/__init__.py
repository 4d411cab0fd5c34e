"""vLLM's real scheduler and cache manager over a model without weights.

A :class:`SimEngine` is one engine core: the real ``Scheduler`` (or ``AsyncScheduler`` two steps
deep), KV tensors as vLLM allocates them, the connector's scheduler half and one worker half per
rank, and in place of the model runner a forward pass that follows V1's block tables and align-mode
copies but computes with :mod:`sim_model`.
"""

from harness.configuration import MODEL_CONFIG
from harness.engine import HANGS_S, Finished, SimEngine
from harness.groups import ATTENTION, BLOCK, FULL, HYBRID, MIXED, STATE, WINDOW, Group, make_spec
from harness.pair import Pair, new_uri

__all__ = [
    "ATTENTION",
    "BLOCK",
    "FULL",
    "HANGS_S",
    "HYBRID",
    "MIXED",
    "MODEL_CONFIG",
    "STATE",
    "WINDOW",
    "Finished",
    "Group",
    "Pair",
    "SimEngine",
    "make_spec",
    "new_uri",
]
