"""What the simulations' tests do over and over: prompts, both kinds of scheduling, the store's
content."""

from __future__ import annotations

import contextlib
import random
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from harness import HANGS_S, Pair

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
    found = store.list_checkpoints(timeout_s=300)
    store.close()
    return sorted((info.boundary, set(info.kinds)) for info in found)


@contextlib.contextmanager
def daemon(*options: str) -> Iterator[str]:
    """The address of a store daemon of its own, started with these options."""
    command = [sys.executable, "-m", "backhaul.deploy.cli", "store", *options]
    command += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 300)
        line = process.stdout.readline() if ready else ""
        found = re.search(r"grpc \S+:(\d+)", line)
        assert found, f"the daemon did not start: {line!r}"
        yield f"backhaul://127.0.0.1:{found[1]}"
    finally:
        process.kill()
        process.wait(timeout=300)
        if process.stdout is not None:
            process.stdout.close()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
