"""The junction candidate is bounded by every full-attention group's hit."""

from __future__ import annotations

import random
import time
from itertools import permutations, product
from typing import Any, NamedTuple

import pytest
from harness import HANGS_S, Group, Pair, SimEngine
from presence import put_attention, put_state
from sim_kit import tokens
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from backhaul.connector import scheduler as scheduler_module
from backhaul.connector.junction import bounded_gap


class Case(NamedTuple):
    """One cell of the matrix. ``unit`` is relative to ``block``: coarse 1, fine 1/2."""

    block: int
    fine: bool
    draft_first: bool
    eagle: bool
    equal: bool
    state_at_draft: bool

    @property
    def unit(self) -> int:
        return self.block // 2 if self.fine else self.block

    @property
    def scale(self) -> int:
        """Without partial hits, blocks of 32 tokens can express 96/80/64 only doubled."""
        return 2 if self.block == 32 and not self.fine else 1

    @property
    def hits(self) -> tuple[int, int, int]:
        """Target, draft and recurrent hit in tokens."""
        return 96 * self.scale, 80 * self.scale, (80 if self.state_at_draft else 64) * self.scale

    @property
    def expected(self) -> int:
        """The junction to ask for, in tokens; 0: none."""
        return 0 if self.state_at_draft else 80 * self.scale

    @property
    def stock_is_wrong(self) -> bool:
        """vLLM looks groups of one spec up together, and a draft group that comes first already
        bounds the target group's lookup."""
        return not self.equal and not self.draft_first

    def __str__(self) -> str:
        return "-".join(
            (
                str(self.block),
                "fine" if self.fine else "coarse",
                "draft,target" if self.draft_first else "target,draft",
                "eagle" if self.eagle else "plain",
                "equal" if self.equal else "distinct",
                "/".join(map(str, self.hits)),
            )
        )


class StoredCase(Case):
    """The recurrent hit is a checkpoint in the store, so it lies on the grid of blocks."""

    @property
    def scale(self) -> int:
        return 2 if self.block == 32 else 1


CASES = [Case(block, *rest) for block, *rest in product((16, 32), *[(False, True)] * 5)]
PROMPT = tokens(300, 1)
STORED = [StoredCase(*case) for case in CASES]


def groups_of(case: Case) -> tuple[tuple[Group, ...], int, int]:
    """The groups, and the indices of target and draft."""
    target = Group(block=case.block)
    draft = Group(block=case.block, draft=case.eagle, wide=not case.equal)
    state = Group(block=case.block, recurrent=True)
    if case.draft_first:
        return (draft, target, state), 1, 0
    return (target, draft, state), 0, 1


def engine_of(
    case: Case, pair: Pair | None, *, name: str = "engine", inside_blocks: bool = False
) -> SimEngine:
    groups, _, _ = groups_of(case)
    keywords: dict[str, Any] = {
        "name": name,
        "groups": groups,
        "unit": case.unit,
        "budget": 512,
        "num_blocks": 128,
        "drafts": 2 if case.eagle else 0,
        "method": "eagle" if case.eagle else "ngram",
        "inside_blocks": inside_blocks,
    }
    return pair.engine(**keywords) if pair is not None else SimEngine(None, **keywords)


def lookup(engine: SimEngine, case: Case) -> tuple[Request, list[list[int]], int, int]:
    """Fill the pool as the case says, then vLLM's own lookup."""
    request = request_of(engine)
    fill_attention(engine, case, request)
    put_state(engine.pool, 2, request.block_hashes, tokens=case.hits[2], unit=case.unit)
    blocks, hit, junction = engine.scheduler.kv_cache_manager.get_computed_blocks(request)
    return request, [[b.block_id for b in group] for group in blocks.blocks], hit, junction


def request_of(engine: SimEngine) -> Request:
    return Request(
        request_id="one",
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        block_hasher=engine.hasher,
    )


def fill_attention(engine: SimEngine, case: Case, request: Request) -> None:
    """Cache the target's and the draft's blocks, as many as they are to hit."""
    _, target, draft = groups_of(case)
    held_target, held_draft, _ = case.hits
    # An EAGLE group reports one unit less than it holds, and drags groups of its spec along.
    margin = case.unit if case.eagle else 0
    for group, held in (
        (target, held_target + (margin if case.equal else 0)),
        (draft, held_draft + margin),
    ):
        put_attention(engine.pool, group, request.block_hashes, tokens=held, unit=case.unit)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_junction_lies_where_every_full_attention_group_can_resume(
    pair: Pair, case: Case
) -> None:
    _, stock_blocks, stock_hit, stock_junction = lookup(engine_of(case, None), case)
    target, _, state = case.hits
    assert stock_hit == state, "the joint hit, EAGLE's block drop included"
    assert stock_junction == (target if case.stock_is_wrong else case.expected)

    engine = engine_of(case, pair)
    request, blocks, hit, junction = lookup(engine, case)
    assert (blocks, hit) == (stock_blocks, stock_hit)
    assert junction == case.expected

    # And in the scheduler: the first chunk ends at the junction, or where it would without one.
    floor = case.expected // case.block * case.block
    start, end = first_chunk(engine, request)
    assert start == hit and (end == floor) is (floor > hit)


@pytest.mark.parametrize("case", STORED, ids=str)
def test_the_same_where_the_state_comes_out_of_the_store(
    pair: Pair, case: StoredCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target and draft hit locally, no state does; the store holds the checkpoint at the third of
    the hits. Once without the bound, once with it."""
    target, _, stored = case.hits
    # Its prompt's last boundary is that position, so there is no deeper checkpoint.
    engine_of(case, pair, name="other").run(PROMPT[: stored + 1], 1, u_end=stored)
    with monkeypatch.context() as unbound:
        unbound.setattr(scheduler_module, "bind_junction_bound", lambda manager: None)
        stock = engine_of(case, pair, name="unbound")
    chunks = []
    for engine in (stock, engine_of(case, pair, name="bound")):
        request = request_of(engine)
        fill_attention(engine, case, request)
        chunks.append(first_chunk(engine, request))
    (stock_start, stock_end), (start, end) = chunks
    assert stock_start == start == stored, "the joint hit is the checkpoint, bound or not"
    by_itself = (len(PROMPT) // case.block - case.eagle) * case.block
    assert stock_end == (target if case.stock_is_wrong else case.expected or by_itself)
    assert end == (case.expected or by_itself)


def first_chunk(engine: SimEngine, request: Request) -> tuple[int, int]:
    """Where the scheduler begins and ends the request's first chunk, in tokens."""
    engine.requests[request.request_id] = request
    engine.scheduler.add_request(request)
    deadline = time.monotonic() + HANGS_S
    while not (step := engine.scheduler.schedule()).total_num_scheduled_tokens:
        engine._update(step, engine.runner.execute(step))
        assert time.monotonic() < deadline, "nothing is computed"
    engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    (new,) = step.scheduled_new_reqs
    start = int(new.num_computed_tokens)
    return start, start + int(step.num_scheduled_tokens[request.request_id])


@pytest.mark.parametrize("u_end", [None, 64, 100, 130])
def test_a_junction_inside_a_block_is_kept_where_vllm_can(pair: Pair, u_end: int | None) -> None:
    """Hit 64, junction 80, blocks of 32: with --enable-mamba-shared-prefix-checkpoint vLLM ends
    the chunk at 80, and the connector leaves that so."""
    case = Case(32, True, False, True, True, False)
    stock = engine_of(case, None, inside_blocks=True)
    request, _, hit, junction = lookup(stock, case)
    assert (hit, junction, first_chunk(stock, request)) == (64, 80, (64, 80))
    bound = engine_of(case, pair, inside_blocks=True)
    request, _, hit, junction = lookup(bound, case)
    if u_end is not None:
        request.kv_transfer_params = {"backhaul": {"u_end": u_end}}
    assert (hit, junction, first_chunk(bound, request)) == (64, 80, (64, 80))


def test_the_matrix_holds_cases_that_stock_vllm_gets_wrong_and_right() -> None:
    assert len(set(CASES)) == len(set(STORED)) == 64
    assert sum(case.stock_is_wrong for case in CASES) == 16


@pytest.mark.parametrize(
    ("hit", "gap", "attention", "expected"),
    [
        (80, 16, 80, 0),
        (64, 32, 80, 16),
        (64, 32, 96, 32),
        (64, 0, 96, 0),
        (64, 32, 64, 0),
        (64, 32, 48, 0),
    ],
)
def test_the_gap_ends_at_the_attention_hit(
    hit: int, gap: int, attention: int, expected: int
) -> None:
    assert bounded_gap(hit, gap, attention) == expected


FULL_SPECS = (Group(block=16), Group(block=16, wide=True), Group(block=16, latent=True))
"""Three full-attention groups that vLLM looks up one by one; the last is MLA."""


@pytest.mark.parametrize("recurrent", [True, False], ids=["hybrid", "attention only"])
@pytest.mark.parametrize("hits", list(permutations((112, 96, 80))), ids=str)
def test_the_lowest_of_any_full_attention_groups_bounds_it(
    pair: Pair, hits: tuple[int, ...], recurrent: bool
) -> None:
    """Whichever it is, and whatever kind. Without states nothing can be missing."""
    groups = (*FULL_SPECS, *([Group(block=16, recurrent=True)] if recurrent else []))
    keywords: dict[str, Any] = {"groups": groups, "budget": 512}
    stock, bound = SimEngine(None, **keywords), pair.engine(**keywords)
    found = []
    for engine in (stock, bound):
        request = request_of(engine)
        for group, held in enumerate(hits):
            put_attention(engine.pool, group, request.block_hashes, tokens=held, unit=16)
        if recurrent:
            put_state(engine.pool, 3, request.block_hashes, tokens=64, unit=16)
        found.append(engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1:])
    joint = 64 if recurrent else min(hits)
    assert [hit for hit, _ in found] == [joint, joint]
    assert found[1][1] == (min(hits) if recurrent else 0)
    # vLLM looks a later group up below what the first one holds.
    assert found[0][1] == (hits[0] if hits[0] > joint else 0)


@pytest.mark.parametrize(
    ("stored", "junction"),
    [(0, 80), (64, 80), (80, 0), (96, 0)],
    ids=["nothing", "below", "at", "above"],
)
def test_a_loaded_checkpoint_leaves_only_a_junction_above_it(
    pair: Pair, stored: int, junction: int
) -> None:
    """Locally target 96, draft 80, no state; the store holds a checkpoint at ``stored``."""
    groups = (Group(block=16), Group(block=16, wide=True), Group(block=16, recurrent=True))
    generator = random.Random(stored)
    prompt = [generator.randrange(2, 1000) for _ in range(97)]
    rest = [generator.randrange(2, 1000) for _ in range(60)]
    keywords: dict[str, Any] = {"groups": groups, "budget": 512}
    if stored:
        pair.engine(name="other", **keywords).run(prompt[: stored + 1], 1)
    engine = pair.engine(name="prefill", role="kv_consumer", **keywords)
    engine.run(prompt, 2)
    for block in engine.pool.blocks:
        key = block.block_hash
        if key is None:
            continue
        group = int.from_bytes(key[-4:], "big")
        if group == 2 or (group == 1 and block.block_hash_num_tokens == 96):
            engine.pool._maybe_evict_cached_block(block)
    before = engine.counters["forced_chunk_ends|shared_prefix"]
    second = engine.run(prompt + rest, 3)
    assert second.resumed == second.loaded == stored
    assert engine.counters["forced_chunk_ends|shared_prefix"] - before == bool(junction)
    third = engine.run(prompt + rest[::-1], 3)
    assert third.resumed == max(stored, junction), "the junction's state was kept"
    pair.check_idle()
