"""The ledger as training uses it: it stores what it can, and whatever is wrong with it costs one log line."""

from __future__ import annotations

import logging
import os
import re
import resource
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from ledgers import make_plan, make_update

from autobatch.ledger import ledger as ledger_module
from autobatch.ledger import store as store_module
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.store import Store


@pytest.fixture(autouse=True)
def _no_warnings_yet(monkeypatch, caplog):
    """Begin as a process that has warned of nothing."""
    monkeypatch.setattr(store_module, "_warned", set())
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
    assert opened.begin_run(make_plan())
    assert opened.update_run(make_update(0)) == "written"
    store = Store(tmp_path)
    assert [run.steps for run in store.runs_of("a1")] == [1]
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


def test_without_a_home_nothing_is_stored(monkeypatch, caplog):
    """A user whom the system does not know can train, and one log line says what to set."""
    monkeypatch.setattr(ledger_module.Path, "expanduser", lambda _: Path("~nobody"))
    monkeypatch.setenv("AUTOBATCH_HOME", "~nobody")
    monkeypatch.delenv("AUTOBATCH_LEDGER", raising=False)
    assert use(Ledger.open()) == use(Ledger.open()) == (False, [], False, "not now")
    assert len(caplog.records) == 1
    assert "AUTOBATCH_HOME" in caplog.text


def use(opened):
    """One of each of what training does with a ledger."""
    return (
        opened.remember(make_plan("x")),
        opened.recall("f1"),
        opened.begin_run(make_plan("x")),
        opened.update_run(make_update(0, "r0")),
    )


def fill(folder):
    """A ledger with fifty plans, one of which has a run."""
    store = Store(folder)
    for number in range(50):
        store.add_plan(make_plan(f"p{number}"))
    store.begin_run(make_plan("p0"))


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
def closed(mode):
    """A ledger in which this user may read at most; outside tmp_path, which other users cannot enter."""
    folder = Path(tempfile.mkdtemp())
    try:
        fill(folder)
        inside = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        for path in reversed(inside):
            path.chmod(mode)
        with not_allowed():
            yield folder
    finally:
        for path in inside:
            path.chmod(0o700)
        shutil.rmtree(folder)


def read_only(_):
    return closed(0o555)


def hidden(_):
    return closed(0o000)


@contextmanager
def full(folder):
    """No file may grow: what a full disk says, and quotas too."""
    fill(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (file_for_folder, "exists"),
        (file_on_the_way, "directory"),
        (no_such_place, "autobatch"),
        (read_only, "denied"),
        (hidden, "denied"),
        (full, "too large"),
    ],
)
def test_whatever_is_wrong_costs_one_log_line(tmp_path, caplog, trouble, said):
    """Nothing is raised, nothing is acknowledged, what can be read is read; later failures are silent."""
    place = tmp_path / "home"
    if trouble not in (file_for_folder, file_on_the_way):
        place.mkdir()
    with trouble(place) as folder:
        opened = Ledger(folder)
        for _ in range(2):
            remembered, recalled, begun, updated = use(opened)
            assert (remembered, begun, updated in ("not now", "forgotten")) == (False, False, True)
            assert len(recalled) == (50 if trouble in (read_only, full) else 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.search(said, caplog.text)


def test_what_passes_is_used_again(tmp_path):
    """When the disk has room, plans are stored, and those from before are all there."""
    with full(tmp_path) as folder:
        assert not Ledger(folder).remember(make_plan("x"))
    assert Ledger(tmp_path).remember(make_plan("x"))
    assert len(Ledger(tmp_path).recall("f1")) == 51


def test_a_plan_that_cannot_be_written_is_no_error(tmp_path, caplog):
    """A name that is no text in any encoding costs a line."""
    assert not Ledger(tmp_path).remember(make_plan().model_copy(update={"model": "\udc80"}))
    assert len(caplog.records) == 1
