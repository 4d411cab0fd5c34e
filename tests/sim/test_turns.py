"""Turn by turn: what a decode engine leaves in the store is where a prefill engine resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from harness import (
    ATTENTION,
    BLOCK,
    FULL,
    HYBRID,
    MIXED,
    STATE,
    WINDOW,
    Finished,
    Group,
    Pair,
    SimEngine,
    new_uri,
)
from sim_kit import ASYNC, kinds, tokens
from sim_model import cold_output

from backhaul.connector.publisher import Publisher
from backhaul.connector.worker import WorkerHalf
from backhaul.protocols.checkpoint import CheckpointKind

B = BLOCK


# -- the simulation itself --------------------------------------------------------------------


@ASYNC
@pytest.mark.parametrize("groups", [HYBRID, MIXED, ATTENTION], ids=["hybrid", "mixed", "attention"])
def test_the_simulated_engine_without_a_connector_gives_the_model_s_output(
    groups: tuple[Any, ...], asynchronous: bool
) -> None:
    engine = SimEngine(None, groups=groups, asynchronous=asynchronous, budget=20)
    for seed in range(3):
        prompt = tokens(30 + 7 * seed, seed)
        first = engine.run(prompt, 12)
        engine.submit(first.history + tokens(9, seed), 5)
        engine.submit(prompt, 20, stops=False)
        engine.drain()
    engine.check_idle()
    assert len(engine.finished) == 9
    assert engine.runner.checked_bytes > 100_000, "the forward pass reads what it computed"


def test_the_model_depends_on_every_token() -> None:
    prompt = tokens(20, 1)
    other = [prompt[0] + 1, *prompt[1:]]
    assert cold_output(prompt, 5, stops=False) != cold_output(other, 5, stops=False)


# -- D_end ------------------------------------------------------------------------------------


@ASYNC
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("groups", [HYBRID, MIXED], ids=["hybrid", "mixed"])
def test_a_running_request_holds_its_latest_end_only(
    pair: Pair, groups: tuple[Any, ...], drafts: int, asynchronous: bool
) -> None:
    engine = pair.engine(groups=groups, drafts=drafts, asynchronous=asynchronous)
    name = engine.submit(tokens(B + 3, 1), 8 * B)
    tracked = engine.backhaul._half._requests[name]
    most = 0
    while engine.step():
        assert sum(pin.confirmed for pin in tracked.pins.values()) <= 1
        most = max(most, engine.gauges()["pins"])
    # Beside it, those that the steps in flight may reach.
    assert 1 < most <= 3
    pair.check_idle()


@pytest.fixture(scope="module", params=["sync", "async", "late"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Pair, SimEngine, SimEngine]]:
    pair = Pair(new_uri())
    mode = {"asynchronous": request.param != "sync", "late": request.param == "late"}
    yield pair, pair.engine(name="prefill", **mode), pair.engine(name="decode", **mode)
    pair.check_idle()
    pair.close()


@pytest.mark.parametrize("prompt_tokens", [3, B - 1, B, B + 1, 5 * B - 1, 5 * B, 5 * B + 1])
@pytest.mark.parametrize("output_tokens", [1, 2, B, B + 1, B + 2, 2 * B - 1, 3 * B + 3])
def test_turn_two_resumes_at_the_deepest_boundary_of_the_whole_history(
    engines: tuple[Pair, SimEngine, SimEngine], prompt_tokens: int, output_tokens: int
) -> None:
    _, prefill, decode = engines
    prompt = tokens(prompt_tokens, seed=1000 * prompt_tokens + output_tokens)
    first = decode.run(prompt, output_tokens)
    committed = prompt_tokens + output_tokens - 1  # the last token was sampled, never computed
    second = prefill.run(first.history + tokens(5, 7), 4)
    assert second.loaded == second.resumed == committed // B * B
    for engine in (prefill, decode):
        engine.check_idle()


@pytest.mark.parametrize("end", [5 * B, 5 * B + 1, 5 * B + 2], ids=["on", "one after", "two after"])
def test_an_output_that_ends_around_a_boundary(
    engines: tuple[Pair, SimEngine, SimEngine], end: int
) -> None:
    _, prefill, decode = engines
    prompt = tokens(3 * B + 5, seed=end)
    first = decode.run(prompt, end - len(prompt))
    assert len(first.history) == end
    second = prefill.run([*first.history, 5], 3)
    assert second.resumed == (end - 1) // B * B


def test_a_prompt_that_ends_at_a_checkpoint_resumes_below_it(pair: Pair) -> None:
    """Its last token has to be computed, and the state there has taken it in already."""
    decode, prefill = pair.engine(name="decode"), pair.engine(name="prefill")
    first = decode.run(tokens(3 * B, 1), B + 1)
    decode.check_idle()
    assert [boundary for boundary, _ in kinds(pair)] == [2 * B, 4 * B]
    second = prefill.run(first.history[: 4 * B], 4)
    assert second.loaded == second.resumed == 2 * B
    pair.check_idle()


@pytest.mark.parametrize("groups", [MIXED, ATTENTION, (FULL, STATE)])
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_other_models_and_layouts(pair: Pair, groups: tuple[Any, ...], layout: str) -> None:
    decode = pair.engine(groups=groups, layout=layout, asynchronous=True)
    prefill = pair.engine(groups=groups, layout=layout)
    first = decode.run(tokens(3 * B + 2, 1), 4 * B)
    second = prefill.run(first.history + tokens(9, 2), 6)
    assert second.loaded == second.resumed == (len(first.history) - 1) // B * B
    pair.check_idle()


def test_two_ranks(pair: Pair) -> None:
    decode, prefill = (pair.engine(name=name, ranks=2) for name in ("decode", "prefill"))
    first = decode.run(tokens(3 * B + 2, 1), 4 * B)
    second = prefill.run(first.history + tokens(9, 2), 6)
    assert second.loaded == (len(first.history) - 1) // B * B
    pair.check_idle()


def test_a_finer_hash_unit(pair: Pair) -> None:
    decode, prefill = (
        pair.engine(name=name, unit=B // 2, layout="BLHNC") for name in ("decode", "prefill")
    )
    first = decode.run(tokens(3 * B + 2, 1), 4 * B)
    second = prefill.run(first.history + tokens(9, 2), 6)
    assert second.loaded == (len(first.history) - 1) // B * B
    third = prefill.run(second.history + tokens(2 * B, 3), 6)
    assert third.resumed >= (len(second.prompt) - 1) // B * B
    pair.check_idle()


@ASYNC
def test_many_turns_between_two_engines(pair: Pair, asynchronous: bool) -> None:
    both = [pair.engine(name=name, asynchronous=asynchronous, budget=24) for name in "pd"]
    history, added = tokens(2 * B + 3, 1), 0
    for turn in range(10):
        done = both[turn % 2].run(history, 3 + 5 * turn % 17)
        if turn:
            assert done.resumed == (len(history) - added - 1) // B * B
        added = 1 + 3 * turn % 11
        history = done.history + tokens(added, turn)
    pair.check_idle()


# -- U_end, and what is not reusable ----------------------------------------------------------


@pytest.mark.parametrize("u_end", [2, B - 1, B, B + 1, 4 * B - 1, 4 * B, 4 * B + 1, 5 * B + 6])
def test_a_rewritten_output_falls_back_to_the_end_of_the_input(pair: Pair, u_end: int) -> None:
    decode = pair.engine(name="decode")
    prefill = pair.engine(name="prefill", asynchronous=True)
    prompt = tokens(u_end, 1) + tokens(6, 2)
    first = decode.run(prompt, 2 * B, u_end=u_end)
    second = prefill.run(first.prompt[:u_end] + tokens(3 * B, 3), 5)
    assert second.resumed == u_end // B * B
    if second.resumed:
        assert second.params["backhaul"]["selected"]["kind"] == "input_end"
    pair.check_idle()


@pytest.mark.parametrize("budget", [20, 512])
@pytest.mark.parametrize("groups", [(FULL,), (WINDOW, FULL)], ids=["attention", "windows"])
def test_attention_alone_has_every_end_of_a_chunk_that_passes_it(
    pair: Pair, groups: tuple[Any, ...], budget: int
) -> None:
    """No chunk is forced to end there, and none needs to: also where P_end lies inside, since a
    prompt of whole blocks can be resumed one block lower only."""
    decode = pair.engine(groups=groups, budget=budget)
    prefill = pair.engine(groups=groups)
    prompt = tokens(7 * B, 1)
    decode.run(prompt, 2 * B, u_end=3 * B + 1)
    ends = {3 * B: "input_end", 6 * B: "prompt_end"}
    for boundary, kind in ends.items():
        assert kind in dict(kinds(pair))[boundary]
        second = prefill.run(prompt[: boundary + 1] + tokens(3 * B, boundary), 5)
        assert second.resumed == boundary
        assert second.params["backhaul"]["selected"]["kind"] == kind
    assert not any(n for name, n in decode.counters.items() if name.startswith("forced_chunk"))
    pair.check_idle()


def test_a_long_generation_suffix_does_not_cost_the_end_of_the_input(pair: Pair) -> None:
    decode, prefill = pair.engine(name="decode"), pair.engine(name="prefill")
    u_end = 3 * B + 2
    first = decode.run(tokens(u_end, 1) + tokens(3 * B, 2), 5, u_end=u_end)
    assert (3 * B, {CheckpointKind.INPUT_END}) in kinds(pair)
    second = prefill.run(first.prompt[:u_end] + tokens(4 * B, 3), 5)
    assert second.resumed == 3 * B
    assert decode.counters["forced_chunk_ends|input_end"] == 1
    pair.check_idle()


def test_nothing_matches_a_history_that_begins_differently(pair: Pair) -> None:
    decode, prefill = pair.engine(name="decode"), pair.engine(name="prefill")
    first = decode.run(tokens(5 * B, 1), 2 * B, u_end=4 * B)
    second = prefill.run([first.prompt[0] + 1, *first.history[1:]], 5)
    assert second.resumed == 0
    assert second.params["backhaul"]["selected"] is None
    pair.check_idle()


def test_a_request_without_the_offset_has_no_end_of_input(pair: Pair) -> None:
    decode = pair.engine(name="decode", options={"publish_prompt_end": False})
    decode.run(tokens(5 * B, 1) + tokens(6, 2), 2 * B)
    assert {kind for _, found in kinds(pair) for kind in found} == {CheckpointKind.DECODE_END}


@pytest.mark.parametrize("u_end", [0, -1, True, "3", 1.5, 61, [8], {"a": 1}])
def test_a_malformed_offset_is_counted_and_ignored(pair: Pair, u_end: Any) -> None:
    engine = pair.engine()
    done = engine.run(tokens(60, 1), 5, params={"backhaul": {"u_end": u_end}})
    assert done.reason == "stop"
    assert engine.counters["hints_rejected|u_end"] == 1
    assert CheckpointKind.INPUT_END not in {kind for _, found in kinds(pair) for kind in found}
    pair.check_idle()


@pytest.mark.parametrize("hints", ["u_end", 7, [1], True])
def test_malformed_hints_are_counted_and_ignored(pair: Pair, hints: Any) -> None:
    engine = pair.engine()
    assert engine.run(tokens(20, 1), 5, params={"backhaul": hints}).reason == "stop"
    assert engine.counters["hints_rejected|backhaul"] == 1
    pair.check_idle()


# -- what is published ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("main_sparse", {"prompt_end"}),
        ("input_end", {"input_end"}),
        ("decode_end", {"decode_end"}),
        ("both", {"input_end", "decode_end"}),
    ],
)
def test_policies(pair: Pair, policy: str, expected: set[str]) -> None:
    options: dict[str, Any] = {"policy": policy}
    if policy != "main_sparse":
        options["publish_prompt_end"] = False
    engine = pair.engine(options=options)
    engine.run(tokens(40, 1) + tokens(20, 2), 21, u_end=41)
    engine.check_idle()
    found = kinds(pair)
    at = {"prompt_end": 56, "input_end": 40, "decode_end": 80}
    assert found == sorted((at[name], {CheckpointKind(name)}) for name in expected)


@ASYNC
@pytest.mark.parametrize("output", [1, 3, B, 3 * B])
def test_every_end_is_published_once(pair: Pair, output: int, asynchronous: bool) -> None:
    engine = pair.engine(asynchronous=asynchronous, budget=16)
    engine.run(tokens(5 * B + 5, 1), output, u_end=3 * B + 1)
    engine.check_idle()
    published = {k: n for k, n in engine.counters.items() if k.startswith("publications|")}
    decode_end = int((5 * B + 5 + output - 1) // B * B > 5 * B)
    expected = {"publications|input_end": 1, "publications|prompt_end": 1}
    assert published == expected | ({"publications|decode_end": 1} if decode_end else {})
    pair.check_idle()


@pytest.mark.parametrize("end", ["stop", "length", "abort"])
@pytest.mark.parametrize("publish_on", [["stop"], ["stop", "length", "abort"]])
def test_only_the_chosen_finish_reasons_publish_a_decode_end(
    pair: Pair, end: str, publish_on: list[str]
) -> None:
    engine = pair.engine(options={"publish_on": publish_on, "publish_prompt_end": False})
    if end == "abort":
        name = engine.submit(tokens(20, 1), 100)
        for _ in range(2 * B):
            engine.step()
        engine.abort(name)
        engine.drain()
    else:
        engine.run(tokens(20, 1), 2 * B, stops=end == "stop")
    engine.check_idle()
    assert bool(kinds(pair)) == (end in publish_on)
    pair.check_idle()


def test_a_shared_prefix_is_published_and_used(pair: Pair) -> None:
    first, other = pair.engine(name="first"), pair.engine(name="other")
    shared = tokens(5 * B + 3, 1)
    for seed in (2, 3):
        first.run(shared + tokens(3 * B, seed), 4)
    first.check_idle()
    assert (5 * B, {CheckpointKind.SHARED_PREFIX}) in kinds(pair)
    assert other.run(shared + tokens(3 * B, 4), 4).resumed == 5 * B
    pair.check_idle()


@pytest.mark.parametrize("resumed", [0, 5 * B], ids=["cold", "from the block's start"])
def test_a_shared_prefix_that_ends_inside_a_block_hides_no_end_behind_it(
    pair: Pair, resumed: int
) -> None:
    """vLLM ends the chunk for it at the block's start, and none at the position itself."""
    groups = (Group(block=B // 2), STATE)
    engine = pair.engine(groups=groups, layout="BLHNC", budget=512, role="kv_producer")
    shared = tokens(5 * B + B // 2, 1)
    if resumed:
        engine.run(shared[: resumed + 1], 1)
    engine.run(shared + tokens(6 * B, 2), 1)
    second = engine.run(shared + tokens(6 * B, 3), 1, u_end=7 * B + 1)
    record = second.params["backhaul"]
    assert second.resumed == resumed
    assert record["forced_chunk_ends"] == [end for end in (5 * B, 7 * B) if end > resumed]
    assert record["input_end"]["outcome"] == "published"
    pair.check_idle()
    assert (7 * B, {CheckpointKind.INPUT_END}) in kinds(pair)


def test_an_end_that_was_hit_locally_is_published_where_the_store_lacks_it(pair: Pair) -> None:
    engine = pair.engine()
    prompt = tokens(3 * B + 1, 1)
    engine.run(prompt, 1, params={"backhaul": {"publish": False}})
    engine.check_idle()
    assert kinds(pair) == []
    second = engine.run(prompt + tokens(3 * B, 2), 1, u_end=3 * B)
    assert (second.resumed, second.loaded) == (3 * B, 0)
    pair.check_idle()
    assert (3 * B, {CheckpointKind.INPUT_END}) in kinds(pair)


def test_the_prompt_is_not_sent_again_when_the_store_has_it(pair: Pair) -> None:
    prefill = pair.engine(name="prefill")
    decode = pair.engine(name="decode", options={"stream_ahead": False})
    prompt = tokens(10 * B + 1, 1)
    prefill.run(prompt, 1)
    decode.run(prompt, B + 1)
    decode.check_idle()
    attention_block = decode.backhaul._half._facts.object_bytes[0]
    state = sum(decode.backhaul._half._facts.object_bytes[g] for g in (1, 2))
    assert decode.counters["publish_bytes"] == attention_block + state


# -- where the hit comes from -----------------------------------------------------------------


@ASYNC
def test_no_local_remote_and_deeper_remote_hit_give_the_same_output(
    pair: Pair, asynchronous: bool
) -> None:
    decode = pair.engine(name="decode")
    first = decode.run(tokens(4 * B + 3, 1), 3 * B)
    prompt = first.history + tokens(7, 2)
    deep = (len(first.history) - 1) // B * B

    cold = Pair(new_uri())
    runs: dict[str, Finished] = {}
    alone = cold.engine(asynchronous=asynchronous)
    runs["none"] = alone.run(prompt, 20)
    assert (runs["none"].resumed, runs["none"].loaded) == (0, 0)
    runs["local"] = alone.run(prompt, 20)
    assert runs["local"].resumed == (len(prompt) - 1) // B * B
    assert runs["local"].loaded == 0
    remote = pair.engine(asynchronous=asynchronous, role="kv_consumer")
    runs["remote"] = remote.run(prompt, 20)
    assert (runs["remote"].resumed, runs["remote"].loaded) == (deep, deep)

    held = pair.engine(asynchronous=asynchronous, role="kv_consumer")
    held.run(first.prompt, 1, stops=False)
    runs["deeper remote"] = held.run(prompt, 20)
    local = (len(first.prompt) - 1) // B * B
    assert (runs["deeper remote"].resumed, runs["deeper remote"].loaded) == (deep, deep - local)
    assert len({tuple(run.output) for run in runs.values()}) == 1
    for one in (pair, cold):
        one.check_idle()
    cold.close()


@pytest.mark.parametrize("u_end", [None, 2 * B], ids=["alone", "an end below it"])
def test_a_loaded_state_serves_the_next_request_locally(pair: Pair, u_end: int | None) -> None:
    decode, prefill = pair.engine(name="decode"), pair.engine(name="prefill")
    first = decode.run(tokens(4 * B + 3, 1), 3 * B)
    deep = (len(first.history) - 1) // B * B
    assert prefill.run(first.history + tokens(2 * B, 2), 2, u_end=u_end).loaded == deep
    again = prefill.run(first.history + tokens(2 * B, 3), 2)
    assert (again.resumed, again.loaded) == (deep, 0)
    pair.check_idle()


def test_a_gain_below_the_minimum_is_not_loaded(pair: Pair) -> None:
    decode = pair.engine(name="decode")
    prefill = pair.engine(name="prefill", options={"min_load_tokens": 100})
    first = decode.run(tokens(4 * B + 3, 1), 3 * B)
    assert prefill.run([*first.history, 3], 4).loaded == 0
    pair.check_idle()


def test_a_request_may_opt_out(pair: Pair) -> None:
    decode, prefill = pair.engine(name="decode"), pair.engine(name="prefill", role="kv_consumer")
    private = decode.run(tokens(4 * B, 1), 3 * B, params={"backhaul": {"publish": False}})
    decode.check_idle()
    assert kinds(pair) == []
    first = decode.run(private.history + tokens(3, 1), 3 * B)
    deep = (len(first.history) - 1) // B * B
    prompt = first.history + tokens(5, 2)
    assert prefill.run(prompt, 3, params={"backhaul": {"load": False}}).loaded == 0
    assert pair.engine(name="other").run(prompt, 3).loaded == deep
    pair.check_idle()


@pytest.mark.parametrize("sibling", [False, True], ids=["alone", "beside a sibling"])
def test_roles(pair: Pair, sibling: bool) -> None:
    producer = pair.engine(name="producer", role="kv_producer", sibling=sibling)
    consumer = pair.engine(name="consumer", role="kv_consumer", sibling=sibling)
    first = producer.run(tokens(4 * B, 1), 2 * B)
    second = consumer.run(first.history + tokens(B, 2), 3 * B)
    assert second.loaded == (len(first.history) - 1) // B * B
    elsewhere = pair.engine(name="elsewhere", role="kv_producer", sibling=sibling)
    assert elsewhere.run(first.history + tokens(B, 1), 2).loaded == 0, "a producer loads nothing"
    elsewhere.check_idle()
    count = len(kinds(pair))
    consumer.run(tokens(5 * B, 9), 2 * B)
    consumer.check_idle()
    assert len(kinds(pair)) == count, "a consumer publishes nothing"
    pair.check_idle()


# -- beside a connector that hands prompts over -----------------------------------------------


@ASYNC
@pytest.mark.parametrize("prompt_tokens", [B, 4 * B - 1, 4 * B, 4 * B + 1, 4 * B + 2])
def test_beside_a_connector_that_hands_the_prompt_over(
    pair: Pair, prompt_tokens: int, asynchronous: bool
) -> None:
    prefill = pair.engine(name="prefill", sibling=True, asynchronous=asynchronous)
    decode = pair.engine(name="decode", sibling=True, asynchronous=asynchronous)
    history, decode_end = tokens(prompt_tokens, prompt_tokens), 0
    for turn, output in enumerate((2 * B, 5, 3 * B + 1, 1)):
        u_end = len(history) - 3
        # The hand-over gives the prefill side a prompt without its last token.
        name = prefill.submit(
            history[:-1],
            1,
            stops=False,
            u_end=u_end,
            params={"do_remote_decode": True},
            handed_over=history[-1],
        )
        prefill.drain()
        assert prefill.finished[name].resumed >= min(decode_end, (len(history) - 2) // B * B)
        done = decode.run(history, output, params={"do_remote_prefill": True})
        # A boundary inside the prompt is the prefill side's to keep, but for the last one.
        end = (len(done.history) - 1) // B * B
        decode_end = end if end >= len(history) - 1 else 0
        history = done.history + tokens(1 + 4 * turn, turn)
    published = {kind for _, found in kinds(pair) for kind in found}
    assert CheckpointKind.PROMPT_END not in published, "the sibling carries it"
    pair.check_idle()


# -- each check can fail ----------------------------------------------------------------------


def _zeros(self: WorkerHalf, job: Any) -> Any:
    result = _LOAD(self, job)
    for block in job.blocks:
        for address, nbytes in self._groups[block.group].segments(block.block_id).tolist():
            import ctypes

            ctypes.memset(address, 0, nbytes)
    return result


def _flipped_bit(self: WorkerHalf, job: Any) -> Any:
    import ctypes

    result = _LOAD(self, job)
    block = job.blocks[-1]
    address, nbytes = self._groups[block.group].segments(block.block_id).tolist()[-1]
    last = (ctypes.c_uint8 * 1).from_address(address + nbytes - 1)
    last[0] ^= 1
    return result


def _not_loaded(self: WorkerHalf, job: Any) -> Any:
    return _LOAD(self, job._replace(blocks=job.blocks[:1]))


_LOAD = WorkerHalf._load


@pytest.mark.parametrize("wrong", [_zeros, _flipped_bit, _not_loaded])
def test_a_wrong_load_is_noticed(pair: Pair, wrong: Callable[..., Any]) -> None:
    decode = pair.engine(name="decode")
    first = decode.run(tokens(3 * B, 1), 3 * B)
    with patch.object(WorkerHalf, "_load", wrong):
        prefill = pair.engine(name="prefill")
        second = prefill.run(first.history + tokens(5, 2), 5)
    assert prefill.runner.violations, "the forward pass read a wrong byte"
    assert second.output != second.expected, "and the output shows it, as a real model's would"
    with pytest.raises(AssertionError, match="prefill-1"):
        prefill.check()


def _swapped(self: Publisher, tracked: Any, pin: Any) -> Any:
    # As if a state were taken from the wrong block: that of the other recurrent group.
    refs = _PINNED(self, tracked, pin)
    return [
        ref._replace(block_id=other.block_id) for ref, other in zip(refs, refs[::-1], strict=True)
    ]


_PINNED = Publisher._pinned


def test_a_wrong_state_in_the_store_is_noticed(pair: Pair) -> None:
    with patch.object(Publisher, "_pinned", _swapped):
        decode = pair.engine(name="decode")
        first = decode.run(tokens(3 * B, 1), 2 * B)
        decode.check_idle()
    with pytest.raises(AssertionError, match=r"group [12], tokens"):
        pair.checkpoints()
    prefill = pair.engine(name="prefill")
    second = prefill.run(first.history + tokens(5, 2), 5)
    assert prefill.runner.violations
    assert second.output != second.expected


def test_another_request_s_state_is_noticed(pair: Pair) -> None:
    # As if two prefixes had one hash: the store's answer is right for the key and wrong here.
    decode, prefill = pair.engine(name="decode"), pair.engine(name="prefill")
    first, other = (decode.run(tokens(3 * B, seed), 2 * B) for seed in (1, 2))
    decode.check_idle()
    request, liar = decode.requests[first.name], decode.requests[other.name]
    prompt = first.history + tokens(5, 2)
    name = prefill.submit(prompt, 5)
    lied = {
        bytes(a): bytes(b) for a, b in zip(request.block_hashes, liar.block_hashes, strict=False)
    }
    hashes = prefill.requests[name].block_hashes
    hashes[:] = [lied.get(bytes(value), bytes(value)) for value in hashes]
    prefill.backhaul._half._catalog.drop(name)
    prefill.drain()
    assert prefill.finished[name].loaded
    assert prefill.runner.violations
    assert prefill.finished[name].output != prefill.finished[name].expected


def test_a_leaked_block_is_noticed(pair: Pair) -> None:
    with patch.object(
        Publisher, "_unpin", lambda self, tracked, boundary: tracked.pins.pop(boundary)
    ):
        engine = pair.engine()
        engine.run(tokens(3 * B, 1), 2 * B)
        with pytest.raises(AssertionError, match=r"held_blocks|not free"):
            engine.check_idle(seconds=0.2)
