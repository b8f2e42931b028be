"""The ledger as training uses it: it stores what it can, and whatever is wrong with it costs one log line."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import sqlite3
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from ledgers import make_plan, make_run, make_update, run_process, start_process

from autobatch.ledger import database, ledger
from autobatch.ledger.database import VERSION, find_ledger
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.store import Store


@pytest.fixture(autouse=True)
def _no_warnings_yet(monkeypatch, caplog):
    """Begin as a process that has warned of nothing, and do not wait long for locks that stay."""
    monkeypatch.setattr(database, "_warned", set())
    monkeypatch.setattr(ledger, "_FIT_WAITS_S", 0.1)
    caplog.set_level(logging.WARNING, "autobatch")


def test_what_is_remembered_is_recalled(tmp_path, caplog):
    """Plans of the same fingerprint, the newest first, also by another process's ledger; and nothing is logged."""
    first = Ledger(tmp_path / "made" / "on the way")
    assert first.recall("f1") == []
    plans = [make_plan("a", made_at=3e9), make_plan("b", made_at=4e9), make_plan("c", fingerprint="f2")]
    assert [first.remember(plan) for plan in plans] == [True] * 3
    assert Ledger(tmp_path / "made" / "on the way").recall("f1") == [plans[1], plans[0]]
    assert caplog.records == []


def test_a_run_is_stored_with_its_plan(tmp_path):
    """Also where the plan was never remembered; an update of a run that was forgotten differs from one that failed."""
    opened = Ledger(tmp_path)
    assert opened.begin_run(
        make_plan(made_at=1.0), make_run()
    )  # older than any retention, as a plan from a file may be
    assert opened.update_run(make_update(0)) == "written"
    with Store(tmp_path / "ledger.sqlite3") as store:
        assert store.runs_of("a1") == [make_run(ranges=make_update(0).ranges)]
        store.forget(everything=True)
    assert opened.update_run(make_update(1)) == "forgotten"


def test_a_ledger_that_is_off_does_nothing(tmp_path, monkeypatch, caplog):
    """No file, no folder, no log line, and nothing is acknowledged."""
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AUTOBATCH_LEDGER", "Off")
    nothing = Ledger.open()
    assert not nothing.is_enabled
    assert use(nothing) == (False, [], False, "not now")
    assert list(tmp_path.iterdir()) == []
    assert caplog.records == []


def test_the_environment_says_where(tmp_path, monkeypatch):
    """``open`` uses ``AUTOBATCH_HOME``."""
    monkeypatch.delenv("AUTOBATCH_LEDGER", raising=False)
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
    assert Ledger.open().remember(make_plan())
    assert (tmp_path / "home" / "ledger.sqlite3").exists()


def test_without_a_home_nothing_is_stored(monkeypatch, caplog):
    """A user whom the system does not know can train, and one log line says what to set."""
    monkeypatch.setattr(database, "find_home", lambda: Path("~nobody-of-this-name").expanduser())
    monkeypatch.delenv("AUTOBATCH_LEDGER", raising=False)
    assert use(Ledger.open()) == use(Ledger.open()) == (False, [], False, "not now")
    assert len(caplog.records) == 1
    assert "AUTOBATCH_HOME" in caplog.text


def use(opened):
    """One of each of what training does with a ledger."""
    return (
        opened.remember(make_plan("x")),
        opened.recall("f1"),
        opened.begin_run(make_plan("x"), make_run("rx", "x")),
        opened.update_run(make_update(0, "r0")),
    )


def fill(home):
    """A ledger with fifty plans and a run, which is some fifty pages."""
    with Store(home / "ledger.sqlite3") as store:
        for number in range(50):
            store.add_plan(make_plan(f"p{number}", warnings=("w" * 2000,)))
        store.add_run(make_run("r0", "p0"))


@contextmanager
def file_for_folder(home):
    """A file lies where the folder should be."""
    home.write_text("")
    yield home


@contextmanager
def file_on_the_way(home):
    """A file lies where a folder above should be."""
    home.write_text("")
    yield home / "below" / "it"


@contextmanager
def no_such_place(home):
    """A file system in which no folder can be made."""
    yield Path("/proc/autobatch")


@contextmanager
def not_allowed():
    """Be a user who owns nothing, if this one may do everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@contextmanager
def read_only(folder_mode, file_mode):
    """A ledger in which this user may read at most; outside tmp_path, which other users cannot enter."""
    home = Path(tempfile.mkdtemp())
    try:
        fill(home)
        (home / "ledger.sqlite3").chmod(file_mode)
        home.chmod(folder_mode)
        with not_allowed():
            yield home
    finally:
        home.chmod(0o700)
        shutil.rmtree(home)


def read_only_folder(home):
    """Neither a file nor a log can be made."""
    return read_only(0o555, 0o444)


def hidden_folder(home):
    """Not even to look into."""
    return read_only(0o000, 0o444)


@contextmanager
def locked(home):
    """Somebody writes and does not come to an end."""
    fill(home)
    other = sqlite3.connect(home / "ledger.sqlite3", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    yield home
    other.close()


@contextmanager
def locked_for_all(home):
    """Nobody else may even read."""
    fill(home)
    other = sqlite3.connect(home / "ledger.sqlite3", isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    other.execute("DELETE FROM setbacks")
    yield home
    other.close()


@contextmanager
def newer(home):
    """A later version was here."""
    fill(home)
    other = sqlite3.connect(home / "ledger.sqlite3")
    other.execute(f"PRAGMA user_version = {VERSION + 1}")
    other.close()
    yield home


@contextmanager
def another_database(home):
    """A file of another program, with a table of this name."""
    other = sqlite3.connect(home / "ledger.sqlite3")
    other.execute("CREATE TABLE plans (for_dinner)")
    other.close()
    yield home


@contextmanager
def full(home):
    """No file may grow: what a full disk says, and quotas too."""
    resource = pytest.importorskip("resource")
    fill(home)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield home
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def all_damaged(home):
    """Nine files, none of which is a ledger."""
    for name in ("ledger", *(f"ledger-{number}" for number in range(2, 10))):
        (home / f"{name}.sqlite3").write_bytes(b"no database" * 200)
    yield home


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (file_for_folder, "exists"),
        (file_on_the_way, "directory"),
        (no_such_place, "autobatch"),
        (read_only_folder, "unable to open|readonly"),
        (hidden_folder, "denied|unable to open"),
        (locked, "locked"),
        (locked_for_all, "locked"),
        (newer, "newer autobatch"),
        (another_database, "already exists"),
        (full, "full|I/O error"),
        (all_damaged, "look at that disk"),
    ],
)
def test_whatever_is_wrong_costs_one_log_line(tmp_path, caplog, trouble, said):
    """Nothing is raised, nothing is acknowledged, and the second time is silent; it takes a second at most."""
    home = tmp_path / "home"
    if trouble not in (file_for_folder, file_on_the_way):
        home.mkdir()
    with trouble(home) as folder:
        opened, began = Ledger(folder), time.monotonic()
        for _ in range(2):
            remembered, recalled, begun, updated = use(opened)
            assert (remembered, begun, updated) == (False, False, "not now")
            assert len(recalled) in (0, 50)  # what can be read is read
        seconds = time.monotonic() - began
    assert seconds < 5  # SQLite by itself waits five seconds for each lock
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.text.count("\n") == 1
    assert re.search(said, caplog.text)


@pytest.mark.parametrize("trouble", [locked, locked_for_all, full])
def test_what_passes_is_used_again(tmp_path, trouble):
    """When the disk has room or the lock is gone, plans are stored, and those from before are all there."""
    tmp_path.joinpath("home").mkdir()
    with trouble(tmp_path / "home") as home:
        assert not Ledger(home).remember(make_plan("x"))
    assert Ledger(home).remember(make_plan("x"))
    assert len(Ledger(home).recall("f1")) == 51


def garble_header(path):
    """Its first bytes are others."""
    with path.open("r+b") as file:
        file.write(random.Random(0).randbytes(100))


def garble_pages(path):
    """All but the first page are others."""
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))


def truncate_in_the_middle(path):
    """Half of its pages are missing."""
    os.truncate(path, path.stat().st_size // 8192 * 4096)


def truncate_in_the_header(path):
    """Fifty bytes are left."""
    os.truncate(path, 50)


@pytest.mark.parametrize("damage", [garble_header, garble_pages, truncate_in_the_middle, truncate_in_the_header])
def test_a_damaged_file_stays_and_another_takes_over(tmp_path, caplog, damage):
    """The plan is stored all the same, one line says where, and not a byte of the damaged file changes."""
    fill(tmp_path)
    path = tmp_path / "ledger.sqlite3"
    damage(path)
    before = path.read_bytes()
    opened = Ledger(tmp_path)
    assert [opened.remember(make_plan(name)) for name in "ab"] == [True, True]
    assert [plan.id for plan in opened.recall("f1")] == ["b", "a"]
    assert find_ledger(tmp_path) == tmp_path / "ledger-2.sqlite3"
    assert path.read_bytes() == before
    (record,) = caplog.records
    assert "is damaged" in record.getMessage()
    assert "ledger-2.sqlite3" in record.getMessage()


def test_a_disk_that_damages_the_next_file_too_is_not_filled(tmp_path, caplog, monkeypatch):
    """One use opens two files: the second failure costs a log line, and no third file."""

    class Garbled(Store):
        def __enter__(self):
            self._connection.close()  # no `with` block comes to its end here
            raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(ledger, "Store", Garbled)
    assert not Ledger(tmp_path).remember(make_plan())
    assert {file.stem for file in tmp_path.glob("*.sqlite3")} == {"ledger", "ledger-2"}
    assert ["cannot be used" in record.getMessage() for record in caplog.records] == [False, True]


def test_a_plan_that_cannot_be_written_is_no_error(tmp_path, caplog):
    """A name that is no text in any encoding costs a line."""
    assert not Ledger(tmp_path).remember(make_plan().model_copy(update={"model": "\udc80"}))
    assert len(caplog.records) == 1


def test_many_who_find_the_same_damage_go_to_the_same_file(tmp_path):
    """Five processes at once lose nothing of what they acknowledge."""
    (tmp_path / "ledger.sqlite3").write_bytes(b"no database" * 200)
    program = """
import sys
from pathlib import Path
from ledgers import make_plan
from autobatch.ledger.ledger import Ledger
for number in range(20):
    assert Ledger(Path(sys.argv[1])).remember(make_plan(f"{sys.argv[2]}-{number}"))
"""
    processes = [start_process(program, tmp_path, number) for number in range(5)]
    lines = []
    for process in processes:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        lines.append(errors.count("\n"))
        assert lines[-1] == errors.count("is damaged")
    assert max(lines) == 1  # who comes later finds the other file and has nothing to say
    assert len(Ledger(tmp_path).recall("f1")) == 100
    assert not (tmp_path / "ledger-3.sqlite3").exists()


def test_the_ledger_needs_no_torch(tmp_path):
    """Every module of it is imported without torch, which takes 0.2 s."""
    program = """
import pkgutil, sys
import autobatch.ledger
for module in pkgutil.iter_modules(autobatch.ledger.__path__, "autobatch.ledger."):
    __import__(module.name)
print("torch" in sys.modules, len([name for name in sys.modules if "ledger." in name]))
"""
    torch, count = run_process(program)[0].split()
    assert torch == "False"
    assert int(count) >= 7
