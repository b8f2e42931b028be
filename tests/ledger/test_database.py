"""Opening the ledger's file: its tables and their version, the journal mode by file system, what counts as damage."""

from __future__ import annotations

import sqlite3
import threading
import time

import pytest
from ledgers import make_plan, start_process

from autobatch.ledger import database
from autobatch.ledger.database import VERSION, LedgerUnavailable, is_damaged, is_remote, open_database
from autobatch.ledger.store import Store


def read_schema(path):
    """All statements that make the file's tables, and its version."""
    connection = sqlite3.connect(path)
    tables = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE sql != ''"))
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return tables, version


def test_tables_are_made_whole_or_not_at_all(tmp_path, monkeypatch):
    """Half of them are none: the next start begins anew."""
    path = tmp_path / "new.sqlite3"
    monkeypatch.setattr(database, "_TABLES", (*database._TABLES, "CREATE NONSENSE"))
    with pytest.raises(sqlite3.OperationalError, match="NONSENSE"):
        Store(path)
    assert read_schema(path) == ({}, 0)
    monkeypatch.undo()
    with Store(path) as store:
        assert store.plans() == []
    tables, version = read_schema(path)
    assert version == VERSION
    assert {"plans", "runs", "ranges", "setbacks", "clock", "set_aside"} <= set(tables)


def test_another_who_was_faster_is_noticed_under_the_lock(tmp_path):
    """A process that found a new file before another one made its tables does not make them again."""
    path = tmp_path / "new.sqlite3"
    slow = sqlite3.connect(path, isolation_level=None)
    with Store(path) as store:
        store.add_plan(make_plan())
    database._update_tables(slow)
    slow.close()
    assert read_schema(path)[1] == VERSION
    with Store(path) as store:
        assert len(store.plans()) == 1


@pytest.mark.parametrize("exists", [True, False])
def test_many_may_open_it_at_once(tmp_path, exists):
    """Six processes that open a file that is there, or is not yet, at the same moment all succeed."""
    path = tmp_path / "ledger.sqlite3"
    if exists:
        with Store(path) as store:
            store.add_plan(make_plan())
    program = """
import sys, time
from pathlib import Path
from ledgers import make_plan
from autobatch.ledger.store import Store
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.001)
with Store(Path(sys.argv[1])) as store:
    store.add_plan(make_plan(sys.argv[3], made_at=0.0))
"""
    start = tmp_path / "start"
    processes = [start_process(program, path, start, f"new{number}") for number in range(6)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    start.touch()
    for process in processes:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    with Store(path) as store:
        assert len(store.plans()) == 6 + exists


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (VERSION + 1, r"a newer autobatch .*: get that one here too, or set AUTOBATCH_HOME"),
        (3, r"an older autobatch .*: move it away, or set AUTOBATCH_HOME"),
        (1, r"an older autobatch .*: move it away, or set AUTOBATCH_HOME"),
    ],
)
def test_a_file_of_another_version_is_refused_and_left_alone(tmp_path, version, said):
    """Not a byte changes, and the message says what to do."""
    path = tmp_path / "ledger.sqlite3"
    connection = sqlite3.connect(path)
    connection.executescript(f"CREATE TABLE other (x); PRAGMA user_version = {version}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(LedgerUnavailable, match=said):
        Store(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.sqlite3"]


@pytest.mark.parametrize(
    ("error", "damaged"),
    [
        (sqlite3.DatabaseError("file is not a database"), True),
        (sqlite3.DatabaseError("database disk image is malformed"), True),
        (sqlite3.DatabaseError("malformed database schema (plans)"), True),
        (sqlite3.OperationalError("database is locked"), False),
        (sqlite3.OperationalError("disk I/O error"), False),
        (sqlite3.OperationalError("attempt to write a readonly database"), False),
        (OSError("not a database"), False),
    ],
)
def test_only_a_broken_content_is_damage(error, damaged):
    """A lock or a full disk goes away: another file would not help."""
    assert is_damaged(error) is damaged


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
    """A network's file system differs from a disk's, whatever lies above or beside it; the last mount covers others."""
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
    monkeypatch.setattr(database, "is_remote", lambda folder: is_remote(folder, mounts))
    connection = open_database(tmp_path / "file.sqlite3", 1.0)
    assert connection.execute("PRAGMA journal_mode").fetchone() == (mode,)
    assert connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
    connection.close()


def test_who_makes_a_file_together_waits_for_the_other(tmp_path):
    """The change of the journal waits as long as it may, which SQLite alone would not do, and then gives up."""
    path = tmp_path / "file.sqlite3"
    first = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    first.execute("CREATE TABLE something (x)")
    first.execute("BEGIN IMMEDIATE")
    second = sqlite3.connect(path, isolation_level=None, timeout=60.0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        database._set_journal_mode(second, tmp_path, 0.05)
    timer = threading.Timer(0.2, first.execute, ["COMMIT"])
    began = time.monotonic()  # before the clock of the timer, so that a busy machine cannot make this too short
    timer.start()
    database._set_journal_mode(second, tmp_path, 60.0)
    assert time.monotonic() - began > 0.1
    timer.join()
    first.close()
    second.close()
