"""Which transports UCX really uses between here and a store's pool: reads once and asks UCX.

Neither NIXL's telemetry (times and bytes) nor its API names a transport, and no tool shows them for
a process that runs already. UCX itself does, for the process that it is in: with
``UCX_PROTO_INFO=used`` it lists, at the end, the protocol of every kind of transfer that took
place. So the answer is that of a process started here and now, with this machine's devices,
namespaces and ``UCX_*`` variables; it is an engine's own where that engine shares all of these.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import NamedTuple

PROBE_BYTES = 1 << 20
"""The smallest pool there is, and enough for UCX to use its protocol for long messages."""
START_ALLOWANCE_S = 60.0
"""Importing NIXL takes seconds, and far more on a busy machine."""

_TITLE = re.compile(r"remote memory read by ucp_get")
_ROW = re.compile(r"\|\s*([1-9]\d*)\s*\|\s*(\S+)\s*\|\s*([^|]+?)\s*\|\s*([^|]+?)\s*\|\s*$")


class ProbeResult(NamedTuple):
    """``transports``: UCX's names, e.g. ``cma/memory`` or ``rc_mlx5/mlx5_0:1``, of the read that
    was made; empty with ``error`` where none was."""

    transports: tuple[str, ...]
    error: str = ""


def parse_used(text: str) -> tuple[str, ...]:
    """Transports of remote reads in UCX's report, in its order, each once."""
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        if _TITLE.search(line):
            inside = True
        elif re.search(r"\|.*(ucp_|cfg#)", line):
            inside = False
        elif inside and (row := _ROW.search(line)):
            # e.g. "cma/memory", or "50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1"
            found += re.findall(r"[a-z0-9_]+/[\w.:@-]+", row[4])
    return tuple(dict.fromkeys(found))


def probe_transports(target: str, timeout_s: float) -> ProbeResult:
    """Run the probe in a process of its own: UCX reads its variables once, at its start."""
    environment = os.environ | {"UCX_PROTO_INFO": "used", "UCX_LOG_LEVEL": "warn"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "backhaul.transfer.transport_probe", target, str(timeout_s)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout_s + START_ALLOWANCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ProbeResult((), f"no answer within {timeout_s + START_ALLOWANCE_S:.0f} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return ProbeResult((), lines[-1] if lines else f"exit code {done.returncode}")
    used = parse_used(done.stdout + done.stderr)
    return ProbeResult(used, "" if used else "UCX did not report what it used")


def main() -> None:
    """Read the start of the pool of the store at ``argv[1]`` once, within ``argv[2]`` seconds."""
    import time

    import numpy as np

    from backhaul.protocols import store_pb2
    from backhaul.transfer.backends.rpc import PROTOCOL_VERSION, CatalogChannel
    from backhaul.transfer.base import MemoryKind, MemoryRegion
    from backhaul.transfer.nixl_agent import NixlAgent, Operation, Outcome, Post

    target, timeout_s = sys.argv[1], float(sys.argv[2])
    channel = CatalogChannel(target)
    request = store_pb2.HelloRequest(
        protocol_version=PROTOCOL_VERSION, client_name=f"transport-probe-{os.getpid()}"
    )
    hello = channel.call("Hello", request, timeout_s)
    memory = np.zeros(PROBE_BYTES, dtype=np.uint8)
    agent = NixlAgent(f"transport-probe-{os.getpid()}")
    agent.register([MemoryRegion(memory.ctypes.data, PROBE_BYTES)])
    agent.add_peer(hello.agent_name, hello.agent_metadata)
    local = np.array([[memory.ctypes.data, PROBE_BYTES, 0]], dtype=np.uint64)
    remote = np.array([[hello.pool_address, PROBE_BYTES, 0]], dtype=np.uint64)
    ended = agent.transfer(
        Operation.READ,
        hello.agent_name,
        [Post(local, remote, MemoryKind.DRAM)],
        time.monotonic() + timeout_s,
    )
    if ended.outcome is not Outcome.DONE:
        # Not closed: a transfer in flight may still write into the memory above.
        print(f"the read ended as {ended.outcome.value} {ended.detail}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    agent.close()
    channel.close()


if __name__ == "__main__":
    main()
