"""What the simulations' tests do over and over: prompts, both kinds of scheduling, the store's
content."""

from __future__ import annotations

import random

import pytest
from harness import Pair

from backhaul.protocols.checkpoint import CheckpointKind
from backhaul.transfer.registry import open_store

ASYNC = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def tokens(count: int, seed: int) -> list[int]:
    """A prompt that shares no prefix with one of another seed."""
    generator = random.Random(seed)
    return [generator.randrange(2, 1000) for _ in range(count)]


def kinds(pair: Pair) -> list[tuple[int, set[CheckpointKind]]]:
    """(boundary, kinds) of everything in the store, by boundary."""
    store = open_store(pair.uri, client_name="look")
    found = store.list_checkpoints(timeout_s=1)
    store.close()
    return sorted((info.boundary, set(info.kinds)) for info in found)
