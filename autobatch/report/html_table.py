"""Renders a table of values as HTML, its notes beneath.

Covers escaping, alignment and what a screen reader is given. Does not cover which values are shown (``tables``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autobatch.report.svg import element, escape
from autobatch.report.tables import Cell, Table, format_cell, number_columns

__all__ = ["render_table"]


def render_table(table: Table, name: str, *, planned: int | None = None, leads: Sequence[str] = ()) -> str:
    """A table, its notes beneath.

    Args:
        table: What is in it.
        name: For those who do not see it.
        planned: Rows that begin with this number are the plan's own.
        leads: Markup instead of the first cell of each row.
    """
    notes = "".join(element("p", escape(note), class_="aside") for note in table.notes)
    if not table.rows:
        return notes
    numbers = number_columns(table)
    rows = (
        element("tr", *_cells(row, numbers, leads[index : index + 1]), class_="planned" if row[0] == planned else "")
        for index, row in enumerate(table.rows)
    )
    whole = element("table", *_head(table, numbers), element("tbody", *rows), aria_label=name)
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=name) + notes


def _head(table: Table, numbers: frozenset[int]) -> Iterator[str]:
    heads = [
        element("th", escape(heading), scope="col", class_="number" if index in numbers else "")
        if heading
        else element("td")
        for index, heading in enumerate(table.headings)
    ]
    if any(table.headings):
        yield element("thead", element("tr", *heads))


def _cells(row: Iterable[Cell], numbers: frozenset[int], lead: Sequence[str]) -> Iterator[str]:
    for index, cell in enumerate(row):
        if index == 0 and lead:
            yield element("td", *lead)
            continue
        kind = "number" if index in numbers else "long" if isinstance(cell, str) and len(cell) > 20 else ""
        exact = "" if isinstance(cell, str) else repr(cell + 0)
        name, scope = ("th", "row") if index == 0 else ("td", "")
        yield element(name, escape(format_cell(cell)), class_=kind, scope=scope, data_value=exact)
