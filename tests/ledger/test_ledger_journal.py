"""Which journal a file gets, by where it lies."""

from __future__ import annotations

import sqlite3
import threading
import time

import pytest

from autobatch.ledger import sqlite_journal_mode
from autobatch.ledger.sqlite_journal_mode import is_remote, set_journal_mode

MOUNTS = """\
sysfs /sys sysfs rw 0 0

/dev/sda1 / ext4 rw 0 0
tmpfs {here} tmpfs rw 0 0
server:/export {here}/home nfs4 rw,vers=4.2 0 0
/dev/sdb1 {here}/home/fast xfs rw 0 0
//box/share {here}/with\\040blank cifs rw 0 0
server:/twice {here}/twice nfs rw 0 0
tmpfs {here}/twice tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "remote"),
    [
        (".", False),
        ("home", True),
        ("home/me/state", True),
        ("home/fast/state", False),
        ("homestead", False),
        ("with blank", True),
        ("twice", False),
    ],
)
def test_the_deepest_mount_above_decides(tmp_path, folder, remote):
    """A network's file system is told from a disk, whatever lies above or beside it; the last mount covers others."""
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS.format(here=tmp_path.resolve()))
    assert is_remote(tmp_path / folder, mounts) is remote


def test_no_list_of_mounts_means_a_disk(tmp_path):
    """Other systems than Linux have none."""
    assert not is_remote(tmp_path, tmp_path / "nowhere")


@pytest.mark.parametrize(("kind", "mode", "synchronous"), [("ext4", "wal", 1), ("nfs4", "truncate", 2)])
def test_a_file_that_other_computers_write_to_has_no_shared_memory(tmp_path, monkeypatch, kind, mode, synchronous):
    """A write-ahead log on a disk, a rollback journal on a network, which is only safe where each commit is synced."""
    mounts = tmp_path / "mounts"
    mounts.write_text(f"somewhere / {kind} rw 0 0\n")
    monkeypatch.setattr(sqlite_journal_mode, "is_remote", lambda folder: is_remote(folder, mounts))
    connection = sqlite3.connect(tmp_path / "file.sqlite3", isolation_level=None)
    set_journal_mode(connection, tmp_path, 1.0)
    assert connection.execute("PRAGMA journal_mode").fetchone() == (mode,)
    assert connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
    connection.close()


def test_who_makes_a_file_together_waits_for_the_other(tmp_path):
    """The change of the journal waits as long as it may, which SQLite alone would not do, and then gives up."""
    path = tmp_path / "file.sqlite3"
    first = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    first.execute("CREATE TABLE something (x)")
    first.execute("BEGIN IMMEDIATE")
    second = sqlite3.connect(path, isolation_level=None, timeout=5.0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        set_journal_mode(second, tmp_path, 0.05)
    timer = threading.Timer(0.2, first.execute, ["COMMIT"])
    began = time.monotonic()  # before the clock of the timer, so that a busy machine cannot make this too short
    timer.start()
    set_journal_mode(second, tmp_path, 5.0)
    assert 0.1 < time.monotonic() - began < 4
    timer.join()
    first.close()
    second.close()
