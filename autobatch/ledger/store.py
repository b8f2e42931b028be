"""Writes, finds and deletes plans and runs in the ledger's file.

Whatever fails is raised: ``sqlite3.Error``, ``OSError``, ``LedgerUnavailable``. Does not cover what training does then
(``ledger``).
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Run
from autobatch.ledger.database import VERSION, open_database, transaction
from autobatch.ledger.reader import PARTS, RUN_COLUMNS, UnreadablePlanError, read_plan, read_runs
from autobatch.ledger.retention import find_retention, prune, tick
from autobatch.ledger.run_summary import RunUpdate
from autobatch.plan import Plan

__all__ = ["Store", "plan_id", "runs_id"]

_MOST_ALIKE = 200
"""Each start of a script adds one, and they differ in target and budget: older ones than these are not read."""


class Store:
    """One connection to one file, for one thread of one process; used in a ``with``."""

    def __init__(self, path: Path, *, patience_s: float = 5.0) -> None:
        """Open the file, as ``open_database`` does."""
        self._pruned = False
        self._connection = open_database(path, patience_s)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def check_writable(self) -> None:
        """Write what the file has already, and undo it: a file that may only be read lets a write begin."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.execute(f"PRAGMA user_version = {VERSION}")
        finally:
            self._connection.rollback()

    def add_plan(self, plan: Plan) -> None:
        """Write a plan, unless one of its id is stored; before the first one, delete what is beyond the retention.

        A plan without an id gets one that follows from its content, and one without a date is of now.
        """
        retention = find_retention()
        plan = plan.model_copy(update={"id": plan_id(plan), "made_at": plan.made_at or time.time()})
        with transaction(self._connection) as connection:
            elapsed = tick(connection, retention)
            if not self._pruned:  # before, so that an old plan that is used again stays until it has its run
                prune(connection, retention, elapsed)
            connection.execute(
                "INSERT INTO plans VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
                (
                    *(plan.id, plan.made_at, plan.fingerprint, elapsed, plan.model_dump_json()),
                    *(plan.rank, _find_whole(plan)),
                ),
            )
        self._pruned = True

    def add_run(self, run: Run) -> None:
        """Write a run of a stored plan with its ranges and setbacks; of one that is stored only those are written."""
        with transaction(self._connection) as connection:
            values = (*(getattr(run, name) for name in RUN_COLUMNS), tick(connection, find_retention()))
            connection.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING", values)
            self._write_parts(run, ranges=0, setbacks=0, ranks=0)

    def update_run(self, update: RunUpdate) -> bool:
        """Write what is new of a run, all or nothing; ``False`` where the run is not stored (any more)."""
        with transaction(self._connection) as connection:
            elapsed = tick(connection, find_retention())
            found = connection.execute(
                "UPDATE runs SET last_seen_at = ?, outcome = ?, reason = ?, seen = ? WHERE id = ?",
                (update.last_seen_at, update.outcome, update.reason, elapsed, update.id),
            ).rowcount
            if found:
                first = {"ranges": update.first_range, "setbacks": update.first_setback, "ranks": 0}
                self._write_parts(update, **first)
            return found > 0

    def _write_parts(self, run: Run, **first: int) -> None:
        for table, columns in PARTS.items():
            statement = f"INSERT OR REPLACE INTO {table} VALUES (?, ?{', ?' * len(columns)})"  # noqa: S608 - our names
            rows = (
                (run.id, position, *(getattr(part, name) for name in columns))
                for position, part in enumerate(getattr(run, table), first[table])
            )
            self._connection.executemany(statement, rows)

    def plans(self, model: str | None = None, device: str | None = None, limit: int | None = None) -> list[Plan]:
        """Plans with these in the names of model and device, the newest first; without those that cannot be read.

        Of several ranks the first one's.
        """
        wanted = (
            plan
            for plan in self._read_plans("SELECT rowid FROM plans WHERE whole = '' ORDER BY made_at DESC, rowid DESC")
            if (model or "").lower() in plan.model.lower() and (device or "").lower() in plan.device.name.lower()
        )
        return list(islice(wanted, limit))

    def plans_like(self, fingerprint: str, rank: int = 0) -> list[Plan]:
        """The newest plans of a rank that were measured on the same, the newest first; none for no fingerprint."""
        query = (
            "SELECT rowid FROM plans WHERE fingerprint = ? AND fingerprint != '' AND rank = ? "
            "ORDER BY made_at DESC, rowid DESC LIMIT ?"
        )
        found = self._read_plans(query, fingerprint, rank, _MOST_ALIKE)
        return [plan for plan in found if plan.fingerprint == fingerprint]

    def _read_plans(self, query: str, *values: str | int) -> Iterator[Plan]:
        for (rowid,) in self._connection.execute(query, values).fetchall():
            with suppress(UnreadablePlanError):
                plan = read_plan(self._connection, rowid)
                if plan is not None:
                    yield plan

    def find_plan(self, id_or_prefix: str) -> Plan:
        """The plan of this id, or the only one whose id begins so; ``InvalidArgument`` where it cannot be had."""
        rowid, name = self._find_row(id_or_prefix)
        try:
            plan = read_plan(self._connection, rowid)
        except UnreadablePlanError as error:
            todo = "update autobatch, or run fit() again" if error.is_foreign else "run fit() again"
            raise InvalidArgument(f"plan {name} is not one that this version reads ({error}): {todo}") from error
        if plan is None:
            raise InvalidArgument(f"plan {name} was forgotten a moment ago")
        return plan

    def _find_row(self, wanted: str) -> tuple[int, str]:
        # Not LIKE: an id is the user's input here, and % is not what it says. By name: Python 3.12.0 warns of ?1.
        query = (
            "SELECT rowid, id FROM plans WHERE substr(id, 1, length(:wanted)) = :wanted "
            "ORDER BY id != :wanted, made_at DESC, rowid DESC LIMIT 4"
        )
        found = self._connection.execute(query, {"wanted": wanted}).fetchall() if wanted else []
        if found and (len(found) == 1 or found[0][1] == wanted):
            return int(found[0][0]), str(found[0][1])
        if found:
            names = ", ".join(name for _, name in found[:3]) + (", ..." if len(found) > 3 else "")
            raise InvalidArgument(f"several plans begin with {wanted!r}: {names}; give more of the id")
        newest = self._connection.execute("SELECT id FROM plans ORDER BY made_at DESC, rowid DESC LIMIT 3")
        names = ", ".join(name for (name,) in newest)
        known = f"the newest are {names}" if names else "no plan is stored yet: run fit()"
        raise InvalidArgument(f"no plan has the id {wanted!r}; {known}")

    def runs_of(self, plan_id: str) -> list[Run]:
        """The runs of the plan of this very id, the newest first, without those that cannot be read."""
        return read_runs(self._connection, plan_id)

    def forget(
        self, ids: Iterable[str] | None = None, *, older_than_seconds: float | None = None, everything: bool = False
    ) -> int:
        """Delete plans with their runs, and return how many: by ids, by age or all, exactly one of the three.

        All that ``ids`` name, as ``find_plan`` takes them, or nothing; by age also those that still have runs.
        """
        if (ids is not None) + (older_than_seconds is not None) + everything != 1:
            raise InvalidArgument("forget() takes ids, older_than_seconds= or everything=True: one of them")
        if older_than_seconds is not None and not older_than_seconds >= 0:  # nan is refused too
            raise InvalidArgument(f"older_than_seconds={older_than_seconds!r} must be at least 0")
        with transaction(self._connection) as connection:
            if ids is not None:
                rows = [self._find_row(wanted)[:1] for wanted in ids]
                return _delete(connection, [connection.execute(_WHOLE_OF_ROW, row).fetchone() for row in rows])
            # Nothing says how old a row is that cannot be read, and whoever wants old ones gone wants it gone.
            connection.execute("DELETE FROM set_aside")
            if older_than_seconds is None:
                return _delete(connection, connection.execute(f"SELECT {_WHOLE} FROM plans").fetchall())  # noqa: S608
            limit = time.time() - older_than_seconds
            return _delete(connection, connection.execute(_WHOLE_OF_OLD, (limit,)).fetchall())


_WHOLE = "CASE whole WHEN '' THEN id ELSE whole END"
"""The id of the first rank's plan."""

_WHOLE_OF_ROW = f"SELECT {_WHOLE} FROM plans WHERE rowid = ?"  # noqa: S608 - our own names
_WHOLE_OF_OLD = f"SELECT {_WHOLE} FROM plans WHERE made_at < ?"  # noqa: S608 - the same


def _delete(connection: sqlite3.Connection, found: Iterable[tuple[str]]) -> int:
    """Delete the plans of these first ranks, with those of the others, and return how many; all ranks are one."""
    wholes = set(found)
    connection.executemany(f"DELETE FROM plans WHERE {_WHOLE} = ?", wholes)  # noqa: S608 - the same
    return len(wholes)


def _find_whole(plan: Plan) -> str:
    """The id of the first rank's plan; empty where this is that one, or where there is one rank."""
    return plan.whole_id if plan.rank else ""


def runs_id(plan: Plan) -> str:
    """The id of the plan whose runs are this one's too: the first rank's."""
    return plan.whole_id or plan_id(plan)


def plan_id(plan: Plan) -> str:
    """The plan's id; one made by hand has none, and gets one that follows from its content."""
    return plan.id or hashlib.sha256(plan.model_dump_json().encode()).hexdigest()[:16]
