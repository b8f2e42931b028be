"""Reads plans and runs row by row, so that one that is damaged hides no other.

A plan or run that a disk, or somebody, has changed is moved into the table ``set_aside`` as it is, with the reason, and
left out from then on. Does not cover a file whose structure is broken (``ledger``).
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from autobatch._version import __version__
from autobatch.events.run_history import RankTotal, Run, Setback, StepRange
from autobatch.ledger.database import is_damaged, transaction, warn_once
from autobatch.ledger.retention import read_clock
from autobatch.plan import Plan
from autobatch.records import spell_invalid

__all__ = ["PARTS", "RUN_COLUMNS", "UnreadablePlanError", "read_plan", "read_runs"]

PARTS = {
    "ranges": tuple(StepRange.model_fields),
    "setbacks": tuple(Setback.model_fields),
    "ranks": tuple(RankTotal.model_fields),
}
"""A run's other tables, with their columns after the run's id and the position in it."""

RUN_COLUMNS = tuple(name for name in Run.model_fields if name not in PARTS)


_Row = tuple[int, Any, Any]
"""Its number, its id and its content: of a plan the JSON, of a run the fields by name."""


class UnreadablePlanError(Exception):
    """Why a row is no plan, in one line, and whether another version of autobatch wrote it, which may read it."""

    def __init__(self, reason: str, *, is_foreign: bool = False) -> None:
        super().__init__(reason)
        self.is_foreign = is_foreign


def read_plan(connection: sqlite3.Connection, rowid: int) -> Plan | None:
    """The plan of this row, ``None`` where it was deleted meanwhile; what cannot be read is logged, then raised."""
    try:
        row = connection.execute("SELECT id, content FROM plans WHERE rowid = ?", (rowid,)).fetchone()
        return None if row is None else _parse_plan(row[1])
    except sqlite3.DatabaseError as error:
        if not is_damaged(error):
            raise
        _warn_of_damage("plan", f"in row {rowid}", str(error))  # SQLite cannot move it either
        raise UnreadablePlanError(str(error)) from error
    except UnreadablePlanError as error:
        if error.is_foreign:
            warn_once(
                "a plan of another version",
                f"plan {row[0]} in the ledger is not one that this version reads ({error}): such plans are left out",
            )
        else:
            _warn_of_damage("plan", row[0], str(error))
            _set_aside(connection, "plan", (rowid, *row), str(error))
        raise


def _parse_plan(content: Any) -> Plan:
    if not isinstance(content, str):
        raise UnreadablePlanError(f"its content is of type {type(content).__name__}")
    try:
        return Plan.model_validate_json(content)
    except ValidationError as error:
        raise UnreadablePlanError(spell_invalid(error), is_foreign=_is_foreign(content)) from None


def _is_foreign(content: str) -> bool:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return False
    version = found.get("version") if isinstance(found, dict) else None
    return isinstance(version, str) and version != __version__


def read_runs(connection: sqlite3.Connection, plan_id: str) -> list[Run]:
    """The runs of the plan of this very id, the newest first, without those that cannot be read."""
    found = []
    with transaction(connection, "DEFERRED"):  # so that a run's parts are of one moment
        rows = _read_run_rows(connection, plan_id)
    for row in rows:
        _, name, fields = row
        try:
            found.append(Run.model_validate(fields))
        except ValidationError as error:
            reason = spell_invalid(error)
            _warn_of_damage("run", name, reason)
            _set_aside(connection, "run", row, reason)
    return found


def _read_run_rows(connection: sqlite3.Connection, plan_id: str) -> list[_Row]:
    """A plan's runs with their ranges and setbacks, as they stand there."""
    query = (
        f"SELECT rowid, {', '.join(RUN_COLUMNS)} FROM runs WHERE plan_id = ? "  # noqa: S608 - our own names
        f"ORDER BY started_at DESC, rowid DESC"
    )
    found = []
    for rowid, *row in connection.execute(query, (plan_id,)).fetchall():
        fields = dict(zip(RUN_COLUMNS, row, strict=True))
        for table, columns in PARTS.items():
            query = f"SELECT {', '.join(columns)} FROM {table} WHERE run_id = ? ORDER BY position"  # noqa: S608
            parts = connection.execute(query, (fields["id"],))
            fields[table] = [dict(zip(columns, part, strict=True)) for part in parts]
        found.append((rowid, fields["id"], fields))
    return found


def _warn_of_damage(kind: str, name: str, reason: str) -> None:
    warn_once(
        f"unreadable {kind} {name}",
        f"{kind} {name} in the ledger is not one that this version reads ({reason}): it is damaged, and is set aside",
    )


def _set_aside(connection: sqlite3.Connection, kind: str, row: _Row, reason: str) -> None:
    """Move a row that cannot be read; a plan with its runs, which cannot be shown without it."""
    # It was logged and left out: where it cannot be moved (the file may only be read, another process writes, the row
    # is broken beyond that), it stays.
    with suppress(sqlite3.Error), transaction(connection):
        if not _still_stands(connection, kind, row):
            return  # another process was faster
        if kind == "plan":
            for run in _read_run_rows(connection, row[1]):
                _move(connection, "run", run, f"its plan {row[1]} cannot be read")
        _move(connection, kind, row, reason)


def _still_stands(connection: sqlite3.Connection, kind: str, row: _Row) -> bool:
    """Whether this row is what was read: SQLite gives the number of one that was deleted to another."""
    # Compared as they are read, since a text that is no UTF-8 is no longer equal to what stands in the file.
    rowid, *known = row
    if kind == "plan":
        query = "SELECT id, content FROM plans WHERE rowid = ?"
    else:
        query, known = "SELECT id FROM runs WHERE rowid = ?", known[:1]
    return bool(connection.execute(query, (rowid,)).fetchone() == tuple(known))


def _move(connection: sqlite3.Connection, kind: str, row: _Row, reason: str) -> None:
    rowid, name, content = row
    if kind == "run":
        content = json.dumps(content, default=repr)
    connection.execute(f"DELETE FROM {kind}s WHERE rowid = ?", (rowid,))  # noqa: S608 - our own names
    values = (kind, str(name), read_clock(connection)[0], reason, content)
    connection.execute("INSERT INTO set_aside VALUES (?, ?, ?, ?, ?)", values)
