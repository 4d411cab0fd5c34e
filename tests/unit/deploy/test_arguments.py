"""Bad values on the command line are refused at once: one line, exit code 2, nothing done.

The commands run in this process; whatever would start, build or ask something fails the test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_command

from backhaul.deploy import arguments, cli
from backhaul.deploy.proxy_command import check_further_arguments
from backhaul.protocols.errors import ConfigError

Run = Callable[..., tuple[int, str, str]]

COMMAND = get_command(cli.app)
"""Built once: Typer builds it anew in every call."""
GIVEN = {
    "URL": "http://127.0.0.1:1",
    "PATH": __file__,
    "RESULTS...": __file__,
    "PATH...": "",
    "EXPERIMENT": "reuse",
    "DIRECTORY": str(Path(__file__).parent),
}
"""What a required parameter gets, by its kind; nothing where tests give it themselves."""


def required(command: str) -> tuple[str, ...]:
    """Words without which a command is refused for another reason than the one under test."""
    if command == "explain":
        return ("-",)
    if command == "simulate":
        return (__file__,)
    words = []
    for parameter in COMMAND.commands[command].params:  # type: ignore[attr-defined]
        value = GIVEN[parameter.metavar] if parameter.required else ""
        if value and parameter.param_type_name == "option":
            words.append(f"{parameter.opts[0]}={value}")
        elif value:
            words.append(value)
    return tuple(words)


COMMANDS = {name: required(name) for name in COMMAND.commands}  # type: ignore[attr-defined]
NUMBERS = ("nan", "inf", "-inf", "-1", "1e99", "x", "", "٣", "0x10")
"""No number of seconds; 0 is none either where a wait must end."""
PORTS = ("65536", "99999", "9" * 5000, "-1", "x", "٣", "²", "")
PATHS = ("", "  ", "/nonexistent/x", "/dev/null/x", "a\0b")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command as from a shell; exit code, standard output, standard error."""

    def forbidden(*args: object, **kwargs: object) -> None:
        pytest.fail("bad input went further than the command line")

    monkeypatch.setattr(cli, "app", COMMAND)
    for module in ("proxy.run", "transfer.daemon.run", "deploy.tiny_model"):
        monkeypatch.setitem(sys.modules, f"backhaul.{module}", None)  # cannot be imported
    for owner, name in ((subprocess, "Popen"), (httpx, "get"), (httpx, "Client")):
        monkeypatch.setattr(owner, name, forbidden)
    monkeypatch.setattr("grpc.insecure_channel", forbidden)
    monkeypatch.setattr("tempfile.mkdtemp", forbidden)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["backhaul", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, shown.out, shown.err

    return call


def refused(run: Run, *words: str) -> str:
    code, out, err = run(*words)
    assert (code, out) == (2, ""), (words, code, out, err)
    assert err.startswith("backhaul: error: ") and err.count("\n") == 1, err
    return err


def options_of(metavar: str, *without: str) -> list[tuple[str, str]]:
    """(command, option) of every option whose value is of this kind."""
    found = [
        (name, parameter.opts[0])
        for name, command in COMMAND.commands.items()  # type: ignore[attr-defined]
        for parameter in command.params
        if parameter.metavar == metavar and parameter.opts[0] not in without
    ]
    assert found
    return found


@pytest.mark.parametrize(("command", "option"), options_of("SECONDS"))
def test_no_time_to_wait(run: Run, command: str, option: str) -> None:
    numbers = [*NUMBERS, *(["0"] if option not in ("--grace", "--pause") else [])]
    for number in numbers:
        err = refused(run, command, *COMMANDS[command], f"{option}={number}")
        assert option in err or option.strip("-").replace("-", " ") in err


def test_no_factor(run: Run) -> None:
    for text in (*NUMBERS, "0"):
        if text:
            assert "--scale" in refused(run, "bench", *COMMANDS["bench"], f"--scale={text}")


@pytest.mark.parametrize(("command", "option"), options_of("TIME"))
def test_no_age(run: Run, command: str, option: str) -> None:
    for text in (*NUMBERS, "1h1", "9" * 5000):
        if text:
            assert option in refused(run, command, f"{option}={text}")


@pytest.mark.parametrize(("command", "option"), options_of("HOST:PORT"))
def test_no_address_to_listen_on(run: Run, command: str, option: str) -> None:
    for port in PORTS:
        refused(run, command, *COMMANDS[command], f"{option}=127.0.0.1:{port}")
    assert "65535" in refused(run, command, *COMMANDS[command], f"{option}=127.0.0.1:65536")


@pytest.mark.parametrize(
    ("command", "option"), [*options_of("URL"), *options_of("URI")], ids=lambda one: one
)
def test_no_address_to_ask(run: Run, command: str, option: str) -> None:
    scheme = "backhaul" if option == "--store" else "http"
    rest = [word for word in COMMANDS[command] if not word.startswith(f"{option}=")]
    texts = [f"{scheme}://127.0.0.1:{port}" for port in (*PORTS, "0") if port]
    for text in (
        *texts,
        "foo",
        "",
        f"{scheme}://",
        f"{scheme}://[",
        f"{scheme}://h:1/\n",
        "ftp://h:1",
    ):
        refused(run, command, *rest, f"{option}={text}")
    assert "65535" in refused(run, command, *rest, f"{option}={scheme}://127.0.0.1:65536")


@pytest.mark.parametrize(("command", "option"), options_of("SIZE"))
def test_no_size(run: Run, command: str, option: str) -> None:
    for text in ("", "x", "-1", "٣MiB", "1_0MiB", "9" * 5000, "1e9", "nan", "9" * 30):
        assert option in refused(run, command, *COMMANDS[command], f"{option}={text}")
    if (command, option) in (("store", "--capacity"), ("up", "--capacity")):
        for text in ("0", "1KiB"):
            assert "1 MiB" in refused(run, command, *COMMANDS[command], f"{option}={text}")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("demo", "--output"),
        ("demo", "--cache-dir"),
        ("up", "--log-dir"),
        ("ab", "--out"),
        ("trace", "--out"),
        ("simulate", "--output"),
    ],
)
def test_nowhere_to_write(run: Run, command: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    is_file = option in ("--output", "--out")
    wrong = str(tmp_path) if is_file else str(tmp_path / "file")
    below = "/nonexistent/x" if is_file else "/proc/self/x"
    for path in ("", "/dev/null/x", wrong, f"{tmp_path}/file/x", below):
        assert option in refused(run, command, *COMMANDS[command], f"{option}={path}")
    if os.geteuid():  # root may write everywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        path = f"{tmp_path}/locked/x"
        assert option in refused(run, command, *COMMANDS[command], f"{option}={path}")


@pytest.mark.parametrize("option", ["--against", "--tokenizer", "--request-log", "FILE"])
def test_nothing_to_read(run: Run, option: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (*PATHS, "/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):
        if option == "FILE":
            refused(run, "explain", path)
        elif option == "--request-log":
            refused(run, "explain", "--request=r", f"{option}={path}")
        else:
            refused(run, "explain", "-", "--no-lookup", f"{option}={path}")


@pytest.mark.parametrize("path", [*PATHS, "/dev/zero"])
@pytest.mark.parametrize(
    "words",
    [("lint-template",), ("trace",), ("simulate",), ("trace", __file__, "--tokenizer"),
     ("ab", "--a=http://127.0.0.1:1", "--questions")],
)  # fmt: skip
def test_nothing_to_examine(run: Run, words: tuple[str, ...], path: str) -> None:
    if path.strip() or words == ("lint-template",):
        refused(run, *words, path)


@pytest.mark.parametrize(
    "options",
    [
        ("--model=/nonexistent",),
        ("--model=",),
        ("--model=/dev/null",),
        ("--model=org/model",),  # a hub's name, and no accelerator
        ("--model=../x", "--gpus=0", "--gpus=1"),
        ("--gpus=0", "--gpus=1"),
        ("--gpus=", "--gpus=", "--model=m"),
        ("--cores=x", "--cores=0"),
        ("--cores=3-1", "--cores=0"),
        ("--cores=99999", "--cores=0"),
        ("--cores=",),
        ("--proxy-arg=--nonsense",),
        ("--proxy-arg=--retries=x",),
        ("--proxy-arg=--retries=99",),
        ("--proxy-arg=--grace=-1",),
        ("--proxy-arg=--stall-timeout=0",),
        ("--proxy-arg=--listen=127.0.0.1:1",),
        ("--proxy-arg=--help",),
        ("--proxy-arg=stray",),
        ("--proxy-arg=",),
        ("--engine-arg=--port=1",),
        ("--engine-arg=",),
        ("--prefill=0",),
        ("--first-engine-port=99999",),
        ("--first-engine-port=٣",),
    ],
    ids=" ".join,
)
def test_nothing_to_start(run: Run, options: tuple[str, ...]) -> None:
    refused(run, "up", *options)


@pytest.mark.parametrize("option", ["--listen", "--store-listen", "--store-http"])
def test_a_port_that_is_taken_is_known_before_anything_starts(run: Run, option: str) -> None:
    import socket

    options = dict.fromkeys(("--listen", "--store-listen", "--store-http"), "127.0.0.1:0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options[option] = f"127.0.0.1:{port}"
        err = refused(run, "up", *(f"{name}={value}" for name, value in options.items()))
    assert f"another {option}" in err and str(port) in err


def test_what_the_proxy_takes_is_handed_on() -> None:
    check_further_arguments(
        ["--retries", "2", "--stall-timeout=5", "--prefill-policy=least-loaded"]
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_words(run: Run, command: str) -> None:
    assert "--nonsense" in refused(run, command, *COMMANDS[command], "--nonsense")
    refused(run, command, "\n", "\n", "\n")


def test_an_unknown_command_and_none(run: Run) -> None:
    assert "nonsense" in refused(run, "nonsense")
    code, out, err = run()
    assert code == 2 and "Commands" in out + err


@settings(max_examples=50)
@given(st.text(max_size=30))
def test_every_check_passes_or_complains_in_words(text: str) -> None:
    checks = (
        arguments.http_url, arguments.http_urls, arguments.store_uri, arguments.listen_address,
        arguments.pool_size, arguments.domain_prefix, arguments.file_to_read,
        arguments.file_or_folder, arguments.prompt_file, arguments.file_to_write,
        arguments.folder_to_write, arguments.model_or_hub_name, arguments.core_list,
        arguments.device_list, arguments.one_line, arguments.not_ours,
    )  # fmt: skip
    for check in checks:
        try:
            check("--x", text)
        except ConfigError as error:
            assert "--x" in str(error)
            assert len(str(error)) < 400


@given(host=st.sampled_from(["h", "10.0.0.1", "[::1]"]), port=st.integers(1, 65_535))
def test_good_addresses_pass(host: str, port: int) -> None:
    arguments.http_url("--x", f"http://{host}:{port}")
    arguments.http_url("--x", f"https://{host}:{port}/path/")
    arguments.http_urls("--x", f"http://{host}, http://{host}:{port}")
    arguments.store_uri("--x", f"backhaul://{host}:{port}")
    arguments.listen_address("--x", f"{host}:{port}")


def test_good_paths_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    arguments.model_or_hub_name("--x", str(tmp_path))
    arguments.model_or_hub_name("--x", "Qwen/Qwen3-Next-80B-A3B")
    arguments.file_to_write("--x", str(tmp_path / "new"))
    arguments.file_to_write("--x", str(tmp_path / "config.json"))
    arguments.folder_to_write("--x", str(tmp_path / "new" / "deeper"))
    arguments.file_to_read("--x", str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report",), "Missing argument 'RESULTS...'; see --help"),
        (("ab",), "Missing option '--a'; see --help"),
        (("nothing",), "No such command 'nothing'; see --help"),
        (("simulate", "--policy"), "Option '--policy' requires an argument; see --help"),
        (("checkpoints", "--kind=x"), "Invalid value for '--kind': 'x' is not one of"),
        (("bench", "x", "y"), "Invalid value for 'EXPERIMENT': 'x' is not one of 'reuse'; see"),
    ],
)
def test_the_librarys_own_errors_read_like_ours(
    run: Run, words: tuple[str, ...], said: str
) -> None:
    line = refused(run, *words)
    assert line.startswith(f"backhaul: error: {said}"), line
    assert ".;" not in line and "Value error" not in line
