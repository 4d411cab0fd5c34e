"""What a report consists of, before it is laid out."""

from __future__ import annotations

from typing import NamedTuple

from backhaul.benchmarks.reuse.figures import Question


class Table(NamedTuple):
    """Cells as text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Answer(NamedTuple):
    """One question's section."""

    question: Question
    table: Table


class Chart(NamedTuple):
    """``name``: of its file, beside the Markdown."""

    name: str
    title: str
    svg: str


class Report(NamedTuple):
    """Everything that is shown, before it is laid out."""

    title: str
    summary: tuple[str, ...]
    runs: Table
    accounting: Table
    remarks: tuple[str, ...]
    answers: tuple[Answer, ...]
    charts: tuple[Chart, ...]
