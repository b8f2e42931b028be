"""Defines ``Event`` and ``Hook``, logs each event in one line and calls the hooks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from autobatch._bounds import Count
from autobatch.records import Record

logger = logging.getLogger("autobatch")


class Event(Record):
    """Something that happened; its text is the log line.

    Attributes:
        rank: Rank of the process, from 0.
        world_size: Number of ranks.
    """

    rank: Count = 0
    world_size: Count = 1

    @property
    def source(self) -> str:
        """Beginning of the log line: ``"rank 3 of 8: "``, or empty with one rank."""
        return "" if self.world_size == 1 else f"rank {self.rank} of {self.world_size}: "

    @property
    def level(self) -> int:
        """Level at which it is logged."""
        return logging.INFO


class Hook(Protocol):
    """Anything that can be called with an event."""

    def __call__(self, event: Event, /) -> None:
        """Handle the event. An error that is raised here costs a log line, never a step."""


def log_event(event: Event) -> None:
    """Log the event's line on logger ``autobatch``."""
    logger.log(event.level, "%s", event)


def emit(event: Event, hooks: Iterable[Hook] = ()) -> None:
    """Log the event, then call each hook with it; an error of a hook is logged and the next one is called."""
    log_event(event)
    for hook in hooks:
        try:
            hook(event)
        except Exception as error:  # noqa: BLE001 - an error of a hook must not end the step
            _log_failure(hook, event, error)


_failed: list[Callable[[], Hook | None]] = []
"""Hooks that have failed, as weak references. Each is logged once: an unreachable tracker fails in every step."""


def _log_failure(hook: Hook, event: Event, error: Exception) -> None:
    if any(other() is hook for other in _failed):
        return
    _failed[:] = [other for other in _failed if other() is not None] + [_refer_to(hook)]
    name = type(event).__name__
    logger.error("hook %r failed on %s; its further failures are not logged", hook, name, exc_info=error)


def _refer_to(hook: Hook) -> Callable[[], Hook | None]:
    try:
        return weakref.ref(hook)
    except TypeError:  # a builtin, or an object with slots
        return lambda: hook
