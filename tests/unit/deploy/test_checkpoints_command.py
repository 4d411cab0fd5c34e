"""`backhaul checkpoints` against a real daemon, and how it writes times and tables."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_kit import GRID, chain
from store_kit import RunningStore, backhaul

from backhaul.deploy.checkpoints_command import table
from backhaul.deploy.console import Console
from backhaul.deploy.processes import free_port
from backhaul.deploy.terminal import format_age, parse_duration
from backhaul.protocols.checkpoint import CheckpointKind, DomainId
from backhaul.protocols.errors import ConfigError
from backhaul.protocols.record import LoggedRequest
from backhaul.transfer.base import CheckpointInfo


def listed(store: RunningStore, *options: str) -> list[int]:
    """Boundaries, in blocks, in the order of the listing."""
    code, out, err = backhaul("checkpoints", "--store", store.uri, "--json", *options)
    assert code == 0, err
    return [one["boundary"] // GRID for one in json.loads(out)["checkpoints"]]


def test_filters_and_pages(live_store: RunningStore) -> None:
    domain, other = live_store.open("filters"), live_store.open("filters-other")
    for tokens, kinds in (("a", ["input_end"]), ("ab", ["decode_end"]), ("abc", ["prompt_end"])):
        live_store.publish(domain, tokens, *kinds)
    live_store.publish(other, "zzzzzz")
    assert listed(live_store, "--domain", domain[:10]) == [3, 2, 1]
    assert listed(live_store, "--domain", domain.upper(), "--kind", "input_end") == [1]
    both = ("--kind=input_end", "--kind=prompt_end")
    assert listed(live_store, "--domain", domain, *both) == [3, 1]
    assert listed(live_store, "--domain", domain, "--older-than", "1h") == []
    assert listed(live_store, "--domain", domain, "--newer-than", "1h") == [3, 2, 1]
    assert listed(live_store, "--domain", domain, "--show", "evicted") == []
    assert listed(live_store, "--domain", domain, "--older-than", "0") == [3, 2, 1]
    everything = listed(live_store, "--limit=0")
    assert listed(live_store, "--limit=0", "--kind=input_end", "--show=all").count(1) >= 1
    assert {6, 3, 2, 1} <= set(everything)
    assert 6 in listed(live_store, "--limit=0")
    _, out, _ = backhaul(
        "checkpoints", f"--store={live_store.uri}", f"--domain={domain}", "--limit=2", "--json"
    )
    cursor = json.loads(out)["next_cursor"]
    assert listed(live_store, "--domain", domain, "--limit=2", "--cursor", cursor) == [1]


def test_json_says_everything(live_store: RunningStore) -> None:
    domain = live_store.open("json")
    live_store.publish(domain, "ab", "decode_end", "prompt_end")
    live_store.lookup(domain, "abc")
    _, out, _ = backhaul("checkpoints", f"--store={live_store.uri}", f"--domain={domain}", "--json")
    document = json.loads(out)
    (one,) = document["checkpoints"]
    assert one.pop("age_s") >= 0 and one.pop("idle_s") >= 0
    assert one == {
        "domain": domain,
        "boundary": 2 * GRID,
        "block_hash": chain("ab")[-1].hex(),
        "kinds": ["decode_end", "prompt_end"],
        "visibility": "visible",
        "state_bytes": 256,
        "attention_bytes": 512,
        "hits": 1,
        "leases": 0,
        "producer": "decode-0",
        "tags": {
            "retained": True,
            "hash_matched": None,
            "consumable": None,
            "selected": None,
            "reason": None,
            "field": "",
            "goes_on": False,
        },
    }
    assert document["for_domain"] is None
    assert document["store"] == live_store.uri and document["next_cursor"] == ""


def test_the_table_and_an_empty_answer_say_what_to_do(live_store: RunningStore) -> None:
    domain = live_store.open("table")
    for tokens in ("a", "ab"):
        live_store.publish(domain, tokens)
    options = ("checkpoints", f"--store={live_store.uri}", f"--domain={domain}")
    code, out, _ = backhaul(*options, "--limit=1")
    assert code == 0 and "decode_end" in out and "decode-0" in out and "--cursor 0x" in out
    code, out, _ = backhaul("checkpoints", f"--store={live_store.uri}", "--domain=ffffffffffff")
    assert code == 0 and "No checkpoint fits" in out and domain in out


def test_an_unreachable_store_is_exit_code_1() -> None:
    code, out, err = backhaul("checkpoints", f"--store=backhaul://127.0.0.1:{free_port()}")
    assert code == 1 and out == ""
    assert err.count("\n") == 1 and "is `backhaul store` running" in err


def test_ages_split_a_listing_in_two(live_store: RunningStore) -> None:
    domain = live_store.open("ages")
    live_store.publish(domain, "a")
    time.sleep(1.0)
    live_store.publish(domain, "ab")
    began = time.monotonic()
    options = ("--domain", domain)
    _, out, _ = backhaul("checkpoints", f"--store={live_store.uri}", *options, "--json")
    new, old = (one["age_s"] for one in json.loads(out)["checkpoints"])
    assert old - new > 0.9
    older = listed(live_store, *options, f"--older-than={old - 0.001:f}s")
    newer = listed(live_store, *options, f"--newer-than={old - 0.001:f}s")
    assert 1 in older and 1 not in newer
    if time.monotonic() - began < 0.9:  # else both have grown past it meanwhile
        assert older == [1] and newer == [2]


def tagged(store: RunningStore, *options: str) -> dict[int, str]:
    """Boundary in blocks -> deepest tag, of a listing for a request."""
    code, out, err = backhaul("checkpoints", "--store", store.uri, "--json", *options)
    assert code == 0, err
    found = {}
    for one in json.loads(out)["checkpoints"]:
        tags = one["tags"]
        names = [n for n in ("retained", "hash_matched", "consumable", "selected") if tags[n]]
        assert bool(tags["reason"]) == (not tags["selected"])
        found[one["boundary"] // GRID] = names[-1] if names else "none"
    return found


def log_of(folder: Path, domain: str, text: str) -> str:
    """A request log with one request, whose prompt has these blocks and a token."""
    line = LoggedRequest(
        time=0.0,
        engine="prefill-0",
        request_id="cmpl-1-0-abcdef12",
        finish="FINISHED_STOPPED",
        prompt_tokens=len(text) * GRID + 1,
        domain=domain,
        grid_tokens=GRID,
        boundary_hashes=tuple(one.hex() for one in chain(text)),
    )
    (folder / "log.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    return str(folder / "log.jsonl")


def test_tags_for_a_request(live_store: RunningStore, tmp_path: Path) -> None:
    domain = live_store.open("tags")
    other = live_store.open("tags", kv_dtype="fp8")
    for tokens in ("m", "mn", "mnX", "Z"):
        live_store.publish(domain, tokens)
    live_store.publish(other, "mno")
    log = log_of(tmp_path, domain, "mnop")
    options = ("--request=cmpl-1", f"--request-log={log}")
    mine = {1: "consumable", 2: "selected", 3: "hash_matched"}
    assert tagged(live_store, *options, f"--domain={other}") == {3: "hash_matched"}
    assert tagged(live_store, *options, "--tag=consumable") == {1: "consumable", 2: "selected"}
    assert tagged(live_store, *options, "--tag=selected") == {2: "selected"}
    assert tagged(live_store, *options, "--tag=hash_matched") == mine
    assert tagged(live_store, *options, "--tag=hash_matched", "--limit=1") == {3: "hash_matched"}
    retained = tagged(live_store, *options, "--tag=retained", f"--domain={domain}")
    assert retained == {1: "retained", 2: "selected", 3: "retained"}  # Z and m: one boundary
    used = (*options, "--used", f"--domain={domain}")  # other tests looked others up
    assert tagged(live_store, *used) == {}
    live_store.lookup(domain, "m")
    assert tagged(live_store, *used) == {1: "consumable"}
    # For a worker of the other domain, what it holds itself is the one to load.
    theirs = tagged(live_store, *options, f"--for-domain={other}", "--tag=selected")
    assert theirs == {3: "selected"}
    code, out, _ = backhaul("checkpoints", "--store", live_store.uri, *options)
    assert code == 0 and "hash_matched (domain_mismatch kv_dtype)" in out
    assert "consumable (shallower)" in out and "retained (hash_mismatch)" in out
    assert "goes on" not in out

    live_store.publish(domain, "mnopq")
    _, out, _ = backhaul("checkpoints", "--store", live_store.uri, *options)
    assert "retained (goes on past the prompt)" in out
    _, out, _ = backhaul("checkpoints", "--store", live_store.uri, "--json", *options)
    for one in json.loads(out)["checkpoints"]:
        assert one["tags"]["goes_on"] == (one["boundary"] == 5 * GRID)


def test_tags_without_a_request(live_store: RunningStore) -> None:
    domain, other = live_store.open("untagged"), live_store.open("untagged", kv_dtype="fp8")
    for tokens in ("a", "ab"):
        live_store.publish(domain, tokens)
    live_store.publish(other, "abc")
    live_store.lookup(domain, "a")
    options = ("--domain", domain)
    assert listed(live_store, *options, "--tag=retained") == [2, 1]
    assert listed(live_store, *options, "--used") == [1]
    assert listed(live_store, "--tag=consumable", f"--for-domain={domain}") == [2, 1]
    assert listed(live_store, "--tag=consumable", f"--for-domain={other}") == [3]
    assert listed(live_store, "--used", "--domain", other, f"--for-domain={other}") == []
    consumable = (f"--for-domain={domain}", "--tag=consumable", "--used")
    assert listed(live_store, *consumable) == [1]
    # Pages of what is left of pages: the cursor goes on where the listing ended.
    options = ("--tag=consumable", f"--for-domain={domain}", "--limit=1")
    _, out, _ = backhaul("checkpoints", "--store", live_store.uri, "--json", *options)
    document = json.loads(out)
    assert [one["boundary"] // GRID for one in document["checkpoints"]] == [2]
    assert listed(live_store, *options, "--cursor", document["next_cursor"]) == [1]
    _, out, _ = backhaul(
        "checkpoints", "--store", live_store.uri, f"--domain={other}", f"--for-domain={domain}"
    )
    assert "hash_matched (domain_mismatch kv_dtype)" in out


def test_a_tag_that_means_nothing_here_says_what_to_give(live_store: RunningStore) -> None:
    for options, words in (
        (("--tag=hash_matched",), "--request"),
        (("--tag=selected",), "--used"),
        (("--tag=selected", "--for-domain=0"), "--request"),
        (("--tag=consumable",), "--for-domain"),
        (("--tag=retained", "--show=evicted"), "--show"),
        (("--request=r",), "--request-log"),
        ((f"--request-log={__file__}",), "--request ID"),
        (("--request=r", f"--request-log={__file__}"), "is not in"),
        (("--prompt=-", "--request=r", f"--request-log={__file__}"), "FILE"),
    ):
        code, out, err = backhaul("checkpoints", "--store", live_store.uri, *options)
        assert (code, out) == (2, "") and words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--store=http://127.0.0.1:7400",),
        ("--store=backhaul://127.0.0.1",),
        ("--older-than=soon",),
        ("--older-than=2h", "--newer-than=1h"),
        ("--cursor=nonsense",),
        ("--kind=nonsense",),
        ("--limit=-1",),
    ],
)
def test_wrong_usage_is_exit_code_2(options: tuple[str, ...]) -> None:
    code, out, err = backhaul("checkpoints", *options)
    assert code == 2 and out == "" and "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5s", 1.5), ("10m", 600), ("2h30m", 9000), ("1d", 86400), ("250ms", 0.25)],
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text, "--x") == seconds


@given(st.text(alphabet="0123456789.smhd -", max_size=8))
def test_a_time_is_read_or_refused_in_words(text: str) -> None:
    try:
        assert parse_duration(text, "--older-than") >= 0
    except ConfigError as error:
        assert "--older-than" in str(error)


@given(st.floats())
def test_any_age_is_shown_in_a_few_characters(seconds: float) -> None:
    shown = format_age(seconds)
    assert len(shown) <= len("3652500 d 23 h")
    assert (shown == "-") == (not seconds < 3.2e11 or seconds == -math.inf)


@given(st.floats(0, 1e7))
def test_an_age_reads_back_within_its_second_unit(seconds: float) -> None:
    shown = format_age(seconds)
    read = parse_duration(shown.replace(" ", ""), "--x")
    smallest = {"d": 3600.0, "h": 60.0, "m": 1.0, "s": 1.0}[shown.split()[1]]
    assert abs(read - seconds) <= smallest


@given(width=st.integers(40, 200), count=st.integers(1, 4))
def test_a_table_fits_the_terminal_or_says_what_it_left_out(width: int, count: int) -> None:
    info = CheckpointInfo(
        domain=DomainId("0123456789abcdef"),
        boundary=131_072,
        block_hash=bytes(32),
        kinds=(CheckpointKind.DECODE_END, CheckpointKind.PROMPT_END)[:count],
        state_bytes=75 << 20,
        attention_bytes=3 << 30,
        age_s=12_345.0,
        idle_s=99.0,
        leases=count,
        producer="engine-decode-0:worker",
    )
    shown, left_out = table((info,) * count, width)
    text = io.StringIO()
    Console(file=text, width=500).print(shown)
    lines = text.getvalue().splitlines()
    for name in ("domain", "tokens", "ends", "age"):
        assert name in lines[0]
    if len(left_out) < 7:
        assert max(len(line.rstrip()) for line in lines) <= width
    assert all(name not in lines[0] for name in left_out)
