"""What a chat template means for U_end, as a report on plain data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jinja2
import msgspec

from backhaul.protocols.errors import ConfigError
from backhaul.render.guards import analyse
from backhaul.render.reasons import Reason
from backhaul.render.syntax import Branch, Finding, InlineBranch, describe
from backhaul.render.template import environment

TEMPLATE_BYTES_MAX = 4 * 1024 * 1024
"""Real templates have at most some tens of kilobytes."""

_DIRECTIVE = re.compile(r"%[-_0^#]*[EO]?(.)")
"""Flags as glibc's strftime takes them, for which Python passes all it does not know itself."""
_CLOCK_PARTS = (
    ("f", "microsecond"),
    ("SsTXcr", "second"),
    ("MR", "minute"),
    ("HIklpP", "hour"),
)  # fmt: skip
"""Directives by the finest part that they write, the finest first."""


class Remark(msgspec.Struct, frozen=True):
    """A line of the template and what there is to say about it."""

    line: int
    message: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one template.

    Attributes:
        name: where it was found.
        reason: why U_end is never known; None where it is found.
        guards: generation-only branches.
        refusals: uses of the flag whose effect cannot be known.
        moving: control text that makes U_end unknown in prompts that have it.
        maybe_moving: where more such text may come from, unseen by the search for U_end.
        clocks: the prompt changes with the time.
        trailing: text after the message loop and outside every guard.
    """

    name: str
    reason: Reason | None
    guards: list[Remark]
    refusals: list[Remark]
    moving: list[Remark]
    maybe_moving: list[Remark]
    clocks: list[Remark]
    trailing: list[Remark]

    @property
    def found(self) -> bool:
        """Whether U_end will be found."""
        return self.reason is None


def lint(name: str, source: str) -> Report:
    """Examine a template. Raises ``ConfigError`` where it is no valid Jinja template."""
    try:
        tree = environment().parse(source)
        guards = analyse(tree)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{name}: line {error.lineno} is not valid Jinja: {error.message}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{name}: expressions are nested too deeply to be examined") from None
    reason = None
    if guards.refusals:
        reason = Reason.REFUSED
    elif not guards.guarded:
        reason = Reason.UNGUARDED
    marks = [Remark(b.line, b.condition) for b in guards.branches]
    marks += [Remark(i.line, describe(i.expression.test)) for i in guards.inline]
    return Report(
        name=name,
        reason=reason,
        guards=sorted(marks, key=lambda remark: remark.line),
        refusals=_once(guards.refusals),
        moving=sorted(
            [*map(_moving, guards.moving.branches), *map(_moving, guards.moving.inline)],
            key=lambda remark: remark.line,
        ),
        maybe_moving=_once(guards.moving.remarks),
        clocks=[Remark(c.line, _clock(c.message)) for c in guards.clocks],
        trailing=_once(guards.moving.trailing),
    )


def _once(findings: list[Finding]) -> list[Remark]:
    """The first line of each message."""
    first: dict[str, int] = {}
    for finding in findings:
        first.setdefault(finding.message, finding.line)
    return [Remark(line, message) for message, line in first.items()]


def _moving(place: Branch | InlineBranch) -> Remark:
    return Remark(place.line, f"text that only the end of the conversation has: {place.condition}")


def _clock(call: str) -> str:
    used = set(_DIRECTIVE.findall(call))
    finest = next((part for letters, part in _CLOCK_PARTS if used & set(letters)), "day")
    return f"{call}: nothing after it survives the {finest}"


def load(path: Path) -> dict[str, str]:
    """Templates of a file or of a tokenizer's directory, by name.

    Raises ``ConfigError`` where there is none.
    """
    if path.is_dir():
        return _of_directory(path)
    if path.suffix == ".json":
        found = _of_json(path)
        if not found:
            raise ConfigError(f'{path} has no "chat_template"')
        return found
    return {str(path): _read(path)}


def _of_directory(path: Path) -> dict[str, str]:
    files = [path / "chat_template.jinja", *sorted(path.glob("additional_chat_templates/*.jinja"))]
    found = {str(file): _read(file) for file in files if file.exists()}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if not found and (path / name).exists():
            found = _of_json(path / name)
    if not found:
        raise ConfigError(
            f"{path} has no chat template: neither chat_template.jinja nor one in "
            "tokenizer_config.json or chat_template.json"
        )
    return found


def _of_json(path: Path) -> dict[str, str]:
    try:
        document = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno} is not valid JSON: {error.msg}") from None
    template = document.get("chat_template") if isinstance(document, dict) else None
    if isinstance(template, str):
        return {str(path): template}
    named = template if isinstance(template, list) else []
    return {
        f"{path}#{item['name']}": item["template"]
        for item in named
        if isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("template"), str)
    }


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            # A device tells no size and may have no end: one byte too many says enough.
            source = file.read(TEMPLATE_BYTES_MAX + 1)
        if len(source) > TEMPLATE_BYTES_MAX:
            raise ConfigError(f"{path} is larger than {TEMPLATE_BYTES_MAX} bytes: no chat template")
        return source.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
