"""The repository's own rules: packages that are listed, imports that point one way, one version."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

import backhaul
from backhaul.deploy.cli import app

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("protocols", "transfer", "render", "connector", "proxy", "deploy", "benchmarks")

MAY_IMPORT = {
    "protocols": {"protocols"},
    "transfer": {"transfer", "protocols"},
    "render": {"render", "protocols"},
    "connector": {"connector", "render", "transfer", "protocols"},
    "proxy": {"proxy", "protocols"},
    "deploy": {"deploy", "proxy", "render", "transfer", "protocols"},
    "benchmarks": set(FOLDERS),
}

# What a user runs is one command, so its sub-commands reach what they start; nothing imports them.
COMMANDS_MAY_IMPORT = MAY_IMPORT["deploy"] | {"benchmarks"}


def modules(folder: str) -> list[Path]:
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in p.name]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_package_is_listed() -> None:
    """An editable install does not need the list, so that a missing entry shows in a wheel only."""
    found = {"backhaul"}
    for folder in FOLDERS:
        for init in (ROOT / folder).rglob("__init__.py"):
            if "_root" not in init.parts:
                parts = init.parent.relative_to(ROOT).parts
                found.add(".".join(("backhaul", *parts)))
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_one_way(folder: str) -> None:
    for path in modules(folder):
        command = folder == "deploy" and path.name.endswith("_command.py")
        allowed = COMMANDS_MAY_IMPORT if command else MAY_IMPORT[folder]
        for name in imported(path):
            match = re.match(r"backhaul\.(\w+)", name)
            if match and match[1] in FOLDERS:
                assert match[1] in allowed, f"{path} imports {name}"


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f != "connector"])
def test_only_the_connector_imports_vllm(folder: str) -> None:
    for path in modules(folder):
        assert not any(n.split(".")[0] == "vllm" for n in imported(path)), path


def test_the_connector_logs_where_vllm_prints() -> None:
    """vLLM configures its own tree of loggers only; of any other, INFO is lost and a warning has no
    time."""
    found = set()
    for path in modules("connector"):
        found |= set(re.findall(r"(?:getLogger|init_logger)\((.*?)\)", path.read_text()))
    assert found == {'"vllm.backhaul"'}


def test_nixl_is_imported_in_one_client_module() -> None:
    users = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in modules(folder)
        if any(name.split(".")[0] == "nixl" for name in imported(path))
    }
    # The plugin only adjusts how other connectors' agents idle; the benchmark measures raw NIXL.
    assert users <= {"transfer/nixl_agent.py", "connector/plugin.py", "benchmarks/transfer.py"}


def test_the_version_is_one() -> None:
    assert PROJECT["project"]["version"] == backhaul.__version__
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


def test_the_root_package_imports_nothing() -> None:
    assert not imported(ROOT / "protocols" / "_root" / "__init__.py")


def test_links_for_type_checkers_exist() -> None:
    for folder in FOLDERS:
        assert (ROOT / ".typing" / "backhaul" / folder).resolve() == ROOT / folder


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports them by file name alone, across folders; what a package holds is imported by
    the package's name."""
    names = [
        path.name
        for path in (ROOT / "tests").rglob("*.py")
        if path.name != "conftest.py" and not (path.parent / "__init__.py").exists()
    ]
    assert sorted(set(names)) == sorted(names)


def test_the_demos_help_before_the_set_up_names_its_options() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "demo", "--help"], capture_output=True, text=True, check=True,
        env={"PATH": "/usr/bin:/bin", "BACKHAUL_VENV": "/nowhere"},
    )  # fmt: skip
    options = {
        name
        for parameter in get_command(app).commands["demo"].params  # type: ignore[attr-defined]
        for name in parameter.opts
    }
    assert options - {"--help"} == set(re.findall(r"--[a-z-]+", done.stdout))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ""),
        ("tests/unit", "--no-tools"),
        ("tests/unit/proxy tests/contract -x", "--no-tools"),
        ("tests/unit/proxy tests/e2e/test_resume.py -x", ""),
        ("-k lookup", ""),
        ("tests/unit tests/browser", ""),
        ("tests/prometheus/test_scrape.py", ""),
        ("tests", ""),
    ],
)
def test_only_tests_that_need_them_install_a_browser_and_prometheus(
    tmp_path: Path, arguments: str, expected: str
) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "test").write_text((ROOT / "scripts" / "test").read_text())
    (scripts / "setup").write_text('#!/bin/sh\necho "set up: $*"\nexit 9\n')
    (scripts / "setup").chmod(0o755)
    done = subprocess.run(
        ["sh", scripts / "test", *arguments.split()], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (9, f"set up: {expected}".strip())
