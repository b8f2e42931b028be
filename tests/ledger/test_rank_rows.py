"""Several ranks in the ledger: one plan in each list, one run with a row a rank, and files from before are read."""

from __future__ import annotations

import json
import sqlite3
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgers import add_plans, count_rows, finished, make_plan, make_run, make_update, names, start_process
from plans import make_whole_plans

from autobatch.cli.main import main
from autobatch.events.rank_step import RankStep
from autobatch.events.run_history import RankTotal
from autobatch.ledger.database import VERSION
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.retention import Retention
from autobatch.ledger.run_recorder import RunRecorder
from autobatch.ledger.run_summary import Tally
from autobatch.ledger.store import Store, runs_id

VERSION_4 = """
CREATE TABLE plans (
    id TEXT PRIMARY KEY NOT NULL, made_at REAL NOT NULL, fingerprint TEXT NOT NULL, added REAL NOT NULL,
    content TEXT NOT NULL);
CREATE INDEX plans_by_age ON plans (made_at);
CREATE INDEX plans_by_fingerprint ON plans (fingerprint, made_at);
CREATE INDEX plans_by_addition ON plans (added);
CREATE TABLE runs (
    id TEXT PRIMARY KEY NOT NULL, plan_id TEXT NOT NULL REFERENCES plans (id) ON DELETE CASCADE,
    pid INTEGER NOT NULL, started_at REAL NOT NULL, last_seen_at REAL NOT NULL, outcome TEXT NOT NULL,
    reason TEXT NOT NULL, seen REAL NOT NULL);
CREATE INDEX runs_by_plan ON runs (plan_id, started_at);
CREATE INDEX runs_by_last_write ON runs (seen);
CREATE TABLE ranges (
    run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, position INTEGER NOT NULL,
    first_step INTEGER NOT NULL, last_step INTEGER NOT NULL, micro_batch_size INTEGER NOT NULL,
    retries INTEGER NOT NULL, peak_bytes INTEGER NOT NULL, seconds REAL NOT NULL, samples INTEGER NOT NULL,
    PRIMARY KEY (run_id, position)) WITHOUT ROWID;
CREATE TABLE setbacks (
    run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, position INTEGER NOT NULL,
    step INTEGER NOT NULL, kind TEXT NOT NULL, old_size INTEGER NOT NULL, new_size INTEGER NOT NULL,
    used_bytes INTEGER NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (run_id, position)) WITHOUT ROWID;
CREATE TABLE clock (id INTEGER PRIMARY KEY, elapsed REAL NOT NULL, latest REAL NOT NULL);
CREATE TABLE set_aside (kind TEXT NOT NULL, id TEXT NOT NULL, added REAL NOT NULL, reason TEXT NOT NULL, content);
PRAGMA user_version = 4;
"""


@pytest.fixture
def store(tmp_path):
    """An empty ledger."""
    with Store(tmp_path / "ledger.sqlite3") as opened:
        yield opened


def make_ranks(size=3, **changes):
    """The plans of so many ranks, of the future."""
    plans = make_whole_plans((8,) * size, (0.5,) * size, fingerprint="f1", made_at=3e9, **changes)
    return [plan.model_copy(update={"model": "Net"}) for plan in plans]


def make_old_file(path):
    """A ledger of version 4 with a plan of one rank, which knows no ranks, and its run."""
    connection = sqlite3.connect(path)
    connection.executescript(VERSION_4)
    content = json.loads(make_plan("old").model_dump_json())
    content = json.dumps({key: value for key, value in content.items() if key != "ranks"})
    connection.execute("INSERT INTO plans VALUES ('old', 3e9, 'f1', 0.0, ?)", (content,))
    connection.execute("INSERT INTO runs VALUES ('r', 'old', 7, 3e9, 3e9, 'finished', '', 0.0)")
    connection.execute("INSERT INTO ranges VALUES ('r', 0, 0, 4, 8, 1, 100, 2.5, 160)")
    connection.execute("INSERT INTO setbacks VALUES ('r', 0, 2, 'retry', 8, 4, 300, 'why')")
    connection.commit()
    connection.close()


def read_version(path):
    """Of the file's tables."""
    connection = sqlite3.connect(path)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return version


def test_a_file_from_before_is_read_and_goes_on(tmp_path):
    """Its plan, run, range and setback are there, and plans and runs of ranks beside them."""
    path = tmp_path / "ledger.sqlite3"
    make_old_file(path)
    with Store(path) as store:
        assert names(store.plans()) == names(store.plans_like("f1")) == ["old"]
        [run] = store.runs_of("old")
        assert (run.steps, run.retries, run.setbacks[0].reason, run.ranks) == (5, 1, "why", ())
        for plan in make_ranks():
            store.add_plan(plan)
        store.add_run(make_run("new", "a0", ranks=(RankTotal(steps=1),) * 3))
        assert sorted(names(store.plans())) == ["a0", "old"]
        assert len(store.runs_of("a0")[0].ranks) == 3
    assert read_version(path) == VERSION


def test_a_file_that_was_changed_has_the_tables_of_a_new_one(tmp_path):
    """Columns and indices too."""

    def describe(path):
        with Store(path):
            pass
        connection = sqlite3.connect(path)
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {name: connection.execute(f"PRAGMA table_info({name})").fetchall() for name in tables}
        indices = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'index'").fetchall()
        connection.close()
        return found, sorted(indices, key=str)

    make_old_file(tmp_path / "old.sqlite3")
    assert describe(tmp_path / "old.sqlite3") == describe(tmp_path / "new.sqlite3")


def test_many_may_change_a_file_from_before_at_once(tmp_path):
    """Four ranks that open it at the same moment all succeed, and nothing of it is lost."""
    path, start = tmp_path / "ledger.sqlite3", tmp_path / "start"
    make_old_file(path)
    program = """
import sys, time
from pathlib import Path
from ledgers import make_plan
from autobatch.ledger.store import Store
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.001)
with Store(Path(sys.argv[1])) as store:
    store.add_plan(make_plan(sys.argv[3]))
"""
    processes = [start_process(program, path, start, f"new{number}") for number in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    start.touch()
    for process in processes:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    with Store(path) as store:
        assert len(store.plans()) == 5
        assert len(store.runs_of("old")) == 1


def test_a_plan_of_several_ranks_is_one_in_a_list(store):
    """Each rank finds its own again, and each is shown by its id, with the runs of all."""
    for plan in reversed(make_ranks()):
        store.add_plan(plan)
    store.add_run(make_run(plan="a0"))
    assert names(store.plans()) == ["a0"]
    for rank in range(3):
        assert names(store.plans_like("f1", rank)) == [f"a{rank}"]
        assert store.find_plan(f"a{rank}").rank == rank
        assert store.runs_of(runs_id(store.find_plan(f"a{rank}"))) == [make_run(plan="a0")]


@pytest.mark.parametrize(
    "what", [{"ids": ["a0"]}, {"ids": ["a2", "a1"]}, {"older_than_seconds": 1.0}, {"everything": True}]
)
def test_forgetting_one_rank_forgets_all(store, monkeypatch, what):
    """They are one plan."""
    for plan in make_ranks():
        store.add_plan(plan)
    store.add_run(make_run(plan="a0", ranks=(RankTotal(steps=1),) * 3, ranges=make_update(0).ranges))
    add_plans(store, other=5e9)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert store.forget(**what) == 1 + ("everything" in what)
    assert count_rows(store) == [0] * 4 if "everything" in what else [1] * 4
    assert store._connection.execute("SELECT count(*) FROM ranks").fetchone() == (0,)


def test_ranks_of_a_plan_that_runs_are_no_surplus(store, monkeypatch):
    """Only the first one's has the run."""
    monkeypatch.setattr("autobatch.ledger.store.find_retention", lambda: Retention(plans=1))
    for plan in make_ranks():
        store.add_plan(plan)
    store.add_run(make_run(plan="a0"))
    for name in ("b", "c"):
        store._pruned = False
        store.add_plan(make_plan(name, made_at=9e9))
    found = store._connection.execute("SELECT id FROM plans ORDER BY id").fetchall()
    assert [name for (name,) in found] == ["a0", "a1", "a2", "b", "c"]


def make_rows(step, ranks=2):
    """What each rank says of a step."""
    return tuple(
        RankStep(rank=rank, samples=rank, micro_batch_size=step + rank, retries=rank, peak_bytes=step, seconds=0.25)
        for rank in range(ranks)
    )


@given(steps=st.integers(1, 40), written=st.integers(0, 40))
def test_what_each_rank_did_adds_up(steps, written):
    """However often it was written meanwhile."""
    tally = Tally(8)
    for step in range(steps):
        tally.add_step(step, (8,), 0, 5, 0.5, make_rows(step))
        if step == written:
            tally.drop_written()
    assert tally.unwritten(make_run(), 0.0, "running", "").ranks == tuple(
        RankTotal(
            steps=steps,
            samples=rank * steps,
            micro_batch_size=steps - 1 + rank,
            retries=rank * steps,
            peak_bytes=steps - 1,
            seconds=0.25 * steps,
        )
        for rank in range(2)
    )


def test_a_run_is_recorded_with_a_row_for_each_rank(tmp_path, monkeypatch, capsys):
    """In the file, in the list and in the answer of ``show``, as text and as JSON."""
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")
    plans = make_ranks(2)
    for plan in plans:
        assert Ledger(tmp_path).remember(plan)
    recorder = RunRecorder(plans[0], Ledger(tmp_path), every_s=0.0)
    for step in range(3):
        recorder(finished(step, (8,)).model_copy(update={"ranks": make_rows(step)}))
    del recorder
    assert main(["plans"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a")]
    assert row.startswith("a0 ")
    assert "16 on 2 ranks" in row
    assert row.endswith("1: 3 steps, 3 retries")
    assert main(["show", "a1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "     0        0            2        0  2 bytes    250.0" in lines
    assert "     1        3            3        3  2 bytes    250.0" in lines
    assert main(["show", "a1", "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out)["runs"]
    assert [rank["samples"] for rank in run["ranks"]] == [0, 3]
