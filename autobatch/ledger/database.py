"""Finds and opens the ledger's SQLite file, whose tables are of this version and whose commits are safe.

Covers the environment variables, the tables, the journal mode by file system, transactions, which errors mean a damaged
file, and one warning for each cause. Does not cover file systems that ignore locks: no setting makes SQLite safe there.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from platformdirs import user_state_path

from autobatch.errors import AutobatchError

__all__ = [
    "VERSION",
    "LedgerUnavailable",
    "cause_of",
    "find_home",
    "find_ledger",
    "is_damaged",
    "is_enabled",
    "is_remote",
    "next_file",
    "open_database",
    "transaction",
    "warn_once",
]

logger = logging.getLogger("autobatch")
_warned: set[str] = set()

_OFF = frozenset({"off", "0", "false", "no"})
_MOST_FILES = 9
"""A disk that damages file after file should be looked at, not filled."""


class LedgerUnavailable(AutobatchError):
    """The ledger's file must not be used by this version."""


def is_enabled() -> bool:
    """Whether plans are stored: yes, unless ``AUTOBATCH_LEDGER`` is off, 0, false or no, in any case of letters."""
    return os.environ.get("AUTOBATCH_LEDGER", "").strip().lower() not in _OFF


def find_home() -> Path:
    """``AUTOBATCH_HOME``, else the user's state folder, which need not exist; ``OSError`` for a user without a home."""
    named = os.environ.get("AUTOBATCH_HOME", "").strip()
    try:
        home = Path(named).expanduser() if named else user_state_path("autobatch", appauthor=False)
    except RuntimeError:
        home = Path("~")
    if str(home).startswith("~"):  # older platformdirs leave it as it is: a folder called ~ is not meant
        raise FileNotFoundError("this user has no home folder; set AUTOBATCH_HOME to a folder for the ledger")
    return home.absolute()


def find_ledger(home: Path) -> Path:
    """The ledger's file in this folder: the last that exists of ``ledger.sqlite3``, ``ledger-2.sqlite3``..."""
    # A damaged file is not renamed. If it were, another process that has it open would delete, on closing, the
    # write-ahead log that by then belongs to the new file of the same name.
    later = (home / f"ledger-{number}.sqlite3" for number in range(_MOST_FILES, 1, -1))
    return next((file for file in later if file.exists()), home / "ledger.sqlite3")


def next_file(damaged: Path) -> Path | None:
    """The file that replaces a damaged one, the same in every process; ``None`` after the ninth."""
    number = int(damaged.stem.partition("-")[2] or 1) + 1
    return damaged.with_name(f"ledger-{number}.sqlite3") if number <= _MOST_FILES else None


def warn_once(cause: str, message: str) -> None:
    """Log a warning, unless this process has already warned of this cause."""
    if cause not in _warned:
        _warned.add(cause)
        logger.warning("%s", message)


def cause_of(error: Exception) -> str:
    """What two errors of the same cause have in common, whatever file, step or time they are about."""
    if isinstance(error, sqlite3.Error):
        return str(error)  # SQLite's own texts are few and fixed
    return f"{type(error).__name__} {getattr(error, 'errno', None)}"


VERSION = 5
"""Of the tables; a file has its own in ``PRAGMA user_version``. 1 to 3 were never released."""

_RANKS = """CREATE TABLE ranks (
        run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, position INTEGER NOT NULL,
        steps INTEGER NOT NULL, samples INTEGER NOT NULL, micro_batch_size INTEGER NOT NULL,
        retries INTEGER NOT NULL, peak_bytes INTEGER NOT NULL, seconds REAL NOT NULL,
        PRIMARY KEY (run_id, position)) WITHOUT ROWID"""
# They hold all that a search needs, so that it reads no row: one that is damaged would end it.
_INDICES = (
    "CREATE INDEX plans_by_fingerprint ON plans (fingerprint, rank, made_at)",
    "CREATE INDEX plans_by_whole ON plans (whole, made_at, id)",
)
_SET_VERSION = f"PRAGMA user_version = {VERSION}"

# `whole` is the id of the first rank's plan in those of the other ranks, else empty. `added` and `seen` are seconds of
# the ledger's own clock. `ranges`, `setbacks` and `ranks` are keyed by their position in the run, so writing one twice
# leaves it there once; their other columns are the fields of their records, in that order.
_TABLES = (
    """CREATE TABLE plans (
        id TEXT PRIMARY KEY NOT NULL, made_at REAL NOT NULL, fingerprint TEXT NOT NULL, added REAL NOT NULL,
        content TEXT NOT NULL, rank INTEGER NOT NULL DEFAULT 0, whole TEXT NOT NULL DEFAULT '')""",
    *_INDICES,
    "CREATE INDEX plans_by_age ON plans (made_at)",
    "CREATE INDEX plans_by_addition ON plans (added)",
    """CREATE TABLE runs (
        id TEXT PRIMARY KEY NOT NULL, plan_id TEXT NOT NULL REFERENCES plans (id) ON DELETE CASCADE,
        pid INTEGER NOT NULL, started_at REAL NOT NULL, last_seen_at REAL NOT NULL, outcome TEXT NOT NULL,
        reason TEXT NOT NULL, seen REAL NOT NULL)""",
    "CREATE INDEX runs_by_plan ON runs (plan_id, started_at)",
    "CREATE INDEX runs_by_last_write ON runs (seen)",
    """CREATE TABLE ranges (
        run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, position INTEGER NOT NULL,
        first_step INTEGER NOT NULL, last_step INTEGER NOT NULL, micro_batch_size INTEGER NOT NULL,
        retries INTEGER NOT NULL, peak_bytes INTEGER NOT NULL, seconds REAL NOT NULL, samples INTEGER NOT NULL,
        PRIMARY KEY (run_id, position)) WITHOUT ROWID""",
    """CREATE TABLE setbacks (
        run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, position INTEGER NOT NULL,
        step INTEGER NOT NULL, kind TEXT NOT NULL, old_size INTEGER NOT NULL, new_size INTEGER NOT NULL,
        used_bytes INTEGER NOT NULL, reason TEXT NOT NULL,
        PRIMARY KEY (run_id, position)) WITHOUT ROWID""",
    _RANKS,
    "CREATE TABLE clock (id INTEGER PRIMARY KEY, elapsed REAL NOT NULL, latest REAL NOT NULL)",
    "CREATE TABLE set_aside (kind TEXT NOT NULL, id TEXT NOT NULL, added REAL NOT NULL, reason TEXT NOT NULL, content)",
    _SET_VERSION,
)

_FROM_4 = (
    "ALTER TABLE plans ADD COLUMN rank INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE plans ADD COLUMN whole TEXT NOT NULL DEFAULT ''",
    "DROP INDEX plans_by_fingerprint",
    *_INDICES,
    _RANKS,
    _SET_VERSION,
)

_READ = (0, 4, VERSION)
"""Versions of a file whose tables are made those of today where they are not; others are refused."""

_LOCAL = frozenset(
    {"apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs"}
    | {"aufs", "rootfs", "ufs", "xfs", "zfs"}
)
"""File systems that no other computer writes to; on any other a rollback journal is safe."""


def open_database(path: Path, patience_s: float) -> sqlite3.Connection:
    """A connection in autocommit mode; the file, and a folder that nobody else may enter, are made if missing.

    Each operation waits at most ``patience_s`` while another process writes. A file of another version is left alone.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=patience_s, isolation_level=None)
    # A damaged text must not stop what is read beside it; a backslash is what no JSON has there.
    connection.text_factory = lambda raw: raw.decode("utf-8", "backslashreplace")
    try:
        version = _read_version(connection)
        _set_journal_mode(connection, path.parent, patience_s)
        connection.execute("PRAGMA foreign_keys = ON")
        if version != VERSION:
            _update_tables(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _read_version(connection: sqlite3.Connection) -> int:
    """Of the file's tables, 0 where it has none yet; one that this autobatch does not know is refused."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in _READ:
        age, todo = ("a newer", "get that one here too") if version > VERSION else ("an older", "move it away")
        raise LedgerUnavailable(
            f"it was made by {age} autobatch (its tables are version {version}, this one knows {VERSION}): "
            f"{todo}, or set AUTOBATCH_HOME to another folder"
        )
    return int(version)


def _update_tables(connection: sqlite3.Connection) -> None:
    with transaction(connection):
        version = _read_version(connection)  # again: another process may have been faster
        for statement in {0: _TABLES, 4: _FROM_4}.get(version, ()):
            connection.execute(statement)


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

    With a log, readers and the writer do not wait for each other, but all processes must share memory
    (sqlite.org/wal.html, "Overview"): the nodes of a cluster with one home folder do not. NORMAL then does not wait for
    the disk at a commit: a power cut may take the last ones, and leaves a whole file. A rollback journal is only as
    safe with FULL (sqlite.org/pragma.html#pragma_synchronous).
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


def is_remote(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
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
