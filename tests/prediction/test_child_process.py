"""A function in a child of this process: its result, its errors, its death."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from autobatch.errors import InvalidArgument
from autobatch.prediction import child_process
from autobatch.prediction.child_process import begin_apart, run_apart

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux forks here")


def abort():
    """As C++ does; pytest's own report of it would be noise."""
    faulthandler.disable()
    os.abort()


class OtherArguments(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def test_the_result_comes_back_and_nothing_else():
    """What the function changes stays in the child."""
    seen = []
    model = torch.nn.Linear(2, 2)
    before = model.weight.clone()

    def change():
        seen.append(1)
        with torch.no_grad():
            model.weight.zero_()
        return os.getpid(), float(model.weight.detach().sum())

    child, total = run_apart(change)
    assert (child != os.getpid(), total, seen) == (True, 0.0, [])
    assert torch.equal(model.weight, before)


def test_an_error_comes_out_as_it_was_raised():
    """With its type and text."""
    with pytest.raises(KeyError, match="missing"):
        run_apart(lambda: {}["missing"])


@pytest.mark.parametrize("stop", [KeyboardInterrupt("now"), SystemExit(3), OtherArguments("one", "two")], ids=repr)
def test_any_error_comes_out_as_it_was_raised(stop):
    """Those that are no ``Exception``, and those whose constructor wants other arguments than they keep."""

    def fail():
        raise stop

    with pytest.raises(type(stop)) as caught:
        run_apart(fail)
    assert (repr(caught.value), vars(caught.value)) == (repr(stop), vars(stop))


@pytest.mark.parametrize(
    ("end", "message"),
    [(abort, "signal SIGABRT"), (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"), (lambda: os._exit(3), "3")],
    ids=["abort", "kill", "exit"],
)
def test_the_death_of_the_child_is_an_error_here(end, message):
    """An abort in C++ ends the child alone."""
    with pytest.raises(InvalidArgument, match=f"ended the process that it ran in .*{message}"):
        run_apart(end)


def test_a_child_that_hangs_is_killed(monkeypatch):
    """After the time that it was given; it is not left behind, whatever other children this process has."""
    start, children = child_process._start, []

    def note_child(*given):
        made = start(*given)
        children.append(made[0])
        return made

    monkeypatch.setattr(child_process, "_start", note_child)
    started = time.monotonic()
    with pytest.raises(InvalidArgument, match="did not come to an end in time"):
        run_apart(lambda: time.sleep(60), most_seconds=0.3)
    assert time.monotonic() - started < 50
    (child,) = children
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def test_a_large_result_comes_whole():
    """More than a pipe holds at once."""
    assert run_apart(lambda: b"x" * 5_000_000) == b"x" * 5_000_000


def test_no_descriptor_stays_open():
    """After an answer, an error, a death, or a child that nobody asked."""

    def fail():
        raise ValueError("no")

    before = len([*Path("/proc/self/fd").iterdir()])
    assert run_apart(lambda: 3) == 3
    with pytest.raises(ValueError, match="no"):
        run_apart(fail)
    with pytest.raises(InvalidArgument):
        run_apart(abort)
    with begin_apart(lambda: 3):
        pass
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_child_computes_after_its_parents_threads_have():
    """They are not there in the child, and an operation that waits for them would wait forever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        matrix = torch.ones(512, 512)
        assert (matrix @ matrix).sum() == 512**3
        assert torch.ones(10**6).exp().sum() > 10**6
        assert run_apart(lambda: float((matrix @ matrix + torch.ones(512, 512).exp()).mean()), 30) > 512
    finally:
        torch.set_num_threads(threads)


def test_where_there_is_no_process_to_be_had_it_says_so(monkeypatch):
    """And leaves no descriptor open."""

    def refuse():
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(child_process, "has_cards_threads", lambda: False)  # so that os.fork is what forks
    monkeypatch.setattr(os, "fork", refuse)
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(InvalidArgument, match=r"none could be started .*no more processes"):
        run_apart(lambda: 3)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_what_the_child_prints_goes_nowhere(capfd):
    """A prediction is silent: warnings, prints and torch's own log."""

    def chatter():
        sys.stdout.write("out\n")
        sys.stderr.write("error\n")
        os.write(2, b"from C++")
        return 3

    assert run_apart(chatter) == 3
    assert capfd.readouterr() == ("", "")


def test_a_child_that_is_killed_takes_its_own_children_along(tmp_path):
    """One that hangs would hang on for minutes after the answer is not wanted any more."""
    note = tmp_path / "pid"

    def hang():
        with begin_apart(lambda: (note.write_text(str(os.getpid())), time.sleep(60))) as inner:
            return inner()

    with begin_apart(hang):
        wait_until(lambda: note.exists() and note.read_text())
    wait_until(lambda: not is_running(int(note.read_text())))


def wait_until(condition):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    """Whether a process is there and no mere entry that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
