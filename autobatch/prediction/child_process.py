"""Runs a function in a child of this process, so that nothing it does can harm the parent.

Covers tracing, which registers a device with torch for the life of a process and goes through C++ that aborts where an
error finds it unprepared. The child is a fork (``forking``): it sees the user's model without a copy, and only its
result comes back. What it prints is dropped, but for the last line before a crash. Where a process cannot fork
(Windows) or must not (macOS, whose system libraries forbid it), the function runs here.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TypeVar

import torch

from autobatch.errors import InvalidArgument
from autobatch.prediction.forking import fork
from autobatch.undo.process_lock import one_at_a_time

__all__ = ["MOST_SECONDS", "begin_apart", "run_apart"]

MOST_SECONDS = 300.0
"""A trace takes seconds; what takes longer hangs."""

_FILTERS = threading.Lock()
_FORKS = sys.platform.startswith("linux")
_DEATH_SIGNAL = 1
_WELL = "exit status 0"
_STDOUT, _STDERR = 1, 2
_LONGEST = 200
_PARENTS_STREAMS: list[Any] = []
"""Kept by a child: those that a user made of descriptors 1 and 2 close these as they are let go of."""
_Result = TypeVar("_Result")


def run_apart(function: Callable[[], _Result], most_seconds: float = MOST_SECONDS) -> _Result:
    """The function's result, from a child process where there can be one; results and errors are pickled.

    Args:
        function: Takes nothing; it and all it holds are seen by the child as they are now.
        most_seconds: After these the child is killed.

    Raises:
        InvalidArgument: The child was killed, by itself or by the clock. What the function raises comes out as it is.
    """
    with begin_apart(function, most_seconds) as answer:
        return answer()


@contextmanager
def begin_apart(function: Callable[[], _Result], most_seconds: float = MOST_SECONDS) -> Iterator[Callable[[], _Result]]:
    """The same while the block goes on: what is yielded waits for the result, once. At the block's end the child ends.

    Where there can be no child, the function runs when it is asked for.
    """
    if not _FORKS:
        with one_at_a_time():  # a trace changes torch's functions, which are those of all threads
            yield function
        return
    with tempfile.TemporaryFile() as answered, tempfile.TemporaryFile() as printed:
        child, ended = _start(function, answered, printed)
        deadline, ends = time.monotonic() + most_seconds, list[str]()

        def answer() -> _Result:
            _await_end(ended, deadline)
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
    """The child, and the end of a pipe that can be read when it has answered or died."""
    pipe: tuple[int, ...] = ()
    try:
        pipe = os.pipe()
        # The filters are one list for all threads: two that change it and put it back in turn would leave it changed.
        with _FILTERS, warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads. The child uses one thread and none of their locks.
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
    """In the child: note what comes of the function, and end without the parent's clean-up."""
    status = 1
    gc.freeze()  # what the parent has let go of may wait, as it is freed, for threads that are not here
    try:
        # A child that is killed for its time takes its own children with it (prctl(2), PR_SET_PDEATHSIG).
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGKILL))
        # Not the numbers of the standard streams, which files get where a process was started with those closed.
        answers, prints, ended = (_above_standard(number) for number in (answered.fileno(), printed.fileno(), ended))
        for stream in (_STDOUT, _STDERR):  # as C++ knows them; Python's are others in notebooks
            os.dup2(prints, stream)
        _PARENTS_STREAMS.extend((sys.stdout, sys.stderr))
        sys.stdout = sys.stderr = os.fdopen(prints, "w", buffering=1, errors="replace")
        torch.set_num_threads(1)  # the pool's threads are the parent's: whoever waits for them here waits forever
        with os.fdopen(answers, "wb") as file:
            file.write(_pack(function))
        os.write(ended, b".")  # others may hold the pipe open, such as processes that were forked beside this one
        status = 0
    finally:
        os._exit(status)


def _above_standard(descriptor: int) -> int:
    import fcntl  # noqa: PLC0415 - Windows has none, and no child

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1 + _STDERR)


def _pack(function: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((False, function()))
    except SystemExit as error:
        message = f"the step ends its process (sys.exit({error.code!r})); run fit() on a GPU"
        return pickle.dumps((True, InvalidArgument(message)))
    except Exception as error:  # noqa: BLE001 - raised again in the parent
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 - some errors only fail on the way back
            return pickle.dumps((True, error))
        except Exception:  # noqa: BLE001 - an error of the user's own that does not travel
            return pickle.dumps((True, InvalidArgument(f"{type(error).__name__}: {error}")))


def _await_end(ended: int, deadline: float) -> None:
    ready, left = select.poll(), deadline - time.monotonic()  # select() takes no descriptor above 1023
    ready.register(ended, select.POLLIN)
    if left <= 0 or not ready.poll(1000 * left):
        raise InvalidArgument("the trace did not come to an end in time; run fit() on a GPU")


def _wait(child: int) -> str:
    """How it ended; ``_WELL`` also where that cannot be known, since ``SIGCHLD`` is ignored."""
    try:
        _, status = os.waitpid(child, 0)
    except ChildProcessError:
        return _WELL
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _stop(child: int) -> None:
    # Where SIGCHLD is ignored, the kernel has waited for a child that is gone, and its number may be another's by now.
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
        raise result
    return result
