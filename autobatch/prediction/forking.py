"""Forks this process so that its child can run backward passes, also after torch has started autograd's device threads.

torch refuses every backward pass in a child of a process whose autograd engine has threads for cards
(``torch/csrc/autograd/engine.cpp``, ``forked_autograd_child``): it starts them at a process's first backward pass on a
build with CUDA where there is a card, and a handler that the C library runs at a fork says in the child that they are
gone. A trace needs none of them: it runs in the calling thread. So on such builds the child is made without those
handlers. That also keeps it off the card: its engine believes it has its threads, and starts none, whose first call to
CUDA a child cannot make.

Python's own handlers are run. Does not cover what a child is for (``child_process``), nor what those handlers would
mend: the C library's locks, where another thread was allocating memory at that very moment, and the threads of other
libraries, such as NumPy's. A child may hang over either, so whoever waits for it needs a clock.
"""

# ruff: noqa: SLF001 - torch has no public name for what a child may not do

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Callable
from functools import cache, partial
from itertools import tee
from operator import methodcaller

import torch

from autobatch.memory.device import end_failed_backward

__all__ = ["fork"]

_CLONE = {"x86_64": 56, "aarch64": 220}
"""The system call's number (``asm/unistd.h``), for C libraries older than ``_Fork`` (glibc 2.34)."""


def fork() -> int:
    """As ``os.fork``: 0 in the child, whose number is returned in the parent.

    Raises:
        OSError: The system has no process left.
    """
    if not has_cards_threads():
        return os.fork()
    if torch.cuda.is_initialized():
        end_failed_backward()  # where the threads are not there yet, the child would start its own
    child = fork_without_handlers()
    if child == 0:
        _keep_off_the_card()
    return child


def has_cards_threads() -> bool:
    """Whether autograd may have threads for cards in this process, or a child may start some."""
    is_built = torch.version.cuda is not None or torch.version.hip is not None
    return is_built and _find_fork() is not None


def fork_without_handlers() -> int:
    """Fork as ``fork`` does on builds with CUDA: Python's handlers run, those of C and C++ libraries do not."""
    make_child = _find_fork()
    assert make_child is not None  # noqa: S101 - the callers have asked
    python = ctypes.pythonapi
    before, in_parent, in_child = python.PyOS_BeforeFork, python.PyOS_AfterFork_Parent, python.PyOS_AfterFork_Child
    for function in (before, in_parent, in_child):
        function.restype, function.argtypes = None, ()
    made, children = tee(iter(make_child, None))
    after = map(methodcaller("__call__"), map((in_child, in_parent).__getitem__, map(bool, made)))
    # All of it in one call of C. Between two lines of Python the child of a parent that had been asked for the
    # interpreter's lock would hand it to a thread that it does not have and wait forever: 1 of 200 forks beside two
    # busy threads.
    next(zip(iter(before, ...), after, strict=True))
    child = next(children)
    if child < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return child


@cache
def _find_fork() -> Callable[[], int] | None:
    # PyDLL: the lock of the interpreter stays with this thread, as the functions around it expect.
    library = ctypes.PyDLL(None, use_errno=True)
    if hasattr(library, "_Fork"):
        function: Callable[[], int] = library._Fork
        return function
    number = _CLONE.get(platform.machine())
    return None if number is None else _make_clone(library, number)


def _make_clone(library: ctypes.PyDLL, number: int) -> Callable[[], int]:
    library.syscall.restype = ctypes.c_long
    return partial(library.syscall, *[ctypes.c_long(value) for value in (number, int(signal.SIGCHLD), 0, 0, 0, 0)])


def _keep_off_the_card() -> None:
    """Have torch say what it says in the child of a plain fork: CUDA cannot be used here."""
    torch.cuda._is_in_bad_fork = lambda: True
