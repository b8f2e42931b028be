"""Defers signals whose Python handlers may raise, such as Ctrl-C, to the end of a block.

Only the main thread calls such handlers: those of SIGINT, of a DataLoader's SIGCHLD, and of the user. A signal that
ends the process is not deferred.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from autobatch._user_errors import contextmanager

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))  # Windows has fewer


_is_deferring = False
"""Of the main thread, the only one that sets it."""


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """A block in whose middle no handler of a signal is called, so that none raises; at its end they are."""
    global _is_deferring  # noqa: PLW0603 - a block inside another has nothing to hold back
    if _is_deferring or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    came: dict[int, Any] = {}
    with ExitStack() as end:  # all of it is done, also where a handler raises
        end.callback(_call, handlers, came)
        for number, handler in handlers.items():
            end.callback(signal.signal, number, handler)
            signal.signal(number, came.__setitem__)
        _is_deferring = True
        try:
            yield
        finally:
            _is_deferring = False


def restore_each(*parts: Callable[[], object]) -> None:
    """Call these in order, without an interrupt between them. If one raises, the others are called all the same."""
    with deferred_interrupts(), ExitStack() as rest:
        for part in reversed(parts):
            rest.callback(part)


def _call(handlers: Mapping[int, Callable[[int, Any], Any]], came: Mapping[int, Any]) -> None:
    """Each handler whose signal came; of several that raise, Ctrl-C's error comes out."""
    with ExitStack() as calls:
        for number in sorted(came, key=lambda number: number != signal.SIGINT):  # the first of these is called last
            calls.callback(handlers[number], number, came[number])
