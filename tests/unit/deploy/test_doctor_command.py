"""`backhaul doctor` against a real daemon and an HTTP server that answers as vLLM does."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from store_kit import RunningStore, backhaul, running_store
from test_diagnosis import METRICS

from backhaul.deploy.doctor_command import http_of
from backhaul.deploy.engine_view import read_engine
from backhaul.deploy.processes import free_port


@pytest.fixture(scope="module")
def store() -> Iterator[RunningStore]:
    with running_store() as store:
        yield store


@contextlib.contextmanager
def engine_at(
    domain: str,
    failure_policy: str = "fail",
    server_info: dict[str, Any] | None = None,
    pages: dict[str, Any] | None = None,
    **cache: str,
) -> Iterator[str]:
    """The URL of an HTTP server that answers as a vLLM in this cache domain does, but for some
    pages: text as it is, all else as JSON."""
    metrics = METRICS.replace("0123456789abcdef", domain)
    for name, value in cache.items():
        metrics = re.sub(f'{name}="[^"]*"', f'{name}="{value}"', metrics)
    # A connector inside another one has the same field, and it does not count.
    inner = {"connectors": [{"kv_load_failure_policy": "inner"}]}
    transfer = {"kv_connector_extra_config": inner, "kv_load_failure_policy": failure_policy}
    shown = {
        "/version": ("application/json", json.dumps({"version": "0.32.0"})),
        "/v1/models": ("application/json", json.dumps({"data": [{"id": "tiny"}]})),
        "/metrics": ("text/plain", metrics),
        "/server_info?config_format=json": (
            "application/json",
            json.dumps(
                {"vllm_config": {"kv_transfer_config": transfer}}
                if server_info is None
                else server_info
            ),
        ),
    }
    for path, page in (pages or {}).items():
        shown[path] = ("", page if isinstance(page, str) else json.dumps(page))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, body = shown[self.path]
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(300)


@pytest.fixture
def engine_url() -> Iterator[str]:
    with engine_at("0123456789abcdef") as url:
        yield url


def doctor(store: RunningStore, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document of the command, without its probe."""
    code, out, err = backhaul(
        "doctor", f"--store={store.uri}", f"--store-http=http://{store.http}", "--no-probe",
        "--json", *options,
    )  # fmt: skip
    assert err == "" and code in (0, 1), err
    return code, json.loads(out)


@pytest.mark.parametrize(
    ("target", "listening", "url"),
    [
        ("10.0.0.5:7400", "0.0.0.0:7401", "http://10.0.0.5:7401"),
        ("[fd00::5]:7400", "[::]:7401", "http://[fd00::5]:7401"),
        ("store:7400", "10.0.0.5:80", "http://10.0.0.5:80"),
        ("127.0.0.1:9", "127.0.0.1:7401", "http://127.0.0.1:7401"),
        ("localhost:9", "[::1]:7401", "http://[::1]:7401"),
        ("10.0.0.5:7400", "127.0.0.1:7401", ""),
        ("store:7400", "localhost:7401", ""),
        ("10.0.0.5:7400", "", ""),
    ],
)
def test_where_the_stores_http_is(target: str, listening: str, url: str) -> None:
    assert http_of(target, listening) == url


def test_the_store_says_where_its_http_is(store: RunningStore) -> None:
    options = ("doctor", f"--store={store.uri}", "--no-probe", "--json")
    _, out, err = backhaul(*options)
    (found,) = [one for one in json.loads(out)["findings"] if one["check"] == "store HTTP"]
    assert found["says"] == f"http://{store.http} is healthy", err
    free = free_port()
    document = json.loads(backhaul(*options, f"--store-http=http://127.0.0.1:{free}")[1])
    assert levels_of(document, "store HTTP") == ["problem"]


def test_an_engine_that_shows_no_policy_is_read_all_the_same() -> None:
    with engine_at("0123456789abcdef") as url:
        assert read_engine(url, 5.0).failure_policy == "fail"
    for answer in ({"vllm_config": "as text"}, {"vllm_config": {"kv_transfer_config": None}}, {}):
        with engine_at("0123456789abcdef", server_info=answer) as url:
            view = read_engine(url, 5.0)
        assert (view.failure_policy, view.error, view.models) == ("", "", ("tiny",))


ODD_METRICS = [
    'backhaul:transport_ranks{transport="tcp"} +Inf',
    'backhaul:transport_ranks{transport="tcp"} NaN',
    "vllm:request_prompt_tokens_bucket 3",
    'vllm:request_prompt_tokens_bucket{le="many"} 3',
    "{",
]


@pytest.mark.parametrize(
    "odd",
    [
        *({"/metrics": text} for text in ODD_METRICS),
        *({"/v1/models": data} for data in ({"data": None}, {"data": 3}, {"data": ["m"]}, [], 7)),
        *({"/version": data} for data in ([], None, "0.32", "<html>")),
    ],
    ids=str,
)
def test_an_engine_that_answers_nonsense_is_said_to(odd: dict[str, Any]) -> None:
    """A proxy's or another server's address is given easily."""
    with engine_at("0123456789abcdef", pages=odd) as url:
        view = read_engine(url, 300.0)
    assert view.error.startswith("cannot be read: ") and "\n" not in view.error


def levels_of(document: dict[str, Any], words: str) -> list[str]:
    return [one["level"] for one in document["findings"] if words in one["check"]]


def test_from_a_healthy_pair_to_a_mismatch(store: RunningStore, engine_url: str) -> None:
    options = ("doctor", f"--store={store.uri}")
    store.open("m", "prefill-0:scheduler")
    one = store.open("m", "decode-0:scheduler")
    code, out, _ = backhaul(*options, f"--engine={engine_url}/")
    # This store has never heard of the domain that the engine's metrics name.
    assert code == 1 and "0123456789abcdef" in out and "kv_load_failure_policy: fail" in out
    code, out, _ = backhaul(*options, "--json")
    document = json.loads(out)
    by_check = {one["check"]: one for one in document["findings"]}
    assert code == 0 and {one["level"] for one in by_check.values()} == {"ok"}
    assert "reads the pool over" in by_check["transports"]["says"]
    assert document["differences"] == [] and document["domains"][0]["id"] == one

    other = store.open("m", "decode-1:scheduler", tensor_parallel=2)
    code, out, _ = backhaul(*options, "--no-probe")
    assert code == 1 and "tensor_parallel" in out and "≠" in out
    assert one in out and other in out and "decode-1" in out
    code, out, _ = backhaul(*options, "--no-probe", "--json", "--compare", "decode-0", other)
    assert json.loads(out)["compared"] == [one, other]
    (differing,) = json.loads(out)["differences"]
    assert differing == {
        "path": "tensor_parallel",
        "left": "1",
        "right": "2",
        "differs": True,
        "cause": True,
        "note": "--tensor-parallel-size",
    }
    code, _, err = backhaul(*options, "--no-probe", "--compare", "decode", "nobody")
    assert code == 2 and "fits several" in err and "Traceback" not in err


def test_two_engines_are_compared_by_what_they_are_in_now(store: RunningStore) -> None:
    one = store.open("pair", "prefill-7:scheduler")
    other = store.open("pair", "decode-7:scheduler", kv_dtype="fp8", hash_probe="ff")
    store.open("later", "somebody-else:scheduler")
    store.open("later", "somebody-else:scheduler", kv_dtype="fp8")
    with engine_at(one) as prefill, engine_at(other) as decode, engine_at(one) as third:
        code, document = doctor(store, f"--engine={prefill}", f"--engine={decode}")
        assert code == 1 and document["compared"] == [one, other]
        assert {row["path"] for row in document["differences"]} == {"kv_dtype", "hash_probe"}
        assert levels_of(document, "engines side by side") == ["problem"]
        assert [e["url"] for e in document["engines"]] == [prefill, decode]
        assert [e["domain"] for e in document["engines"]] == [one, other]
        # The table names both addresses, and marks the fields.
        code, out, _ = backhaul(
            "doctor", f"--store={store.uri}", "--no-probe",
            f"--engine={prefill}", f"--engine={decode}",
        )  # fmt: skip
        assert code == 1 and prefill in out and decode in out
        assert re.search("≠ +kv_dtype", out) and "prefill-7" in out and "decode-7" in out
        # Of three engines, the two that differ.
        _, document = doctor(store, *(f"--engine={u}" for u in (prefill, third, decode)))
        assert document["compared"] == [one, other]
        assert levels_of(document, "engines side by side") == ["ok", "problem", "problem"]
        _, document = doctor(store, f"--engine={prefill}", f"--engine={third}")
        assert document["compared"] == [one, one] and document["differences"] == []
        # One engine: against the other domain of its model.
        _, document = doctor(store, f"--engine={decode}/")
        assert document["compared"] == [other, one]
        _, document = doctor(
            store, f"--engine={prefill}", f"--engine={decode}", "--compare", decode, "prefill-7"
        )
        assert document["compared"] == [other, one]


def test_engines_that_show_no_domain_are_not_passed_over(store: RunningStore) -> None:
    """Nor is the comparison made without saying so; it is no problem, so the exit code is 0."""
    with running_store() as empty:
        domain = empty.open("fresh", "prefill-9:scheduler")
        empty.open("fresh", "decode-9:scheduler")
        for other in (domain, ""):
            with engine_at("") as fresh, engine_at(other) as second:
                code, document = doctor(empty, f"--engine={fresh}", f"--engine={second}")
            assert code == 0
            silent = [fresh, second][: 1 + (not other)]
            assert levels_of(document, ": connector") == ["warning"] * len(silent)
            (said,) = [f for f in document["findings"] if f["check"] == "engines side by side"]
            assert said["level"] == "warning" and all(url in said["says"] for url in silent)


def test_engines_with_stores_of_their_own(store: RunningStore) -> None:
    one = store.open("apart", "prefill-8:scheduler")
    with running_store() as elsewhere:
        other = elsewhere.open("apart", "decode-8:scheduler", state_dtypes=("bfloat16",))
        with engine_at(one) as prefill, engine_at(other) as decode:
            engines = (f"--engine={prefill}", f"--engine={decode}")
            code, document = doctor(store, *engines)
            assert code == 1 and f"engine {decode}: connector" in {
                one["check"] for one in document["findings"] if "--other-store" in one["todo"]
            }
            code, _, err = backhaul(
                "doctor", f"--store={store.uri}", "--no-probe", *engines,
                "--compare", decode, prefill,
            )  # fmt: skip
            assert code == 2 and "--other-store" in err
            code, document = doctor(store, *engines, f"--other-store={elsewhere.uri}")
            assert code == 1 and document["compared"] == [one, other]
            assert {row["path"] for row in document["differences"]} == {"state_dtypes"}
            assert [e["known_here"] for e in document["engines"]] == [True, False]
            assert any(elsewhere.uri in one["says"] for one in document["findings"])
    gone = f"--other-store={elsewhere.uri}"
    code, document = doctor(store, gone)
    assert code == 1 and levels_of(document, f"store {elsewhere.uri}") == ["problem"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_dtype", "fp8"),
        ("state_dtypes", ("bfloat16",)),
        ("conv_layout", "DS"),
        ("quantization", "fp8"),
        ("revision", "abc"),
        ("hash_function", "xxhash"),
        ("cpu_isa", "avx2"),
        ("speculative_tokens", 2),
        ("weights", "other"),
    ],
)
def test_each_mismatch_is_named_over_a_real_store(
    store: RunningStore, field: str, value: Any
) -> None:
    one = store.open(f"mismatch-{field}", "a:scheduler")
    other = store.open(f"mismatch-{field}", "b:scheduler", **{field: value})
    with engine_at(one) as a, engine_at(other) as b:
        code, document = doctor(store, f"--engine={a}", f"--engine={b}")
    assert code == 1 and [row["path"] for row in document["differences"]] == [field]
    (said,) = [f for f in document["findings"] if f["check"] == "engines side by side"]
    assert field in said["says"] and said["level"] == "problem"
    named = [f for f in document["findings"] if f["check"] == "cache domains"]
    assert any(one in f["says"] and field in f["says"] for f in named)


def test_what_an_engine_keeps_and_how_it_fails_reach_the_report(store: RunningStore) -> None:
    domain = store.open("settings", "a:scheduler")
    interval = "prefix_cache_retention_interval"
    with engine_at(domain, "recompute", **{interval: "None"}, policy="main_sparse") as url:
        _, document = doctor(store, f"--engine={url}")
    assert levels_of(document, "retention") == ["warning"]
    assert levels_of(document, ": policy") == ["warning"]
    assert levels_of(document, "kv_load_failure_policy") == ["ok"]
    assert levels_of(document, f"{url}: transports") == ["ok"]
    assert document["engines"][0]["transports"] == {"cma/memory": 3}
    with engine_at(domain, "fail") as url:
        _, document = doctor(store, f"--engine={url}")
    assert levels_of(document, "retention") == ["ok"] == levels_of(document, ": policy")
    assert levels_of(document, "kv_load_failure_policy") == ["warning"]


def test_a_store_that_is_down_is_a_problem_not_a_crash() -> None:
    code, out, err = backhaul("doctor", f"--store=backhaul://127.0.0.1:{free_port()}", "--json")
    findings = {one["check"]: one["level"] for one in json.loads(out)["findings"]}
    assert code == 1 and findings["store catalog"] == "problem" and err == ""
    assert backhaul("doctor", "--store=nonsense")[0] == 2


DISCARD_PORT = 9
"""Nobody listens there."""


def test_an_engine_that_cannot_be_read_is_a_problem_not_a_crash(store: RunningStore) -> None:
    url = f"http://127.0.0.1:{DISCARD_PORT}"
    code, out, _ = backhaul(
        "doctor", f"--store={store.uri}", "--no-probe", "--json", f"--engine={url}"
    )
    (finding,) = [one for one in json.loads(out)["findings"] if one["check"].startswith("engine")]
    assert code == 1 and finding["level"] == "problem" and finding["todo"]
