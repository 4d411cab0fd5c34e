"""`backhaul explain` against a real daemon, with vLLM's own hashes and a real tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from index_kit import GRID
from store_kit import RunningStore, backhaul, running_store
from tokenizers import Tokenizer, models, pre_tokenizers

from backhaul.deploy.prompts import hash_prompt

WORDS = ["[UNK]", *"abcdefghijklmnopqrstuvwxyz"]


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


def text_file(folder: Path, name: str, words: str) -> str:
    (folder / name).write_text(" ".join(words))
    return str(folder / name)


def test_a_rewritten_history_is_explained_to_the_token(store: RunningStore, model: Path) -> None:
    history = "abcdefghijkl"
    tokens = [WORDS.index(word) for word in history]
    hashed = hash_prompt(tokens, "sha256", GRID)
    assert len(hashed.hashes) == len(history) // GRID
    domain = store.open("explained", "decode-0:worker", hash_probe=hashed.probe)
    store.publish_hashes(domain, list(hashed.hashes[:1]), "input_end", name="u")
    store.publish_hashes(domain, list(hashed.hashes), "decode_end", name="d")

    prompt = text_file(model, "prompt", "abcdefXhijklmn".replace("X", "z"))
    options = ("explain", prompt, f"--store={store.uri}", f"--tokenizer={model}")
    code, out, err = backhaul(*options, "--json", f"--against={text_file(model, 'o', history)}")
    assert code == 0, err
    document = json.loads(out)
    matched, parted = document["candidates"]
    assert matched["boundary"] == GRID and matched["selected"] and matched["kinds"] == ["input_end"]
    assert parted["reason"] == "hash_mismatch" and parted["common_tokens"] == GRID
    closest = document["closest_mismatch"]
    assert closest["block"] == [GRID, 2 * GRID] and closest["prompt_block"] == "e f z h"
    assert document["difference"]["position"] == 6
    assert document["difference"]["left"].startswith("z h")
    assert document["difference"]["right"].startswith("g h")

    code, out, _ = backhaul(*options)
    assert code == 0 and "hash_mismatch" in out and "'e f z h'" in out and "--against" in out

    before = store.catalog.Stats(store_stats_request()).counters
    backhaul(*options)
    assert store.catalog.Stats(store_stats_request()).counters == before

    store.open("explained", hash_probe="ff")
    code, _, err = backhaul(*options)
    assert code == 2 and "--domain" in err and domain in err and err.count("\n") == 1


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
    assert json.loads(backhaul(*options, "--json")[1])["candidates"] == [candidate]


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
