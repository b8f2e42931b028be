"""Opens a SQLite file whose tables are of this version and whose commits are safe.

Covers the tables and their versions, the journal mode by file system, transactions, and which errors mean a damaged
file. Does not cover what is in the rows (``rows``) nor file systems that ignore locks: no setting makes SQLite safe
there.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autobatch.errors import AutobatchError

__all__ = ["VERSION", "LedgerUnavailable", "is_damaged", "is_remote", "migrate", "open_database", "transaction"]


class LedgerUnavailable(AutobatchError):
    """The ledger's file must not be used by this version."""


# Each step leads from one version to the next and is never changed once it was shipped: files of all versions exist.
# `ranges` and `setbacks` are keyed by their position in the run, so writing one twice leaves it there once.
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

_LOCAL = frozenset(
    {"apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs"}
    | {"aufs", "rootfs", "ufs", "xfs", "zfs"}
)
"""File systems that no other computer writes to; on any other a rollback journal is safe."""
_MOUNTS = Path("/proc/self/mounts")


def open_database(path: Path, patience_s: float) -> sqlite3.Connection:
    """A connection in autocommit mode; the file, and a folder that nobody else may enter, are made if missing.

    Each operation waits at most ``patience_s`` while another process writes.

    Raises:
        OSError: The folder cannot be made.
        sqlite3.Error: The file cannot be read or made, or is damaged.
        LedgerUnavailable: A newer autobatch made it; it is left as it is.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=patience_s, isolation_level=None)
    # A damaged text must not stop what is read beside it; a backslash is what no JSON has there.
    connection.text_factory = lambda raw: raw.decode("utf-8", "backslashreplace")
    try:
        _read_version(connection)
        _set_journal_mode(connection, path.parent, patience_s)
        connection.execute("PRAGMA foreign_keys = ON")
        migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the tables to this version, each step whole or not at all."""
    for known in range(_read_version(connection), VERSION):
        with transaction(connection):
            if _read_version(connection) == known:  # another process may have done it meanwhile
                for statement in (*_STEPS[known], f"PRAGMA user_version = {known + 1}"):
                    connection.execute(statement)


def _read_version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise LedgerUnavailable(
            f"it was made by a newer autobatch (its tables are version {version}, this one knows {VERSION}): "
            f"get the newer one here too, or set AUTOBATCH_HOME to another folder"
        )
    return int(version)


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
    """Commit all that is done in the block, or nothing: ``"IMMEDIATE"`` to write, ``"DEFERRED"`` to read one state."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # the first error is what is raised
            connection.rollback()
        raise


def is_damaged(error: Exception) -> bool:
    """Whether SQLite says that the file's content is broken: nothing else is cured by another file."""
    text = str(error)  # Python 3.10 does not give the error's number
    return isinstance(error, sqlite3.DatabaseError) and ("malformed" in text or "not a database" in text)


def _set_journal_mode(connection: sqlite3.Connection, folder: Path, patience_s: float) -> None:
    """A write-ahead log on a disk of this computer, a rollback journal on one that other computers write to.

    With a write-ahead log, readers and the writer do not wait for each other, but all processes must share memory
    (sqlite.org/wal.html, "Overview"): the nodes of a cluster with one home folder do not.

    A process that is killed loses nothing that was committed. With the log NORMAL does not wait for the disk at a
    commit, so a power cut may take the last ones and leaves a whole file. Where the last connection closes, SQLite
    moves the log into the file and does wait: four ``fdatasync`` calls were counted for one write. A rollback journal
    is only as safe with FULL (sqlite.org/pragma.html#pragma_synchronous).
    """
    mode, synchronous = ("TRUNCATE", "FULL") if is_remote(folder) else ("WAL", "NORMAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    deadline = time.monotonic() + patience_s
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode = {mode}")
            return
        except sqlite3.OperationalError as error:
            # The change itself does not wait as other statements do: processes that make a file together meet here.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def is_remote(folder: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether other computers may write to this existing folder too; ``False`` where the system lists no mounts."""
    try:
        lines = os.fsdecode(mounts.read_bytes()).splitlines()
    except OSError:
        return False
    folder = folder.resolve()
    kinds = {}  # by depth: the deepest mount point above the folder is the one it lies on, and of those the last
    for _device, point, kind, *_options in (line.split(" ") for line in lines if line.count(" ") > 1):
        above = Path(point.replace("\\040", " "))  # a blank in a name
        if folder.is_relative_to(above):
            kinds[len(above.parts)] = kind
    return bool(kinds) and kinds[max(kinds)] not in _LOCAL
