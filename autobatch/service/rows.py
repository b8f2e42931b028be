"""Stores records once, forgets them for good, searches names, and reads pages: what all tables have in common."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Table, delete, false, func, literal, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql import ColumnElement

from autobatch.service import tables
from autobatch.service.answers import PageQuery
from autobatch.service.database import Database
from autobatch.service.records import Record
from autobatch.service.tables import Base, ForgottenRow, NameRow, PeakRow, RecordRow

_LONGEST_NAME = 200
_MOST_FOUND = 1000  # names or ids with a part in them
_PARTS: dict[type[RecordRow], tuple[Any, ...]] = {
    tables.PlanRow: (PeakRow.source_id,),
    tables.RunRow: (tables.SummaryRow.run_id, tables.ReadingRow.run_id, tables.AlertRow.run_id, PeakRow.source_id),
    tables.PredictionRow: (),
}
_SEARCHED = ("model", "device", "host")
_Line = TypeVar("_Line", bound=Record)


class Rows:
    """The rows of one database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        # Built once: to build a statement takes several times as long as to run it.
        self._inserts = {
            mapper.class_: database.insert(cast("Table", mapper.local_table)).on_conflict_do_nothing()
            for mapper in Base.registry.mappers
        }

    def insert(self, connection: Connection, table: type[Base], row: Mapping[str, Any]) -> bool:
        """Insert a row unless there is one with its key; return whether it is new."""
        return bool(connection.execute(self._inserts[table], row).rowcount)

    def add(self, connection: Connection, table: type[RecordRow], row: Mapping[str, Any]) -> bool:
        """Store a record unless it is there or was forgotten; return whether it is new."""
        # Names go first and in one order, so that writers do not wait for each other.
        for kind in _SEARCHED:
            if name := row.get(kind):
                self.insert(connection, NameRow, {"kind": kind, "name": name, "folded": name.casefold()})
        if not self.insert(connection, table, row):
            return False
        # After the insert, which waits for a transaction that forgets this record now.
        is_forgotten = self.is_forgotten(connection, table, row["id"])
        if is_forgotten:
            connection.execute(delete(table).where(table.id == row["id"]))
        return not is_forgotten

    def is_forgotten(self, connection: Connection, table: type[RecordRow], record_id: str) -> bool:
        is_it = (ForgottenRow.kind == table.__tablename__) & (ForgottenRow.id == record_id)
        return connection.execute(select(ForgottenRow.id).where(is_it)).first() is not None

    def forget_rows(self, connection: Connection, table: type[RecordRow], wanted: ColumnElement[bool]) -> int:
        """Delete records, and keep their ids so that no client brings them back; return how many."""
        ids = select(literal(table.__tablename__), table.id, literal(time.time())).where(wanted)
        connection.execute(self._inserts[ForgottenRow].from_select(["kind", "id", "at"], ids))
        return delete_rows(connection, table, wanted)

    def _find_parts(self, table: type[RecordRow], parts: Mapping[str, str]) -> list[ColumnElement[bool]]:
        """Return conditions: an id begins with its part, a name has it anywhere, in any case.

        Names are searched in their short table, ids in their index. The query then lists what was found, so that
        the database's planner knows how many rows have it.
        """
        conditions = []
        with self.database.read() as connection:
            for name, part in parts.items():
                if name == "id":
                    begins = table.id.between(part, f"{part}~")  # "~" is after all letters of ids
                    query = select(table.id).where(begins)
                    # SQLite would sort all that begin so, instead of reading the newest until the page is full.
                    common = func.substr(table.id, 1, len(part)) == part if self.database.is_sqlite else begins
                else:
                    is_like = NameRow.folded.contains(part.casefold(), autoescape=True)
                    query = select(NameRow.name).where(NameRow.kind == name, is_like)
                    common = getattr(table, name).in_(query)
                found = connection.execute(query.limit(_MOST_FOUND + 1)).scalars().all()
                if len(found) > _MOST_FOUND:  # the newest rows have it, too
                    conditions.append(common)
                else:
                    conditions.append(
                        getattr(table, name).in_(found) if found else false()
                    )  # SQLite reads all for IN ()
        return conditions

    def read_page(
        self, moment: InstrumentedAttribute[float], line: type[_Line], page: PageQuery, *wanted: ColumnElement[bool]
    ) -> tuple[tuple[_Line, ...], str | None]:
        """Return a page of the table with this column, the newest first, and the place of the next one."""
        table: Any = moment.class_
        place = tuple_(moment, table.id)  # a row value uses the index, an OR would not
        query = select(*columns_of(table, line)).where(*wanted, *self._find_parts(table, page.parts))
        query = query.order_by(moment.desc(), table.id.desc()).limit(page.limit)
        with self.database.read() as connection:
            rows = connection.execute(query if page.place is None else query.where(place < page.place)).all()
        following = f"{getattr(rows[-1], moment.key)!r}_{rows[-1].id}" if len(rows) == page.limit else None
        return tuple(line.model_validate(row, from_attributes=True) for row in rows), following


def delete_rows(
    connection: Connection, table: type[RecordRow], wanted: ColumnElement[bool], *, keep_peaks: bool = False
) -> int:
    """Delete records with all that belongs to them, and return how many."""
    ids = select(table.id).where(wanted)
    for column in _PARTS[table]:
        if column.class_ is not PeakRow or not keep_peaks:
            connection.execute(delete(column.class_).where(column.in_(ids)))
    return connection.execute(delete(table).where(wanted)).rowcount


def columns_of(table: type[Base], line: type[Record]) -> list[ColumnElement[Any]]:
    """Return what a line of a list shows: the columns, and what tables name as such."""
    return [getattr(table, name).label(name) for name in line.model_fields]


def make_upsert(database: Database, table: type[Base], key: list[str], higher: Any = None) -> Any:
    """Return a statement that inserts a row or replaces it, with ``higher`` only by one with more in that column."""
    statement = database.insert(cast("Table", table.__table__))
    values = {column.name: statement.excluded[column.name] for column in table.__table__.c if column.name not in key}
    where = None if higher is None else higher < statement.excluded[higher.name]
    return statement.on_conflict_do_update(index_elements=key, set_=values, where=where)


def cut(text: str) -> str:
    return text[:_LONGEST_NAME]
