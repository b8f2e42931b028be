"""Moves rows that cannot be read out of the way of those that can.

Covers plans and runs that a disk, or somebody, has changed: they go into the table ``set_aside`` as they are, with the
reason, and are left out from then on. Does not cover plans of another version, which stay where they are for that
version, nor a file whose structure is broken (``ledger``).
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from autobatch.ledger.clock import read_elapsed
from autobatch.ledger.warnings import warn_once

__all__ = ["report_unreadable", "set_plan_aside", "set_run_aside"]

_RUN_PARTS = ("ranges", "setbacks")


def report_unreadable(kind: str, name: str, reason: str) -> None:
    """One log line a process for each row."""
    warn_once(
        f"unreadable {kind} {name}",
        f"{kind} {name} in the ledger is not one that this version reads ({reason}): it is damaged, and is set aside",
    )


def set_plan_aside(connection: sqlite3.Connection, rowid: int, reason: str) -> None:
    """Move a plan, and its runs, of which nothing could be shown without it.

    Args:
        connection: In a transaction that writes.
        rowid: Of the plan.
        reason: Why it cannot be read.
    """
    row = connection.execute("SELECT id, content FROM plans WHERE rowid = ?", (rowid,)).fetchone()
    if row is None:  # another process was faster
        return
    runs = connection.execute("SELECT rowid FROM runs WHERE plan_id = ?", (row[0],)).fetchall()
    for (run,) in runs:
        set_run_aside(connection, run, f"its plan {row[0]} cannot be read")
    _write(connection, "plan", row[0], reason, row[1])
    connection.execute("DELETE FROM plans WHERE rowid = ?", (rowid,))


def set_run_aside(connection: sqlite3.Connection, rowid: int, reason: str) -> None:
    """Move a run with its ranges and setbacks, as JSON.

    Args:
        connection: In a transaction that writes.
        rowid: Of the run.
        reason: Why it cannot be read.
    """
    cursor = connection.execute("SELECT * FROM runs WHERE rowid = ?", (rowid,))
    row = cursor.fetchone()
    if row is None:
        return
    content: dict[str, Any] = dict(zip([column[0] for column in cursor.description], row, strict=True))
    for table in _RUN_PARTS:
        query = f"SELECT * FROM {table} WHERE run_id = ? ORDER BY place"  # noqa: S608 - our own names
        content[table] = connection.execute(query, (content["id"],)).fetchall()
    _write(connection, "run", content["id"], reason, json.dumps(content, default=repr))
    connection.execute("DELETE FROM runs WHERE rowid = ?", (rowid,))


def _write(connection: sqlite3.Connection, kind: str, name: Any, reason: str, content: Any) -> None:
    values = (kind, str(name), read_elapsed(connection), reason, content)
    connection.execute("INSERT INTO set_aside VALUES (?, ?, ?, ?, ?)", values)
