"""`backhaul` with engines that are not there: `python up_stub.py up ...`."""

from __future__ import annotations

import atexit
import sys
import time

from backhaul.deploy import cli
from backhaul.deploy.engines import Engine

STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from backhaul.proxy import fake_engine
fake_engine.main()
"""


def command(self: Engine) -> list[str]:
    """An engine without a model; one named ``broken`` ends at once, ``stubborn`` only killed."""
    if self.spec.model.name == "broken":
        return [sys.executable, "-c", "raise SystemExit('cannot start')"]
    if self.spec.model.name == "stubborn":
        return [sys.executable, "-c", STUBBORN, str(self.spec.port)]
    return [sys.executable, "-m", "backhaul.proxy.fake_engine", str(self.spec.port)]


def end_slowly() -> None:
    """Says that the interpreter ends, and leaves time for a signal then."""
    print("interpreter ends", flush=True)
    time.sleep(2)


if __name__ == "__main__":
    Engine.command = command  # type: ignore[method-assign]
    if "slow-end" in " ".join(sys.argv):
        # As on a busy machine, where the interpreter takes its time to end.
        atexit.register(end_slowly)
    cli.main()
