"""Writes, finds and deletes plans and runs in the ledger's file.

Covers one open file. Whatever fails is raised: ``sqlite3.Error``, ``OSError``, ``LedgerUnavailable``. Does not cover
what training does then (``ledger``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Run
from autobatch.ledger import reader
from autobatch.ledger.database import VERSION, open_database, transaction
from autobatch.ledger.retention import find_retention, prune, tick
from autobatch.ledger.rows import UnreadableRowError, insert_plan, insert_run, update_run
from autobatch.ledger.run_summary import RunUpdate
from autobatch.plan import Plan

__all__ = ["Store"]


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
        """Write what the file has already, and undo it: a file that may only be read lets a write begin.

        Raises:
            sqlite3.Error: Nothing can be written.
        """
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
        with transaction(self._connection) as connection:
            elapsed = tick(connection, retention)
            if not self._pruned:  # before, so that an old plan that is used again stays until it has its run
                prune(connection, retention, elapsed)
            insert_plan(connection, plan, elapsed)
        self._pruned = True

    def add_run(self, run: Run) -> None:
        """Write a run with its ranges and setbacks; writing it twice does no harm.

        Raises:
            sqlite3.IntegrityError: Its plan is not stored.
        """
        with transaction(self._connection) as connection:
            insert_run(connection, run, tick(connection, find_retention()))

    def update_run(self, update: RunUpdate) -> bool:
        """Write what is new of a run, all or nothing; ``False`` where the run is not stored (any more)."""
        with transaction(self._connection) as connection:
            return update_run(connection, update, tick(connection, find_retention()))

    def plans(self, model: str | None = None, device: str | None = None, limit: int | None = None) -> list[Plan]:
        """Plans, the newest first, without those that this version does not read.

        Args:
            model: A part of the model's name, in any case of letters.
            device: The same of the device's name.
            limit: The most of them.
        """
        wanted = (
            plan
            for plan in reader.newest_plans(self._connection)
            if (model or "").lower() in plan.model.lower() and (device or "").lower() in plan.device.name.lower()
        )
        return list(islice(wanted, limit))

    def plans_like(self, fingerprint: str) -> list[Plan]:
        """The newest plans that were measured on the same, the newest first; none for no fingerprint."""
        return list(reader.plans_like(self._connection, fingerprint))

    def runs_of(self, plan_id: str) -> list[Run]:
        """The runs of the plan of this very id, the newest first, without those that cannot be read."""
        return reader.runs_of(self._connection, plan_id)

    def find_plan(self, id_or_prefix: str) -> Plan:
        """The plan of this id, or the only one whose id begins so.

        Raises:
            InvalidArgument: None does, several do, or this version does not read it.
        """
        rowid, plan_id = reader.find_row(self._connection, id_or_prefix)
        try:
            plan = reader.plan_in(self._connection, rowid)
        except UnreadableRowError as error:
            todo = "update autobatch, or run fit() again" if error.is_foreign else "run fit() again"
            raise InvalidArgument(
                f"plan {plan_id} is not one that this version reads ({error.reason}): {todo}"
            ) from error
        if plan is None:
            raise InvalidArgument(f"plan {plan_id} was forgotten a moment ago")
        return plan

    def forget(
        self,
        ids: Iterable[str] | None = None,
        *,
        older_than_seconds: float | None = None,
        everything: bool = False,
    ) -> int:
        """Delete plans with their runs, and return how many: by ids, by age or all, exactly one of the three.

        Args:
            ids: As ``find_plan`` takes them; those of plans that this version does not read too.
            older_than_seconds: Made longer ago than that, whether or not they still have runs.
            everything: All of them.

        Raises:
            InvalidArgument: An id is of no plan or of several, and then nothing is deleted.
        """
        if (ids is not None) + (older_than_seconds is not None) + everything != 1:
            raise InvalidArgument("forget() takes ids, older_than_seconds= or everything=True: one of them")
        if older_than_seconds is not None and not older_than_seconds >= 0:  # nan is refused too
            raise InvalidArgument(f"older_than_seconds={older_than_seconds!r} must be at least 0")
        with transaction(self._connection) as connection:
            if ids is not None:
                rows = {reader.find_row(connection, wanted)[:1] for wanted in ids}
                return connection.executemany("DELETE FROM plans WHERE rowid = ?", rows).rowcount if rows else 0
            # Nothing says how old a row is that cannot be read, and whoever wants old ones gone wants it gone.
            connection.execute("DELETE FROM set_aside")
            if everything:
                return connection.execute("DELETE FROM plans").rowcount
            limit = time.time() - (older_than_seconds or 0)
            return connection.execute("DELETE FROM plans WHERE made_at < ?", (limit,)).rowcount
