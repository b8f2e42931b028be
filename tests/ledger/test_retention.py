"""Which plans and runs are deleted, whatever the clocks say, and the user's setting of it."""

from __future__ import annotations

import logging
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgers import add_plans, count_rows, make_plan, make_run, make_update, names

from autobatch.ledger import database
from autobatch.ledger.database import transaction
from autobatch.ledger.retention import Retention, find_retention, prune, tick
from autobatch.ledger.store import Store

DAY = 86400.0


@pytest.fixture(autouse=True)
def _no_warnings_yet(monkeypatch):
    """Begin as a process that has warned of nothing."""
    monkeypatch.setattr(database, "_warned", set())


@pytest.fixture
def store(tmp_path):
    """An empty ledger."""
    with Store(tmp_path / "ledger.sqlite3") as opened:
        yield opened


@pytest.mark.parametrize(("word", "days"), [("", 400.0), ("30", 30.0), (" 0.5 ", 0.5)])
def test_the_environment_changes_the_days(monkeypatch, word, days):
    """Days may be parts of one; the count of plans stays."""
    monkeypatch.setenv("AUTOBATCH_RETENTION_DAYS", word)
    assert find_retention() == Retention(days=days)


@pytest.mark.parametrize("word", ["a year", "0", "-3", "nan", "inf", "1e999"])
def test_what_is_no_number_of_days_is_logged_once(monkeypatch, caplog, word):
    """It costs one line with the word in it, and the default is used: nothing is deleted for a typing error."""
    monkeypatch.setenv("AUTOBATCH_RETENTION_DAYS", word)
    with caplog.at_level(logging.WARNING, "autobatch"):
        assert [find_retention(), find_retention()] == [Retention(), Retention()]
    assert len(caplog.records) == 1
    assert word in caplog.text


class Clock:
    """The time of day, as a test wants it."""

    def __init__(self, monkeypatch, now=1.7e9):
        self.now = now
        monkeypatch.setattr(time, "time", lambda: self.now)

    def live(self, store, days, every=1.0):
        """Let so many days pass in which something is written every day."""
        for _ in range(int(days / every)):
            self.now += every * DAY
            with transaction(store._connection) as connection:
                tick(connection, Retention(days=30))


def prune_now(store, retention):
    """Delete what is beyond the retention; how many plans that were."""
    with transaction(store._connection) as connection:
        return prune(connection, retention, tick(connection, retention))


def test_old_plans_go_when_nobody_runs_them(store, monkeypatch):
    """By the days, where no run is younger; old runs go in any case."""
    clock = Clock(monkeypatch)
    for name in ("old", "used", "idle"):
        store.add_plan(make_plan(name))
    store.add_run(make_run("r-old", "old"))
    store.add_run(make_run("r-used", "used"))
    clock.live(store, 20)
    store.add_plan(make_plan("young"))
    store.add_run(make_run("r-young", "young"))
    clock.live(store, 20)
    assert store.update_run(make_update(0, "r-used"))
    assert prune_now(store, Retention(days=30)) == 2
    assert set(names(store.plans())) == {"young", "used"}
    assert [len(store.runs_of(name)) for name in ("young", "used", "old")] == [1, 1, 0]


def test_a_plan_of_last_year_that_is_used_again_is_new(store, monkeypatch):
    """Its own date is not when it came here."""
    clock = Clock(monkeypatch)
    store.add_plan(make_plan("a"))
    clock.live(store, 40)
    store.add_plan(make_plan("b", made_at=1.6e9))
    clock.live(store, 20)
    prune_now(store, Retention(days=30))
    assert names(store.plans()) == ["b"]


@pytest.mark.parametrize("days", [1, 30, 400])
@pytest.mark.parametrize("ahead", [1.25, 10, 100], ids=lambda ahead: f"{ahead:g} times as far ahead")
def test_a_clock_that_was_ahead_once_deletes_nothing(tmp_path, monkeypatch, days, ahead):
    """In one start or in several, with runs or without, and also after the clock was put right."""
    monkeypatch.setenv("AUTOBATCH_RETENTION_DAYS", str(days))
    clock, path = Clock(monkeypatch), tmp_path / "ledger.sqlite3"

    def use(*plans):
        for name in plans:
            with Store(path) as store:
                store.add_plan(make_plan(name, made_at=0.0))
                store.add_run(make_run(f"r-{name}", name, last_seen_at=time.time()))
        with Store(path) as store:
            return sorted(names(store.plans())), sum(len(store.runs_of(plan.id)) for plan in store.plans())

    use("a", "b")
    clock.now += ahead * days * DAY
    assert use("c", "d", "e") == (["a", "b", "c", "d", "e"], 5)
    clock.now -= ahead * days * DAY
    assert use("f") == (["a", "b", "c", "d", "e", "f"], 6)


def test_two_machines_of_which_one_is_ahead_delete_nothing(tmp_path, monkeypatch):
    """With one ledger for both, writing by turns."""
    clock = Clock(monkeypatch)
    with Store(tmp_path / "ledger.sqlite3") as store:
        for number in range(20):
            store.add_plan(make_plan(f"p{number}"))
            clock.now += 500 * DAY if number % 2 == 0 else -500 * DAY + 60
            prune_now(store, Retention())
        assert len(store.plans()) == 20


def test_a_damaged_clock_is_made_anew(store, monkeypatch):
    """Nothing is deleted for it, and time goes on."""
    clock = Clock(monkeypatch)
    store.add_plan(make_plan("a"))
    for value in ("text", None, float("inf")):
        store._connection.execute("DELETE FROM clock")
        if value is not None:
            store._connection.execute("INSERT INTO clock VALUES (1, ?, 0)", (value,))
        prune_now(store, Retention(days=30))
        assert names(store.plans()) == ["a"]
    clock.live(store, 40)
    assert prune_now(store, Retention(days=30)) == 1


def test_a_plan_that_runs_is_no_surplus(store):
    """However many were made since: its run is being written."""
    add_plans(store, a=1e9)
    for number in range(8):
        store.add_plan(make_plan(f"p{number}", made_at=5e9 + number))
    prune_now(store, Retention(plans=3))
    assert names(store.plans()) == ["p7", "p6", "p5", "a"]
    assert [run.id for run in store.runs_of("a")] == ["ra"]


@settings(max_examples=30)
@given(ages=st.lists(st.integers(0, 9), max_size=8), most=st.integers(1, 8))
def test_the_last_that_were_written_stay_and_no_more(tmp_path_factory, ages, most):
    """By their count, whatever their dates say; runs by their last update."""
    with Store(tmp_path_factory.mktemp("home") / "ledger.sqlite3") as store:
        for number, age in enumerate(ages):
            store.add_plan(make_plan(f"p{number}", made_at=5e9 - age))
        assert prune_now(store, Retention(plans=most)) == max(len(ages) - most, 0)
        assert set(names(store.plans())) == {f"p{number}" for number in range(len(ages))[-most:]}
    with Store(tmp_path_factory.mktemp("home") / "ledger.sqlite3") as store:
        add_plans(store, **{f"p{number}": 5e9 - age for number, age in enumerate(ages)})
        prune_now(store, Retention(plans=most))
        assert count_rows(store)[1] == min(most, len(ages))


def test_pruning_happens_once_an_opening(tmp_path, monkeypatch):
    """With the first plan that is added, before it, by the days that the environment says."""
    path, clock = tmp_path / "ledger.sqlite3", Clock(monkeypatch)
    monkeypatch.setenv("AUTOBATCH_RETENTION_DAYS", "2")
    with Store(path) as store:
        for name in "abc":
            store.add_plan(make_plan(name))
        clock.live(store, 3, every=0.2)
        store.add_plan(make_plan("d"))
        assert len(store.plans()) == 4
    with Store(path) as store:
        assert len(store.plans()) == 4
        store.add_plan(make_plan("e"))
        assert names(store.plans()) == ["e", "d"]
