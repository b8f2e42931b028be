"""The hook that writes down how a plan's steps went: all of them, cheaply, and whatever becomes of the process."""

from __future__ import annotations

import gc
import logging
import sqlite3
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from builders.python_calls import count_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgers import failed, finished, make_plan, make_run, resized, retried, run_process, start_process
from torch import nn

import autobatch
from autobatch.events import BatchDiffers, StepFinished
from autobatch.ledger import database, run_recorder, run_summary
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.run_recorder import RunRecorder
from autobatch.ledger.store import Store
from autobatch.testing import FakeDevice

OFTEN = 0.0
SELDOM = 1e9


@pytest.fixture(autouse=True)
def _no_warnings_yet(monkeypatch, caplog):
    """Begin as a process that has warned of nothing and has no run."""
    monkeypatch.setattr(database, "_warned", set())
    monkeypatch.setattr(run_recorder, "_unfinished", set())
    caplog.set_level(logging.WARNING, "autobatch")


def read_runs(home, plan="a1"):
    """The runs of a plan, the newest first."""
    with Store(home / "ledger.sqlite3") as store:
        return store.runs_of(plan)


def take(recorder, *events):
    """Hand all of these to the hook."""
    for event in events:
        recorder(event)


@st.composite
def histories(draw):
    """Events of a runner: steps in order, each perhaps after retries or a change of its size."""
    events, size = [], 16
    for step in range(draw(st.integers(0, 12))):
        retries = 0
        for trouble in draw(st.lists(st.sampled_from(["retry", "size"]), max_size=2)):
            old, size = size, draw(st.integers(1, 16))
            events.append(retried(step, old, size) if trouble == "retry" else resized(step, old, size))
            retries += trouble == "retry"
        sizes = tuple(draw(st.lists(st.integers(1, size), min_size=1, max_size=4)))
        seconds = draw(st.integers(0, 64)) / 64  # sums of these are exact
        events.append(finished(step, sizes, retries, draw(st.integers(0, 2**50)), seconds))
    return events


@settings(max_examples=60)
@given(events=histories(), every_s=st.sampled_from([OFTEN, SELDOM]), read_between=st.booleans())
def test_what_happened_is_what_is_read(events, every_s, read_between):
    """Steps, retries, peak, samples, seconds and setbacks come back in sum, however often they were written."""
    with tempfile.TemporaryDirectory() as folder:
        home, steps = Path(folder), [event for event in events if isinstance(event, StepFinished)]
        recorder = RunRecorder(make_plan(size=16), Ledger(home), every_s=every_s)
        for event in events:
            recorder(event)
            if read_between:
                read_runs(home)
        del recorder
        if not events:
            assert list(home.iterdir()) == []
            return
        (run,) = read_runs(home)
        assert run.steps == len(steps)
        assert run.retries == sum(step.retries for step in steps)
        assert run.peak_bytes == max((step.peak_bytes for step in steps), default=0)
        assert sum(part.seconds for part in run.ranges) == sum(step.seconds for step in steps)
        assert sum(part.samples for part in run.ranges) == sum(sum(step.micro_batch_sizes) for step in steps)
        assert [(part.step, part.new_size) for part in run.setbacks] == [
            (event.step, event.new_size) for event in events if event not in steps
        ]
        assert run.outcome == "finished"


@pytest.mark.parametrize("interrupted", [0, 3, 5])
def test_an_interrupt_while_steps_are_added_up_counts_none_twice(tmp_path, monkeypatch, interrupted):
    """Those before it are in, those after it wait, and of the one that it came into at most that one is lost."""
    recorder = RunRecorder(make_plan(), Ledger(tmp_path), every_s=SELDOM)
    for step in range(7):  # the first is written at once, the others wait
        recorder(finished(step, (16,)))
    add_step, calls = run_summary.Tally.add_step, []

    def add(tally, *step):
        calls.append(step)
        if len(calls) == interrupted + 1:
            raise KeyboardInterrupt
        add_step(tally, *step)

    monkeypatch.setattr(run_summary.Tally, "add_step", add)
    with pytest.raises(KeyboardInterrupt):
        recorder(failed("ValueError"))
    recorder(failed("ValueError"))
    [run] = read_runs(tmp_path)
    assert 6 * 16 <= sum(part.samples for part in run.ranges) <= 7 * 16


def test_a_real_runner_is_recorded(tmp_path):
    """A plan from ``fit``, a tenant in the middle and a step that never fits leave their marks."""
    free = [100]
    device = FakeDevice(lambda n: 10 * n + 100 - free[0], total_bytes=110)
    model = nn.Linear(2, 1)

    def step(model, batch):
        return model(batch).mean()

    batch = torch.zeros(8, 2)
    plan = autobatch.fit(model, 8, batch=batch, step=step, device=device, check=None, headroom=0)
    recorder = RunRecorder(plan, Ledger(tmp_path), every_s=OFTEN)
    runner = autobatch.Runner(plan, model, step, None, hooks=[recorder], device=device)
    runner.accumulate(batch)
    free[0] = 50
    result = runner.accumulate(batch)
    free[0] = -100
    with pytest.raises(autobatch.DoesNotFit):
        runner.accumulate(batch)
    with Store(tmp_path / "ledger.sqlite3") as store:
        (stored,) = store.plans()
        (run,) = store.runs_of(stored.id)
    assert stored.micro_batch_sizes == plan.micro_batch_sizes
    assert run.steps == 2
    assert run.ranges[-1].micro_batch_size == max(result.micro_batch_sizes) < plan.micro_batch_size
    assert run.retries == result.retries
    assert len(run.setbacks) > 0
    assert run.outcome == "failed"
    assert "step 2 ran out of memory" in run.reason


def test_a_step_costs_a_few_calls(tmp_path):
    """They took 3 microseconds; the number of micro-batches does not matter."""
    recorder = RunRecorder(make_plan(), Ledger(tmp_path), every_s=SELDOM)
    events = [finished(step, (8,) * 32) for step in range(101)]
    recorder(events[0])
    assert count_calls(lambda: take(recorder, *events[1:]), builtins=True) < 30 * 100


class Counted(Ledger):
    """A ledger that counts how often something was to be written."""

    updates = 0

    def update_run(self, *arguments):
        self.updates += 1
        return super().update_run(*arguments)


def test_it_is_written_at_first_after_setbacks_and_seldom_else(tmp_path, monkeypatch):
    """The first step at once, a setback at once or with others of the same second, else each ten seconds."""
    clock = [100.0]
    monkeypatch.setattr(run_recorder.time, "monotonic", lambda: clock[0])
    counted = Counted(tmp_path)
    recorder = RunRecorder(make_plan(), counted)
    story = [
        (0.0, finished(0), 1),
        (5.0, finished(1), 1),
        (4.9, finished(2), 1),
        (0.2, finished(3), 2),
        (5.0, retried(4), 3),
        (0.1, resized(4), 3),
        (0.1, finished(4), 3),
        (1.0, finished(5), 4),
        (9.0, finished(6), 4),
        (1.1, finished(7), 5),
        (0.1, BatchDiffers(step=8, samples=3, planned=32), 5),
    ]
    for wait, event, updates in story:
        clock[0] += wait
        recorder(event)
        assert counted.updates == updates, event
    monkeypatch.undo()


def test_a_busy_ledger_is_not_waited_for(tmp_path, caplog):
    """One short wait, none in the steps after it, and when the lock is gone nothing is missing; one log line."""
    recorder = RunRecorder(make_plan(), Ledger(tmp_path))
    recorder(finished(0))
    other = sqlite3.connect(tmp_path / "ledger.sqlite3", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    recorder._current._tried_at -= 11
    recorder(finished(1))
    first = time.monotonic() - began
    for step in range(2, 300):
        take(recorder, retried(step), finished(step, retries=1))
    rest = time.monotonic() - began - first
    other.close()
    recorder._current._tried_at -= 11
    recorder(finished(300))
    (run,) = read_runs(tmp_path)
    assert 0.05 < first < 10
    assert rest < 10  # with a wait in each step it takes half a minute
    assert (run.steps, run.retries, len(run.setbacks)) == (301, 298, 298)
    assert len(caplog.records) == 1


def test_setbacks_do_not_hurry_to_a_ledger_that_was_busy(tmp_path, monkeypatch):
    """After a refusal the next try is ten seconds later, whatever happens; after a success setbacks hurry again."""
    clock = [100.0]
    monkeypatch.setattr(run_recorder.time, "monotonic", lambda: clock[0])
    counted = Counted(tmp_path)
    recorder = RunRecorder(make_plan(), counted)
    recorder(finished(0))
    other = sqlite3.connect(tmp_path / "ledger.sqlite3", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    for wait, updates in [(1.1, 2), (1.1, 2), (8.8, 2), (0.2, 3)]:
        clock[0] += wait
        recorder(retried(1))
        assert counted.updates == updates
    other.close()
    for wait, updates in [(9.9, 3), (0.2, 4), (1.1, 5)]:
        clock[0] += wait
        recorder(retried(1))
        assert counted.updates == updates
    monkeypatch.undo()


def test_a_ledger_that_comes_late_gets_all(tmp_path):
    """What happened while the folder could not be made is written when it can."""
    home = tmp_path / "home"
    home.write_text("")
    recorder = RunRecorder(make_plan(), Ledger(home), every_s=OFTEN)
    take(recorder, retried(0), finished(0, retries=1), finished(1))
    home.unlink()
    recorder(finished(2))
    (run,) = read_runs(home)
    assert (run.steps, run.retries, len(run.setbacks)) == (3, 1, 1)


def test_an_end_that_meets_a_lock_is_written_when_the_process_ends(tmp_path):
    """A runner that was dropped at a bad moment is not lost."""
    recorder = RunRecorder(make_plan(), Ledger(tmp_path), every_s=SELDOM)
    take(recorder, finished(0), finished(1))
    other = sqlite3.connect(tmp_path / "ledger.sqlite3", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    del recorder
    gc.collect()
    other.close()
    assert [(run.outcome, run.steps) for run in read_runs(tmp_path)] == [("running", 1)]
    run_recorder._finish_all()
    assert [(run.outcome, run.steps) for run in read_runs(tmp_path)] == [("finished", 2)]
    assert run_recorder._unfinished == set()


def test_a_run_that_was_forgotten_stays_forgotten(tmp_path, caplog):
    """The training that goes on does not bring half of it back, and asks once."""
    counted = Counted(tmp_path)
    recorder = RunRecorder(make_plan(), counted, every_s=OFTEN)
    recorder(finished(0))
    with Store(tmp_path / "ledger.sqlite3") as store:
        store.forget(everything=True)
    take(recorder, finished(1), finished(2))
    recorder(failed("late"))
    assert counted.updates == 2
    del recorder
    run_recorder._finish_all()
    with Store(tmp_path / "ledger.sqlite3") as store:
        assert store.plans() == []
    assert read_runs(tmp_path) == []
    assert caplog.records == []
    assert run_recorder._unfinished == set()


@pytest.mark.parametrize("finds_it", ["this run", "another process"])
def test_a_run_goes_on_in_another_file_when_its_own_is_damaged(tmp_path, finds_it):
    """What was stored before is in the damaged file; nobody had the run forgotten."""
    recorder = RunRecorder(make_plan("a"), Ledger(tmp_path), every_s=OFTEN)
    take(recorder, finished(0), finished(1))
    (tmp_path / "ledger.sqlite3").write_bytes(b"no database" * 2000)
    for journal in ("ledger.sqlite3-wal", "ledger.sqlite3-shm"):
        (tmp_path / journal).unlink(missing_ok=True)
    if finds_it == "another process":
        Ledger(tmp_path).remember(make_plan("b"))
    take(recorder, finished(2), finished(3))
    del recorder
    with Store(tmp_path / "ledger-2.sqlite3") as store:
        assert "a" in {plan.id for plan in store.plans()}
        (run,) = store.runs_of("a")
    assert (run.outcome, run.ranges[-1].last_step) == ("finished", 3)
    assert run_recorder._unfinished == set()


def take_after_failure(recorder):
    """A user who catches the error and goes on."""
    recorder(failed("no memory"))
    recorder(finished(1))


@pytest.mark.parametrize(
    ("after", "outcome", "reason"),
    [
        (lambda recorder: None, "finished", ""),
        (lambda recorder: recorder(failed("no <memory> in /home/bob/x\nmore")), "failed", "no <memory> in <path>"),
        (lambda recorder: recorder(failed("KeyboardInterrupt")), "interrupted", "KeyboardInterrupt"),
        (take_after_failure, "finished", ""),
    ],
)
def test_the_end_says_how_it_went(tmp_path, after, outcome, reason):
    """Finished when the runner is gone; failed with the error's first line, unless another step followed it."""
    recorder = RunRecorder(make_plan(), Ledger(tmp_path), every_s=SELDOM)
    recorder(finished(0))
    after(recorder)
    del recorder
    (run,) = read_runs(tmp_path)
    assert (run.outcome, run.reason) == (outcome, reason)


def test_a_failure_is_written_at_once(tmp_path):
    """Even where it is all that ever happened: the process may not live much longer."""
    recorder = RunRecorder(make_plan(), Ledger(tmp_path), every_s=SELDOM)
    recorder(failed("no memory"))
    (run,) = read_runs(tmp_path)
    assert (run.outcome, run.reason, run.steps) == ("failed", "no memory", 0)


def test_a_plan_without_an_id_is_stored_too(tmp_path):
    """Under an id that follows from its content, so that its runs are together."""
    for _ in range(2):
        take(RunRecorder(make_plan(""), Ledger(tmp_path)), finished(0))
    with Store(tmp_path / "ledger.sqlite3") as store:
        (plan,) = store.plans()
        assert len(store.runs_of(plan.id)) == 2


def test_a_ledger_that_is_off_costs_nothing(tmp_path, monkeypatch):
    """No file, no run, and no step is even counted."""
    monkeypatch.setenv("AUTOBATCH_LEDGER", "off")
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))
    recorder = RunRecorder(make_plan(), Ledger.open(), every_s=OFTEN)
    take(recorder, retried(0), finished(0))
    recorder(failed("no memory"))
    assert list(tmp_path.iterdir()) == []
    assert recorder._current._tally.unwritten(make_run(), 0.0, "running", "").ranges == ()


def test_another_thread_may_train(tmp_path):
    """Made in one thread, used in others, one after another."""
    recorder = RunRecorder(make_plan(), Ledger(tmp_path), every_s=OFTEN)
    recorder(finished(0))
    for step in (1, 2):
        thread = threading.Thread(target=recorder, args=(finished(step),))
        thread.start()
        thread.join()
    assert read_runs(tmp_path)[0].steps == 3


BEGIN = """
import os, sys
from pathlib import Path
from ledgers import failed, finished, make_plan, retried
from autobatch.ledger.run_recorder import RunRecorder
from autobatch.ledger.ledger import Ledger
recorder = RunRecorder(make_plan(), Ledger(Path(sys.argv[1])), every_s=float(sys.argv[2]))
for step in range(5):
    recorder(finished(step))
"""


@pytest.mark.parametrize(
    ("end", "outcome", "steps"),
    [
        ("", "finished", 5),
        ("sys.exit(0)", "finished", 5),
        ("del recorder; os._exit(0)", "finished", 5),
        ("os._exit(0)", "running", 1),
        ("os.kill(os.getpid(), 9)", "running", 1),
        ("recorder(failed('no memory'))", "failed", 5),
        ("raise SystemError('the user\\'s own')", "finished", 5),
    ],
)
def test_the_end_of_a_process_is_the_end_of_its_run(tmp_path, end, outcome, steps):
    """The rest is written at exit; after a kill what was written last is there, and the run seems to go on."""
    start_process(BEGIN + end, tmp_path, 10).communicate(timeout=200)
    (run,) = read_runs(tmp_path)
    assert (run.outcome, run.steps) == (outcome, steps)


@pytest.mark.parametrize("way", ["sys.exit(0)", "os._exit(0)", "del recorder; gc.collect(); sys.exit(0)"])
def test_a_forked_child_writes_nothing_of_its_parent(tmp_path, way):
    """Whatever it does and however it ends; the parent's run has the parent's steps, once."""
    program = f"""{BEGIN}
import gc
from autobatch.ledger.store import Store
child = os.fork()
if child == 0:
    for step in range(100, 200):
        recorder(retried(step))
        recorder(finished(step))
    recorder(failed("in the child"))
    {way}
assert os.waitpid(child, 0)[1] == 0
with Store(Path(sys.argv[1]) / "ledger.sqlite3") as store:
    (run,) = store.runs_of("a1")
    assert (run.outcome, run.steps) == ("running", 5), run
for step in range(5, 9):
    recorder(finished(step))
"""
    _, errors = run_process(program, tmp_path, 0)
    assert errors == ""
    (run,) = read_runs(tmp_path)
    assert (run.outcome, run.steps, run.setbacks) == ("finished", 9, ())
    assert len(run.ranges) == 1


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_the_end_of_a_run_is_written_is_not_lost(tmp_path, monkeypatch):
    """A runner that nobody holds any more is found by a weak reference, whose callback's errors Python only prints."""
    recorder = RunRecorder(make_plan(), Ledger(tmp_path), every_s=SELDOM)
    take(recorder, finished(0), finished(1))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Ledger, "update_run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        del recorder
        for _ in range(600):  # one long wait would not be woken
            time.sleep(0.1)
    monkeypatch.undo()
    run_recorder._finish_all()
