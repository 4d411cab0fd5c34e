"""`backhaul demo` with engines that are not there: `python demo_stub.py LIMIT demo ...`.

The decode engine of the first pair dies after LIMIT completions, with LIMIT 0 none does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from backhaul.deploy import cli, demo
from backhaul.deploy.engines import Engine

LIMIT = sys.argv.pop(1)


def command(self: Engine) -> list[str]:
    """An engine without a model."""
    script = str(Path(__file__).with_name("demo_engine.py"))
    dies = [LIMIT] if LIMIT != "0" and self.spec.name == "decode" else []
    return [sys.executable, script, str(self.spec.port), *dies]


if __name__ == "__main__":
    Engine.command = command  # type: ignore[method-assign]
    demo.PAUSE_S = 0.1
    cli.main()
