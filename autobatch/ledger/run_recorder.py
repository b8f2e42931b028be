"""Records how a plan's steps went: the hook that a ``Runner`` calls for the ledger.

Covers when a run is written: with its first step, soon after memory was short, else every ten seconds, and at the end;
in between a step costs some microseconds. Does not cover how steps add up (``run_summary``).
"""

from __future__ import annotations

import _thread
import atexit
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from autobatch.events import Event, Retried, SizeChanged, StepFailed, StepFinished
from autobatch.events.rank_step import RankStep
from autobatch.events.run_history import Outcome, Run
from autobatch.ledger.ledger import TRAINING_WAITS_S, Ledger
from autobatch.ledger.run_summary import Tally, shorten_reason
from autobatch.ledger.store import plan_id
from autobatch.plan import Plan

__all__ = ["RunRecorder"]

_EVERY_S = 10.0
"""What a kill may lose of a run without setbacks."""

_AFTER_SETBACK_S = 1.0
"""Of many setbacks in a second the first is written at once and the others together."""

_MOST_WAITING = 1000
"""Steps, and rows of their ranks, that are added up at once."""

_SLOW_S = 0.25
_SELDOM = 100
"""After a write that took longer than that, wait so many times as long: a slow disk costs a hundredth of the time."""

_EXIT_WAITS_S = 5.0
"""For other writers, at the end of the process."""


class RunRecorder:
    """Records one run of a plan; the run begins with the first event of a step.

    Of several ranks the first one's process records the run of all. In a forked child it does nothing: the run is the
    parent's.

    Attributes:
        count_step: Counts a finished step, of which no event was made, and writes if it is time.
    """

    def __init__(self, plan: Plan, ledger: Ledger, *, every_s: float = _EVERY_S) -> None:
        """Write nothing yet; ``every_s`` is the least time between two writes without a setback."""
        self._current = _CurrentRun(plan, ledger, every_s)
        self.count_step = self._current.count_step
        # The run outlives the recorder by one write: a runner that nobody refers to any more has finished.
        weakref.finalize(self, _finish_unreferenced, self._current).atexit = False

    def __call__(self, event: Event, /) -> None:
        """Count a step or a setback, and write if it is time."""
        self._current.take(event)


class _CurrentRun:
    """A run that is written a last time when its recorder is gone or the process ends."""

    def __init__(self, plan: Plan, ledger: Ledger, every_s: float) -> None:
        self._plan, self._ledger, self._every_s = plan, ledger, every_s
        self._pid = os.getpid()
        self._steps: deque[tuple[int, Sequence[int], int, int, float, Sequence[RankStep]]] = deque()
        self._run: Run | None = None
        self._tally = Tally(plan.micro_batch_size)
        self._outcome: Outcome = "running"
        self._reason = ""
        self._file: Path | None = None  # which has the run
        self._least_wait_s = 0.0
        self._tried_at, self._wait_s, self._was_refused = -float("inf"), 0.0, False
        self._over = not ledger.is_enabled

    def take(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            numbers = event.retries, event.peak_bytes, event.seconds, event.ranks
            self.count_step(event.step, event.micro_batch_sizes, *numbers)
            return
        if self._over or os.getpid() != self._pid:
            return
        self._add_steps()
        if isinstance(event, (Retried, SizeChanged)):
            self._tally.add_setback(event)
            if not self._was_refused:  # waiting for another process's lock again and again would be felt
                self._wait_s = max(min(_AFTER_SETBACK_S, self._wait_s), self._least_wait_s)
        elif isinstance(event, StepFailed):  # the run has failed, unless another step follows
            stopped = event.reason.startswith(KeyboardInterrupt.__name__)
            self._outcome, self._reason = "interrupted" if stopped else "failed", shorten_reason(event.reason)
            self._wait_s = 0.0
        else:
            return
        self._write_if_due()

    def count_step(  # noqa: PLR0917 - called in every step
        self,
        step: int,
        sizes: Sequence[int],
        retries: int,
        peak_bytes: int,
        seconds: float,
        ranks: Sequence[RankStep] = (),
    ) -> None:
        if self._over:
            return
        self._steps.append((step, sizes, retries, peak_bytes, seconds, ranks))
        if time.monotonic() - self._tried_at >= self._wait_s and os.getpid() == self._pid:
            self._write(TRAINING_WAITS_S)
        elif len(self._steps) * (1 + len(ranks)) >= _MOST_WAITING:
            self._add_steps()

    def _add_steps(self) -> None:
        """Add up the steps since the last time: not one by one, as each new thing touched costs time in a step."""
        if self._steps:
            self._outcome, self._reason = "running", ""
        while self._steps:  # one by one: an interrupt must not count any of them twice
            self._tally.add_step(*self._steps.popleft())

    def _write_if_due(self) -> None:
        if time.monotonic() - self._tried_at >= self._wait_s:
            self._write(TRAINING_WAITS_S)

    def finish(self, patience_s: float = TRAINING_WAITS_S) -> None:
        """Write the rest; where that fails it is tried again at the end of the process."""
        if self._over or os.getpid() != self._pid or self._run is None:
            return
        self._add_steps()
        self._outcome = "finished" if self._outcome == "running" else self._outcome
        if self._write(patience_s):
            self._over = True
            _unfinished.discard(self)

    def _write(self, patience_s: float) -> bool:
        self._add_steps()
        now = time.time()
        run = self._run = self._run or self._begin(now)
        self._tried_at = time.monotonic()
        if self._file is None and self._ledger.begin_run(self._plan, run, patience_s):
            self._file = self._ledger.file
        update = self._tally.unwritten(run, now, self._outcome, self._reason)
        written = self._ledger.update_run(update, patience_s) if self._file else "not now"
        took_s = time.monotonic() - self._tried_at
        self._least_wait_s = _SELDOM * took_s if took_s > _SLOW_S else 0.0
        self._tried_at, self._wait_s = time.monotonic(), max(self._every_s, self._least_wait_s)
        self._was_refused = written == "not now"
        if written == "written":
            self._tally.drop_written()
        elif written == "forgotten" and self._ledger.file != self._file:
            self._file = None  # not deleted, but in a file that is damaged: the run goes on in the next one
            return self._write(patience_s)
        elif written == "forgotten":
            self._over = True  # a user deleted it, and does not want it back
            _unfinished.discard(self)
        return written == "written"

    def _begin(self, now: float) -> Run:
        _unfinished.add(self)
        run_id = secrets.token_hex(8)
        return Run(id=run_id, plan_id=plan_id(self._plan), pid=self._pid, started_at=now, last_seen_at=now)


_unfinished: set[_CurrentRun] = set()


def _finish_unreferenced(run: _CurrentRun) -> None:
    """Write the end of a run whose runner is gone; an interrupt meanwhile comes again when this is over.

    Python prints what a weak reference's callback raises and goes on (``handle_callback`` in Objects/weakrefobject.c),
    and a write may wait for others for long enough that a user interrupts it.
    """
    try:
        run.finish()
    except KeyboardInterrupt:
        threading.Timer(0.1, _thread.interrupt_main).start()


def _finish_all() -> None:
    """Within one time limit: a process must end, however many runs it had and whatever happened to the disk."""
    deadline = time.monotonic() + _EXIT_WAITS_S
    for run in list(_unfinished):
        run.finish(max(deadline - time.monotonic(), 0.0))
        if run in _unfinished:  # nor will the next one be written
            return


atexit.register(_finish_all)
