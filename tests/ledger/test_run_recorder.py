"""The hook that writes down how a plan's steps went: all of them, cheaply, and whatever becomes of the process."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ledgers import failed, finished, make_plan, resized, retried, run_process, start_process
from plans import make_whole_plans
from torch import nn

import autobatch
from autobatch.cli.main import main
from autobatch.events import StepFinished, run_history
from autobatch.events.run_history import RankTotal, Setback
from autobatch.events.runner_events import RankStep
from autobatch.ledger import ledger as ledger_module
from autobatch.ledger import run_recorder
from autobatch.ledger import store as store_module
from autobatch.ledger.ledger import Ledger, find_home
from autobatch.ledger.run_recorder import RunRecorder
from autobatch.ledger.store import Store
from autobatch.testing import FakeDevice


@pytest.fixture(autouse=True)
def _no_warnings_yet(monkeypatch, caplog):
    """Begin as a process that has warned of nothing."""
    monkeypatch.setattr(store_module, "_warned", set())
    caplog.set_level(logging.WARNING, "autobatch")


@pytest.fixture
def clock(monkeypatch):
    """The time, which stands still unless a test moves it: one number in a list."""
    now = [100.0]
    monkeypatch.setattr(run_recorder.time, "monotonic", lambda: now[0])
    return now


def read_runs(folder, plan="a1"):
    """The runs of a plan, the newest first."""
    return Store(folder).runs_of(plan)


def take(recorder, *events):
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


@given(events=histories(), pause=st.sampled_from([0.0, 1.0, 100.0]))
def test_what_happened_is_what_is_read(events, pause):
    """Steps, retries, peak, samples, seconds and setbacks come back in sum, however often they were written."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        now = [0.0]
        patch.setattr(run_recorder.time, "monotonic", lambda: now[0])
        steps = [event for event in events if isinstance(event, StepFinished)]
        recorder = RunRecorder(make_plan(size=16), Ledger(Path(folder)))
        for event in events:
            now[0] += pause
            recorder(event)
        del recorder
        if not events:
            assert list(Path(folder).iterdir()) == []
            return
        (run,) = read_runs(Path(folder))
        assert run.steps == len(steps)
        assert run.retries == sum(step.retries for step in steps)
        assert run.peak_bytes == max((step.peak_bytes for step in steps), default=0)
        assert sum(part.seconds for part in run.ranges) == sum(step.seconds for step in steps)
        assert sum(part.samples for part in run.ranges) == sum(sum(step.micro_batch_sizes) for step in steps)
        assert [(part.step, part.new_size) for part in run.setbacks] == [
            (event.step, event.new_size) for event in events if event not in steps
        ]
        assert run.outcome == "finished"


def ranges_of(folder, *events):
    """First and last step of each range that these make, with its largest micro-batch and its retries."""
    take(RunRecorder(make_plan(), Ledger(folder)), *events)
    [run] = read_runs(folder)
    return [(part.first_step, part.last_step, part.micro_batch_size, part.retries) for part in run.ranges]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([finished(0), finished(1), finished(2)], [(0, 2, 8, 0)]),
        ([finished(0, (8, 3)), finished(1, (7, 7)), finished(2, (2,))], [(0, 2, 8, 0)]),
        (
            [finished(0), retried(1), finished(1, (4, 4), 1), finished(2, (4,))],
            [(0, 0, 8, 0), (1, 1, 4, 1), (2, 2, 4, 0)],
        ),
        ([finished(0, retries=1), finished(1, retries=2)], [(0, 1, 8, 3)]),
        ([finished(0), resized(1, 8, 4), finished(1, (4,)), finished(2, (4,))], [(0, 0, 8, 0), (1, 2, 4, 0)]),
        ([finished(0), finished(5), finished(2)], [(0, 0, 8, 0), (5, 5, 8, 0), (2, 2, 8, 0)]),
        ([finished(0, ())], [(0, 0, 0, 0)]),
    ],
)
def test_a_range_ends_where_steps_go_otherwise(tmp_path, events, expected):
    """At another pace, at retries and at a gap; not at batches that are smaller than others."""
    assert ranges_of(tmp_path, *events) == expected


def test_setbacks_say_what_happened(tmp_path):
    """Sizes, bytes and reason of either kind, without the user's paths."""
    take(RunRecorder(make_plan(), Ledger(tmp_path)), retried(3, 8, 4, "no memory for /home/bob/a"), resized(9, 4, 8))
    assert read_runs(tmp_path)[0].setbacks == (
        Setback(step=3, kind="retry", old_size=8, new_size=4, used_bytes=300, reason="no memory for <path>"),
        Setback(step=9, kind="size", old_size=4, new_size=8, reason="grown back"),
    )


def test_endless_trouble_is_bounded(tmp_path, monkeypatch):
    """Beyond the most rows steps add up in the last range, and setbacks are its retries."""
    monkeypatch.setattr(run_history, "_MOST_ROWS", 10)
    recorder = RunRecorder(make_plan(), Ledger(tmp_path))
    for step in range(100):
        take(recorder, retried(step), finished(step, retries=step % 2))
    del recorder
    [run] = read_runs(tmp_path)
    assert (len(run.ranges), len(run.setbacks), run.steps, run.retries) == (10, 10, 100, 50)
    assert run.ranges[-1].last_step == 99


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("\n  \n", ""),
        ("CUDA out of memory.\nTried to allocate 2.00 GiB", "CUDA out of memory."),
        ("\n  first\nsecond", "first"),
        ("No such file: '/home/bob/my data.csv' here", "No such file: <path> here"),
        ('cannot open "C:\\Users\\bob\\a.pt"', "cannot open <path>"),
        ("cannot open /home/bob/a.pt: denied", "cannot open <path> denied"),
        ("cannot open ~/a.pt, ~bob/b and ../e", "cannot open <path> <path> and <path>"),
        ("x" * 301, "x" * 300),
        ("/" * 10**6, "<path>"),
    ],
)
def test_a_reason_is_one_line_without_paths(text, line):
    """The first line, in which no file of the user's is named."""
    assert run_recorder._shorten(text) == line


def test_a_real_runner_is_recorded(tmp_path):
    """A plan from ``fit``, a tenant in the middle and a step that never fits leave their marks."""
    free = [100]
    device = FakeDevice(lambda n: 10 * n + 100 - free[0], total_bytes=110)
    model = nn.Linear(2, 1)

    def step(model, batch):
        return model(batch).mean()

    batch = torch.zeros(8, 2)
    plan = autobatch.fit(model, 8, batch=batch, step=step, device=device, check=None, headroom=0)
    recorder = RunRecorder(plan, Ledger(tmp_path))
    runner = autobatch.Runner(plan, model, step, None, hooks=[recorder], device=device)
    runner.accumulate(batch)
    free[0] = 50
    result = runner.accumulate(batch)
    free[0] = -100
    with pytest.raises(autobatch.DoesNotFit):
        runner.accumulate(batch)
    (stored,) = Store(tmp_path).plans()
    (run,) = read_runs(tmp_path, stored.id)
    assert stored.micro_batch_sizes == plan.micro_batch_sizes
    assert run.steps == 2
    assert run.ranges[-1].micro_batch_size == max(result.micro_batch_sizes) < plan.micro_batch_size
    assert run.retries == result.retries
    assert len(run.setbacks) > 0
    assert run.outcome == "failed"
    assert "step 2 ran out of memory" in run.reason


@pytest.fixture
def two_steps(tmp_path, monkeypatch):
    """A function that makes a plan, and a Runner with no hook that takes two steps."""
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")

    def run():
        model, batch = nn.Linear(2, 1), torch.zeros(8, 2)
        options = {"step": lambda model, batch: model(batch).mean()}
        plan = autobatch.fit(model, 8, batch=batch, check=None, max_micro_batch=3, **options)
        runner = autobatch.Runner(plan, model, optimizer=None, **options)
        return plan, [runner.accumulate(batch) for _ in range(2)]

    return run


def test_a_runner_records_its_own_steps(two_steps):
    """Their number, samples, sizes, retries, peak and seconds are those of the results."""
    plan, results = two_steps()
    (stored,) = Store(find_home()).plans()
    (run,) = Store(find_home()).runs_of(stored.id)
    assert (run.steps, run.retries, run.outcome) == (2, 0, "finished")
    assert sum(part.samples for part in run.ranges) == 16
    assert {part.micro_batch_size for part in run.ranges} == {plan.micro_batch_size}
    assert max(part.peak_bytes for part in run.ranges) == max(result.peak_bytes for result in results)
    assert sum(part.seconds for part in run.ranges) == pytest.approx(sum(result.seconds for result in results))


def test_a_record_that_fails_costs_no_step(two_steps, monkeypatch, caplog):
    """The error is in the log, once."""
    monkeypatch.setattr(Ledger, "begin_run", lambda *_: 1 / 0)
    _, results = two_steps()
    assert len(results) == 2
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["division by zero"]


class Counted(Ledger):
    """A ledger that counts how often something was to be written."""

    updates = 0

    def update_run(self, *arguments):
        self.updates += 1
        return super().update_run(*arguments)


def test_a_slow_disk_is_asked_seldom(tmp_path, clock):
    """Writing may cost a hundredth of the time, whatever happens; errors and the end are written at once."""

    class Slow(Counted):
        def update_run(self, *arguments):
            clock[0] += 1.0
            return super().update_run(*arguments)

    slow = Slow(tmp_path)
    recorder = RunRecorder(make_plan(), slow)
    for wait, event, updates in [
        (0.0, finished(0), 1),
        (99.0, retried(1), 1),
        (0.0, finished(1, retries=1), 1),
        (1.1, finished(2), 2),
        (0.0, failed("ValueError"), 3),
    ]:
        clock[0] += wait
        recorder(event)
        assert slow.updates == updates, event
    assert read_runs(tmp_path)[0].steps == 3


def test_a_ledger_that_comes_late_gets_all(tmp_path, clock, caplog):
    """What happened while the folder could not be made is written when it can; one log line."""
    place = tmp_path / "home"
    place.write_text("")
    recorder = RunRecorder(make_plan(), Ledger(place))
    take(recorder, retried(0), finished(0, retries=1), finished(1))
    place.unlink()
    clock[0] += 11
    recorder(finished(2))
    (run,) = read_runs(place)
    assert (run.steps, run.retries, len(run.setbacks)) == (3, 1, 1)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_line_whose_end_was_not_reported_counts_once(tmp_path, clock, error):
    """It is in the file whole, and then written again with what is new."""

    class Torn(Store):
        def update_run(self, new):
            super().update_run(new)
            raise error

    recorder = RunRecorder(make_plan(), Ledger(tmp_path))
    recorder(finished(0))
    clock[0] += 100
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(ledger_module, "Store", Torn)
        take(recorder, finished(1), retried(2))
    for step in (2, 3):
        clock[0] += 1000
        recorder(finished(step))
    del recorder
    [run] = read_runs(tmp_path)
    assert (run.steps, len(run.setbacks), run.outcome) == (4, int(error is OSError), "finished")


def test_a_run_that_was_forgotten_stays_forgotten(tmp_path, clock, caplog):
    """The training that goes on does not bring half of it back, and asks once."""
    counted = Counted(tmp_path)
    recorder = RunRecorder(make_plan(), counted)
    recorder(finished(0))
    Store(tmp_path).forget(everything=True)
    clock[0] += 11
    take(recorder, finished(1), retried(2))
    recorder(failed("late"))
    assert counted.updates == 2
    del recorder
    assert Store(tmp_path).plans() == read_runs(tmp_path) == []
    assert caplog.records == []


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
    recorder = RunRecorder(make_plan(), Ledger(tmp_path))
    recorder(finished(0))
    after(recorder)
    del recorder
    (run,) = read_runs(tmp_path)
    assert (run.outcome, run.reason) == (outcome, reason)


def test_a_failure_is_written_at_once(tmp_path):
    """Even where it is all that ever happened: the process may not live much longer."""
    recorder = RunRecorder(make_plan(), Ledger(tmp_path))
    recorder(failed("no memory"))
    (run,) = read_runs(tmp_path)
    assert (run.outcome, run.reason, run.steps) == ("failed", "no memory", 0)


BEGIN = """
import os, sys
from pathlib import Path
from ledgers import failed, finished, make_plan, retried
from autobatch.ledger import run_recorder
from autobatch.ledger.run_recorder import RunRecorder
from autobatch.ledger.ledger import Ledger, find_home
run_recorder._LEAST_WAIT_S = run_recorder._MOST_WAIT_S = 1000.0  # however slow the machine is
recorder = RunRecorder(make_plan(), Ledger(Path(sys.argv[1])))
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
    start_process(BEGIN + end, tmp_path).communicate(timeout=200)
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
(run,) = Store(Path(sys.argv[1])).runs_of("a1")
assert (run.outcome, run.steps) == ("running", 1), run
for step in range(5, 9):
    recorder(finished(step))
"""
    _, errors = run_process(program, tmp_path)
    assert errors == ""
    (run,) = read_runs(tmp_path)
    assert (run.outcome, run.steps, run.setbacks) == ("finished", 9, ())
    assert len(run.ranges) == 1


def make_rows(step, ranks=2):
    return tuple(
        RankStep(rank=rank, samples=rank, micro_batch_size=step + rank, retries=rank, peak_bytes=step, seconds=0.25)
        for rank in range(ranks)
    )


def test_a_run_is_recorded_with_a_row_for_each_rank(tmp_path, monkeypatch, capsys):
    """In the file, in the list and in the answer of ``show``."""
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")
    plans = make_whole_plans((8,) * 2, (0.5,) * 2, fingerprint="f1", made_at=3e9)
    for plan in plans:
        assert Ledger(tmp_path).remember(plan)
    recorder = RunRecorder(plans[0], Ledger(tmp_path))
    for step in range(3):
        recorder(finished(step, (8,)).model_copy(update={"ranks": make_rows(step)}))
    del recorder
    [run] = read_runs(tmp_path, "a0")
    assert run.ranks == tuple(
        RankTotal(steps=3, samples=rank * 3, micro_batch_size=2 + rank, retries=rank * 3, peak_bytes=2, seconds=0.75)
        for rank in range(2)
    )
    assert main(["plans"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a")]
    assert row.startswith("a0 ")
    assert "16 on 2 ranks" in row
    assert row.endswith("1: 3 steps, 3 retries")
    assert main(["show", "a1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "     0        0            2        0  2 bytes    250.0" in lines
    assert "     1        3            3        3  2 bytes    250.0" in lines
