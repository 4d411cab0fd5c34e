"""What the request log keeps so that a request can be explained later: hashes at its boundaries,
and token ids where the engine was told so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from harness import BLOCK as B
from harness import Pair, new_uri

from backhaul.protocols.record import LoggedRequest
from backhaul.transfer.registry import open_store


@pytest.mark.parametrize("unit", [B, B // 2], ids=["coarse", "fine"])
@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_checkpoint_is_found_in_the_log_of_who_produced_it(
    tmp_path: Path, with_tokens: bool, unit: int
) -> None:
    pair = Pair(new_uri())
    path = tmp_path / "requests.jsonl"
    options = {"request_log": str(path), "request_log_tokens": with_tokens}
    engine = pair.engine(options=options, unit=unit)
    done = engine.run(list(range(2, 3 * B + 7)), 2 * B)
    engine.drain()
    stored = open_store(pair.uri).list_checkpoints(timeout_s=300)
    pair.close()
    (logged,) = [
        msgspec.json.decode(line, type=LoggedRequest) for line in path.read_bytes().splitlines()
    ]
    assert logged.token_ids == (tuple(done.history) if with_tokens else ())
    assert logged.grid_tokens == B
    assert len(logged.boundary_hashes) == len(done.history) // B
    assert any(info.boundary > 3 * B for info in stored)
    for info in stored:
        assert info.domain == logged.domain
        assert logged.boundary_hashes[info.boundary // B - 1] == info.block_hash.hex()
