"""Defers signals whose Python handlers may raise, such as Ctrl-C, to the end of a block.

Only the main thread calls such handlers: those of SIGINT, of a DataLoader's SIGCHLD, and of the user. A signal that
ends the process is not deferred.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))  # Windows has fewer


_is_deferring = False
"""Of the main thread, the only one that sets it."""


class deferred_interrupts(AbstractContextManager[None]):  # noqa: N801 - named as a block, like ``contextlib.suppress``
    """A block in whose middle no handler of a signal is called, so that none raises; at its end they are."""

    def __enter__(self) -> None:
        """Put aside the handlers; a block inside another, or of another thread, has none to put aside."""
        global _is_deferring  # noqa: PLW0603 - as above
        self._handlers: dict[int, Callable[[int, Any], Any]] = {}
        self._came: dict[int, Any] = {}
        if _is_deferring or threading.current_thread() is not threading.main_thread():
            return
        self._handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
        try:
            for number in self._handlers:
                signal.signal(number, self._came.__setitem__)
        except BaseException:  # of a handler that was not put aside yet
            self._end([*self._handlers])
            raise
        _is_deferring = bool(self._handlers)

    def __exit__(self, *_: object) -> None:
        """Restore the handlers, and call those whose signal came."""
        global _is_deferring  # noqa: PLW0603 - as above
        if self._handlers:
            _is_deferring = False
            self._end([*self._handlers])

    def _end(self, numbers: Sequence[int]) -> None:
        """Restore the handlers of these signals, the last one first; all of it is done, also where a handler raises."""
        if numbers:
            try:
                signal.signal(numbers[-1], self._handlers[numbers[-1]])
            finally:
                self._end(numbers[:-1])
        elif self._came:
            self._call()

    def _call(self) -> None:
        """Call each handler whose signal came; of several that raise, Ctrl-C's error comes out."""
        with ExitStack() as calls:
            for number in sorted(self._came, key=lambda number: number != signal.SIGINT):  # the first is called last
                calls.callback(self._handlers[number], number, self._came[number])


def restore_each(*parts: Callable[[], object]) -> None:
    """Call these in order, without an interrupt between them. If one raises, the others are called all the same."""
    with deferred_interrupts(), ExitStack() as rest:
        for part in reversed(parts):
            rest.callback(part)
