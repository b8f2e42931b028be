"""A fork whose child runs no handlers of C libraries, as a trace needs it beside autograd's threads for a card."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading

import pytest
import torch

from autobatch.prediction import child_process
from autobatch.prediction.child_process import run_apart

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux forks here")


@pytest.fixture(params=["_Fork", "clone"])
def system_fork(request, monkeypatch):
    """What makes a child: the C library's own function, or the system call of older ones."""
    if request.param == "clone":
        library = ctypes.PyDLL(None, use_errno=True)
        number = child_process._CLONE[os.uname().machine]
        monkeypatch.setattr(child_process, "_find_fork", lambda: child_process._make_clone(library, number))
    elif not hasattr(ctypes.CDLL(None), "_Fork"):
        pytest.skip("the C library is older")


@pytest.fixture
def quiet(system_fork, monkeypatch):
    monkeypatch.setattr(child_process, "has_cards_threads", lambda: True)


def backward():
    """A gradient, computed in whatever process this is."""
    weight = torch.ones(3, requires_grad=True)
    (weight * weight).sum().backward()
    return os.getpid(), weight.grad.tolist()


@pytest.mark.usefixtures("quiet")
def test_a_child_runs_a_backward_pass():
    """It is another process, and its result comes back."""
    child, gradient = run_apart(backward, 30)
    assert (child != os.getpid(), gradient) == (True, [2.0, 2.0, 2.0])


@pytest.mark.usefixtures("system_fork")
def test_handlers_of_libraries_are_not_run(monkeypatch):
    """Autograd's own handler says in a child that no backward pass can run there."""
    # The child that compares is forked plainly: NumPy's handlers wait forever where they were left out once before.
    monkeypatch.setattr(child_process, "has_cards_threads", lambda: False)
    libc = ctypes.CDLL(None)

    def status_of(fork):
        child = fork()
        if child == 0:
            os._exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def compare():  # a handler stays for the life of a process, so it is a child that gets one
        faulthandler.disable()
        libc.__register_atfork(None, None, libc.abort, None)
        return status_of(os.fork), status_of(child_process.fork_without_handlers)

    assert run_apart(compare, 30) == (-signal.SIGABRT, 3)


@pytest.mark.usefixtures("quiet")
def test_a_child_uses_no_card():
    """Torch says there what it says in the child of a plain fork; the parent's word stays as it was."""
    before = torch.cuda._is_in_bad_fork

    def ask():  # in the child, where it is another function
        return torch.cuda._is_in_bad_fork()

    assert run_apart(ask, 30)
    assert torch.cuda._is_in_bad_fork is before


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_a_child_keeps_the_lock_of_the_interpreter():
    """Threads that ask for it as the process forks are not in the child, which would wait for them."""
    ended = threading.Event()

    def ask():
        while not ended.is_set():
            sum(range(100))

    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=ask) for _ in range(2)]
    sys.setswitchinterval(1e-6)  # asked for at all times
    try:
        for thread in threads:
            thread.start()
        assert [run_apart(lambda number=number: number, 30) for number in range(20)] == [*range(20)]
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
