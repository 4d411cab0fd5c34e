"""Two cache domains side by side, for people."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from backhaul.protocols.comparison import Comparison


def comparison_table(comparison: Comparison, ours: str, theirs: str) -> Table:
    """One row per differing field: its path, the value of either side, what decides it.

    ``ours``, ``theirs``: names of the sides. Causes stand out; what follows from them is dimmed.
    """
    table = Table(title=Text(comparison.line()), title_justify="left", title_style="bold")
    for heading in ("field", ours, theirs, "note"):
        table.add_column(Text(heading), overflow="fold")
    causes = {one.path for one in comparison.causes}
    for path, here, there, note in comparison.rows():
        # Text, not markup: "layout.groups[2]" would be read as a tag.
        cells = [Text(cell) for cell in (path, here or '""', there or '""', note)]
        table.add_row(*cells, style="" if path in causes else "dim")
    return table
