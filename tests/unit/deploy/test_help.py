"""What `--help` says of every command, and that it says what is."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from store_kit import backhaul
from typer.main import get_command

from backhaul.deploy import cli
from backhaul.protocols.errors import ConfigError

COMMANDS: dict[str, Any] = get_command(cli.app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    for parameter in COMMANDS[name].params:
        text = parameter.help or ""
        assert text.endswith("."), f"{name} {parameter.opts[0]}: {text!r}"
        assert parameter.metavar or parameter.opts[0].startswith("--")
    code, out, err = backhaul(name, "--help")
    assert (code, err) == (0, "")
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "option":
            assert parameter.opts[0][:12] in out


@pytest.mark.parametrize("name", COMMANDS)
def test_exit_codes_and_an_example_are_there(name: str) -> None:
    text = COMMANDS[name].help
    (codes,) = re.findall(r"^Exit code (.*)", text, re.MULTILINE | re.DOTALL)
    stated = {int(code) for code in re.findall(r"(?:^|; )(\d+)[:,]", " ".join(codes.split()))}
    assert 2 in stated and stated & {0, 1}
    assert backhaul(name, "--nonsense")[0] == 2
    code, out, _ = backhaul(name, "--help")
    assert code == 0 and "Exit code" in out and "Example: backhaul" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_can_be_typed(name: str) -> None:
    (example,) = re.findall(r"^Example: (.*)$", COMMANDS[name].help, re.MULTILINE)
    program, command, *words = shlex.split(example)
    assert (program, command) == ("backhaul", name)
    # Files of the example are not here; anything else that it says must be right.
    try:
        COMMANDS[name].make_context(name, words)
    except ConfigError as error:
        assert re.search("cannot be read|no folder|config.json", str(error))


def test_the_list_of_commands() -> None:
    code, out, _ = backhaul("--help")
    assert code == 0 and all(name in out for name in COMMANDS)
