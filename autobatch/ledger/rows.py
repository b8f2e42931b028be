"""Plans and runs as rows of the ledger, and back.

Covers one record at a time, on a connection whose transaction is somebody else's. Does not cover choosing, finding and
deleting them (``store``).
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from typing import Any

from pydantic import ValidationError

from autobatch._version import __version__
from autobatch.events.run_history import Run
from autobatch.ledger.run_summary import RunNotes
from autobatch.plan import Plan
from autobatch.records import spell_invalid

__all__ = [
    "RUN_COLUMNS",
    "UnreadableRowError",
    "identify",
    "insert_notes",
    "insert_plan",
    "insert_run",
    "read_plan",
    "read_run",
]

_RANGE = ("first_step", "last_step", "micro_batch_size", "retries", "peak_bytes", "seconds", "samples")
_SETBACK = ("step", "kind", "old_size", "new_size", "used_bytes", "reason")
RUN_COLUMNS = ("id", "plan_id", "pid", "started_at", "last_seen_at", "outcome", "reason")


def identify(plan: Plan) -> str:
    """The plan's id; one made by hand or by an earlier version has none, and gets one that follows from its content."""
    return plan.id or hashlib.sha256(plan.model_dump_json().encode()).hexdigest()[:16]


class UnreadableRowError(Exception):
    """A row that does not become a record.

    Attributes:
        reason: Why, in one line.
        is_foreign: Whether another version of autobatch wrote it, which may read it.
    """

    def __init__(self, reason: str, *, is_foreign: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_foreign = reason, is_foreign


def insert_plan(connection: sqlite3.Connection, plan: Plan, elapsed: float) -> None:
    """Write a plan with its id and age; one of the same id that is there already stays as it is."""
    plan = plan.model_copy(update={"id": identify(plan), "made_at": plan.made_at or time.time()})
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
    """Write a run with all that is in it; one of the same id that is there already gets its ranges and setbacks."""
    values = (run.id, run.plan_id, run.pid, run.started_at, run.last_seen_at, run.outcome, run.reason, elapsed)
    connection.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING", values)
    notes = RunNotes(run_id=run.id, last_seen_at=run.last_seen_at, ranges=run.ranges, setbacks=run.setbacks)
    _insert_parts(connection, notes)


def insert_notes(connection: sqlite3.Connection, notes: RunNotes, elapsed: float) -> bool:
    """Write what is new of a run; ``False``, and nothing written, where there is no such run."""
    found = connection.execute(
        "UPDATE runs SET last_seen_at = ?, outcome = ?, reason = ?, seen = ? WHERE id = ?",
        (notes.last_seen_at, notes.outcome, notes.reason, elapsed, notes.run_id),
    ).rowcount
    if found:
        _insert_parts(connection, notes)
    return found > 0


def _insert_parts(connection: sqlite3.Connection, notes: RunNotes) -> None:
    connection.executemany(
        "INSERT OR REPLACE INTO ranges VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (notes.run_id, place, *(getattr(part, name) for name in _RANGE))
            for place, part in enumerate(notes.ranges, notes.first_range)
        ],
    )
    connection.executemany(
        "INSERT OR REPLACE INTO setbacks VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (notes.run_id, place, *(getattr(setback, name) for name in _SETBACK))
            for place, setback in enumerate(notes.setbacks, notes.first_setback)
        ],
    )


def read_run(connection: sqlite3.Connection, row: tuple[Any, ...]) -> Run:
    """The run of this row of ``runs``, with its ranges and setbacks in order.

    Args:
        connection: Of the same moment as the row.
        row: The columns of ``RUN_COLUMNS``.

    Raises:
        UnreadableRowError: It is none.
    """
    fields = dict(zip(RUN_COLUMNS, row, strict=True))
    ranges = connection.execute(_SELECT_RANGES, (fields["id"],))
    setbacks = connection.execute(_SELECT_SETBACKS, (fields["id"],))
    fields["ranges"] = [dict(zip(_RANGE, part, strict=True)) for part in ranges]
    fields["setbacks"] = [dict(zip(_SETBACK, part, strict=True)) for part in setbacks]
    try:
        return Run.model_validate(fields)
    except ValidationError as error:
        raise UnreadableRowError(spell_invalid(error)) from None


_SELECT_RANGES = f"SELECT {', '.join(_RANGE)} FROM ranges WHERE run_id = ? ORDER BY place"  # noqa: S608 - our own names
_SELECT_SETBACKS = f"SELECT {', '.join(_SETBACK)} FROM setbacks WHERE run_id = ? ORDER BY place"  # noqa: S608 - as above
