"""Writes plans and runs as rows of the ledger, and reads them back.

Covers one record at a time, inside a transaction of the caller's. Does not cover finding and deleting rows (``reader``,
``store``).
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from autobatch._version import __version__
from autobatch.events.run_history import Run, Setback, StepRange
from autobatch.ledger.run_summary import RunUpdate
from autobatch.plan import Plan
from autobatch.records import spell_invalid

__all__ = [
    "PARTS",
    "RUN_COLUMNS",
    "UnreadableRowError",
    "insert_plan",
    "insert_run",
    "plan_id",
    "read_plan",
    "read_run",
    "update_run",
]

RUN_COLUMNS = ("id", "plan_id", "pid", "started_at", "last_seen_at", "outcome", "reason")
PARTS = {
    "ranges": ("first_step", "last_step", "micro_batch_size", "retries", "peak_bytes", "seconds", "samples"),
    "setbacks": ("step", "kind", "old_size", "new_size", "used_bytes", "reason"),
}
"""A run's other tables: their columns after the run's id and the position in it."""


class UnreadableRowError(Exception):
    """A row that does not become a record.

    Attributes:
        reason: Why, in one line.
        is_foreign: Whether another version of autobatch wrote it, which may read it.
    """

    def __init__(self, reason: str, *, is_foreign: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_foreign = reason, is_foreign


def plan_id(plan: Plan) -> str:
    """The plan's id; one made by hand has none, and gets one that follows from its content."""
    return plan.id or hashlib.sha256(plan.model_dump_json().encode()).hexdigest()[:16]


def insert_plan(connection: sqlite3.Connection, plan: Plan, elapsed: float) -> None:
    """Write a plan with its id and date, unless one of this id is stored."""
    plan = plan.model_copy(update={"id": plan_id(plan), "made_at": plan.made_at or time.time()})
    values = (
        plan.id,
        plan.made_at,
        plan.model,
        plan.device.name,
        plan.fingerprint,
        plan.target_batch,
        plan.micro_batch_size,
        plan.peak_bytes,
        plan.model_dump_json(),
        elapsed,
    )
    connection.execute("INSERT INTO plans VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING", values)


def read_plan(content: Any) -> Plan:
    """The plan of this column.

    Raises:
        UnreadableRowError: It is none.
    """
    if not isinstance(content, str):
        raise UnreadableRowError(f"its content is of type {type(content).__name__}")
    try:
        return Plan.model_validate_json(content)
    except ValidationError as error:
        raise UnreadableRowError(spell_invalid(error), is_foreign=_is_foreign(content)) from None


def _is_foreign(content: str) -> bool:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return False
    version = found.get("version") if isinstance(found, dict) else None
    return isinstance(version, str) and version != __version__


def insert_run(connection: sqlite3.Connection, run: Run, elapsed: float) -> None:
    """Write a run with its ranges and setbacks; of one that is stored only those are written."""
    values = (*(getattr(run, name) for name in RUN_COLUMNS), elapsed)
    connection.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING", values)
    _insert_parts(connection, "ranges", run.id, 0, run.ranges)
    _insert_parts(connection, "setbacks", run.id, 0, run.setbacks)


def update_run(connection: sqlite3.Connection, update: RunUpdate, elapsed: float) -> bool:
    """Write what is new of a run; ``False``, and nothing written, where no such run is stored."""
    found = connection.execute(
        "UPDATE runs SET last_seen_at = ?, outcome = ?, reason = ?, seen = ? WHERE id = ?",
        (update.last_seen_at, update.outcome, update.reason, elapsed, update.run_id),
    ).rowcount
    if found:
        _insert_parts(connection, "ranges", update.run_id, update.first_range, update.ranges)
        _insert_parts(connection, "setbacks", update.run_id, update.first_setback, update.setbacks)
    return found > 0


def _insert_parts(
    connection: sqlite3.Connection, table: str, run_id: str, first: int, parts: Sequence[StepRange | Setback]
) -> None:
    columns = PARTS[table]
    connection.executemany(
        f"INSERT OR REPLACE INTO {table} VALUES (?, ?{', ?' * len(columns)})",  # noqa: S608 - our own names
        [(run_id, position, *(getattr(part, name) for name in columns)) for position, part in enumerate(parts, first)],
    )


def read_run(connection: sqlite3.Connection, row: Sequence[Any]) -> Run:
    """The run of this row, the columns of ``RUN_COLUMNS``, with its ranges and setbacks in order.

    Raises:
        UnreadableRowError: It is none.
    """
    fields = dict(zip(RUN_COLUMNS, row, strict=True))
    for table, columns in PARTS.items():
        query = f"SELECT {', '.join(columns)} FROM {table} WHERE run_id = ? ORDER BY place"  # noqa: S608 - our own names
        found = connection.execute(query, (fields["id"],))
        fields[table] = [dict(zip(columns, part, strict=True)) for part in found]
    try:
        return Run.model_validate(fields)
    except ValidationError as error:
        raise UnreadableRowError(spell_invalid(error)) from None
