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


@contextmanager
def showing_progress(*, progress: bool) -> Iterator[tuple[Hook, ...]]:
    """Yield a hook that shows each event, or none if stderr is not a terminal; a daemon has no stderr."""
    if not progress or sys.stderr is None or not sys.stderr.isatty():
        yield ()
        return
    bar = _make_bar()
    task = bar.add_task("starting", total=None, memory="")

    def show(event: Event, /) -> None:
        bar.console.print(f"autobatch: {event}", markup=False, highlight=False, soft_wrap=True)
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
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = TextColumn("autobatch: {task.description}"), BarColumn(), TextColumn("{task.fields[memory]}")
    # No thread redraws it: one that held a lock when a loader forks its processes would stop these.
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, auto_refresh=False)
