"""Reads a table that is shipped beside the code, each line checked as a record.

Covers files of comma-separated values whose first line names the fields. Does not cover what the fields mean.
"""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import TypeVar

from autobatch.records import Record

__all__ = ["read_table"]

_Row = TypeVar("_Row", bound=Record)


def read_table(name: str, kind: type[_Row]) -> tuple[_Row, ...]:
    """Its rows, in order; empty cells are left out, so that a field's default holds."""
    text = files("autobatch.prediction").joinpath(name).read_text(encoding="utf-8")
    cells = csv.DictReader(text.splitlines())
    return tuple(kind.model_validate({key: cell for key, cell in row.items() if cell}) for row in cells)
