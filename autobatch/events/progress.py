"""Shows on a terminal what a long call is doing: the events of its trials and stages, a line each."""

from __future__ import annotations

import sys

from autobatch.events.event import Event, Hook

__all__ = ["progress_hooks"]


def progress_hooks(*, progress: bool) -> tuple[Hook, ...]:
    """The hook that writes each event on stderr, if that is a terminal; a daemon has no stderr."""
    return (_show,) if progress and sys.stderr is not None and sys.stderr.isatty() else ()


def _show(event: Event) -> None:
    sys.stderr.write(f"autobatch: {event}\n")
    sys.stderr.flush()
