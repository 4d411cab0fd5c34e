"""`backhaul explain` against a real daemon, with vLLM's own hashes and a real tokenizer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_kit import GRID, Driver, chain, make_record
from store_kit import RunningStore, backhaul, running_store
from tokenizers import Tokenizer, models, pre_tokenizers

from backhaul.deploy import prompts
from backhaul.deploy.explain_command import as_document
from backhaul.deploy.explanation import Explanation
from backhaul.deploy.processes import free_port
from backhaul.deploy.prompt_lookup import Subject, make_reader
from backhaul.deploy.request_lines import RequestLine
from backhaul.protocols.checkpoint import LookupOutcome, NotAsked
from backhaul.protocols.layout import CacheLayout, GroupKind, GroupLayout
from backhaul.protocols.record import Candidate, InputEnd, InputEndOutcome, LoggedRequest
from backhaul.transfer.base import DomainInfo
from backhaul.transfer.listing import ListQuery

WORDS = ["[UNK]", *"abcdefghijklmnopqrstuvwxyz"]
HASH_PROMPT = prompts.hash_prompt
HASHED: dict[tuple[Any, ...], prompts.Hashes] = {}
FIELDS = st.sampled_from([*LoggedRequest.__struct_fields__, *Candidate.__struct_fields__])


@pytest.fixture(scope="module")
def store() -> Iterator[RunningStore]:
    with running_store() as store:
        yield store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture(autouse=True)
def hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt in one process that imports vLLM, which takes a minute on a busy machine."""

    def hash_once(tokens: Sequence[int], *more: Any) -> prompts.Hashes:
        key = (tuple(tokens), *more)
        if key not in HASHED:
            HASHED[key] = HASH_PROMPT(tokens, *more)
        return HASHED[key]

    monkeypatch.setattr(prompts, "hash_prompt", hash_once)


def text_file(folder: Path, name: str, words: str) -> str:
    (folder / name).write_text(" ".join(words))
    return str(folder / name)


def test_a_rewritten_history_is_explained_to_the_token(store: RunningStore, model: Path) -> None:
    history = "abcdefghijkl"
    tokens = [WORDS.index(word) for word in history]
    hashed = prompts.hash_prompt(tokens, "sha256", GRID)
    assert len(hashed.hashes) == len(history) // GRID
    domain = store.open("explained", "decode-0:worker", hash_probe=hashed.probe)
    store.publish_hashes(domain, list(hashed.hashes[:1]), "input_end", name="u")
    store.publish_hashes(domain, list(hashed.hashes), "decode_end", name="d")

    prompt = text_file(model, "prompt", "abcdefXhijklmn".replace("X", "z"))
    options = ("explain", prompt, f"--store={store.uri}", f"--tokenizer={model}")
    code, out, err = backhaul(*options, "--json", f"--against={text_file(model, 'o', history)}")
    assert code == 0, err
    document = json.loads(out)
    parted, matched = document["candidates"]
    assert matched["boundary"] == GRID and matched["selected"] and matched["kinds"] == ["input_end"]
    assert parted["reason"] == "hash_mismatch" and parted["common_tokens"] == GRID
    closest = document["closest_mismatch"]
    assert closest["block"] == [GRID, 2 * GRID] and closest["prompt_block"] == "e f z h"
    assert document["difference"]["position"] == 6
    assert document["difference"]["left"].startswith("z h")
    assert document["difference"]["right"].startswith("g h")

    code, out, _ = backhaul(*options)
    assert code == 0 and "hash_mismatch" in out and "'e f z h'" in out and "--against" in out

    # A log with the tokens of who produced the checkpoint names the token without --against.
    known = line("d-1", tokens, domain, hashed.hashes, with_tokens=True)
    log = write_log(model, line("other", tokens[:5], domain, hashed.hashes[:1], True), known)
    code, out, _ = backhaul(*options, f"--request-log={log}")
    assert code == 0 and "part at token 6, against request d-1" in out and "very tokens" in out
    assert "this     'z h" in out and "against  'g h" in out

    before = store.catalog.Stats(store_stats_request()).counters
    backhaul(*options)
    assert store.catalog.Stats(store_stats_request()).counters == before

    store.open("explained", hash_probe="ff")
    code, _, err = backhaul(*options)
    assert code == 2 and "--domain" in err and domain in err and err.count("\n") == 1


def line(
    request_id: str,
    tokens: list[int],
    domain: str,
    hashes: Sequence[bytes],
    with_tokens: bool = False,
    **more: Any,
) -> LoggedRequest:
    """A line of the request log."""
    return LoggedRequest(
        engine="prefill-0",
        request_id=request_id,
        finish="FINISHED_STOPPED",
        domain=domain,
        grid_tokens=GRID,
        boundary_hashes=tuple(one.hex() for one in hashes),
        token_ids=tuple(tokens) if with_tokens else (),
        **{"prompt_tokens": len(tokens), "time": 0.0} | more,
    )


def write_log(folder: Path, *lines: LoggedRequest) -> str:
    path = folder / "requests.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    return str(path)


def test_a_logged_request_is_explained_without_vllm(store: RunningStore, model: Path) -> None:
    domain = store.open("logged", "decode-0:worker")
    other = store.open("logged", kv_dtype="fp8")
    said, asked = "abcd", "abcXe"  # one letter: one block
    for text in ("a", said):
        store.publish(domain, text, "decode_end")
    store.publish(other, "ab", "input_end")
    earlier = [WORDS.index(letter) for letter in said for _ in range(GRID)]
    tokens = [*earlier[: 3 * GRID + 1], *[26] * (2 * GRID - 1), 1]
    candidate = {
        "boundary": GRID, "kinds": ["decode_end"], "retained": True, "hash_matched": True,
        "consumable": False, "selected": False, "reason": "unreachable",
    }  # fmt: skip
    ran = msgspec.convert([candidate], tuple[Candidate, ...])
    mine = line("cmpl-2-0-aa", tokens, domain, chain(asked), True, candidates=ran)
    theirs = line("cmpl-1-0-bb", earlier, domain, chain(said), True)
    log = write_log(model, theirs, mine)
    options = (
        "explain", "--request=cmpl-2", f"--request-log={log}", f"--store={store.uri}",
        f"--tokenizer={model}",
    )  # fmt: skip
    code, out, err = backhaul(*options, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["request"]["candidates"][0]["reason"] == "unreachable"  # as it ran
    tags = {
        (one["boundary"] // GRID, one["domain"]): (one["selected"], one.get("reason"), one["field"])
        for one in document["candidates"]
    }
    assert tags == {
        (1, ""): (True, None, ""),
        (2, other): (False, "domain_mismatch", "kv_dtype"),
        (3, ""): (False, "state_missing", ""),  # shared attention, and no state at its end
        (4, ""): (False, "hash_mismatch", ""),
    }
    assert document["closest_mismatch"]["block"] == [3 * GRID, 4 * GRID]
    difference = document["difference"]
    assert difference["position"] == 3 * GRID + 1
    assert difference["request_id"] == "cmpl-1-0-bb" and difference["has_the_checkpoint"]
    assert difference["left"].startswith("z z") and difference["right"].startswith("d d")
    code, out, _ = backhaul(*options)
    assert code == 0 and "as it ran" in out and "unreachable" in out
    assert "domain_mismatch (kv_dtype)" in out and f"part at token {3 * GRID + 1}" in out

    # Without the other's tokens, the block, and what would name the token.
    log = write_log(model, msgspec.structs.replace(theirs, token_ids=()), mine)
    code, out, _ = backhaul(*options)
    assert code == 0 and "part at" not in out and "request_log_tokens" in out
    assert f"one of tokens {3 * GRID} to {4 * GRID - 1}" in out
    # Without its own, neither the text of the block nor a comparison.
    write_log(model, theirs, msgspec.structs.replace(mine, token_ids=()))
    code, out, _ = backhaul(*options)
    assert code == 0 and "no token ids of this request" in out and "block  " not in out
    code, _, err = backhaul(*options, f"--against={text_file(model, 'o', 'abc')}")
    assert code == 2 and "request_log_tokens" in err and err.count("\n") == 1


@pytest.mark.parametrize("told", ["whole record", "no match"])
def test_what_came_after_a_logged_request_is_no_part_of_its_explanation(
    store: RunningStore, model: Path, told: str
) -> None:
    """It publishes the end of its own history, and others go on from it and depart from it."""
    domain = store.open(f"later {told}", "prefill-0:worker")
    said, asked = "abcd", "abXe"
    if told != "no match":
        store.publish(domain, "ab", "input_end", name=f"{told} 1")
    store.publish(domain, said, "decode_end", name=f"{told} 2")
    arrived = time.time()
    earlier = [WORDS.index(letter) for letter in said for _ in range(GRID)]
    tokens = [*earlier[: 2 * GRID + 1], *[26] * (2 * GRID)]
    tags = {"retained": True, "hash_matched": False, "consumable": False, "selected": False}
    match = {"hash_matched": True, "consumable": True, "selected": True}
    met: list[dict[str, Any]] = [
        {"boundary": 4 * GRID, "kinds": ["decode_end"], **tags, "reason": "hash_mismatch"},
        {"boundary": 2 * GRID, "kinds": ["input_end"], **tags, **match},
    ]
    more: dict[str, Any] = {
        "candidates": msgspec.convert([] if told == "no match" else met, tuple[Candidate, ...]),
        "input_end": InputEnd(outcome=InputEndOutcome.PUBLISHED, boundary=4 * GRID),
    }
    time.sleep(1.0)  # longer than it takes to ask the store
    for text in (asked, "abXef", "abXq"):
        store.publish(domain, text, "decode_end", name=f"{told} {text}")
    more |= {"arrived": arrived, "time": time.time()}
    mine = line("cmpl-2-0-aa", tokens, domain, chain(asked), True, **more)
    theirs = line("cmpl-1-0-bb", earlier, domain, chain(said), True)
    log = write_log(model, theirs, mine)
    options = ("explain", "--request=cmpl-2", f"--request-log={log}", f"--store={store.uri}")
    code, out, err = backhaul(*options, "--json")
    assert code == 0, err
    document = json.loads(out)
    later = {(one["boundary"] // GRID, one["hash_matched"]) for one in document["candidates"]
             if one["later"]}  # fmt: skip
    assert later == {(4, True), (5, False), (4, False)}, "its own, what goes on from it, another's"
    assert not document["full_match"]
    assert document["difference"]["position"] == 2 * GRID + 1
    assert document["difference"]["has_the_checkpoint"]
    code, out, _ = backhaul(*options)
    assert code == 0 and "goes on past the prompt, later" in out and "hash_mismatch, later" in out
    assert "shallower, later" not in out and "no more of it" not in out
    assert f"part at token {2 * GRID + 1}, against request cmpl-1-0-bb" in out
    assert "came into the store after this request had looked" in out


def test_what_ended_while_a_logged_request_ran_is_not_its_history(model: Path) -> None:
    """It had looked by then. An older log says only when it ended."""
    tokens = [1, 2, 3, 4, 5, 6]
    before = line("cmpl-1", [*tokens[:2], 9, 9], "d", [], True, time=50.0)
    beside = line("cmpl-2", [*tokens[:4], 9, 9], "d", [], True, time=150.0)
    for arrived, closest in ((100.0, "cmpl-1"), (0.0, "cmpl-2")):
        mine = line("cmpl-3", tokens, "d", [], True, arrived=arrived, time=200.0)
        log = write_log(model, before, beside, mine)
        options = ("explain", f"--request-log={log}", "--no-lookup", "--request=cmpl-3", "--json")
        code, out, err = backhaul(*options)
        assert code == 0, err
        assert json.loads(out)["difference"]["request_id"] == closest


def test_a_decode_leg_is_not_said_to_have_asked(model: Path) -> None:
    fed = line("cmpl-1-0-bb", [1] * 9, "d", [], other_tokens=8, recomputed_tokens=1)
    asked = line("cmpl-1-0-aa", [1] * 9, "d", [], recomputed_tokens=9, lookup=LookupOutcome.MISS)
    log = write_log(model, asked, fed)
    options = ("explain", f"--request-log={log}", "--no-lookup")
    code, out, _ = backhaul(*options, "--request=cmpl-1-0-bb")
    assert code == 0 and "store was not asked: another" in out and "no checkpoint" not in out
    code, out, _ = backhaul(*options, "--request=cmpl-1")
    assert code == 0 and "cmpl-1-0-aa" in out and "The store knew no checkpoint" in out


@pytest.mark.parametrize("why", [*LookupOutcome, *NotAsked, None])
def test_the_store_is_said_to_know_nothing_only_where_it_said_so(
    model: Path, why: LookupOutcome | NotAsked | None
) -> None:
    field = "not_asked" if isinstance(why, NotAsked) else "lookup"
    log = write_log(model, line("cmpl-1", [1] * 9, "d", [], recomputed_tokens=9, **{field: why}))
    code, out, _ = backhaul("explain", f"--request-log={log}", "--no-lookup", "--request=cmpl-1")
    answered = ("hit", "not_taken", "passed_over", "miss")
    assert code == 0 and ("The store knew no checkpoint" in out) == (why in answered)
    assert ("The store was not asked" in out) == (field == "not_asked")
    assert f"at {GRID} tokens" in out or why is not NotAsked.BELOW_GRID


def test_what_lies_loose_is_named_as_a_lookup_names_it(store: RunningStore, model: Path) -> None:
    """A publication that streamed ahead and ended leaves objects and no checkpoint."""
    domain = store.open("loose", "decode-0:worker")
    store.publish(domain, "a", "input_end")
    store.leave_loose(domain, "abcd", GroupKind.FULL)
    store.leave_loose(domain, "ax", GroupKind.FULL)
    store.leave_loose(domain, "axyz", GroupKind.RECURRENT)

    for letters, boundary, reason in (
        ("abce", 3, "state_missing"),
        ("axyz", 4, "attention_missing"),
    ):
        log = write_log(model, line("r", [1] * (4 * GRID + 1), domain, chain(letters)))
        options = ("explain", "--request=r", f"--request-log={log}", f"--store={store.uri}")
        before = store.catalog.Stats(store_stats_request())
        code, out, err = backhaul(*options, "--json")
        assert code == 0, err
        assert store.catalog.Stats(store_stats_request()) == before
        looked_up = [one for one in json.loads(out)["candidates"] if one["looked_up"]]
        answer = store.lookup(domain, letters).matches
        assert [(one["boundary"], one["reason"] or "", one["consumable"]) for one in looked_up] == [
            (match.boundary, match.reason, match.consumable) for match in answer
        ]
        (loose,) = [one for one in looked_up if one["reason"] == reason]
        assert loose["boundary"] == loose["common_tokens"] == boundary * GRID
        assert not (loose["retained"] or loose["hash_matched"])
        assert looked_up[-1]["selected"] and looked_up[-1]["boundary"] == GRID
        assert reason in backhaul(*options)[1]


def test_a_full_match_has_no_closest_that_does_not(store: RunningStore, model: Path) -> None:
    domain = store.open("full", "decode-0:worker")
    store.publish(domain, "ab", "input_end")
    store.publish(domain, "abc", "decode_end")
    store.publish(domain, "x", "decode_end")

    def explained(letters: str, more: int) -> str:
        tokens = [WORDS.index(letter) for letter in letters for _ in range(GRID)] + [1] * more
        log = write_log(model, line("r", tokens, domain, chain(letters), True))
        options = ("explain", "--request=r", f"--request-log={log}", f"--store={store.uri}")
        code, out, err = backhaul(*options)
        assert code == 0, err
        return out

    for letters, more in (("ab", 1), ("abc", 1), ("abz", 0)):
        out = explained(letters, more)
        assert "no more of it can be reused" in out, (letters, more)
        assert "does not match" not in out and "keeps hashes" not in out
    out = explained("abz", 1)  # departs in its third block
    assert "can be reused" not in out and "does not match: decode_end" in out
    assert f"one of tokens {2 * GRID} to {3 * GRID - 1} of this prompt.\n" in out
    out = explained("z", 1)  # departs at once
    assert "shares a block" in out and "Both share no whole block." in out
    assert "before " not in out


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    """Of a group that is compared block by block, or none, and one that is not."""
    sizes = st.sampled_from([GRID, 2 * GRID, 3 * GRID])
    other = GroupLayout(index=0, kind=GroupKind.RECURRENT, block_tokens=draw(sizes))
    full = GroupLayout(index=1, kind=GroupKind.FULL, block_tokens=draw(sizes))
    groups = draw(st.sampled_from([(other,), (other, full)]))
    return CacheLayout(groups=groups, hash_tokens=GRID)


@given(layouts(), st.text("ab", min_size=12, max_size=12), st.data())
def test_the_first_other_token_is_in_the_block_that_is_named(
    layout: CacheLayout, letters: str, data: st.DataObject
) -> None:
    """Whatever groups there are, and whichever of the prompt's hashes are known."""
    step = layout.boundary_tokens // GRID
    kept = letters[: step * data.draw(st.integers(1, len(letters) // step))]
    prompt = letters[: data.draw(st.integers(0, 12))] + data.draw(st.text("ab", max_size=12))
    driver = Driver(layout=layout)
    driver.publish(kept)
    grid = data.draw(st.integers(1, 3))
    hashes = [one if not (i + 1) % grid else b"" for i, one in enumerate(chain(prompt))]
    query = ListQuery(prefix_hashes=tuple(hashes) or (b"none",))
    (info,) = driver.index.query_checkpoints(query, driver.now).checkpoints
    if info.common_tokens == info.boundary:
        return
    subject = Subject(
        prompt_tokens=len(prompt) * GRID, tokens=[],
        request=RequestLine(raw={}, request_id="r", grid_tokens=grid * GRID),
    )  # fmt: skip
    record = make_record("m", layout)
    home = DomainInfo(record.domain_id, record, (), 0.0, 1, {}, 0, 0)
    found = Explanation(candidates=(), common=(), later=(), looked_up=0, closest=info, strangers=0)
    reader = make_reader(None, special_tokens=False)
    closest = as_document(home, found, subject, reader)["closest_mismatch"]
    pairs = zip(kept, prompt, strict=False)
    other = next((i for i, (one, two) in enumerate(pairs) if one != two), None)
    first, end = closest["block"]
    if other is None:
        assert not closest["block_is_whole"]
    else:
        assert first <= other * GRID < end


def test_what_the_prompt_cuts_off_may_be_the_same(store: RunningStore, model: Path) -> None:
    domain = store.open("cut", "decode-0:worker")
    store.publish(domain, "a", "input_end")
    store.publish(domain, "abcd", "decode_end")
    log = write_log(model, line("r", [1] * (3 * GRID + 1), domain, chain("abc")))
    options = ("explain", "--request=r", f"--request-log={log}", f"--store={store.uri}")
    code, out, _ = backhaul(*options)
    assert code == 0 and "the checkpoint only goes on." in out
    assert "goes on past the prompt" in out
    candidates = json.loads(backhaul(*options, "--json")[1])["candidates"]
    (one,) = [one for one in candidates if one["goes_on"] and not one["domain"]]
    assert one["boundary"] == 4 * GRID and one["reason"] == "hash_mismatch"


def test_what_the_store_lost_is_still_compared_with_the_log(model: Path) -> None:
    mine = line("me", [1, 2, 3, 4, 9], "d", [], True)
    log = write_log(
        model, line("a", [1, 7], "d", [], True), line("b", [1, 2, 3, 8], "d", [], True), mine
    )
    options = ("explain", "--request=me", f"--request-log={log}", "--no-lookup")
    code, out, _ = backhaul(*options)
    assert code == 0 and "part at token 3, against request b" in out and "shares most" in out


def test_a_request_of_an_unknown_domain(store: RunningStore, model: Path) -> None:
    log = write_log(model, line("r", [1] * GRID, "feedfeedfeedfeed", chain("a")))
    options = ("explain", "--request=r", f"--request-log={log}", f"--store={store.uri}")
    code, _, err = backhaul(*options)
    assert code == 2 and "feedfeedfeedfeed" in err and "--store" in err and err.count("\n") == 1


def test_a_store_that_is_down_still_shows_the_record(model: Path) -> None:
    log = write_log(model, line("r", [1] * GRID, "d", chain("a")))
    options = ("explain", "--request=r", f"--request-log={log}")
    code, out, err = backhaul(*options, f"--store=backhaul://127.0.0.1:{free_port()}")
    assert code == 1 and "as it ran" in out and "no store answers" in err


def store_stats_request() -> object:
    from backhaul.protocols import store_pb2

    return store_pb2.StatsRequest()


def test_two_prompts_are_compared_without_a_store(model: Path) -> None:
    a, b = text_file(model, "a", "abcx"), text_file(model, "b", "abc")
    options = ("explain", a, "--no-lookup", f"--tokenizer={model}")
    code, out, err = backhaul(*options, f"--against={b}")
    assert code == 0 and "part at token 3" in out and "(ends here)" in out, err
    assert "the same 4 tokens" in backhaul(*options, f"--against={a}")[1]
    ids = ("explain", "-", "--no-lookup", f"--against={a}", f"--tokenizer={model}")
    assert "part at token 1" in backhaul(*ids, stdin="[1, 9]")[1]


def test_a_request_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    candidate = {
        "boundary": 1056, "kinds": ["decode_end"], "retained": True, "hash_matched": False,
        "consumable": False, "selected": False, "reason": "hash_mismatch",
    }  # fmt: skip
    log.write_text(json.dumps({"request_id": "r", "candidates": [candidate]}) + "\n")
    options = ("explain", "--request=r", f"--request-log={log}")
    code, out, _ = backhaul(*options)
    assert code == 0 and "1056" in out and "hash_mismatch" in out
    assert "no fresh lookup" in out  # the line has no hashes
    document = json.loads(backhaul(*options, "--json")[1])
    assert document["request"]["candidates"] == [candidate] and "candidates" not in document


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from([-1, 10**400, 2**40, 1e300, "[/]", "[link=x]", "00", GRID]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40)
@given(st.dictionaries(FIELDS, ODD), st.lists(st.dictionaries(FIELDS, ODD), max_size=3))
def test_any_line_of_a_log_is_shown_or_one_line_says_what_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any], candidates: list[Any]
) -> None:
    log = tmp_path_factory.getbasetemp() / "odd.jsonl"
    whole = {"candidates": candidates, "prompt_tokens": 5, "token_ids": [1, 2]} | fields
    log.write_text(json.dumps(whole | {"request_id": "r"}) + "\n")
    options = ("explain", "--request=r", f"--request-log={log}", "--no-lookup")
    for more in ((), ("--json",)):
        code, out, err = backhaul(*options, *more)
        if code:
            assert code == 2 and out == "" and err.count("\n") == 1 and f"{log}:1: " in err
        else:
            assert "r" in out and err == ""


@pytest.mark.parametrize("grid", [1, GRID, 1 << 23, 1 << 62])
def test_a_lookup_of_huge_numbers_ends(store: RunningStore, tmp_path: Path, grid: int) -> None:
    domain = store.open(f"huge {grid}", "decode-0:worker")
    log = tmp_path / "requests.jsonl"
    entry = {
        "request_id": "r", "domain": domain, "grid_tokens": grid, "prompt_tokens": 2 * grid,
        "boundary_hashes": ["00", "ff"],
    }  # fmt: skip
    log.write_text(json.dumps(entry) + "\n")
    options = ("explain", "--request=r", f"--request-log={log}", f"--store={store.uri}")
    code, _, err = backhaul(*options)
    assert code in (0, 2) and err.count("\n") == (code == 2)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("x", "--request=r"),
        ("--request=r",),
        ("x", "--no-lookup"),
        ("/nonexistent",),
        ("--request=r", "--request-log=/nonexistent"),
    ],
)
def test_wrong_usage_is_exit_code_2(options: tuple[str, ...]) -> None:
    code, out, err = backhaul("explain", *options)
    assert code == 2 and out == "" and "Traceback" not in err
