"""``Store``: the ledger's file, open.

Covers writing, finding and deleting plans and runs. Whatever fails is raised: ``sqlite3.Error``, ``OSError``,
``LedgerUnavailable``. Does not cover what training does then (``ledger``).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from types import TracebackType

from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Run
from autobatch.ledger.clock import tick
from autobatch.ledger.reader import Reader, decode_text
from autobatch.ledger.retention import Retention, find_retention, prune
from autobatch.ledger.rows import UnreadableRowError, insert_notes, insert_plan, insert_run
from autobatch.ledger.run_summary import RunNotes
from autobatch.ledger.schema import VERSION, check_version, migrate
from autobatch.ledger.sqlite_journal_mode import set_journal_mode, transaction
from autobatch.plan import Plan

__all__ = ["Store"]


class Store:
    """One connection to one file, for one thread of one process; close it, or use it in a ``with``."""

    def __init__(self, path: Path, *, patience_s: float = 5.0) -> None:
        """Open the file; make it, and a folder for it that nobody else may enter, where they are not there.

        Args:
            path: Of the file.
            patience_s: How long each operation waits while another process writes.

        Raises:
            OSError: The folder cannot be made.
            sqlite3.Error: The file cannot be read or made, or is damaged.
            LedgerUnavailable: A newer autobatch made it; it is left as it is.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._pruned = False
        self._connection = sqlite3.connect(path, timeout=patience_s, isolation_level=None)
        self._connection.text_factory = decode_text
        self._reader = Reader(self._connection)
        try:
            check_version(self._connection)
            set_journal_mode(self._connection, path.parent, patience_s)
            self._connection.execute("PRAGMA foreign_keys = ON")
            migrate(self._connection)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def check_writable(self) -> None:
        """Write what is there already, and take it back: a file that may only be read lets a write begin.

        Raises:
            sqlite3.Error: Nothing can be written.
        """
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.execute(f"PRAGMA user_version = {VERSION}")
        finally:
            self._connection.rollback()

    def close(self) -> None:
        """Give the file back; what was written is in it."""
        self._connection.close()

    def add_plan(self, plan: Plan) -> None:
        """Write a plan; the first time since the opening, delete what is beyond the retention before.

        A plan without an id gets one that follows from its content, and one without a date is of now. A plan whose id
        is there already is not written again.
        """
        retention = find_retention()
        with transaction(self._connection) as connection:
            elapsed = tick(connection, retention)
            if not self._pruned:  # before, so that an old plan that is used again stays until it has its run
                prune(connection, retention, elapsed)
            insert_plan(connection, plan, elapsed)
        self._pruned = True

    def add_run(self, run: Run) -> None:
        """Write a run of a plan that is there, with its ranges and setbacks; writing it twice does no harm.

        Raises:
            sqlite3.IntegrityError: The plan is not there.
        """
        with transaction(self._connection) as connection:
            insert_run(connection, run, tick(connection, find_retention()))

    def update_run(self, notes: RunNotes) -> bool:
        """Write what is new of a run, all or nothing.

        Returns:
            Whether the run is there: somebody may have had it forgotten.
        """
        with transaction(self._connection) as connection:
            return insert_notes(connection, notes, tick(connection, find_retention()))

    def plans(self, model: str | None = None, device: str | None = None, limit: int | None = None) -> list[Plan]:
        """Plans, the newest first, without those that this version does not read.

        Args:
            model: A part of the model's name, in any case of letters.
            device: The same of the device's name.
            limit: The most of them.
        """
        wanted = (
            plan
            for plan in self._reader.newest_plans()
            if (model or "").lower() in plan.model.lower() and (device or "").lower() in plan.device.name.lower()
        )
        return list(islice(wanted, limit))

    def plans_like(self, fingerprint: str) -> list[Plan]:
        """The newest plans that were measured on the same, the newest first; none for no fingerprint."""
        return list(self._reader.plans_like(fingerprint))

    def runs_of(self, plan_id: str) -> list[Run]:
        """The runs of the plan of this very id, the newest first, without those that cannot be read."""
        return self._reader.runs_of(plan_id)

    def find_plan(self, id_or_prefix: str) -> Plan:
        """The plan of this id, or the only one whose id begins so.

        Raises:
            InvalidArgument: There is none, there are several, or this version does not read it.
        """
        rowid, plan_id = self._reader.find_row(id_or_prefix)
        try:
            plan = self._reader.read_plan(rowid)
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
        """Delete plans with their runs: exactly one of the three says which.

        Args:
            ids: As ``find_plan`` takes them; those of plans that this version does not read too.
            older_than_seconds: Made longer ago than that, whether or not they still have runs.
            everything: All of them.

        Returns:
            How many plans are gone.

        Raises:
            InvalidArgument: An id is of no plan or of several, and then nothing is deleted; or not one of the three
                was given.
        """
        if (ids is not None) + (older_than_seconds is not None) + everything != 1:
            raise InvalidArgument("forget() takes ids, older_than_seconds= or everything=True: one of them")
        if older_than_seconds is not None and not older_than_seconds >= 0:  # nan is refused too
            raise InvalidArgument(f"older_than_seconds={older_than_seconds!r} must be at least 0")
        with transaction(self._connection) as connection:
            if ids is not None:
                found = {self._reader.find_row(wanted)[:1] for wanted in ids}
                return connection.executemany("DELETE FROM plans WHERE rowid = ?", list(found)).rowcount if found else 0
            # Nothing says how old a row is that cannot be read, and whoever wants old ones gone wants it gone.
            connection.execute("DELETE FROM set_aside")
            if older_than_seconds is not None:
                limit = (time.time() - older_than_seconds,)
                return connection.execute("DELETE FROM plans WHERE made_at < ?", limit).rowcount
            return connection.execute("DELETE FROM plans").rowcount

    def prune(self, retention: Retention) -> int:
        """Delete what is beyond the retention.

        Returns:
            How many plans are gone.
        """
        with transaction(self._connection) as connection:
            return prune(connection, retention, tick(connection, retention))
