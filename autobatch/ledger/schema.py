"""The tables, and how a file of an earlier version gets them.

Covers versions and the errors by which SQLite says that a file is damaged. Does not cover what is in the rows
(``store``).
"""

from __future__ import annotations

import sqlite3

from autobatch.errors import AutobatchError

__all__ = ["VERSION", "LedgerUnavailable", "check_version", "is_damaged", "migrate"]


class LedgerUnavailable(AutobatchError):
    """The ledger's file must not be used by this version."""


# Each step leads from one version to the next and is never changed once it was shipped: files of all versions exist.
# `ranges` and `setbacks` are keyed by their place in the run, so writing the same note twice leaves it there once.
_STEPS = (
    (
        """CREATE TABLE plans (
            id TEXT PRIMARY KEY NOT NULL, made_at REAL NOT NULL, model TEXT NOT NULL, device TEXT NOT NULL,
            fingerprint TEXT NOT NULL, target_batch INTEGER NOT NULL, micro_batch_size INTEGER NOT NULL,
            peak_bytes INTEGER NOT NULL, content TEXT NOT NULL)""",
        "CREATE INDEX plans_by_age ON plans (made_at)",
        "CREATE INDEX plans_by_fingerprint ON plans (fingerprint, made_at)",
    ),
    (
        """CREATE TABLE runs (
            id TEXT PRIMARY KEY NOT NULL, plan_id TEXT NOT NULL REFERENCES plans (id) ON DELETE CASCADE,
            pid INTEGER NOT NULL, started_at REAL NOT NULL, last_seen_at REAL NOT NULL, outcome TEXT NOT NULL,
            reason TEXT NOT NULL)""",
        "CREATE INDEX runs_by_plan ON runs (plan_id, started_at)",
        "CREATE INDEX runs_by_age ON runs (last_seen_at)",
        """CREATE TABLE ranges (
            run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, place INTEGER NOT NULL,
            first_step INTEGER NOT NULL, last_step INTEGER NOT NULL, micro_batch_size INTEGER NOT NULL,
            retries INTEGER NOT NULL, peak_bytes INTEGER NOT NULL, seconds REAL NOT NULL, samples INTEGER NOT NULL,
            PRIMARY KEY (run_id, place)) WITHOUT ROWID""",
        """CREATE TABLE setbacks (
            run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, place INTEGER NOT NULL,
            step INTEGER NOT NULL, kind TEXT NOT NULL, old_size INTEGER NOT NULL, new_size INTEGER NOT NULL,
            used_bytes INTEGER NOT NULL, reason TEXT NOT NULL,
            PRIMARY KEY (run_id, place)) WITHOUT ROWID""",
    ),
    (
        # `added` and `seen` are seconds of the ledger's own clock.
        "CREATE TABLE clock (id INTEGER PRIMARY KEY, elapsed REAL NOT NULL, latest REAL NOT NULL)",
        "ALTER TABLE plans ADD COLUMN added REAL NOT NULL DEFAULT 0",
        "CREATE INDEX plans_by_addition ON plans (added)",
        "ALTER TABLE runs ADD COLUMN seen REAL NOT NULL DEFAULT 0",
        "CREATE INDEX runs_by_last_write ON runs (seen)",
        """CREATE TABLE set_aside (
            kind TEXT NOT NULL, id TEXT NOT NULL, added REAL NOT NULL, reason TEXT NOT NULL, content)""",
    ),
)

VERSION = len(_STEPS)
"""Of the tables this version writes; a file has its own in ``PRAGMA user_version``."""


def check_version(connection: sqlite3.Connection) -> int:
    """The file's version, 0 for a new one.

    Raises:
        LedgerUnavailable: A newer autobatch made it; nothing was written.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise LedgerUnavailable(
            f"it was made by a newer autobatch (its tables are version {version}, this one knows {VERSION}): "
            f"get the newer one here too, or set AUTOBATCH_HOME to another folder"
        )
    return int(version)


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the file to this version, each step whole or not at all.

    Args:
        connection: In autocommit mode. Another process may do the same at the same time: the version is read again
            under the write lock.

    Raises:
        LedgerUnavailable: A newer autobatch made it.
        sqlite3.Error: It cannot be written.
    """
    for known in range(check_version(connection), VERSION):
        connection.execute("BEGIN IMMEDIATE")
        try:
            if check_version(connection) == known:
                for statement in (*_STEPS[known], f"PRAGMA user_version = {known + 1}"):
                    connection.execute(statement)
            connection.execute("COMMIT")
        finally:
            connection.rollback()  # does nothing after the COMMIT


def is_damaged(error: Exception) -> bool:
    """Whether SQLite says that the file's content is broken: nothing else is cured by another file."""
    # By the text, since the error's number is not told before Python 3.11.
    text = str(error)
    return isinstance(error, sqlite3.DatabaseError) and ("malformed" in text or "not a database" in text)
