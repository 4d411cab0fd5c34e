"""`backhaul up`: what is started, that it serves, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from backhaul.deploy import up_command
from backhaul.deploy.arguments import option_pair
from backhaul.deploy.engines import Engine, EngineSpec
from backhaul.deploy.processes import free_port
from backhaul.deploy.up import ProxyService, UpPlan, make_services
from backhaul.protocols.errors import ConfigError
from backhaul.transfer.daemon.settings import Address

STUB = Path(__file__).with_name("up_stub.py")
WAIT_S = 300.0


def plan(tmp_path: Path, **changes: Any) -> UpPlan:
    return UpPlan(**({"model": tmp_path / "m", "log_dir": tmp_path} | changes))


def test_what_a_plan_starts(tmp_path: Path) -> None:
    services = make_services(
        plan(tmp_path, prefill=2, decode=1, first_engine_port=21_000, port=8123)
    )
    assert [s.name for s in services.all] == [
        "store",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "proxy",
    ]
    assert services.urls["decode-0"] == "http://127.0.0.1:21002"
    assert services.urls["proxy"] == "http://127.0.0.1:8123/v1"
    command = services.proxy.command()
    assert [command[i + 1] for i, word in enumerate(command) if word == "--prefill"] == [
        "http://127.0.0.1:21000", "http://127.0.0.1:21001",
    ]  # fmt: skip
    assert [command[i + 1] for i, word in enumerate(command) if word == "--decode"] == [
        "http://127.0.0.1:21002"
    ]
    assert services.store is not None
    config = next(a for a in services.prefill[0].command() if "kv-transfer-config" in a)
    assert services.store.uri in config
    assert '"cpu"' in config


def test_engines_are_called_by_their_names_and_anew_at_every_start(tmp_path: Path) -> None:
    services = make_services(plan(tmp_path, decode=2))
    started = [engine for engine in (*services.prefill, *services.decode) for _ in range(2)]
    ids = []
    for engine in started:
        (config,) = (a for a in engine.command() if a.startswith("--kv-transfer-config="))
        ids.append(json.loads(config.partition("=")[2])["engine_id"])
        assert ids[-1].startswith(f"{engine.name}-")
    assert len(set(ids)) == len(ids)


def test_every_engine_has_a_core_of_its_own_while_there_are_enough(tmp_path: Path) -> None:
    engines = len(os.sched_getaffinity(0))
    services = make_services(plan(tmp_path, prefill=engines))
    cores = [engine.spec.cores for engine in services.prefill]
    assert len(set(cores)) == engines


def test_engines_on_accelerators(tmp_path: Path) -> None:
    services = make_services(plan(tmp_path, gpus=("0,1", "2,3"), with_backhaul=False))
    (prefill,), (decode,) = services.prefill, services.decode
    assert prefill.environment()["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert decode.environment()["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "VLLM_CPU_KVCACHE_SPACE" not in decode.environment().keys() - os.environ.keys()
    command = " ".join(prefill.command())
    assert '"cuda"' in command
    assert "BackhaulConnector" not in command
    assert "--enforce-eager" not in command
    assert services.store is None


def test_engines_on_cores_are_started_as_before(tmp_path: Path) -> None:
    engine = Engine(EngineSpec("e", tmp_path, cores="1"), tmp_path)
    assert engine.environment()["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert "--enforce-eager" in engine.command()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefill": 0}, "0 prefill engines"),
        ({"decode": 65}, "65 decode engines"),
        ({"cores": ("0",)}, "--cores is given once for 2 engines: give it once per engine"),
        ({"gpus": ("0", "1", "2")}, "3 times for 2 engines"),
        ({"cores": ("0", "1"), "gpus": ("0", "1")}, "exclude each other"),
        ({"first_engine_port": 65_535}, "65535 ... 65536 are not all ports"),
        ({"first_engine_port": 0}, "0 ... 1 are not all ports"),
    ],
)
def test_a_plan_that_makes_no_sense(tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan(tmp_path, **changes)


def test_where_the_store_is(tmp_path: Path) -> None:
    everywhere = make_services(
        plan(tmp_path, store_listen=Address("0.0.0.0", 7400), store_http=Address("::", 7401))
    ).store
    assert everywhere is not None
    assert everywhere.uri == "backhaul://127.0.0.1:7400"
    assert everywhere.http_url == "http://[::1]:7401"
    command = everywhere.command()
    assert command[command.index("--listen") + 1] == "0.0.0.0:7400"
    assert command[command.index("--http") + 1] == "[::]:7401"


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:9"), ("0.0.0.0", "http://127.0.0.1:9"), ("::", "http://[::1]:9")],
)  # fmt: skip
def test_where_the_proxy_is_reached_from_here(tmp_path: Path, host: str, url: str) -> None:
    proxy = ProxyService(tmp_path, prefill=["http://p"], decode=["http://d"], host=host, port=9)
    assert proxy.url == url


def model(tmp_path: Path, name: str) -> str:
    """A folder that looks like a model's."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    return str(tmp_path / name)


class Up:
    """`backhaul up` as a process."""

    def __init__(self, tmp_path: Path, *args: str) -> None:
        self.port = free_port()
        self.output = tmp_path / "output"
        self.tmp = tmp_path / "tmp"
        self.tmp.mkdir()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(STUB), "up", "--listen", f"127.0.0.1:{self.port}",
                 "--store-listen", "127.0.0.1:0", "--store-http", "127.0.0.1:0",
                 "--capacity", "64MiB", *args],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"TMPDIR": str(self.tmp)},
            )  # fmt: skip
        self.seen: dict[int, psutil.Process] = {}

    def wait_ready(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while "Ready after" not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)
        me = psutil.Process(self.process.pid)
        self.seen = {p.pid: p for p in me.children(recursive=True)}

    def text(self) -> str:
        return self.output.read_text()

    def wait_end(self) -> int:
        code = self.process.wait(WAIT_S)
        left = [p for p in self.seen.values() if p.is_running() and p.status() != "zombie"]
        assert not left
        return code


@pytest.fixture
def ups() -> Iterator[list[Up]]:
    started: list[Up] = []
    yield started
    for up in started:
        if up.process.poll() is None:
            up.process.terminate()
            up.process.wait(WAIT_S)


def test_it_serves_until_it_is_told_to_stop(tmp_path: Path, ups: list[Up]) -> None:
    ups.append(up := Up(tmp_path, "--model", model(tmp_path, "m"), "--decode", "2"))
    up.wait_ready()
    assert len(up.seen) == 5
    for name in ("store", "prefill-0", "decode-0", "decode-1", "proxy"):
        assert re.search(rf"^{name} +\w+://127.0.0.1:\d+.* \S+/{name}\.log$", up.text(), re.M)
        assert re.search(rf"^  {name} ready after \d+ s$", up.text(), re.M)
    page = re.search(r"^Status page of the store: (\S+)/ ", up.text(), re.M)
    assert page and "Backhaul" in httpx.get(page[1], follow_redirects=True).text
    assert httpx.get(f"{page[1]}/healthz").is_success
    logs = re.search(r"logs in (\S+)", up.text())
    assert logs and Path(logs[1]).parent == up.tmp and Path(logs[1]).is_dir()
    body = {"messages": [{"role": "user", "content": "u"}], "max_tokens": 2}
    answer = httpx.post(f"http://127.0.0.1:{up.port}/v1/chat/completions", json=body, timeout=300)
    assert answer.json()["choices"][0]["message"]["content"] == "w0 w1 "
    assert answer.headers["x-backhaul-handover"] == "done"
    os.kill(up.process.pid, signal.SIGINT)
    assert up.wait_end() == 130
    assert "everything was stopped" in up.text()
    assert not list(up.tmp.iterdir())


@pytest.mark.parametrize("reason", ["sigterm", "an engine dies"])
def test_it_stops_everything(tmp_path: Path, ups: list[Up], reason: str) -> None:
    own = [f"--log-dir={tmp_path / 'mine'}"] if reason == "sigterm" else []
    ups.append(up := Up(tmp_path, "--model", model(tmp_path, "m"), "--no-backhaul", *own))
    up.wait_ready()
    if reason == "sigterm":
        base = f"http://127.0.0.1:{up.port}/v1"
        assert f"export OPENAI_BASE_URL={base} OPENAI_API_KEY=none; model m" in up.text()
        (line,) = re.findall("^curl .*", up.text(), re.MULTILINE)
        assert "max_tokens" in line and "tiny model" not in up.text()
        words = shlex.split(line)
        answer = httpx.post(words[1], content=words[-1], headers=[words[3].split(": ")])
        assert answer.json()["choices"]
        up.process.terminate()
        assert up.wait_end() == 143
        assert "backhaul: stopping ..." in up.text()
        assert (tmp_path / "mine" / "proxy.log").is_file() and not list(up.tmp.iterdir())
        return
    next(p for p in up.seen.values() if "backhaul.proxy.fake_engine" in p.cmdline()).kill()
    assert up.wait_end() == 1
    assert re.search(r"(prefill|decode)-0 exited with code -9", up.text())
    kept = re.search(r"logs are kept in (\S+)", up.text())
    assert kept and (Path(kept[1]) / "proxy.log").is_file()


def kill_an_engine(up: Up) -> None:
    next(p for p in up.seen.values() if "fake_engine" in " ".join(p.cmdline())).kill()


def test_sigterm_while_the_rest_is_stopped_is_exit_code_143(tmp_path: Path, ups: list[Up]) -> None:
    ups.append(up := Up(tmp_path, "--model", model(tmp_path, "stubborn"), "--no-backhaul"))
    up.wait_ready()
    proxy = next(p for p in up.seen.values() if "proxy" in p.cmdline())
    kill_an_engine(up)
    deadline = time.monotonic() + WAIT_S
    # Once the proxy has ended, the other engine, which does not by itself, is waited for.
    while proxy.is_running() and proxy.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, up.text()
        time.sleep(0.01)
    up.process.terminate()
    assert up.wait_end() == 143


def test_sigterm_once_everything_was_stopped_changes_nothing(tmp_path: Path, ups: list[Up]) -> None:
    ups.append(up := Up(tmp_path, "--model", model(tmp_path, "slow-end"), "--no-backhaul"))
    up.wait_ready()
    kill_an_engine(up)
    deadline = time.monotonic() + WAIT_S
    while "interpreter ends" not in up.text():
        assert time.monotonic() < deadline, up.text()
        time.sleep(0.01)
    up.process.terminate()
    assert up.wait_end() == 1 and "everything was stopped" in up.text()


def test_an_engine_that_does_not_start_is_named(tmp_path: Path, ups: list[Up]) -> None:
    ups.append(up := Up(tmp_path, "--model", model(tmp_path, "broken"), "--no-backhaul"))
    assert up.wait_end() == 1
    assert "cannot start" in up.text()
    assert re.search(r"(prefill|decode)-0 exited with code 1", up.text())
    assert "Traceback" not in up.text()


@pytest.mark.parametrize("with_backhaul", [True, False])
def test_nixl_is_told_what_each_engine_serves(tmp_path: Path, with_backhaul: bool) -> None:
    services = make_services(plan(tmp_path, decode=2, with_backhaul=with_backhaul))
    roles = [
        engine.spec.kv_transfer_config["kv_connector_extra_config"]["connectors"][0]["kv_role"]  # type: ignore[index]
        for engine in (*services.prefill, *services.decode)
    ]
    assert roles == ["kv_producer", "kv_consumer", "kv_consumer"]


def test_options_of_the_connector_reach_every_engine(tmp_path: Path) -> None:
    services = make_services(plan(tmp_path, connector_options={"policy": "auto"}))
    for engine in (*services.prefill, *services.decode):
        config = engine.spec.kv_transfer_config
        assert config is not None
        ours = config["kv_connector_extra_config"]["connectors"][1]  # type: ignore[index]
        assert ours["kv_connector_extra_config"]["policy"] == "auto"
        assert ours["kv_connector_extra_config"]["store"].startswith("backhaul://")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"connector_options": {"polcy": "auto"}}, "unknown option 'polcy'"),
        ({"connector_options": {"policy": "never"}}, "'policy'"),
        ({"connector_options": {"store": "x"}}, "the store is the one started here"),
        ({"connector_options": {"policy": "auto"}, "with_backhaul": False}, "--no-backhaul"),
    ],
)
def test_options_of_the_connector_are_checked_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(tmp_path, **changes)


def test_an_option_is_json_or_text() -> None:
    pairs = {"policy=auto": "auto", "lookup_timeout_s=2": 2, 'publish_on=["stop"]': ["stop"]}
    for text, value in pairs.items():
        assert option_pair("--connector-option", text) == (text.partition("=")[0], value)
    for wrong in ("policy", "=auto", ""):
        with pytest.raises(ConfigError, match="NAME=VALUE"):
            option_pair("--connector-option", wrong)


def test_of_the_tiny_model_it_is_said_that_it_does_not_stop() -> None:
    said = up_command.first_steps("http://h:1/v1", "tiny-hybrid", tiny=True)
    assert "never ends a reply by itself: give max_tokens" in said[-1]
    assert len(said) == len(up_command.first_steps("http://h:1/v1", "m", tiny=False)) + 1
