"""What the two legs of a pair's request tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backhaul.deploy.engines import Engine
from backhaul.deploy.pair import EngineClient, Pair
from backhaul.proxy.fake_engine import FakeEngine

INPUT = {"chosen": {"ends": ["input_end"], "why": "history_misses"}}


def client(engine: FakeEngine) -> EngineClient:
    spec = SimpleNamespace(name="engine", model=Path("model"))
    return EngineClient(cast(Engine, SimpleNamespace(url=engine.url, spec=spec)))


@pytest.mark.parametrize(
    ("record", "hints", "told"),
    [
        (INPUT, {"policy": "auto"}, {"policy": "auto", "ends": ["input_end"]}),
        (INPUT, None, {"ends": ["input_end"]}),
        ({"chosen": {"ends": []}}, {"policy": "auto"}, {"policy": "auto", "ends": []}),
        (INPUT, {"ends": ["decode_end"]}, {"ends": ["decode_end"]}),
        ({"loaded_tokens": 1}, {"policy": "both"}, {"policy": "both"}),
        (None, {"policy": "both"}, {"policy": "both"}),
        (None, None, {}),
    ],
)
def test_decode_does_the_other_half_of_what_prefill_chose(
    tmp_path: Path,
    record: Mapping[str, Any] | None,
    hints: Mapping[str, Any] | None,
    told: Mapping[str, Any],
) -> None:
    pair = Pair(tmp_path / "model", tmp_path)
    with FakeEngine("prefill") as prefill, FakeEngine("decode") as decode:
        prefill.record = record
        pair.prefill, pair.decode = client(prefill), client(decode)
        pair.run([1, 2, 3], max_tokens=2, hints=hints)
        pair.prefill.close()
        pair.decode.close()
    (first,), (second,) = prefill.seen, decode.seen
    asked = first.transfer.get("backhaul", {})
    assert asked == (hints or {})
    heard = second.transfer.get("backhaul", {})
    assert {name: heard[name] for name in ("policy", "ends") if name in heard} == told
    assert second.transfer["do_remote_prefill"], "what prefill handed over is kept"
