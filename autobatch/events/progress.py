"""Shows on a terminal what ``fit`` and ``predict`` do: a line for each event, and a bar of the last trial's memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from autobatch._formatting import format_bytes
from autobatch.events.event import Event, Hook
from autobatch.events.fit_events import TrialFinished

if TYPE_CHECKING:
    from rich.progress import Progress


class showing_progress:  # noqa: N801 - a context manager; one of contextlib would write into the user's error
    """Yields a hook that shows each event, or none if stderr is not a terminal; a daemon has no stderr."""

    def __init__(self, *, progress: bool) -> None:
        is_shown = progress and sys.stderr is not None and sys.stderr.isatty()
        self._bar = _make_bar() if is_shown else None

    def __enter__(self) -> tuple[Hook, ...]:
        if self._bar is None:
            return ()
        self._task = self._bar.add_task("starting", total=None, memory="")
        self._bar.start()
        return (self._show,)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, event: Event, /) -> None:
        assert self._bar is not None  # noqa: S101 - narrows for mypy
        self._bar.console.print(f"autobatch: {event}", markup=False, highlight=False, soft_wrap=True)
        if isinstance(event, TrialFinished):
            peak, limit = event.trial.peak_reserved, event.limit_bytes
            memory = f"{format_bytes(peak)} of {format_bytes(limit)}" if peak and limit else ""
            name = f"{event.trial.micro_batch_size} samples: {event.trial.outcome}"
            self._bar.update(self._task, description=name, completed=peak, total=limit or None, memory=memory)
        self._bar.refresh()


def _make_bar() -> Progress:
    from rich.console import Console  # noqa: PLC0415 - `import autobatch` does not pay for it
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = TextColumn("autobatch: {task.description}"), BarColumn(), TextColumn("{task.fields[memory]}")
    # No thread redraws it: one that held a lock when a loader forks its processes would stop these.
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, auto_refresh=False)
