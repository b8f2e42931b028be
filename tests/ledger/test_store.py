"""The ledger's file: written, found, deleted, by many at once and under kills."""

from __future__ import annotations

import random
import sqlite3
import stat
import time

import pytest
from ledgers import add_plans, count_rows, make_plan, make_run, make_update, names, start_process

from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Setback, StepRange
from autobatch.ledger import database
from autobatch.ledger.database import transaction
from autobatch.ledger.store import Store
from autobatch.records import DeviceInfo

pytestmark = pytest.mark.quick


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty ledger, in a process that has warned of nothing."""
    monkeypatch.setattr(database, "_warned", set())
    with Store(tmp_path / "home" / "ledger.sqlite3") as opened:
        yield opened


def test_what_is_written_is_read_again(tmp_path):
    """A plan is equal to itself after the file was closed, and its id is written once."""
    path = tmp_path / "ledger.sqlite3"
    with Store(path) as store:
        store.add_plan(make_plan(warnings=("näh ✂",)))
        store.add_plan(make_plan(warnings=("another of the same id",)))
    with Store(path) as store:
        assert store.plans() == [make_plan(warnings=("näh ✂",))]


def test_the_folder_is_the_users_own(tmp_path, store):
    """Nobody else may look in."""
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_plans_come_newest_first_and_are_chosen_by_parts_of_names(store):
    """Model and device in any case of letters; a part is enough, and % and _ are letters."""
    h100 = DeviceInfo(kind="cuda", name="NVIDIA H100", total_bytes=1)
    store.add_plan(make_plan("old", made_at=3e9, model="GPT"))
    store.add_plan(make_plan("new", made_at=5e9, model="ResNet"))
    store.add_plan(make_plan("mid", made_at=4e9, model="SmallGPT", device=h100))
    assert names(store.plans()) == ["new", "mid", "old"]
    assert names(store.plans(limit=2)) == ["new", "mid"]
    assert names(store.plans(model="gpt")) == ["mid", "old"]
    assert names(store.plans(model="gpt", device="l4")) == ["old"]
    assert names(store.plans(device="h1_0")) == names(store.plans(model="%")) == []


def test_of_the_same_moment_the_later_written_is_newer(store):
    """A clock that stands still changes no order."""
    for name in "abc":
        store.add_plan(make_plan(name))
    assert names(store.plans()) == ["c", "b", "a"]


def test_plans_like_are_those_of_the_same_fingerprint(store):
    """Exactly the same; plans without one are like nothing."""
    for name, fingerprint, made_at in [("a", "f", 3e9), ("b", "f", 4e9), ("c", "F", 5e9), ("d", "", 6e9)]:
        store.add_plan(make_plan(name, fingerprint=fingerprint, made_at=made_at))
    assert names(store.plans_like("f")) == ["b", "a"]
    assert store.plans_like("") == []


def test_a_plan_is_found_by_as_much_of_its_id_as_is_unique(store):
    """An exact id wins over longer ones; what is unknown or unclear names candidates."""
    for name in ("ab", "abc1", "abc2", "x%"):
        store.add_plan(make_plan(name))
    assert [store.find_plan(wanted).id for wanted in ("ab", "abc1", "x", "x%")] == ["ab", "abc1", "x%", "x%"]
    with pytest.raises(InvalidArgument, match=r"several plans begin with 'abc': abc2, abc1; give more"):
        store.find_plan("abc")
    with pytest.raises(InvalidArgument, match=r"several plans begin with 'a': .*, \.\.\."):
        store.add_plan(make_plan("abd"))
        store.find_plan("a")
    for wanted in ("z", "%", "", "abc1 "):
        with pytest.raises(InvalidArgument, match=r"no plan has the id '.*'; the newest are abd, x%, abc2"):
            store.find_plan(wanted)


def test_where_there_is_no_plan_that_is_said(store):
    """An empty ledger says how to get a plan."""
    with pytest.raises(InvalidArgument, match=r"no plan is stored yet: run fit\(\)"):
        store.find_plan("a")


def test_a_plan_without_an_id_gets_one_that_follows_from_its_content(store):
    """Added twice it is there once, with an id and a date by which it can be found."""
    plan = make_plan("", made_at=0.0)
    before = time.time()
    store.add_plan(plan)
    store.add_plan(plan)
    store.add_plan(
        plan.model_copy(update={"target_batch": 33, "micro_batch_sizes": (8, 8, 8, 8, 1), "accumulation_steps": 5})
    )
    assert len(store.plans()) == 2
    stored = store.plans()[-1]
    assert before <= stored.made_at <= time.time()
    assert store.find_plan(stored.id) == stored == plan.model_copy(update={"id": stored.id, "made_at": stored.made_at})


def test_a_plan_of_another_version_is_left_out(store, caplog):
    """It costs one log line in all, stays where it is, can be forgotten, and hides no other."""
    for name in ("a", "b", "c"):
        store.add_plan(make_plan(name))
    for name in "bc":
        text = make_plan(name, version="9.1.0").model_dump_json()[:-1] + ',"colour":"red"}'
        store._connection.execute("UPDATE plans SET content = ? WHERE id = ?", (text, name))
    assert names(store.plans(limit=1)) == names(store.plans()) == ["a"]
    assert len(caplog.records) == 1
    with pytest.raises(InvalidArgument, match=r"plan b is not one that .* reads \(colour: .*: update autobatch"):
        store.find_plan("b")
    assert store.forget(["b", "c"]) == 2


def test_a_run_is_read_as_it_was_written(store):
    """With all its ranges and setbacks in order, and newest first among others."""
    ranges = tuple(StepRange(first_step=n, last_step=n, micro_batch_size=n, seconds=0.1 * n) for n in range(12))
    setbacks = tuple(Setback(step=n, kind="retry", old_size=n + 2, new_size=n + 1, reason=str(n)) for n in range(12))
    run = make_run(ranges=ranges, setbacks=setbacks, outcome="failed", reason="why")
    store.add_plan(make_plan())
    store.add_run(run)
    store.add_run(run)
    store.add_run(make_run("r2", started_at=4e9))
    assert store.runs_of("a1") == [make_run("r2", started_at=4e9), run]
    assert store.runs_of("a") == []


def test_a_run_needs_its_plan(store):
    """A run of a plan that is not there is refused."""
    with pytest.raises(sqlite3.IntegrityError):
        store.add_run(make_run())


def test_updates_are_laid_over_what_is_stored(store):
    """The last range grows, new ones follow, the run's own fields are the last ones; twice is as once."""
    store.add_plan(make_plan())
    store.add_run(make_run())
    setback = Setback(step=1, kind="size", old_size=8, new_size=4)
    later = make_update(1, steps=2, setbacks=(setback,), last_seen_at=5e9)
    for update in (make_update(0), make_update(0, steps=5), later):
        assert store.update_run(update)
        assert store.update_run(update)
    assert store.update_run(make_update(2, outcome="failed", reason="why", last_seen_at=6e9))
    (run,) = store.runs_of("a1")
    assert [part.samples for part in run.ranges] == [160, 64, 32]
    assert run.setbacks == (setback,)
    assert (run.outcome, run.reason, run.last_seen_at, run.started_at) == ("failed", "why", 6e9, 3e9)


def test_updates_of_a_run_that_is_gone_are_not_written(store):
    """It says so, and leaves no rows behind."""
    assert not store.update_run(make_update(0))
    assert store._connection.execute("SELECT count(*) FROM ranges").fetchone() == (0,)


def test_updates_are_written_whole_or_not_at_all(store):
    """A setback that cannot be written takes the ranges of its update with it."""
    store.add_plan(make_plan())
    store.add_run(make_run())
    setback = Setback.model_construct(step=2**63, kind="size", old_size=8, new_size=4)
    update = make_update(0, outcome="finished").model_copy(update={"setbacks": (setback,)})
    with pytest.raises(OverflowError):
        store.update_run(update)
    assert store.runs_of("a1") == [make_run()]
    assert store.update_run(make_update(0))


@pytest.mark.parametrize(
    ("what", "gone", "left"),
    [
        ({"ids": ["a", "a", "b2"]}, 2, ["c"]),
        ({"ids": []}, 0, ["c", "b2", "a"]),
        ({"ids": iter(["b"])}, 1, ["c", "a"]),
        ({"older_than_seconds": 2.5e9}, 1, ["c", "b2"]),
        ({"older_than_seconds": 9e9}, 0, ["c", "b2", "a"]),
        ({"everything": True}, 3, []),
    ],
)
def test_forgetting_takes_plans_with_all_that_is_theirs(store, monkeypatch, what, gone, left):
    """Runs, ranges and setbacks go with them; it says how many plans are gone."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    add_plans(store, a=4e9, b2=5e9, c=6e9)
    monkeypatch.setattr(time, "time", lambda: 7e9)
    assert store.forget(**what) == gone
    assert names(store.plans()) == left
    assert count_rows(store) == [len(left)] * 4


@pytest.mark.parametrize(
    "what",
    [
        {},
        {"ids": ["a"], "everything": True},
        {"ids": ["a"], "older_than_seconds": 1},
        {"older_than_seconds": -1},
        {"older_than_seconds": float("nan")},
    ],
)
def test_forgetting_needs_to_know_what(store, what):
    """Nothing, or two things, is a mistake that deletes nothing."""
    add_plans(store, a=4e9)
    with pytest.raises(InvalidArgument, match=r"one of them|must be at least 0"):
        store.forget(**what)
    assert names(store.plans()) == ["a"]


def test_forgetting_an_unknown_id_forgets_nothing(store):
    """All or none."""
    add_plans(store, a=4e9)
    with pytest.raises(InvalidArgument, match="no plan has the id 'z'"):
        store.forget(["a", "z"])
    assert names(store.plans()) == ["a"]


def test_readers_do_not_wait_for_a_writer(tmp_path, store):
    """What was committed is there while another one writes; a second writer gives up when its patience is over."""
    path = tmp_path / "home" / "ledger.sqlite3"
    store.add_plan(make_plan())
    with Store(path, patience_s=0.05) as other, transaction(store._connection):
        assert names(other.plans()) == ["a1"]
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.add_plan(make_plan("b"))


WRITE_MANY = """
import sys
from pathlib import Path
from ledgers import make_update, make_plan, make_run
from autobatch.ledger.ledger import Ledger
assert "torch" not in sys.modules
name, ledger = sys.argv[2], Ledger(Path(sys.argv[1]))
plan, run = make_plan(name), make_run(name, name)
assert ledger.begin_run(plan, run, 5.0)
for number in range(500):
    assert ledger.remember(make_plan(f"{name}-{number}")), number
    assert ledger.update_run(make_update(number, name), 5.0) == "written", number
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_eight_writers_lose_nothing(tmp_path):
    """Eight processes write a thousand records each, plans and runs; all are there."""
    processes = [start_process(WRITE_MANY, tmp_path, f"w{number}") for number in range(8)]
    for process in processes:
        _, errors = process.communicate(timeout=250)
        assert process.returncode == 0, errors
        assert errors == ""
    with Store(tmp_path / "ledger.sqlite3") as store:
        wanted = {f"w{writer}-{number}" for writer in range(8) for number in range(500)}
        assert wanted <= set(names(store.plans()))
        for writer in range(8):
            (run,) = store.runs_of(f"w{writer}")
            assert [part.first_step for part in run.ranges] == list(range(500))


WRITE_ON = """
import itertools, sys
from pathlib import Path
from ledgers import make_update, make_plan, make_run
from autobatch.ledger.store import Store
name = sys.argv[2]
print("ready", flush=True)
for opening in itertools.count():
    with Store(Path(sys.argv[1])) as store:
        store.add_plan(make_plan(name))
        store.add_run(make_run(name, name))
        for number in range(opening * 20, opening * 20 + 20):
            store.add_plan(make_plan(f"{name}-{number}"))
            print("plan", f"{name}-{number}", flush=True)
            assert store.update_run(make_update(number, name))
            print("update", number, flush=True)
"""


def kill_while_writing(path, name, delay_s):
    """Start a writer, kill it so long after it began, and return what it had acknowledged: plans and steps."""
    process = start_process(WRITE_ON, path, name)
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay_s)
    process.kill()
    lines = process.stdout.read().split("\n")[:-1]  # a line that was cut off by the kill is none
    process.communicate()
    words = [line.split() for line in lines]
    return [word for kind, word in words if kind == "plan"], [int(word) for kind, word in words if kind == "update"]


@pytest.mark.slow
def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path):
    """At any moment of fifteen writers, in a new file or an old one, the file opens, is whole and has it all."""
    draw, acknowledged = random.Random(0), 0
    for number in range(15):
        path = tmp_path / f"home{number // 3}" / "ledger.sqlite3"  # each third kill is in a file that is being made
        name, delay_s = f"w{number}", draw.uniform(0, 0.02 if number % 3 == 0 else 0.15)
        plans, steps = kill_while_writing(path, name, delay_s)
        acknowledged += len(plans) + len(steps)
        with Store(path) as store:
            assert store._connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert set(plans) <= set(names(store.plans())), delay_s
            stored = [part.first_step for run in store.runs_of(name) for part in run.ranges]
            assert stored[: len(steps)] == steps, delay_s
    assert acknowledged > 100
