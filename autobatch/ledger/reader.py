"""Finds and reads plans and runs row by row, so that one that is damaged hides no other.

A plan or run that a disk, or somebody, has changed is moved into the table ``set_aside`` as it is, with the reason, and
left out from then on. Does not cover a file whose structure is broken (``ledger``).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Run
from autobatch.ledger.database import is_damaged, transaction
from autobatch.ledger.path import warn_once
from autobatch.ledger.retention import read_elapsed
from autobatch.ledger.rows import PARTS, RUN_COLUMNS, UnreadableRowError, read_plan, read_run
from autobatch.plan import Plan

__all__ = ["find_row", "newest_plans", "plan_in", "plans_like", "runs_of"]

_MOST_ALIKE = 200
"""Each start of a script adds one, and they differ in target and budget: older ones than these are not read."""


def newest_plans(connection: sqlite3.Connection) -> Iterator[Plan]:
    """All plans that can be read, by their dates."""
    return _read_plans(connection, "SELECT rowid FROM plans ORDER BY made_at DESC, rowid DESC", ())


def plans_like(connection: sqlite3.Connection, fingerprint: str) -> Iterator[Plan]:
    """The newest plans that were measured on the same; none for no fingerprint."""
    query = (
        "SELECT rowid FROM plans WHERE fingerprint = ? AND fingerprint != '' ORDER BY made_at DESC, rowid DESC LIMIT ?"
    )
    found = _read_plans(connection, query, (fingerprint, _MOST_ALIKE))
    return (plan for plan in found if plan.fingerprint == fingerprint)


def _read_plans(connection: sqlite3.Connection, query: str, values: tuple[str | int, ...]) -> Iterator[Plan]:
    for (rowid,) in connection.execute(query, values).fetchall():
        with suppress(UnreadableRowError):
            plan = plan_in(connection, rowid)
            if plan is not None:
                yield plan


def plan_in(connection: sqlite3.Connection, rowid: int) -> Plan | None:
    """The plan of this row, ``None`` where it was deleted meanwhile.

    Raises:
        UnreadableRowError: It cannot be read, which was logged, and it is set aside where it is damaged.
    """
    try:
        row = connection.execute("SELECT id, content FROM plans WHERE rowid = ?", (rowid,)).fetchone()
        return None if row is None else read_plan(row[1])
    except sqlite3.DatabaseError as error:
        if not is_damaged(error):
            raise
        _warn_of_damage("plan", f"in row {rowid}", str(error))  # SQLite cannot move it either
        raise UnreadableRowError(str(error)) from error
    except UnreadableRowError as error:
        if error.is_foreign:
            warn_once(
                "a plan of another version",
                f"plan {row[0]} in the ledger is not one that this version reads ({error.reason}): such plans are "
                f"left out",
            )
        else:
            _warn_of_damage("plan", row[0], error.reason)
            _set_aside(connection, _move_plan, rowid, error.reason)
        raise


def find_row(connection: sqlite3.Connection, wanted: str) -> tuple[int, str]:
    """The row and the id of the plan of this id, or of the only one whose id begins so.

    Raises:
        InvalidArgument: None does, or several do.
    """
    # Not LIKE: an id is the user's input here, and % is not what it says.
    query = (
        "SELECT rowid, id FROM plans WHERE substr(id, 1, length(?1)) = ?1 "
        "ORDER BY id != ?1, made_at DESC, rowid DESC LIMIT 4"
    )
    found = connection.execute(query, (wanted,)).fetchall() if wanted else []
    if found and (len(found) == 1 or found[0][1] == wanted):
        return int(found[0][0]), str(found[0][1])
    if found:
        names = ", ".join(name for _, name in found[:3]) + (", ..." if len(found) > 3 else "")
        raise InvalidArgument(f"several plans begin with {wanted!r}: {names}; give more of the id")
    newest = connection.execute("SELECT id FROM plans ORDER BY made_at DESC, rowid DESC LIMIT 3").fetchall()
    known = f"the newest are {', '.join(row[0] for row in newest)}" if newest else "no plan is stored yet: run fit()"
    raise InvalidArgument(f"no plan has the id {wanted!r}; {known}")


def runs_of(connection: sqlite3.Connection, plan_id: str) -> list[Run]:
    """The runs of the plan of this very id, the newest first, without those that cannot be read."""
    query = (
        f"SELECT rowid, {', '.join(RUN_COLUMNS)} FROM runs WHERE plan_id = ? "  # noqa: S608 - our own names
        f"ORDER BY started_at DESC, rowid DESC"
    )
    found, unreadable = [], []
    with transaction(connection, "DEFERRED"):  # so that a run's parts are of one moment
        for rowid, *row in connection.execute(query, (plan_id,)).fetchall():
            try:
                found.append(read_run(connection, row))
            except UnreadableRowError as error:
                unreadable.append((rowid, row[0], error.reason))
    for rowid, name, reason in unreadable:
        _warn_of_damage("run", name, reason)
        _set_aside(connection, _move_run, rowid, reason)
    return found


def _warn_of_damage(kind: str, name: str, reason: str) -> None:
    warn_once(
        f"unreadable {kind} {name}",
        f"{kind} {name} in the ledger is not one that this version reads ({reason}): it is damaged, and is set aside",
    )


def _set_aside(
    connection: sqlite3.Connection, move: Callable[[sqlite3.Connection, int, str], None], rowid: int, reason: str
) -> None:
    # It was logged and left out: where it cannot be moved (the file may only be read, another process writes, the row
    # is broken beyond that), it stays.
    with suppress(sqlite3.Error), transaction(connection):
        move(connection, rowid, reason)


def _move_plan(connection: sqlite3.Connection, rowid: int, reason: str) -> None:
    """With its runs, which cannot be shown without it."""
    row = connection.execute("SELECT id, content FROM plans WHERE rowid = ?", (rowid,)).fetchone()
    if row is None:  # another process was faster
        return
    for (run,) in connection.execute("SELECT rowid FROM runs WHERE plan_id = ?", (row[0],)).fetchall():
        _move_run(connection, run, f"its plan {row[0]} cannot be read")
    _insert_set_aside(connection, "plan", row[0], reason, row[1])
    connection.execute("DELETE FROM plans WHERE rowid = ?", (rowid,))


def _move_run(connection: sqlite3.Connection, rowid: int, reason: str) -> None:
    """With its ranges and setbacks, as JSON."""
    cursor = connection.execute("SELECT * FROM runs WHERE rowid = ?", (rowid,))
    row = cursor.fetchone()
    if row is None:
        return
    content: dict[str, Any] = dict(zip([column[0] for column in cursor.description], row, strict=True))
    for table in PARTS:
        query = f"SELECT * FROM {table} WHERE run_id = ? ORDER BY place"  # noqa: S608 - our own names
        content[table] = connection.execute(query, (content["id"],)).fetchall()
    _insert_set_aside(connection, "run", content["id"], reason, json.dumps(content, default=repr))
    connection.execute("DELETE FROM runs WHERE rowid = ?", (rowid,))


def _insert_set_aside(connection: sqlite3.Connection, kind: str, name: Any, reason: str, content: Any) -> None:
    values = (kind, str(name), read_elapsed(connection), reason, content)
    connection.execute("INSERT INTO set_aside VALUES (?, ?, ?, ?, ?)", values)
