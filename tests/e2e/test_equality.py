"""Loaded bytes are the published ones, outputs do not depend on where a state came from, and both
comparisons break when the state is another one."""

from __future__ import annotations

import random

import pytest
from e2e_kit import COLD_TOLERANCE, B, Session, agree, boundary, tokens, worst_difference

from backhaul.protocols.checkpoint import ObjectKey
from backhaul.transfer.registry import open_store


def second_turn(
    session: Session, rng: random.Random, prompt: int = 400, reply: int = 80
) -> list[int]:
    first = session.tokens(prompt)
    turn = session.turn(first, reply)
    session.settle()
    return [*first, *turn.decode.tokens, *tokens(rng, 24)]


def test_the_grid_is_the_one_that_the_tests_assume(pair: Session) -> None:
    log = pair.pair.engines["prefill"].log_path.read_text()
    assert f"boundary grid {B} tokens" in log


def test_loaded_pages_hold_the_published_bytes(pair: Session, rng: random.Random) -> None:
    """Every object of the checkpoint, by the checksum that decode took of its own pages."""
    second = second_turn(pair, rng)
    pair.forget_locally()
    before = set(pair.rpc(pair.pair.prefill, "probe_digests"))
    leg = pair.prefill(second)
    assert leg.backhaul is not None and leg.backhaul["loaded_tokens"] == boundary(400, 80)
    pages = set(pair.rpc(pair.pair.prefill, "probe_digests"))
    written = published_checksums(pair, boundary(400, 80))
    # 15 attention blocks and a state: in four groups, one object each at the boundary.
    assert len(written) >= boundary(400, 80) // B + 1
    missing = {checksum for checksum in written if checksum not in pages}
    assert not missing
    assert written - before, "the pages held these bytes already: nothing was shown"


def published_checksums(session: Session, end: int) -> set[str]:
    """Checksums of all objects of the newest checkpoint at a boundary, from the catalog itself."""
    import grpc

    from backhaul.protocols import store_pb2 as pb
    from backhaul.protocols import store_pb2_grpc as rpc

    store = open_store(session.pair.store.uri, client_name="test")
    newest = next(c for c in store.list_checkpoints(timeout_s=5) if c.boundary == end)
    store.close()
    channel = grpc.insecure_channel(session.pair.store.uri.removeprefix("backhaul://"))
    stub = rpc.CatalogStub(channel)
    found: set[str] = set()
    # The catalog locates leased objects only, so lease the checkpoint by its hash.
    hashes = [b"\0" * 32] * (end // B - 1) + [newest.block_hash]
    lookup = stub.Lookup(
        pb.LookupRequest(domain_id=newest.domain, boundary_hashes=hashes, lease_s=10)
    )
    assert lookup.matches[0].consumable
    for group in range(8):
        key = ObjectKey(0, group, newest.block_hash)
        try:
            reply = stub.Locate(
                pb.LocateRequest(
                    lease_id=lookup.lease_id,
                    keys=[pb.Key(rank=key.rank, group=key.group, block_hash=key.block_hash)],
                )
            )
        except grpc.RpcError:
            continue
        found.add(f"{reply.locations[0].checksum:016x}")
    stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_ids=[lookup.lease_id]))
    channel.close()
    return found


def test_the_matrix_of_hits_gives_one_output(pair: Session, rng: random.Random) -> None:
    """{no hit, remote hit, local hit, local + deeper remote}."""
    first = pair.tokens(400)
    turn = pair.turn(first, 80)
    pair.settle()
    second = [*first, *turn.decode.tokens, *tokens(rng, 24)]
    mixed = pair.continue_on_prefill(second)
    assert mixed.backhaul is not None
    assert mixed.backhaul["local_tokens"] > 0 and mixed.backhaul["loaded_tokens"] > 0
    local = pair.continue_on_prefill(second)
    assert local.backhaul is not None
    assert local.backhaul["loaded_tokens"] == 0
    assert local.cached_tokens == mixed.cached_tokens
    pair.forget_locally()
    remote = pair.continue_on_prefill(second)
    assert remote.backhaul is not None
    assert remote.backhaul["local_tokens"] == 0 and remote.cached_tokens == mixed.cached_tokens
    cold = pair.cold(second)
    assert cold.cached_tokens == 0
    # The same state and the same computation on top: the same numbers.
    assert remote.tokens == local.tokens == mixed.tokens
    assert worst_difference(remote, local) == worst_difference(mixed, local) == 0.0
    # Other chunk boundaries and kernels: within the tolerance.
    assert agree(remote, cold, COLD_TOLERANCE)


@pytest.mark.parametrize("mode", ["zeros", "other", "shift"])
def test_another_state_breaks_the_comparison(pair: Session, rng: random.Random, mode: str) -> None:
    """The check above can fail: zeros, the state of another request, or attention blocks in the
    wrong order, put in behind every checksum, change the log-probabilities beyond the tolerance."""
    if mode == "other":
        other = second_turn(pair, rng)
        pair.forget_locally()
        with pair.tampered(pair.pair.prefill, "record"):
            pair.continue_on_prefill(other)
    second = second_turn(pair, rng)
    good = pair.cold(second)
    pair.forget_locally()
    with pair.tampered(pair.pair.prefill, mode):
        bad = pair.continue_on_prefill(second)
    assert bad.backhaul is not None and bad.backhaul["loaded_tokens"] > 0
    assert not agree(good, bad, COLD_TOLERANCE)
    pair.forget_locally()  # the spoilt state must not serve another test


def test_the_state_of_another_boundary_breaks_the_comparison(
    pair: Session, rng: random.Random
) -> None:
    first = pair.tokens(400)
    turn = pair.turn(first, 80)
    pair.settle()
    earlier = [*first, *turn.decode.tokens[:10]]
    second = [*first, *turn.decode.tokens, *tokens(rng, 24)]
    good = pair.cold(second)
    pair.forget_locally()
    # U_end of a prefix: a state 2 boundaries lower, of the same request.
    pair.run([*first[:390], *tokens(rng, 10)], max_tokens=1, u_end=384)
    pair.settle()
    pair.forget_locally()
    with pair.tampered(pair.pair.prefill, "record"):
        leg = pair.continue_on_prefill(earlier)
        assert leg.backhaul is not None and leg.backhaul["selected"]["boundary"] == 384
    pair.forget_locally()
    with pair.tampered(pair.pair.prefill, "other"):
        bad = pair.continue_on_prefill(second)
        assert bad.backhaul is not None and bad.backhaul["selected"]["boundary"] == 448
    assert not agree(good, bad, COLD_TOLERANCE)
    pair.forget_locally()
