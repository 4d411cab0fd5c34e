"""What the commands accept on their command lines: each kind of value is checked in one place,
before anything is started, built or asked.

A check takes the name that the user knows the value by and the value, and raises ``ConfigError``
in one line that says both and what to give instead; ``each`` makes a Typer callback of it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from backhaul.protocols.errors import ConfigError
from backhaul.transfer.daemon.settings import (
    CAPACITY_MIN_BYTES,
    PORT_MAX,
    format_bytes,
    parse_address,
    parse_bytes,
)

SECONDS_MAX = 86_400
_SHOWN_CHARS = 120
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_CORES = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", re.ASCII)
_GPUS = re.compile(r"[A-Za-z0-9-]+(,[A-Za-z0-9-]+)*", re.ASCII)
_HEX_DIGITS = re.compile(r"[0-9a-fA-F]*", re.ASCII)

_ENGINE_OPTIONS = {"--port": "--first-engine-port", "--model": "--model"}

Check = Callable[[str, Any], object]

UsageError: Any = typer.BadParameter.__mro__[1]
"""What Typer's usage errors share; it names only this one of them in public."""


def each(*checks: Check) -> Callable[..., Any]:
    """A Typer callback that puts every value given by the user through ``checks``; defaults are
    ours and need none."""

    def callback(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
        source = ctx.get_parameter_source(param.name or "")
        if source is None or source.name.startswith("DEFAULT"):
            return value
        name = param.opts[0] if param.param_type_name == "option" else str(param.metavar or "")
        for one in value if isinstance(value, list | tuple) else [value]:
            for check in checks:
                check(
                    name.strip("[]").removesuffix("..."), str(one) if isinstance(one, Path) else one
                )
        return value

    return callback


def seconds(name: str, value: float) -> None:
    """A wait that ends: above 0 and up to a day."""
    if not 0 < value <= SECONDS_MAX:  # also refuses NaN
        raise ConfigError(f"{name} is {value}: give seconds above 0 and up to {SECONDS_MAX}")


def pause_of_seconds(name: str, value: float) -> None:
    """A wait that may be none."""
    if not 0 <= value <= SECONDS_MAX:
        raise ConfigError(f"{name} is {value}: give 0 ... {SECONDS_MAX} seconds")


def one_line(name: str, value: str) -> None:
    """Something is there, on one line."""
    if not value.strip() or "\n" in value or "\0" in value:
        raise ConfigError(f"{name} is {shown(value)}: give a text of one line, or leave it out")


def option_pair(name: str, value: str) -> tuple[str, Any]:
    """NAME=VALUE; the value as JSON where it is that, else as text."""
    key, found, text = value.partition("=")
    if not found or not key.strip():
        raise ConfigError(f"{name} is {shown(value)}: write NAME=VALUE, e.g. policy=auto")
    try:
        return key.strip(), json.loads(text)
    except (ValueError, RecursionError):
        return key.strip(), text


def size_of_bytes(name: str, value: str) -> int:
    """A number of bytes."""
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def pool_size(name: str, value: str) -> None:
    """A size of a store's pool."""
    nbytes = size_of_bytes(name, value)
    if nbytes < CAPACITY_MIN_BYTES:
        raise ConfigError(
            f"{name} is {format_bytes(nbytes)}: at least {format_bytes(CAPACITY_MIN_BYTES)} is "
            "needed"
        )


def store_budget(name: str, value: str) -> None:
    """A size of a store's pool, or 0 for no limit."""
    if size_of_bytes(name, value):
        pool_size(name, value)


def some_bytes(name: str, value: str) -> None:
    """A number of bytes above 0."""
    if not size_of_bytes(name, value):
        raise ConfigError(f"{name} is {shown(value)}: give at least one byte")


def listen_address(name: str, value: str) -> None:
    """``host:port`` to listen on."""
    try:
        parse_address(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def store_uri(name: str, value: str) -> None:
    """``backhaul://host:port``."""
    from backhaul.transfer.backends.inspector import catalog_target

    one_line(name, value)
    try:
        catalog_target(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def http_url(name: str, value: str) -> None:
    """``http(s)://host[:port][/path]``."""
    advice = f"{name} {shown(value)} is no address: write http://HOST:PORT"
    number = re.search(r":(\d+)/*$", value, re.ASCII)
    if number and (len(number[1]) > 5 or int(number[1]) > PORT_MAX):
        raise ConfigError(f"{name} {shown(value)}: port {number[1][:20]} is above {PORT_MAX}")
    try:
        parts = urlsplit(value.strip())
        port = parts.port
    except ValueError:
        raise ConfigError(advice) from None
    printable = value.isprintable() and " " not in value.strip()
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not printable:
        raise ConfigError(advice)
    if parts.query or parts.fragment or parts.netloc.endswith(":"):
        raise ConfigError(advice)


def http_urls(name: str, value: str) -> None:
    """One or several of them, with commas."""
    for one in value.split(","):
        http_url(name, one.strip(" "))


def domain_prefix(name: str, value: str) -> None:
    """The start of a cache domain's id."""
    if not value or not _HEX_DIGITS.fullmatch(value) or len(value) > 16:
        raise ConfigError(
            f"{name} {shown(value)} starts no domain's id: give up to 16 hex digits, as "
            "`backhaul checkpoints` shows them"
        )


def file_to_read(name: str, value: str) -> None:
    """An existing regular file; not a device or a pipe, which may never end."""
    _named(name, value)
    _readable(name, value, Path(value))


def prompt_file(name: str, value: str) -> None:
    """A file, or ``-`` for standard input."""
    if value != "-":
        file_to_read(name, value)


def file_or_folder(name: str, value: str) -> None:
    """An existing folder, or a file as in ``file_to_read``."""
    _named(name, value)
    if not Path(value).is_dir():
        _readable(name, value, Path(value))


def file_to_write(name: str, value: str) -> None:
    """A file that is there and can be written, or that can be made in its folder."""
    _named(name, value)
    path = Path(value)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(f"{name} {shown(value)}: there is no folder {path.parent}") from None
        _holds_files(name, value, path.parent)
        return
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} {shown(value)}: {_words(error)}") from None
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{name} {shown(value)} is a folder: give a file")
    _writable(name, value, path)


def folder_to_write(name: str, value: str) -> None:
    """A folder that is there and can be written, or that can be made."""
    _named(name, value)
    path = Path(value)
    try:
        while not path.exists() and not path.is_symlink():
            path = path.parent
        if not path.is_dir():
            raise ConfigError(f"{name} {shown(value)}: {path} is no folder")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} {shown(value)}: {_words(error)}") from None
    _holds_files(name, value, path)


def model_folder(name: str, value: str) -> None:
    """A folder with a model's configuration."""
    _named(name, value)
    if not (Path(value) / "config.json").is_file():
        raise ConfigError(f"{name} {shown(value)}: there is no config.json; give a model's folder")


def model_or_hub_name(name: str, value: str) -> None:
    """A model's folder, or what looks like a name on a hub and is no path here."""
    if Path(value).exists() or not _HUB_NAME.fullmatch(value):
        model_folder(name, value)


def core_list(name: str, value: str) -> None:
    """Core ids as ``0-3,8``, with ``|`` between ranks, all of them ours."""
    available = os.sched_getaffinity(0)
    for rank in value.split("|"):
        if not _CORES.fullmatch(rank):
            raise ConfigError(f"{name} {shown(value)} is no list of cores: write e.g. 0-3 or 0|1")
        for part in rank.split(","):
            first, _, last = part.partition("-")
            if int(last or first) < int(first):
                raise ConfigError(f"{name} {shown(value)}: {part} counts down")
            missing = {int(first), int(last or first)} - available
            if missing:
                raise ConfigError(
                    f"{name} {shown(value)}: this process may not use core {min(missing)}; there "
                    f"are {', '.join(map(str, sorted(available)))}"
                )


def not_ours(name: str, value: str) -> None:
    """An argument of an engine that ``backhaul up`` does not set itself."""
    option = value.partition("=")[0].replace("_", "-")
    if option in _ENGINE_OPTIONS:
        raise ConfigError(f"{name} {shown(value)}: use {_ENGINE_OPTIONS[option]} of this command")


def device_list(name: str, value: str) -> None:
    """A value of ``CUDA_VISIBLE_DEVICES``."""
    if not _GPUS.fullmatch(value):
        raise ConfigError(f"{name} {shown(value)} is no list of devices: write e.g. 0,1")


def read_bounded(name: str, value: str, bytes_max: int) -> bytes:
    """A file's bytes. Raises ``ConfigError`` where there are more than ``bytes_max``, or none can
    be read."""
    file_to_read(name, value)
    try:
        with open(value, "rb") as file:
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"{name} {shown(value)} cannot be read: {_words(error)}") from None
    if len(content) > bytes_max:
        raise ConfigError(f"{name} {shown(value)} is larger than {format_bytes(bytes_max)}")
    return content


@contextmanager
def writing(name: str, path: Path) -> Iterator[None]:
    """What is written inside goes to ``path``. Raises ``ConfigError`` where that fails: a disk may
    fill up after the check."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{name} {shown(str(path))} cannot be written: {_words(error)}") from None


def shown(value: str) -> str:
    """A value as it stands in an error: quoted, on one line, not endless."""
    return repr(value if len(value) <= _SHOWN_CHARS else value[:_SHOWN_CHARS] + "...")


def _named(name: str, value: str) -> None:
    if not value.strip() or "\0" in value:
        raise ConfigError(f"{name} is {shown(value)}: give a path")


def _readable(name: str, value: str, path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} {shown(value)} cannot be read: {_words(error)}") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise ConfigError(f"{name} {shown(value)} is {what}: give a file")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{name} {shown(value)} cannot be read: permission denied")


def _writable(name: str, value: str, path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{name} {shown(value)}: {path} cannot be written")


def _holds_files(name: str, value: str, folder: Path) -> None:
    """Permissions do not tell: /proc is a folder that root may write and that takes no file."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        raise ConfigError(f"{name} {shown(value)}: {folder} cannot be written") from None


def _words(error: OSError | ValueError) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
