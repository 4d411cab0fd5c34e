"""`backhaul doctor` against a real daemon and an HTTP server that answers as vLLM does."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest
from store_kit import RunningStore, backhaul, running_store
from test_diagnosis import METRICS

from backhaul.deploy.processes import free_port


@pytest.fixture(scope="module")
def store() -> Iterator[RunningStore]:
    with running_store() as store:
        yield store


@pytest.fixture
def engine_url() -> Iterator[str]:
    pages = {
        "/version": ("application/json", json.dumps({"version": "0.32.0"})),
        "/v1/models": ("application/json", json.dumps({"data": [{"id": "tiny"}]})),
        "/metrics": ("text/plain", METRICS),
        "/server_info": (
            "application/json",
            json.dumps({"vllm_config": "KVTransferConfig(kv_load_failure_policy='fail')"}),
        ),
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, body = pages[self.path]
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_from_a_healthy_pair_to_a_mismatch(store: RunningStore, engine_url: str) -> None:
    options = ("doctor", f"--store={store.uri}", f"--store-http=http://{store.http}")
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
