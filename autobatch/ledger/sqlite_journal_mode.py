"""How SQLite makes a commit safe, by where the file lies.

Covers the write-ahead log on a disk of this computer, the rollback journal on one that other computers write to, and
transactions.
Does not cover file systems that ignore locks: no setting makes SQLite safe there.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["is_remote", "set_journal_mode", "transaction"]

_LOCAL = frozenset(
    {"apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs"}
    | {"aufs", "rootfs", "ufs", "xfs", "zfs"}
)
"""Kinds that no other computer writes to. Of others there are too many, and a rollback journal is right anywhere."""
_MOUNTS = Path("/proc/self/mounts")


def set_journal_mode(connection: sqlite3.Connection, folder: Path, patience_s: float) -> None:
    """Choose the journal, and what is waited for in a commit.

    With a write-ahead log, readers and the writer do not wait for each other, but all processes must share memory
    (sqlite.org/wal.html, "Overview"): the nodes of a cluster with one home folder do not. They get a rollback journal.

    A process that is killed loses nothing that was committed. With the log NORMAL does not wait for the disk at a
    commit, so a power cut may take the last ones and leaves a whole file. Where the last connection closes, SQLite
    moves the log into the file and does wait: four ``fdatasync`` calls were counted for one note. A rollback journal
    is only as safe with FULL (sqlite.org/pragma.html#pragma_synchronous).

    Args:
        connection: In autocommit mode.
        folder: Where its file lies.
        patience_s: How long to wait for others who do the same.

    Raises:
        sqlite3.Error: The file cannot be written, or is locked for longer.
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


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
    """All that is done in the block, or nothing.

    Args:
        connection: In autocommit mode.
        kind: ``"IMMEDIATE"`` to write, ``"DEFERRED"`` to read what is of one moment.

    Raises:
        sqlite3.Error: The file is locked, or cannot be written.
    """
    connection.execute(f"BEGIN {kind}")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # what went wrong first is what is raised
            connection.rollback()
        raise


def is_remote(folder: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether other computers may write there too; ``False`` where the system does not list its mounts.

    Args:
        folder: An existing folder.
        mounts: The system's list: a line each, of device, mount point, kind and options.
    """
    try:
        lines = os.fsdecode(mounts.read_bytes()).splitlines()
    except OSError:
        return False
    place = folder.resolve()
    kinds = {}  # by depth: the deepest mount point above the folder is the one it lies on, and of those the last
    for _, point, kind, *_ in (line.split(" ") for line in lines if line.count(" ") > 1):
        above = Path(point.replace("\\040", " "))  # a blank in a name
        if place.is_relative_to(above):
            kinds[len(above.parts)] = kind
    return bool(kinds) and kinds[max(kinds)] not in _LOCAL
