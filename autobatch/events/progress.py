"""Shows on a terminal what ``fit`` and ``predict`` do: a line for each event, and a bar of the last trial's memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autobatch._formatting import format_bytes
from autobatch._user_errors import contextmanager
from autobatch.events.event import Event, Hook, TrialFinished

if TYPE_CHECKING:
    from rich.progress import Progress

_WIDE = 80
"""Columns of a terminal that has room for the bar and the time beside the texts."""


@contextmanager
def showing_progress(*, progress: bool) -> Iterator[tuple[Hook, ...]]:
    """Yield a hook that shows each event, or none if stderr is not a terminal; a daemon has no stderr."""
    if not progress or sys.stderr is None or not sys.stderr.isatty():
        yield ()
        return
    bar = _make_bar()
    task = bar.add_task("starting", total=None, memory="")

    def show(event: Event, /) -> None:
        bar.console.print(f"autobatch: {event}", markup=False, highlight=False)
        if isinstance(event, TrialFinished):
            peak, limit = event.trial.peak_reserved, event.limit_bytes
            memory = f"{format_bytes(peak)} of {format_bytes(limit)}" if peak and limit else ""
            name = f"{event.trial.micro_batch_size} samples: {event.trial.outcome}"
            bar.update(task, description=name, completed=peak, total=limit or None, memory=memory)
        bar.refresh()

    bar.start()
    try:
        yield (show,)
    finally:
        bar.stop()


def _make_bar() -> Progress:
    from rich.console import Console  # noqa: PLC0415 - `import autobatch` does not pay for it
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    console, memory = Console(stderr=True), TextColumn("{task.fields[memory]}")
    columns: list[ProgressColumn] = [TextColumn("{task.description}"), memory]
    if console.width >= _WIDE:
        columns = [TextColumn("autobatch: {task.description}"), BarColumn(), memory, TimeElapsedColumn()]
    # No thread redraws it: one that held a lock when a loader forks its processes would stop these.
    return Progress(*columns, console=console, transient=True, auto_refresh=False)
