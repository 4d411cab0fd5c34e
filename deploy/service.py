"""What `backhaul store` and `backhaul proxy` have in common as services."""

from __future__ import annotations

import logging
import os
import resource
import sys

from backhaul.transfer.daemon.quiet import QuietServers

logger = logging.getLogger(__name__)


def begin(level: str) -> None:
    """Log to standard error from ``level`` on, and be allowed as many open files as there may be:
    every connection is one, and shells give 1024."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(QuietServers())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def announce(line: str) -> None:
    """Say on standard output that it is ready. What takes no text (a full disk, a reader that is
    gone) is no reason not to serve."""
    try:
        print(line, flush=True)
    except OSError as error:
        logger.warning("%s (standard output takes nothing: %s)", line, error.strerror)
        silence_stdout()


def silence_stdout() -> None:
    """What is still to be written is dropped: at exit Python would fail to write it once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
