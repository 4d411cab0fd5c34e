"""UCX's own text about an endpoint, and UCX asked for real where NIXL has brought one."""

from __future__ import annotations

import numpy as np
import pytest

from backhaul.transfer import ucx_lanes
from backhaul.transfer.base import MemoryRegion
from backhaul.transfer.nixl_agent import NixlAgent
from backhaul.transfer.ucx_lanes import endpoints, lanes, parse_lanes

TEXT = """
#
# UCP endpoint
#
#               peer: <no debug data>
#                 lane[0]:  2:tcp/lo.0 md[1]       -> md[1]/tcp/sysdev[255] seg 4294967295 am wireup
#                 lane[1]:  5:cma/memory.0 md[4]   -> md[4]/cma/sysdev[255] seg 4294967295 rma_bw#0
#                 lane[2]:  9:rc_mlx5/mlx5_0:1.0 md[6] -> md[6]/ib/sysdev[3] seg 1 rma_bw#1 am_bw#0
#                 lane[3]: 10:rc_mlx5/mlx5_0:1.1 md[6] -> md[6]/ib/sysdev[3] seg 1 rma_bw#2
#
# | peer intra-node cfg#1                                            |
# | 8185..inf | multi-frag copy-in | tcp/eth0                        |
"""


def test_only_lanes_for_remote_memory_count() -> None:
    assert parse_lanes(TEXT) == ("cma/memory", "rc_mlx5/mlx5_0:1")


def test_without_such_lanes_messages_carry_all() -> None:
    text = "\n".join(line for line in TEXT.splitlines() if "rma_bw" not in line)
    assert parse_lanes(text) == ("tcp/lo",)


def test_text_of_another_form_tells_nothing() -> None:
    assert parse_lanes("") == parse_lanes("lane[0]: something else") == ()


def test_a_real_agent_has_an_endpoint_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the agent's name of any length, and only where its UCX is one that was seen."""
    name = "backhaul-0123456789ab-" + "engine" * 20
    agent = NixlAgent(name)
    memory = np.zeros(4096, dtype=np.uint8)
    agent.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    (own,) = endpoints(name)
    assert lanes(name, own) and all("/" in one for one in lanes(name, own))
    assert endpoints("backhaul-another") == frozenset()
    assert lanes(name, own + 64) == (), "no endpoint of the agent: not even looked at"
    monkeypatch.setattr(ucx_lanes, "SEEN", ((0, 1),))
    assert endpoints(name) == frozenset() and lanes(name, own) == ()
    agent.close()
