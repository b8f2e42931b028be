"""Inserts rows once, searches names, and reads pages: what all that is stored has in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from sqlalchemy import Connection, Table, delete, func, select, tuple_
from sqlalchemy.sql import ColumnElement, Select

from autobatch.service.database import Database
from autobatch.service.tables import (
    AlertRow,
    Base,
    NameRow,
    PeakRow,
    PlanRow,
    PredictionRow,
    ReadingRow,
    RunRow,
    SummaryRow,
)

_LONGEST_NAME = 200
_MOST_NAMES = 1000  # with a part in them
_TABLES: tuple[type[Base], ...] = (NameRow, PlanRow, RunRow, SummaryRow, PredictionRow, PeakRow, AlertRow)


class NotFound(Exception):
    """The record is unknown, or was forgotten."""


class Conflict(Exception):
    """The record contradicts what is stored."""


class Rows:
    """The rows of one database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        # Built once: to build a statement takes several times as long as to run it.
        self._inserts = {
            table: database.insert(cast("Table", table.__table__)).on_conflict_do_nothing() for table in _TABLES
        }
        self._names: set[tuple[str, str]] = set()  # known to be in the table

    def insert(self, connection: Connection, table: type[Base], row: Mapping[str, Any]) -> bool:
        """Insert a row unless there is one with its key; return whether it is new."""
        return bool(connection.execute(self._inserts[table], row).rowcount)

    def write_named(self, names: Mapping[str, str], write: Any) -> bool:
        """Write, and first note the names that are new, in one order, so that writers do not wait for each other."""
        unknown = sorted({pair for pair in names.items() if pair[1]} - self._names)

        def action(connection: Connection) -> bool:
            for kind, name in unknown:
                self.insert(connection, NameRow, {"kind": kind, "name": name})
            return bool(write(connection))

        is_new = self.database.write(action)
        if len(self._names) < 10_000:  # a hostile writer must not fill the memory
            self._names.update(unknown)
        return is_new

    def has_part(self, table: type[Base], kind: str, part: str) -> ColumnElement[bool]:
        """Search the short table of names: a search in the long one would read all of it.

        The names found stand in the query itself. So PostgreSQL's planner knows how many rows have them.
        """
        is_like = func.lower(NameRow.name).contains(part.lower(), autoescape=True)
        names = select(NameRow.name).where(NameRow.kind == kind, is_like).limit(_MOST_NAMES)
        with self.database.read() as connection:
            found = connection.execute(names).scalars().all()
        column: ColumnElement[str] = table.__table__.c[kind]
        return column.in_(found)

    def page(
        self, query: Select[Any], moment: Any, key: Any, after: tuple[float, str] | None, limit: int
    ) -> list[dict[str, Any]]:
        """Return a page, the newest first, from behind a place; a row value uses the index, an OR would not."""
        if after is not None:
            query = query.where(tuple_(moment, key) < after)
        query = query.order_by(moment.desc(), key.desc()).limit(limit)
        with self.database.read() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]


def make_upsert(database: Database, table: type[Base], key: list[str], higher: Any = None) -> Any:
    """Return a statement that inserts a row or replaces it, with ``higher`` only by one with more in that column."""
    statement = database.insert(cast("Table", table.__table__))
    values = {column.name: statement.excluded[column.name] for column in table.__table__.c if column.name not in key}
    where = None if higher is None else higher < statement.excluded[higher.name]
    return statement.on_conflict_do_update(index_elements=key, set_=values, where=where)


def delete_runs(connection: Connection, wanted: ColumnElement[bool]) -> int:
    """Delete runs with all that belongs to them, and return how many."""
    ids = select(RunRow.id).where(wanted)
    for table, column in (
        (SummaryRow, SummaryRow.run_id),
        (ReadingRow, ReadingRow.run_id),
        (AlertRow, AlertRow.run_id),
        (PeakRow, PeakRow.source_id),
    ):
        connection.execute(delete(table).where(column.in_(ids)))
    return connection.execute(delete(RunRow).where(wanted)).rowcount


def cut(text: str) -> str:
    return text[:_LONGEST_NAME]


def cursor(moment: float, key: str) -> str:
    return f"{moment!r}_{key}"
