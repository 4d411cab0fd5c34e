"""What all tests share."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import backhaul.protocols

# On a busy machine an example may take any time: how long one takes is no property of the code.
# The examples are the same in every run, so that a failure can be seen again and means the change
# at hand; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("backhaul", settings.get_profile("explore"), derandomize=True)
settings.load_profile("backhaul")

# A shell's background jobs ignore SIGINT, and what they start inherits that: the commands that
# tests start and interrupt would never hear of it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logging_lets_lines_through() -> None:
    """What an earlier test's libraries made of the process's logging is no matter of the next."""
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(logging.WARNING)


def pytest_report_header() -> str:
    """Which code is tested: an editable install may be another clone's."""
    return f"backhaul: {Path(backhaul.protocols.__file__).resolve().parents[1]}"
