"""The console that every command and benchmark prints on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import IO

from rich.box import SIMPLE
from rich.console import Console as AnyConsole  # noqa: TID251 this is where it is made safe
from rich.measure import Measurement
from rich.table import Table


class Console(AnyConsole):
    """Shows text as it is. Names of models, engines and files, tokens, reasons and errors come from
    outside: nothing in a string, a table's cell or a title is read as markup or as an emoji's
    name. Styles are given as ``style=`` or as a ``rich.text.Text``.

    ``file``: where to; None: standard output. ``width``: columns; None: the terminal's.
    """

    def __init__(
        self, *, file: IO[str] | None = None, stderr: bool = False, width: int | None = None
    ) -> None:
        super().__init__(
            file=file, stderr=stderr, width=width, markup=False, emoji=False, highlight=False
        )


def plain_table(title: str) -> Table:
    """A table without frames: two columns more of a narrow terminal go to every cell's text."""
    return Table(
        title=title, title_justify="left", header_style="bold",
        box=SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip


def narrowed(
    console: AnyConsole, make: Callable[[Collection[str]], Table], expendable: Sequence[str]
) -> tuple[Table, list[str]]:
    """The table that ``make`` builds without the columns given, and which these are: of
    ``expendable``, the first ones first, as many as it takes to fit the console."""
    left_out: list[str] = []
    table = make(left_out)
    for name in expendable:
        unbounded = console.options.update(width=10_000)
        if Measurement.get(console, unbounded, table).maximum <= console.width:
            break
        left_out.append(name)
        table = make(left_out)
    return table, left_out
