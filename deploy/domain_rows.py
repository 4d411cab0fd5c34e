"""Two cache domains side by side, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from backhaul.protocols.domain import DomainRecord, differing_fields

if TYPE_CHECKING:
    from rich.table import Table


class Row(NamedTuple):
    """One field of both domains, by its path in the record."""

    path: str
    left: str
    right: str
    differs: bool


def differences(a: DomainRecord, b: DomainRecord) -> list[Row]:
    """Every field of both, and whether it differs. The only place that compares domains here."""
    named = differing_fields(a, b)
    left, right = dict(_flat(a)), dict(_flat(b))
    return [
        Row(
            path,
            left.get(path, "-"),
            right.get(path, "-"),
            path.partition(".")[0] in named and left.get(path) != right.get(path),
        )
        for path in dict.fromkeys([*left, *right])
    ]


def _flat(record: DomainRecord) -> Iterator[tuple[str, str]]:
    yield from _walk("", msgspec.to_builtins(record))


def _walk(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(f"{path}.{name}" if path else name, item)
    elif isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _walk(f"{path}[{index}]", item)
    elif isinstance(value, list | tuple):
        yield path, ", ".join(map(str, value)) or "-"
    else:
        yield path, str(value) if value != "" else "-"


def domain_table(names: tuple[str, str], rows: list[Row]) -> Table:
    """Fields that differ first and marked, then what is equal, which is shown once."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("field", no_wrap=True)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in sorted(rows, key=lambda one: not one.differs):
        style = "bold red" if row.differs else "dim"
        right = row.right if row.differs else "="
        table.add_row(
            Text("≠" if row.differs else " ", style),
            Text(row.path, style),
            Text(row.left, style),
            Text(right, style),
        )
    return table
