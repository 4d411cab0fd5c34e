"""Readers of text: message logs, SWE-agent trajectories, LMCache's agent traces."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.benchmarks.reuse.trace import Turn, length, shared_prefix
from backhaul.benchmarks.traces import Reason, TraceError, open_trace, text
from backhaul.benchmarks.traces.dialogue import HEADER_TOKENS, TextRules
from backhaul.benchmarks.traces.text import CharacterEstimate, Pieces, TokenizerCount

SYSTEM = {"role": "system", "content": "Answer briefly and do not make things up."}
ASK = {"role": "user", "content": "Where is the nearest lighthouse, and is it open?"}
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning": "I should look it up before I say anything.",
    "tool_calls": [
        {"id": "1", "function": {"name": "find", "arguments": '{"what": "lighthouse", "km": 5}'}}
    ],
}
FOUND = {"role": "tool", "tool_call_id": "1", "content": "North Head, 3 km, open until six"}
ANSWER = {"role": "assistant", "content": "North Head, three kilometres away; open until six."}
THANKS = {"role": "user", "content": "Thank you. And the one after that?"}
LAST = {"role": "assistant", "content": "There is none within five kilometres."}
DIALOGUE = [SYSTEM, ASK, CALL, FOUND, ANSWER, THANKS, LAST]


def _read(tmp_path: Path, value: Any, name: str = "log.json", **rules: Any) -> list[Turn]:
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=1))
    return list(open_trace(path, rules=TextRules(tokens=CharacterEstimate(), **rules)))


def _end(turn: Turn) -> int:
    return turn.prompt_tokens + turn.output_tokens


def _kept(before: Turn, after: Turn) -> int:
    """Tokens of a request's prompt and output that the later prompt begins with."""
    return shared_prefix((*before.prompt, *before.output), after.prompt)


class TestMessages:
    def test_each_reply_is_a_request_over_all_that_came_before(self, tmp_path: Path) -> None:
        call, answer, last = _read(tmp_path, {"messages": DIALOGUE})
        assert [turn.after for turn in (call, answer, last)] == ["", call.request, answer.request]
        assert _kept(call, answer) == _end(call)
        assert _kept(answer, last) == _end(answer)
        assert (call.calls_tool, answer.calls_tool) == (True, False)
        assert (call.tool_continuation, answer.tool_continuation) == (False, True)
        assert (call.user_turn, answer.user_turn, last.user_turn) == (True, False, True)
        assert call.tools and call.reasoning_kept and call.reasoning_tokens > 10

    def test_the_input_ends_before_the_generation_prefix(self, tmp_path: Path) -> None:
        (turn,) = _read(tmp_path, {"messages": [SYSTEM, ASK, ANSWER]})
        # Two messages of 41 and 48 characters at four a token, with header, end and line end.
        assert turn.u_end == 3 + 11 + 2 + 3 + 12 + 2
        assert turn.prompt_tokens == turn.u_end + 3
        assert turn.output_tokens == 13 + 1

    def test_dropped_reasoning_survives_the_tool_loop_only(self, tmp_path: Path) -> None:
        call, answer, last = _read(tmp_path, {"messages": DIALOGUE}, reasoning_kept=False)
        assert call.reasoning_kept is True, "the next prompt is the loop's"
        assert _kept(call, answer) == _end(call)
        assert _kept(call, last) == call.prompt_tokens
        assert call.reasoning_tokens > 0

    def test_arguments_that_are_written_again_part_the_prompt_from_the_reply(
        self, tmp_path: Path
    ) -> None:
        """The model wrote compact JSON; the template puts spaces after colons and commas."""
        compact = json.loads(json.dumps(CALL))
        compact["tool_calls"][0]["function"]["arguments"] = '{"what":"lighthouse","km":5}'
        call, answer = _read(tmp_path, {"messages": [SYSTEM, ASK, compact, FOUND, ANSWER]})
        assert call.prompt_tokens + call.reasoning_tokens < _kept(call, answer) < _end(call)

    def test_arguments_that_are_no_json_stay_as_they_are(self, tmp_path: Path) -> None:
        for arguments in ('{"what":', "NaN", '"\\ud800"', ""):
            odd = json.loads(json.dumps(CALL))
            odd["tool_calls"][0]["function"]["arguments"] = arguments
            call, answer = _read(tmp_path, {"messages": [ASK, odd, FOUND, ANSWER]})
            assert _kept(call, answer) == _end(call)

    def test_dialogues_share_what_they_begin_with(self, tmp_path: Path) -> None:
        other = {"role": "user", "content": ASK["content"][:20] + "?"}
        one, two = _read(
            tmp_path, [{"traj": [SYSTEM, ASK, ANSWER]}, {"traj": [SYSTEM, other, ANSWER]}]
        )
        assert one.conversation != two.conversation
        assert shared_prefix(one.prompt, two.prompt) == 3 + 11 + 2 + 3 + 5

    @pytest.mark.parametrize(
        "content",
        [
            json.dumps([SYSTEM, ASK, ANSWER]),
            json.dumps([SYSTEM, ASK, ANSWER], indent=1),
            json.dumps([{"messages": [SYSTEM, ASK, ANSWER]}]),
            json.dumps([[SYSTEM, ASK, ANSWER]], indent=1),
            json.dumps({"traj": [SYSTEM, ASK, ANSWER]}, indent=1),
            json.dumps({"messages": [SYSTEM, ASK, ANSWER]}) + "\n",
        ],
    )
    def test_lines_and_documents_hold_the_same(self, tmp_path: Path, content: str) -> None:
        (turn,) = _read(tmp_path, content)
        (again,) = _read(tmp_path, {"messages": [SYSTEM, ASK, ANSWER]})
        assert turn == again

    def test_offered_tools_come_first(self, tmp_path: Path) -> None:
        tools = [{"type": "function", "function": {"name": "find"}}]
        (bare,) = _read(tmp_path, {"messages": [ASK, ANSWER]})
        (turn,) = _read(tmp_path, {"messages": [ASK, ANSWER], "tools": tools})
        assert turn.tools and not bare.tools
        assert turn.prompt_tokens > bare.prompt_tokens
        assert shared_prefix(turn.prompt, bare.prompt) == 0

    @pytest.mark.parametrize(
        ("messages", "reason", "message"),
        [
            ([{"content": "x"}], Reason.MISSING, "messages[0].role None: the field is missing"),
            ([{"role": 3}], Reason.WRONG_TYPE, "messages[0].role 3: expected str, got int"),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
                Reason.WRONG_TYPE,
                "messages[0].content[0].type 'image_url': only text can be counted",
            ),
            (
                [{"role": "x", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
                Reason.WRONG_TYPE,
                "messages[0].tool_calls[0].function.arguments b'3': expected str or object",
            ),
        ],
    )  # fmt: skip
    def test_a_malformed_dialogue_is_named_or_counted(
        self, tmp_path: Path, messages: Any, reason: Reason, message: str
    ) -> None:
        """In a document the line is the one on which the element begins."""
        path = tmp_path / "log.json"
        good = json.dumps({"messages": [ASK, ANSWER]})
        path.write_text(f"[\n{good},\n{json.dumps({'messages': messages})},\n{good}]")
        with pytest.raises(TraceError) as error:
            list(open_trace(path))
        assert str(error.value).startswith(f"{path}:3: {message}")
        trace = open_trace(path, strict=False)
        assert len(list(trace)) == 2
        assert trace.skipped == {reason: 1}

    def test_a_dialogue_without_end_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r"messages <5000 elements>: give at most 4096"):
            _read(tmp_path, {"messages": [ASK] * 5000})


def _observation(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text, "message_type": "observation", "agent": "main"}


def _action(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "message_type": "action", "agent": "main"}


RUN = {
    "history": [
        {"role": "system", "content": "Fix it.", "message_type": "system_prompt", "agent": "main"},
        _observation("The issue: it is broken in three places."),
        _action("ls"), _observation("one.py\ntwo.py\nthree.py"),
        _action("cat one.py"), _observation("print(1)\nprint(2)"),
        _action("cat two.py"), _observation("print(3)"),
        _action("submit"),
    ]
}  # fmt: skip


class TestSweAgent:
    def test_a_run_in_full_replays_every_reply(self, tmp_path: Path) -> None:
        turns = _read(tmp_path, RUN, "run.traj")
        assert len(turns) == 4
        assert all(_kept(a, b) == _end(a) for a, b in pairwise(turns))

    @pytest.mark.parametrize("recorded", [True, False])
    def test_an_omitted_observation_parts_the_prompts_where_it_stood(
        self, tmp_path: Path, recorded: bool
    ) -> None:
        """With the last one shown, the third request loses the first result, the fourth both."""
        processors = [{"type": "cache_control"}, {"type": "last_n_observations", "n": 1}]
        config = {"agent": {"history_processors": processors}}
        run = RUN | ({"replay_config": json.dumps(config)} if recorded else {})
        full = _read(tmp_path, RUN, "run.traj")
        turns = _read(tmp_path, run, "run.traj", observations=None if recorded else 1)
        assert [turn.prompt for turn in turns[:2]] == [turn.prompt for turn in full[:2]]
        # What the first request had is still there, and then the omitted result begins.
        assert _kept(turns[1], turns[2]) == _end(turns[0]) + 1 + 3
        assert _kept(turns[0], turns[3]) == _end(turns[0])

    def test_recorded_prompts_are_taken_at_their_word(self, tmp_path: Path) -> None:
        short = [{"role": "user", "content": "Only this was sent."}]
        run = RUN | {"trajectory": [{"query": short}] * 4}
        turns = _read(tmp_path, run, "run.traj")
        assert {turn.prompt_tokens for turn in turns} == {3 + 5 + 2 + 3}
        assert len({turn.output for turn in turns}) == 4

    def test_agents_have_conversations_of_their_own(self, tmp_path: Path) -> None:
        history = [*RUN["history"], {"role": "user", "content": "Review."},
                   {"role": "assistant", "content": "Good."}]  # fmt: skip
        turns = _read(tmp_path, {"history": history}, "run.traj")
        assert len({turn.conversation for turn in turns}) == 2
        assert turns[-1].prompt_tokens == 3 + 2 + 2 + 3

    def test_a_malformed_run_names_the_entry(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r":1: history\[0\].role None: the field is missing"):
            _read(tmp_path, {"history": [{"content": "x"}]}, "run.traj")


def _sent(us: int, given: str, output: str, session: str = "s") -> str:
    line = {"session_id": session, "timestamp": us, "input": given, "output": output}
    return json.dumps(line) + "\n"


class TestLmcache:
    def test_replies_that_inputs_leave_out_are_put_in(self, tmp_path: Path) -> None:
        """Lines are not in the order of time; inputs are all messages but the agent's."""
        first, second, third = _read(
            tmp_path,
            _sent(9_000_000, "Fix the bug.\n\nfile.py\n\nprint(1)", "Done.")
            + _sent(1_000_000, "Fix the bug.", "Let me look: ls")
            + _sent(4_000_000, "Fix the bug.\n\nfile.py", "cat file.py"),
        )
        assert [turn.arrival_s for turn in (first, second, third)] == [0.0, 3.0, 8.0]
        assert [turn.after for turn in (second, third)] == [first.request, second.request]
        assert _kept(first, second) == _end(first)
        assert _kept(second, third) == _end(second)

    def test_replies_under_a_label_are_found(self, tmp_path: Path) -> None:
        one, two, three = _read(
            tmp_path,
            _sent(1, "user: What is it?", "A lighthouse.")
            + _sent(2, "user: What is it?\n\nassistant: A lighthouse.\n\nuser: Open?", "Yes.")
            + _sent(3, "user: What is it?\n\nassistant: Some tower.\n\nuser: Open?", "Yes."),
        )
        assert _kept(one, two) == _end(one)
        assert three.after == one.request
        assert _kept(one, three) < one.prompt_tokens

    def test_a_retry_has_the_same_prompt(self, tmp_path: Path) -> None:
        base = "Fix the bug."
        first, one, two = _read(
            tmp_path,
            _sent(1, base, "ls") + _sent(2, base + "\n\na.py", "cat a.py")
            + _sent(3, base + "\n\na.py", "cat b.py"),
        )  # fmt: skip
        assert one.prompt == two.prompt
        assert one.after == two.after == first.request

    def test_sessions_are_apart_and_share_text(self, tmp_path: Path) -> None:
        one, two = _read(
            tmp_path,
            _sent(1, "The same long system prompt. A", "x", "a")
            + _sent(2, "The same long system prompt. B", "y", "b"),
        )
        assert one.conversation != two.conversation
        assert shared_prefix(one.prompt, two.prompt) == 29 // 4

    def test_an_output_without_text_is_its_end(self, tmp_path: Path) -> None:
        (turn,) = _read(tmp_path, _sent(1, "", ""))
        assert (turn.prompt_tokens, turn.output_tokens) == (3, 1)


class _Words:
    """A tokenizer with one token a word, as the `tokenizers` library answers."""

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        stops = [i + 1 for i, c in enumerate(text) if c == " "] + [len(text)]
        starts = [0, *stops[:-1]]

        class Encoding:
            ids = stops
            offsets = tuple(zip(starts, stops, strict=True))

        return Encoding


_ALIKE = st.text(alphabet="ab", max_size=12)


class TestPieces:
    @given(st.lists(st.tuples(st.sampled_from(["", "x" * 40]), _ALIKE), max_size=8))
    def test_pieces_share_whole_tokens_of_what_they_begin_with(
        self, parts: list[tuple[str, str]]
    ) -> None:
        """Never more than the text allows, and all of it between equal texts."""
        pieces = Pieces(CharacterEstimate())
        texts = [head + tail for head, tail in parts]
        spans = [pieces.spans(one) for one in texts]
        for one, its in zip(texts, spans, strict=True):
            assert length(its) == -(-len(one) // 4)
            assert pieces.spans(one) == its
            for other, others in zip(texts, spans, strict=True):
                common = text.common_prefix(one, other)
                if one != other:
                    assert shared_prefix(its, others) <= common // 4

    def test_memory_is_bounded_and_equal_neighbours_stay_equal(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(text, "KEPT_CHARACTERS_MAX", 1000)
        pieces = Pieces(CharacterEstimate())
        for i in range(100):
            assert pieces.spans(f"{i} " * 50) == pieces.spans(f"{i} " * 50)
        assert pieces.kept_characters <= 1000

    def test_a_tokenizer_counts_instead_where_there_is_one(self) -> None:
        pieces = Pieces(TokenizerCount(_Words()))
        one = pieces.spans("the quick brown fox jumps over the lazy dog now")
        two = pieces.spans("the quick brown fox jumps over the lazy dot now")
        assert (length(one), length(two)) == (10, 10)
        assert shared_prefix(one, two) == 8


class TestWhatRolesTell:
    def test_positions_that_an_application_would_keep(self, tmp_path: Path) -> None:
        tools = [{"type": "function", "function": {"name": "find"}}]
        other = [SYSTEM, THANKS, LAST]
        call, answer, last, elsewhere = _read(
            tmp_path, [{"messages": DIALOGUE, "tools": tools}, {"messages": other, "tools": tools}]
        )
        opening = call.boundaries[0]
        assert shared_prefix(call.prompt, elsewhere.prompt) >= opening == elsewhere.boundaries[0]
        # Until the next user's message the end of this one is what stays.
        assert call.boundaries == answer.boundaries == (opening, call.u_end)
        assert last.boundaries == (opening, last.u_end)

    def test_no_position_without_a_role_that_says_it(self, tmp_path: Path) -> None:
        (only,) = _read(tmp_path, {"messages": [ANSWER]})
        assert only.boundaries == () and only.suffix_start is None

    @pytest.mark.parametrize("reasoning_kept", [True, False])
    def test_what_comes_back_as_it_was(self, tmp_path: Path, reasoning_kept: bool) -> None:
        odd = '{"what":"lighthouse"}'
        thought = {**ANSWER, "reasoning": "It is near."}
        call = {**CALL, "tool_calls": [{"function": {"name": "find", "arguments": odd}}]}
        turns = _read(
            tmp_path,
            {"messages": [SYSTEM, ASK, call, FOUND, thought, THANKS, LAST]},
            reasoning_kept=reasoning_kept,
        )
        called, answered, last = turns
        # The call is written in other words, after as much as the parser keeps of the reply.
        assert called.reasoning_kept is True
        assert called.verbatim_tokens == called.reasoning_tokens
        assert _kept(called, answered) >= called.prompt_tokens + (called.verbatim_tokens or 0)
        assert answered.reasoning_kept is reasoning_kept
        assert answered.verbatim_tokens == (answered.output_tokens if reasoning_kept else 0)
        assert last.verbatim_tokens == last.output_tokens and last.reasoning_kept is None

    def test_the_position_before_what_the_next_step_replaces(self, tmp_path: Path) -> None:
        history = [{"role": "system", "content": "You fix bugs."}]
        for step in range(5):
            told = f"Observation {step}: " + "some lines of output " * (3 + step)
            history.append({"role": "user", "content": told})
            history.append({"role": "assistant", "content": f"Command number {step}"})
        turns = _read(tmp_path, {"history": history}, "run.traj", observations=2)
        departs = 0
        for before, after in pairwise(turns):
            kept = _kept(before, after)
            if kept < before.prompt_tokens:
                departs += 1
                # The header of the replaced message is the same.
                assert kept - HEADER_TOKENS in before.boundaries
        assert departs >= 2
