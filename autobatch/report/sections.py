"""Defines what a report consists of: sections with tables, and how their numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from autobatch._formatting import format_bytes, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_T = TypeVar("_T")

UNKNOWN = "-"

_MOST_ROWS = 24
"""Most rows of a long list; half from its beginning, half from its end."""


class Bytes(int):
    """A number of bytes: a cell that is shown with a unit."""


Cell = str | int | float


class Table(NamedTuple):
    """Rows of text, counts, rates (float) or ``Bytes`` under headings, which may be empty; notes are sentences."""

    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()


class Chart(NamedTuple):
    """A picture: the function that draws it, and its height at a width of 400."""

    draw: Callable[[Axes], None]
    height: float = 300


class Section(NamedTuple):
    """A heading and the parts beneath it; a text has no chart."""

    title: str
    chart: Chart | None = None
    table: Table | None = None
    planned: int | None = None  # rows that begin with this number are the plan's own
    lines: Sequence[str] = ()
    items: Sequence[str] = ()
    only_text: bool = False  # HTML has it elsewhere


def format_cell(cell: Cell) -> str:
    """Format a cell: bytes with a unit, rates with one decimal."""
    if isinstance(cell, Bytes):
        return format_bytes(cell)
    return f"{cell:.1f}" if isinstance(cell, float) else str(cell)


def number_columns(table: Table) -> frozenset[int]:
    """Return the columns of numbers, which are aligned to the right."""

    def is_number(cell: Cell) -> bool:
        return not isinstance(cell, str) or cell == UNKNOWN or cell.endswith("%")

    columns = enumerate(zip(*table.rows, strict=True))
    return frozenset(index for index, column in columns if all(map(is_number, column)))


def ends(items: Sequence[_T], singular: str, several: str | None = None) -> tuple[Sequence[_T], tuple[str, ...]]:
    """Return a list's beginning and end, and a sentence about the rest."""
    if len(items) <= _MOST_ROWS:
        return items, ()
    half = _MOST_ROWS // 2
    missing = plural(len(items) - 2 * half, f"more {singular}", f"more {several}" if several else None)
    return (*items[:half], *items[-half:]), (f"{missing} between the first {half} and the last {half}, not shown.",)


def known(size_bytes: int) -> Cell:
    """Return the bytes, or a dash for 0, which means not measured."""
    return Bytes(size_bytes) if size_bytes else UNKNOWN


def format_seconds(seconds: float) -> str:
    """Format with three digits: ``0.04123`` -> ``"41.2 ms"``, from a second on ``"1.20 s"``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.2f} s"
