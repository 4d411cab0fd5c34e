"""`backhaul` with engines that are not there: `python up_stub.py up ...`."""

from __future__ import annotations

import sys

from backhaul.deploy import cli
from backhaul.deploy.engines import Engine


def command(self: Engine) -> list[str]:
    """An engine without a model; one named ``broken`` ends at once."""
    if self.spec.model.name == "broken":
        return [sys.executable, "-c", "raise SystemExit('cannot start')"]
    return [sys.executable, "-m", "backhaul.proxy.fake_engine", str(self.spec.port)]


if __name__ == "__main__":
    Engine.command = command  # type: ignore[method-assign]
    cli.main()
