"""Runs a function in a fork of this process, so that nothing it does can harm the parent.

A trace registers a device with torch for good, and goes through C++ that may abort. The fork sees the user's model
without a copy, and only its result comes back. On Windows and macOS, which cannot or must not fork, it runs here.

torch refuses backward passes in the child of a process that has run one on a card: a handler of the C library says at
the fork that autograd's threads are gone (``forked_autograd_child`` in ``torch/csrc/autograd/engine.cpp``). A trace
needs none of them. So on builds for cards the child is made without the handlers of C libraries. It stays off the card,
and may hang if another thread held a lock at that moment, so whoever waits for it needs a clock.
"""

# ruff: noqa: SLF001 - torch has no public name for what a child may not do

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import platform
import select
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import tee
from operator import methodcaller
from typing import IO, Any, TypeVar

import torch

from autobatch.errors import InvalidArgument
from autobatch.memory.device import ONE_AT_A_TIME, end_failed_backward

MOST_SECONDS = 300.0  # a trace takes seconds
_FILTERS = threading.Lock()
_FORKS = sys.platform.startswith("linux")
_DEATH_SIGNAL = 1
_WELL = "exit status 0"
_STDOUT, _STDERR = 1, 2
_LONGEST = 200
_PARENTS_STREAMS: list[Any] = []
"""A child keeps them: a stream that a user made of descriptor 1 or 2 closes it when it is freed."""
_Result = TypeVar("_Result")


def run_apart(function: Callable[[], _Result], most_seconds: float = MOST_SECONDS) -> _Result:
    """Run the function in a child process, which sees all it holds; ``InvalidArgument`` if that crashes or hangs."""
    with begin_apart(function, most_seconds) as answer:
        return answer()


@contextmanager
def begin_apart(function: Callable[[], _Result], most_seconds: float = MOST_SECONDS) -> Iterator[Callable[[], _Result]]:
    """Run the function while the block runs; the yielded function waits for the result, once.

    The child ends with the block. Without a fork the function runs when its result is asked for.
    """
    if not _FORKS:
        with ONE_AT_A_TIME:  # a trace changes torch's functions for all threads
            yield function
        return
    with tempfile.TemporaryFile() as answered, tempfile.TemporaryFile() as printed:
        child, ended = _start(function, answered, printed)
        deadline, ends = time.monotonic() + most_seconds, list[str]()

        def answer() -> _Result:
            ready, left = select.poll(), deadline - time.monotonic()  # select() takes no descriptor above 1023
            ready.register(ended, select.POLLIN)
            if left <= 0 or not ready.poll(1000 * left):
                raise InvalidArgument("the trace did not come to an end in time; run fit() on a GPU")
            ends.append(_wait(child))
            result: _Result = _unpack(answered, ends[0], printed)
            return result

        try:
            yield answer
        finally:
            os.close(ended)
            if not ends:
                _stop(child)


def _start(function: Callable[[], Any], answered: IO[bytes], printed: IO[bytes]) -> tuple[int, int]:
    pipe: tuple[int, ...] = ()
    try:
        pipe = os.pipe()
        # All threads share one list of filters: two that change and restore it in turn would leave it changed.
        with _FILTERS, warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads; the child uses none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = fork()
    except OSError as error:
        for end in pipe:
            os.close(end)
        raise InvalidArgument(f"a trace needs a process of its own, and none could be started ({error})") from error
    reading, writing = pipe
    if child == 0:
        _answer(function, answered, printed, writing)
    os.close(writing)
    return child, reading


def _answer(function: Callable[[], Any], answered: IO[bytes], printed: IO[bytes], ended: int) -> None:
    """In the child: run the function, and end without the parent's clean-up."""
    status = 1
    gc.freeze()  # the parent's garbage may wait, as it is freed, for threads that are not here
    try:
        # A killed child takes its children with it (prctl(2), PR_SET_PDEATHSIG).
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGKILL))
        # Files have the numbers of standard streams if the process was started with those closed.
        import fcntl  # noqa: PLC0415 - Windows has none, and no child

        numbers = (answered.fileno(), printed.fileno(), ended)
        answers, prints, ended = (fcntl.fcntl(number, fcntl.F_DUPFD, 1 + _STDERR) for number in numbers)
        for stream in (_STDOUT, _STDERR):  # as C++ knows them; Python's are others in notebooks
            os.dup2(prints, stream)
        _PARENTS_STREAMS.extend((sys.stdout, sys.stderr))
        sys.stdout = sys.stderr = os.fdopen(prints, "w", buffering=1, errors="replace")
        torch.set_num_threads(1)  # the pool's threads are the parent's, and never answer here
        with os.fdopen(answers, "wb") as file:
            file.write(_pack(function))
        os.write(ended, b".")  # processes that were forked beside this one may hold the pipe open
        status = 0
    finally:
        os._exit(status)


def _pack(function: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((False, function()))
    except BaseException as error:  # noqa: BLE001 - raised again in the parent
        # Parts, if the constructor wants other arguments than the error keeps; some errors do not travel at all.
        for answer in (error, (type(error), error.args, vars(error))):
            with suppress(Exception):
                packed = pickle.dumps((True, answer))
                joined = _join(pickle.loads(packed)[1])  # noqa: S301 - our own
                if answer is not error or repr(joined) == repr(error):
                    return packed
        said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        return pickle.dumps((True, InvalidArgument("; ".join(said))))


def _join(answer: Any) -> BaseException:
    """Make the error of its parts, without its constructor."""
    if isinstance(answer, BaseException):
        return answer
    kind, arguments, attributes = answer
    error: BaseException = kind.__new__(kind)
    error.args = arguments
    vars(error).update(attributes)
    return error


def _wait(child: int) -> str:
    """How the child ended; ``_WELL`` also if that is unknown, since ``SIGCHLD`` is ignored."""
    try:
        _, status = os.waitpid(child, 0)
    except ChildProcessError:
        return _WELL
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _stop(child: int) -> None:
    # With SIGCHLD ignored the kernel has waited for a dead child, and its number may belong to another process.
    with suppress(ChildProcessError, ProcessLookupError):
        if os.waitpid(child, os.WNOHANG) == (0, 0):
            os.kill(child, signal.SIGKILL)
            _wait(child)


def _unpack(answered: IO[bytes], end: str, printed: IO[bytes]) -> Any:
    if end != _WELL:
        printed.seek(0)
        lines = printed.read()[-_LONGEST:].decode(errors="replace").strip().splitlines()
        said = f": {lines[-1].strip()}" if lines else ""
        raise InvalidArgument(
            f"the trace ended the process that it ran in ({end}{said}), and nothing else; run fit() on a GPU"
        )
    answered.seek(0)
    try:
        has_failed, result = pickle.load(answered)  # noqa: S301 - our own child wrote it
    except (pickle.UnpicklingError, EOFError) as error:
        raise InvalidArgument("the trace ended in the middle of its answer; run fit() on a GPU") from error
    if has_failed:
        raise _join(result)
    return result


_CLONE = {"x86_64": 56, "aarch64": 220}
"""The system call's number (``asm/unistd.h``), for C libraries older than ``_Fork`` (glibc 2.34)."""


def fork() -> int:
    if not has_cards_threads():
        return os.fork()
    if torch.cuda.is_initialized():
        end_failed_backward()  # starts the threads here; else the child would start its own
    child = fork_without_handlers()
    if child == 0:  # torch then refuses CUDA as in the child of a plain fork
        torch.cuda._is_in_bad_fork = lambda: True
    return child


def has_cards_threads() -> bool:
    is_built = torch.version.cuda is not None or torch.version.hip is not None
    return is_built and _find_fork() is not None


def fork_without_handlers() -> int:
    """Fork with Python's handlers and without those of C libraries."""
    make_child = _find_fork()
    assert make_child is not None  # noqa: S101 - has_cards_threads() asked before
    python = ctypes.pythonapi
    before, in_parent, in_child = python.PyOS_BeforeFork, python.PyOS_AfterFork_Parent, python.PyOS_AfterFork_Child
    for function in (before, in_parent, in_child):
        function.restype, function.argtypes = None, ()
    made, children = tee(iter(make_child, None))
    after = map(methodcaller("__call__"), map((in_child, in_parent).__getitem__, map(bool, made)))
    # One call of C does it all. Between two lines of Python the child could hand the interpreter's lock to a thread
    # that it does not have, and wait forever: 1 of 200 forks beside two busy threads.
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
