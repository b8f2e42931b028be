"""Plans and runs as rows of the ledger, and back.

Covers one record at a time, on a connection whose transaction is somebody else's. Does not cover choosing, finding and
deleting them (``store``).
"""

from __future__ import annotations

import hashlib
import sqlite3
import time

from pydantic import ValidationError

from autobatch.history import Run, Setback, StepRange
from autobatch.ledger.complaint import complain_once
from autobatch.ledger.notes import RunNotes
from autobatch.plan import Plan

__all__ = ["identify", "insert_notes", "insert_plan", "insert_run", "read_plan", "read_run"]

_RANGE = ("first_step", "last_step", "micro_batch_size", "retries", "peak_bytes", "seconds", "samples")
_SETBACK = ("step", "kind", "old_size", "new_size", "used_bytes", "reason")


def identify(plan: Plan) -> str:
    """The plan's id; one made by hand or by an earlier version has none, and gets one that follows from its content."""
    return plan.id or hashlib.sha256(plan.model_dump_json().encode()).hexdigest()[:16]


def insert_plan(connection: sqlite3.Connection, plan: Plan) -> None:
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
    )
    connection.execute("INSERT INTO plans VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING", values)


def read_plan(plan_id: str, content: str) -> Plan | None:
    """The plan, or ``None`` and one log line a process where this version does not read it."""
    try:
        return Plan.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        why = f"{place}: {first['msg']}" if place else first["msg"]
        complain_once(
            "a plan of another version",
            f"plan {plan_id} in the ledger is not one that this version reads ({why}): such plans are left out",
        )
        return None


def insert_run(connection: sqlite3.Connection, run: Run) -> None:
    """Write a run with all that is in it; one of the same id that is there already gets its ranges and setbacks."""
    values = (run.id, run.plan_id, run.pid, run.started_at, run.last_seen_at, run.outcome, run.reason)
    connection.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING", values)
    notes = RunNotes(run_id=run.id, last_seen_at=run.last_seen_at, ranges=run.ranges, setbacks=run.setbacks)
    _insert_parts(connection, notes)


def insert_notes(connection: sqlite3.Connection, notes: RunNotes) -> bool:
    """Write what is new of a run; ``False``, and nothing written, where there is no such run."""
    found = connection.execute(
        "UPDATE runs SET last_seen_at = ?, outcome = ?, reason = ? WHERE id = ?",
        (notes.last_seen_at, notes.outcome, notes.reason, notes.run_id),
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


def read_run(connection: sqlite3.Connection, row: tuple[str, str, int, float, float, str, str]) -> Run:
    """The run of this row of ``runs``, with its ranges and setbacks in order."""
    run_id, plan_id, pid, started_at, last_seen_at, outcome, reason = row
    ranges = connection.execute(_SELECT_RANGES, (run_id,))
    setbacks = connection.execute(_SELECT_SETBACKS, (run_id,))
    return Run.model_validate(
        {
            "id": run_id,
            "plan_id": plan_id,
            "pid": pid,
            "started_at": started_at,
            "last_seen_at": last_seen_at,
            "outcome": outcome,
            "reason": reason,
            "ranges": [StepRange.model_validate(dict(zip(_RANGE, part, strict=True))) for part in ranges],
            "setbacks": [Setback.model_validate(dict(zip(_SETBACK, part, strict=True))) for part in setbacks],
        }
    )


_SELECT_RANGES = f"SELECT {', '.join(_RANGE)} FROM ranges WHERE run_id = ? ORDER BY place"  # noqa: S608 - our own names
_SELECT_SETBACKS = f"SELECT {', '.join(_SETBACK)} FROM setbacks WHERE run_id = ? ORDER BY place"  # noqa: S608 - as above
