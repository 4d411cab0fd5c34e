"""Two cache domains side by side, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from backhaul.protocols.comparison import compare, flatten
from backhaul.protocols.domain import DomainRecord

if TYPE_CHECKING:
    from rich.table import Table


class Row(NamedTuple):
    """One field of both domains, by its path in the record.

    ``cause``: it differs, and no other difference explains it. ``note``: what decides it in vLLM,
    or what it follows from.
    """

    path: str
    left: str
    right: str
    differs: bool
    cause: bool = False
    note: str = ""


def differences(a: DomainRecord, b: DomainRecord) -> list[Row]:
    """Every field of both, and whether it differs."""
    comparison = compare(a, b)
    causes = {one.path for one in comparison.causes}
    notes = {path: note for path, _, _, note in comparison.rows()}
    left, right = flatten(a), flatten(b)
    return [
        Row(
            path,
            left.get(path, "") or "-",
            right.get(path, "") or "-",
            path in notes,
            path in causes,
            notes.get(path, ""),
        )
        for path in dict.fromkeys([*left, *right])
    ]


def domain_table(names: tuple[str, str], rows: list[Row]) -> Table:
    """Fields that differ first and marked, causes before what follows from them, then what is
    equal, which is shown once."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("field", no_wrap=True)
    for name in names:
        table.add_column(name, overflow="fold")
    table.add_column("note", overflow="fold")
    for row in sorted(rows, key=lambda one: (not one.cause, not one.differs)):
        style = "bold red" if row.cause else "red" if row.differs else "dim"
        right = row.right if row.differs else "="
        table.add_row(
            Text("≠" if row.differs else " ", style),
            Text(row.path, style),
            Text(row.left, style),
            Text(right, style),
            Text(row.note, style),
        )
    return table
