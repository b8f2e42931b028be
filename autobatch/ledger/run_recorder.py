"""``RunRecorder``: the hook that writes down how a plan's steps went.

Covers when a run is written: with its first step, soon after memory was short, else every ten seconds, and at the end.
Does not cover what is counted (``notes``) nor where it goes (``ledger``). A step costs it some microseconds, in which
nothing is written.
"""

from __future__ import annotations

import _thread
import atexit
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from autobatch.events import Event, Retried, SizeChanged, StepFailed, StepFinished
from autobatch.events.run_history import Outcome, Run
from autobatch.ledger.failure_reason import shorten
from autobatch.ledger.ledger import TRAINING_WAITS_S, Ledger
from autobatch.ledger.rows import identify
from autobatch.ledger.run_summary import Tally
from autobatch.plan import Plan

__all__ = ["RunRecorder"]

_EVERY_S = 10.0
"""What a kill may cost of a run without trouble."""

_AFTER_SETBACK_S = 1.0
"""Of many setbacks in a second the first is written at once and the others together."""

_SLOW_S = 0.25
_SELDOM = 100
"""Where a write took longer than that, so many times as long is waited: a slow disk costs a hundredth of the time."""

_EXIT_WAITS_S = 5.0
"""For other writers: nothing else is left to do."""


class RunRecorder:
    """Keeps one run of a plan; the run begins with the first event of a step.

    The run is told apart from others by an id of its own. A plan without an id is kept under one that follows from its
    content. In a forked child it does nothing: the run is the parent's.
    """

    def __init__(self, plan: Plan, ledger: Ledger, *, every_s: float = _EVERY_S) -> None:
        """Bind to a plan and a ledger; nothing is written yet.

        Args:
            plan: Whose steps these are; it is kept too, where it is not yet.
            ledger: Where to.
            every_s: The least time between two writes without a setback.
        """
        self._journal = _Journal(plan, ledger, every_s)
        # The journal outlives the keeper by one write: a runner that nobody holds any more has finished.
        weakref.finalize(self, _finish_unheld, self._journal).atexit = False

    def __call__(self, event: Event, /) -> None:
        """Count a step or a setback, and write if it is time."""
        self._journal.take(event)

    def count_step(self, step: int, sizes: Sequence[int], retries: int, peak_bytes: int, seconds: float) -> None:
        """Count a finished step, of which no event was made, and write if it is time.

        Args:
            step: Which one, counted from 0.
            sizes: Its micro-batches.
            retries: How often memory ended in it.
            peak_bytes: Most bytes in tensors at once.
            seconds: Wall time.
        """
        self._journal.count_step(step, sizes, retries, peak_bytes, seconds)


class _Journal:
    """A run's state, which is written a last time when the keeper is gone or the process ends."""

    def __init__(self, plan: Plan, ledger: Ledger, every_s: float) -> None:
        self._plan, self._ledger, self._every_s = plan, ledger, every_s
        self._pid = os.getpid()
        self._run: Run | None = None
        self._tally = Tally(plan.micro_batch_size)
        self._outcome: Outcome = "running"
        self._reason = ""
        self._begun = False
        self._file: Path | None = None
        self._least_wait_s = 0.0
        self._tried_at, self._wait_s, self._was_refused = -float("inf"), 0.0, False
        self._over = not ledger.is_kept

    def take(self, event: Event) -> None:
        if self._over or os.getpid() != self._pid:
            return
        if isinstance(event, StepFinished):
            sizes = event.micro_batch_sizes
            self.count_step(event.step, sizes, event.retries, event.peak_bytes, event.seconds)
            return
        if isinstance(event, (Retried, SizeChanged)):
            self._tally.add_setback(event)
            self._hurry()
        elif isinstance(event, StepFailed):  # the run has failed, unless another step follows
            stopped = event.reason.startswith(KeyboardInterrupt.__name__)
            self._outcome, self._reason = "interrupted" if stopped else "failed", shorten(event.reason)
            self._wait_s = 0.0
        else:
            return
        if time.monotonic() - self._tried_at >= self._wait_s:
            self._write(TRAINING_WAITS_S)

    def count_step(self, step: int, sizes: Sequence[int], retries: int, peak_bytes: int, seconds: float) -> None:
        if self._over or os.getpid() != self._pid:
            return
        self._tally.add_step(step, sizes, retries, peak_bytes, seconds)
        self._outcome, self._reason = "running", ""
        if time.monotonic() - self._tried_at >= self._wait_s:
            self._write(TRAINING_WAITS_S)

    def finish(self, patience_s: float = TRAINING_WAITS_S) -> None:
        """Write the rest; where that fails it stays among the unfinished, for the end of the process."""
        if self._over or os.getpid() != self._pid or self._run is None:
            return
        self._outcome = "finished" if self._outcome == "running" else self._outcome
        if self._write(patience_s):
            self._over = True
            _unfinished.discard(self)

    def _hurry(self) -> None:
        if not self._was_refused:  # waiting for somebody's lock again and again would be felt
            self._wait_s = max(min(_AFTER_SETBACK_S, self._wait_s), self._least_wait_s)

    def _write(self, patience_s: float) -> bool:
        now = time.time()
        run = self._run = self._run or self._begin(now)
        self._tried_at = time.monotonic()
        if not self._begun:
            self._begun, self._file = self._ledger.begin(self._plan, run, patience_s), self._ledger.file
        notes = self._tally.note(run.id, now, self._outcome, self._reason)
        written = self._ledger.note(notes, patience_s) if self._begun else "not now"
        took_s = time.monotonic() - self._tried_at
        self._least_wait_s = _SELDOM * took_s if took_s > _SLOW_S else 0.0
        self._tried_at, self._wait_s = time.monotonic(), max(self._every_s, self._least_wait_s)
        self._was_refused = written == "not now"
        if written == "written":
            self._tally.forget_written()
        elif written == "forgotten" and self._ledger.file != self._file:
            self._begun = False  # not forgotten, but in a file that is damaged: the run goes on in the next one
            return self._write(patience_s)
        elif written == "forgotten":
            self._over = True  # whoever had it forgotten does not want it back
            _unfinished.discard(self)
        return written == "written"

    def _begin(self, now: float) -> Run:
        _unfinished.add(self)
        return Run(
            id=secrets.token_hex(8),
            plan_id=identify(self._plan),
            pid=self._pid,
            started_at=now,
            last_seen_at=now,
        )


_unfinished: set[_Journal] = set()

_AGAIN_S = 0.1


def _finish_unheld(journal: _Journal) -> None:
    """Write the end of a run whose runner is gone; an interrupt meanwhile comes again when this is over.

    Python prints what a weak reference's callback raises and goes on (``handle_callback`` in Objects/weakrefobject.c),
    and a write may wait for others for as long as somebody loses patience.
    """
    try:
        journal.finish()
    except KeyboardInterrupt:
        threading.Timer(_AGAIN_S, _thread.interrupt_main).start()


def _finish_all() -> None:
    """Within one time limit: a process must end, however many runs it had and whatever became of the disk."""
    deadline = time.monotonic() + _EXIT_WAITS_S
    for journal in list(_unfinished):
        journal.finish(max(deadline - time.monotonic(), 0.0))
        if journal in _unfinished:  # nor will the next one be written
            return


atexit.register(_finish_all)
