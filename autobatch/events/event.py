"""``Event`` and ``Hook``: what is told, and who may listen.

Covers the log line of each event and calling hooks. Does not cover which events there are (``fitted``, ``stepped``).
Logger ``autobatch``; nothing is printed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from autobatch.records import Record

__all__ = ["Event", "Hook", "emit", "log_event"]

logger = logging.getLogger("autobatch")


class Event(Record):
    """Something that happened; its text is the log line."""

    @property
    def level(self) -> int:
        """The level at which the default hook logs it."""
        return logging.INFO


class Hook(Protocol):
    """Anything that can be called with an event."""

    def __call__(self, event: Event, /) -> None:
        """Take note of it. What this raises costs a log line, never a step."""


def log_event(event: Event) -> None:
    """The default hook: the event's one line on logger ``autobatch``."""
    logger.log(event.level, "%s", event)


def emit(event: Event, hooks: Iterable[Hook] = ()) -> None:
    """Log the event, then hand it to each hook; a hook that raises is reported and passed over."""
    log_event(event)
    for hook in hooks:
        try:
            hook(event)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the hook's and not the step's
            _warn(hook, event, error)


def _warn(hook: Hook, event: Event, error: Exception) -> None:
    """With its traceback the first time; a tracker that is away fails at every step."""
    if not _is_known(hook):
        name = type(event).__name__
        logger.error(
            "autobatch: hook %r failed on %s and was passed over; further failures of it are not told",
            hook,
            name,
            exc_info=error,
        )


def _is_known(hook: Hook) -> bool:
    """Whether it has failed before; from now on it has."""
    is_known = any(other() is hook for other in _failed)
    if not is_known:
        _failed[:] = [other for other in _failed if other() is not None] + [_refer_to(hook)]
    return is_known


def _refer_to(hook: Hook) -> Callable[[], Hook | None]:
    # Without a callback: what is raised in one, a KeyboardInterrupt too, is printed and lost.
    try:
        return weakref.ref(hook)
    except TypeError:  # a builtin, or one with slots
        return lambda: hook


_failed: list[Callable[[], Hook | None]] = []
