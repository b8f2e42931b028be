"""``Store``: the ledger's file, open.

Covers writing, finding and deleting plans and runs. Whatever fails is raised: ``sqlite3.Error``, ``OSError``,
``LedgerUnavailable``. Does not cover what training does then (``ledger``).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from autobatch.errors import InvalidArgument
from autobatch.history import Run
from autobatch.ledger.journal import set_journal
from autobatch.ledger.notes import RunNotes
from autobatch.ledger.retention import Retention, find_retention
from autobatch.ledger.rows import insert_notes, insert_plan, insert_run, read_plan, read_run
from autobatch.ledger.schema import VERSION, check_version, migrate
from autobatch.plan import Plan

__all__ = ["Store"]

_MOST_ALIKE = 200
"""Each start of a script adds one, and they differ in target and budget: older ones than these are not asked for."""

_DAY_S = 24 * 60 * 60


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
        try:
            check_version(self._connection)
            set_journal(self._connection, path.parent, patience_s)
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

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        self._connection.execute(f"BEGIN {kind}")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # what went wrong first is what is told
                self._connection.rollback()
            raise

    def add_plan(self, plan: Plan) -> None:
        """Write a plan; the first time since the opening, delete what is beyond the retention before.

        A plan without an id gets one that follows from its content, and one without a date is of now. A plan whose id
        is there already is not written again.
        """
        retention = None if self._pruned else find_retention()
        with self._transaction() as connection:
            if retention is not None:  # before, so that an old plan that is used again stays until it has its run
                _prune(connection, retention)
            insert_plan(connection, plan)
        self._pruned = True

    def add_run(self, run: Run) -> None:
        """Write a run of a plan that is there, with its ranges and setbacks; writing it twice does no harm.

        Raises:
            sqlite3.IntegrityError: The plan is not there.
        """
        with self._transaction() as connection:
            insert_run(connection, run)

    def update_run(self, notes: RunNotes) -> bool:
        """Write what is new of a run, all or nothing.

        Returns:
            Whether the run is there: somebody may have had it forgotten.
        """
        with self._transaction() as connection:
            return insert_notes(connection, notes)

    def plans(self, model: str | None = None, device: str | None = None, limit: int | None = None) -> list[Plan]:
        """Plans, the newest first, without those that this version does not read.

        Args:
            model: A part of the model's name, in any case of letters.
            device: The same of the device's name.
            limit: The most of them.
        """
        return self._select_plans(
            "instr(lower(model), lower(?)) AND instr(lower(device), lower(?))", (model or "", device or ""), limit
        )

    def plans_like(self, fingerprint: str) -> list[Plan]:
        """The newest plans that were measured on the same, the newest first; none for no fingerprint."""
        return self._select_plans("fingerprint = ? AND fingerprint != ''", (fingerprint,), _MOST_ALIKE)

    def _select_plans(self, condition: str, values: tuple[str, ...], limit: int | None) -> list[Plan]:
        query = f"SELECT id, content FROM plans WHERE {condition} ORDER BY made_at DESC, rowid DESC"  # noqa: S608 - ours
        found: list[Plan] = []
        for row in self._connection.execute(query, values):
            if limit is not None and len(found) >= limit:
                break
            plan = read_plan(*row)
            if plan is not None:
                found.append(plan)
        return found

    def find_plan(self, id_or_prefix: str) -> Plan:
        """The plan of this id, or the only one whose id begins so.

        Raises:
            InvalidArgument: There is none, there are several, or this version does not read it.
        """
        with self._transaction("DEFERRED") as connection:
            plan_id = self._find_id(id_or_prefix)
            (content,) = connection.execute("SELECT content FROM plans WHERE id = ?", (plan_id,)).fetchone()
        plan = read_plan(plan_id, content)
        if plan is None:
            raise InvalidArgument(
                f"plan {plan_id} is not one that this version reads: update autobatch, or run fit() again"
            )
        return plan

    def _find_id(self, wanted: str) -> str:
        # Not LIKE: an id is the user's input here, and % is not what it says.
        query = (
            "SELECT id FROM plans WHERE substr(id, 1, length(?1)) = ?1 "
            "ORDER BY id != ?1, made_at DESC, rowid DESC LIMIT 4"
        )
        found = [row[0] for row in self._connection.execute(query, (wanted,))] if wanted else []
        if found and (len(found) == 1 or found[0] == wanted):
            return str(found[0])
        if found:
            names = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise InvalidArgument(f"several plans begin with {wanted!r}: {names}; give more of the id")
        newest = self._connection.execute("SELECT id FROM plans ORDER BY made_at DESC, rowid DESC LIMIT 3").fetchall()
        known = f"the newest are {', '.join(row[0] for row in newest)}" if newest else "there is none yet: run fit()"
        raise InvalidArgument(f"no plan has the id {wanted!r}; {known}")

    def runs_of(self, plan_id: str) -> list[Run]:
        """The runs of the plan of this very id, the newest first."""
        with self._transaction("DEFERRED") as connection:  # so that a run's parts are of one moment
            rows = connection.execute(
                "SELECT id, plan_id, pid, started_at, last_seen_at, outcome, reason FROM runs WHERE plan_id = ? "
                "ORDER BY started_at DESC, rowid DESC",
                (plan_id,),
            ).fetchall()
            return [read_run(connection, row) for row in rows]

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
        with self._transaction() as connection:
            if ids is not None:
                found = {(self._find_id(wanted),) for wanted in ids}
                return connection.executemany("DELETE FROM plans WHERE id = ?", list(found)).rowcount if found else 0
            if older_than_seconds is not None:
                limit = (time.time() - older_than_seconds,)
                return connection.execute("DELETE FROM plans WHERE made_at < ?", limit).rowcount
            return connection.execute("DELETE FROM plans").rowcount

    def prune(self, retention: Retention) -> int:
        """Delete what is beyond the retention: old runs, then old plans that have no run any more.

        Returns:
            How many plans are gone.
        """
        with self._transaction() as connection:
            return _prune(connection, retention)


def _prune(connection: sqlite3.Connection, retention: Retention) -> int:
    oldest, most = time.time() - retention.days * _DAY_S, retention.plans
    connection.execute("DELETE FROM runs WHERE last_seen_at < ?", (oldest,))
    connection.execute(
        "DELETE FROM runs WHERE rowid IN "
        "(SELECT rowid FROM runs ORDER BY last_seen_at DESC, rowid DESC LIMIT -1 OFFSET ?)",
        (most,),
    )
    gone = connection.execute(
        "DELETE FROM plans WHERE made_at < ? AND NOT EXISTS (SELECT 1 FROM runs WHERE plan_id = plans.id)", (oldest,)
    ).rowcount
    surplus = connection.execute(
        "DELETE FROM plans WHERE NOT EXISTS (SELECT 1 FROM runs WHERE plan_id = plans.id) AND rowid IN "
        "(SELECT rowid FROM plans ORDER BY made_at DESC, rowid DESC LIMIT -1 OFFSET ?)",
        (most,),
    ).rowcount
    return gone + surplus
