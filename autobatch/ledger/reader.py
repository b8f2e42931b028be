"""Reads plans and runs row by row, so that one that is damaged hides no other.

Covers finding rows, reading them, and setting aside what cannot be read. Does not cover writing and deleting
(``store``).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress

from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Run
from autobatch.ledger.damaged_rows import report_unreadable, set_plan_aside, set_run_aside
from autobatch.ledger.rows import RUN_COLUMNS, UnreadableRowError, read_plan, read_run
from autobatch.ledger.schema import is_damaged
from autobatch.ledger.sqlite_journal_mode import transaction
from autobatch.ledger.warnings import warn_once
from autobatch.plan import Plan

__all__ = ["Reader", "decode_text"]

_MOST_ALIKE = 200
"""Each start of a script adds one, and they differ in target and budget: older ones than these are not asked for."""

_SELECT_RUNS = (
    f"SELECT rowid, {', '.join(RUN_COLUMNS)} FROM runs WHERE plan_id = ? "  # noqa: S608 - our own names
    f"ORDER BY started_at DESC, rowid DESC"
)


def decode_text(raw: bytes) -> str:
    """A damaged text must not stop what is read beside it; a backslash is what no JSON has there."""
    return raw.decode("utf-8", "backslashreplace")


class Reader:
    """What is in a ledger's file; it writes only to set aside what is damaged."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Read from this connection, whose ``text_factory`` is ``decode_text``."""
        self._connection = connection

    def newest_plans(self) -> Iterator[Plan]:
        """All plans, by their dates."""
        return self._read_plans("SELECT rowid FROM plans ORDER BY made_at DESC, rowid DESC", ())

    def plans_like(self, fingerprint: str) -> Iterator[Plan]:
        """The newest that were measured on the same; none for no fingerprint."""
        query = (
            "SELECT rowid FROM plans WHERE fingerprint = ? AND fingerprint != '' "
            "ORDER BY made_at DESC, rowid DESC LIMIT ?"
        )
        found = self._read_plans(query, (fingerprint, _MOST_ALIKE))
        return (plan for plan in found if plan.fingerprint == fingerprint)

    def _read_plans(self, query: str, values: tuple[str | int, ...]) -> Iterator[Plan]:
        for (rowid,) in self._connection.execute(query, values).fetchall():
            with suppress(UnreadableRowError):
                plan = self.read_plan(rowid)
                if plan is not None:
                    yield plan

    def read_plan(self, rowid: int) -> Plan | None:
        """The plan of this row, ``None`` where it is gone by now.

        Raises:
            UnreadableRowError: It cannot be read, which was reported, and it is set aside where it is damaged.
        """
        try:
            row = self._connection.execute("SELECT id, content FROM plans WHERE rowid = ?", (rowid,)).fetchone()
            return None if row is None else read_plan(row[1])
        except sqlite3.DatabaseError as error:
            if not is_damaged(error):
                raise
            report_unreadable("plan", f"in row {rowid}", str(error))  # SQLite cannot move it either
            raise UnreadableRowError(str(error)) from error
        except UnreadableRowError as error:
            if error.is_foreign:
                warn_once(
                    "a plan of another version",
                    f"plan {row[0]} in the ledger is not one that this version reads ({error.reason}): such plans are "
                    f"left out",
                )
            else:
                report_unreadable("plan", row[0], error.reason)
                self._set_aside(set_plan_aside, rowid, error.reason)
            raise

    def _set_aside(self, move: Callable[[sqlite3.Connection, int, str], None], rowid: int, reason: str) -> None:
        # It was reported, and left out: where it cannot be moved (the file may only be read, another process writes,
        # the row is broken beyond that), it stays there.
        with suppress(sqlite3.Error), transaction(self._connection) as connection:
            move(connection, rowid, reason)

    def find_row(self, wanted: str) -> tuple[int, str]:
        """The row and the id of the plan of this id, or of the only one whose id begins so.

        Raises:
            InvalidArgument: There is none, or there are several.
        """
        # Not LIKE: an id is the user's input here, and % is not what it says.
        query = (
            "SELECT rowid, id FROM plans WHERE substr(id, 1, length(?1)) = ?1 "
            "ORDER BY id != ?1, made_at DESC, rowid DESC LIMIT 4"
        )
        found = self._connection.execute(query, (wanted,)).fetchall() if wanted else []
        if found and (len(found) == 1 or found[0][1] == wanted):
            return int(found[0][0]), str(found[0][1])
        if found:
            names = ", ".join(name for _, name in found[:3]) + (", ..." if len(found) > 3 else "")
            raise InvalidArgument(f"several plans begin with {wanted!r}: {names}; give more of the id")
        newest = self._connection.execute("SELECT id FROM plans ORDER BY made_at DESC, rowid DESC LIMIT 3").fetchall()
        known = f"the newest are {', '.join(row[0] for row in newest)}" if newest else "there is none yet: run fit()"
        raise InvalidArgument(f"no plan has the id {wanted!r}; {known}")

    def runs_of(self, plan_id: str) -> list[Run]:
        """The runs of the plan of this very id, the newest first, without those that cannot be read."""
        found, unreadable = [], []
        with transaction(self._connection, "DEFERRED") as connection:  # so that a run's parts are of one moment
            rows = connection.execute(_SELECT_RUNS, (plan_id,)).fetchall()
            for rowid, *row in rows:
                try:
                    found.append(read_run(connection, tuple(row)))
                except UnreadableRowError as error:
                    unreadable.append((rowid, row[0], error.reason))
        for rowid, name, reason in unreadable:
            report_unreadable("run", name, reason)
            self._set_aside(set_run_aside, rowid, reason)
        return found
