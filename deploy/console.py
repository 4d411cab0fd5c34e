"""The console that every command and benchmark prints on."""

from __future__ import annotations

from typing import IO

from rich.console import Console as AnyConsole  # noqa: TID251 this is where it is made safe


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
