"""The daemon's memory: one anonymous mapping, registered with a NIXL agent.

Workers read and write it one-sidedly; the daemon itself never touches a payload byte. The agent's
progress thread serves peers whose transport needs the target's help (shared memory, TCP).
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import psutil

from backhaul.protocols.errors import ConfigError
from backhaul.transfer.base import MemoryRegion
from backhaul.transfer.daemon.settings import format_bytes
from backhaul.transfer.nixl_agent import NixlAgent

_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""(limit, usage) of this process's memory, cgroup version 2 and 1, as a container sees them."""


class Pool:
    """Memory and its registration, from construction to ``close``."""

    def __init__(self, capacity_bytes: int, *, instance_id: str, prefault: bool) -> None:
        """Raises ``ConfigError`` where memory or NIXL is lacking."""
        self.capacity_bytes = capacity_bytes
        self.agent_name = f"backhaul-store-{instance_id}"
        self._memory = _map(capacity_bytes, prefault)
        agent = NixlAgent(self.agent_name, serve=True)
        self._anchor = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._anchor)
        self._agent: NixlAgent | None = agent
        agent.register([MemoryRegion(self.address, capacity_bytes)])
        self.agent_metadata: bytes = agent.metadata

    def close(self) -> None:
        """Deregister and unmap. Safe to call twice."""
        if self._agent is None:
            return
        self._agent.close()
        self._agent = None
        del self._anchor  # an exported pointer would keep the mapping from closing
        self._memory.close()


def available_bytes() -> int:
    """What this process may still allocate: the machine's free memory, or less where a cgroup
    says so."""
    available = int(psutil.virtual_memory().available)
    for limit, usage in _CGROUP_FILES:
        try:
            left = int(limit.read_text()) - int(usage.read_text())
        except (OSError, ValueError):  # no such cgroup, or "max"
            continue
        available = min(available, max(left, 0))
    return available


def _map(capacity_bytes: int, prefault: bool) -> mmap.mmap:
    available = available_bytes()
    if capacity_bytes > available:
        raise ConfigError(
            f"capacity of {format_bytes(capacity_bytes)} exceeds the {format_bytes(available)} of "
            "memory that is available: give a smaller --capacity"
        )
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (mmap.MAP_POPULATE if prefault else 0)
    try:
        return mmap.mmap(-1, capacity_bytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"cannot map a pool of {format_bytes(capacity_bytes)}: {error}; give a smaller "
            "--capacity"
        ) from None
