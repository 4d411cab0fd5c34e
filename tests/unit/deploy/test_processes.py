"""Ports that engines can still bind a minute later."""

import socket
from pathlib import Path

import pytest

from backhaul.deploy import processes
from backhaul.deploy.processes import ServiceError, free_port


def test_ports_are_outside_the_ephemeral_range_and_given_once() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert all(port < low for port in ports)


def test_a_taken_port_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        monkeypatch.setattr(processes, "_given", set())
        monkeypatch.setattr(processes, "_PORTS", range(port, port + 1))
        with pytest.raises(ServiceError, match=f"{port}"):
            free_port()
