"""Whether bytes travel over something better than TCP, for the probe and for engines. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backhaul.deploy.findings import Finding, Level
from backhaul.transfer.transport_probe import ProbeResult

_SLOW = ("tcp",)


def check_transports(probe: ProbeResult) -> Finding:
    """What bytes travel over between here and the pool."""
    name = "transports"
    if probe.error:
        return Finding(
            name,
            Level.PROBLEM,
            f"no bytes could be read from the pool: {probe.error}",
            "run the probe with UCX_LOG_LEVEL=info; usual causes are a firewall and UCX_TLS or "
            "UCX_NET_DEVICES that leave nothing both sides share",
        )
    used = ", ".join(probe.transports)
    return _judge(name, f"a process started here reads the pool over {used}", probe.transports)


def check_engine_transports(engine: str, ranks: Mapping[str, int]) -> Finding:
    """What an engine's own connections to the pool have; UCX takes the fastest for a length.

    Args:
        ranks: transport -> ranks whose connection has it.
    """
    name = f"{engine}: transports"
    used = {transport: count for transport, count in ranks.items() if count}
    if not used:
        return Finding(
            name, Level.OK, "none seen: it has loaded and published nothing yet, or cannot tell"
        )
    over = ", ".join(
        f"{transport} ({count} ranks)" if count > 1 else transport
        for transport, count in sorted(used.items())
    )
    return _judge(name, f"its connection to the pool has lanes over {over}", used)


def _judge(name: str, says: str, used: Iterable[str]) -> Finding:
    if all(one.partition("/")[0] in _SLOW for one in used):
        return Finding(
            name,
            Level.WARNING,
            f"{says}: every byte passes the kernel's TCP stack",
            "unset UCX_TLS; on one host share the IPC and PID namespaces, between hosts use RDMA",
        )
    return Finding(name, Level.OK, says)
