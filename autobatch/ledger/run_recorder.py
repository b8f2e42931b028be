"""Records the steps of a plan: the hook that a ``Runner`` calls for the ledger.

Steps add up in memory. The first step, changes of the size, an error of a step and the end are written at once. Other
steps are written a second later, in long runs up to ten seconds later. A kill loses no more than that.
"""

from __future__ import annotations

import os
import re
import secrets
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autobatch.events import Event, Retried, SizeChanged, StepFailed, StepFinished
from autobatch.events.run_history import Outcome, RankTotal, RunUpdate, Setback, StepRange
from autobatch.events.runner_events import RankStep
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.store import runs_id
from autobatch.plan import Plan

_LEAST_WAIT_S, _MOST_WAIT_S = 1.0, 10.0
_PART_OF_AGE = 0.005  # so that the file of a run of weeks stays small
_PART_OF_RANK = 0.1  # of a line: with many ranks it is long, and written less often
_MOST_OF_TIME = 0.01  # a slow disk must not slow the steps down

_MOST_ROWS = 4096
"""Ranges of a run, and its setbacks; later steps add up in the last range, later setbacks are its retries."""

_MOST_WAITING = 1000  # steps, and rows of their ranks, that are not added up yet
_LONGEST_REASON = 300
_PATH = re.compile(r"""(['"])[^'"]*[/\\][^'"]*\1|\S*[/\\]\S*""")


class RunRecorder:
    """Records one run of a plan. Rank 0 records for all ranks; a forked child records nothing.

    Attributes:
        count_step: Counts a finished step, for which no event was made.
    """

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        """Write nothing before the first step."""
        run = _RunFile(plan, ledger)
        self._take, self.count_step = run.take, run.count_step
        weakref.finalize(self, run.finish)  # also at the end of the process

    def __call__(self, event: Event, /) -> None:
        """Count a step, a setback or an error."""
        self._take(event)


@dataclass
class _Sum:
    """Sums of steps: a ``RankTotal``, or without ``steps`` a ``StepRange``, that still grows."""

    steps: int = 0
    samples: int = 0
    micro_batch_size: int = 0
    retries: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0

    def add(self, samples: int, micro_batch_size: int, retries: int, peak_bytes: int, seconds: float) -> None:
        self.steps += 1
        self.samples += samples
        self.micro_batch_size = max(self.micro_batch_size, micro_batch_size)
        self.retries += retries
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.seconds += seconds


class _RunFile:
    """The run's sums, and which of them its file has."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan, self._ledger = plan, ledger
        self._id, self._pid = secrets.token_hex(8), os.getpid()
        self._started_at, self._began = time.time(), time.monotonic()
        self._outcome: Outcome = "running"
        self._reason = ""
        self._size = self._range_size = plan.micro_batch_size  # the most in a micro-batch now, and in the last range
        self._next_step = -1  # that continues the last range
        self._steps: list[tuple[int, Sequence[int], int, int, float, Sequence[RankStep]]] = []  # not added up yet
        self._ranges: list[tuple[int, _Sum]] = []  # with the first step of each
        self._setbacks: list[Setback] = []
        self._ranks: list[_Sum] = []
        self._ranges_written = self._setbacks_written = 0
        self._has_plan = False  # in the ledger
        self._due_at = self._rests_until = -float("inf")
        self._is_over = not ledger.is_enabled

    def take(self, event: Event) -> None:
        """Count what an event reports."""
        if self._is_over:
            return
        if isinstance(event, StepFinished):
            numbers = event.retries, event.peak_bytes, event.seconds, event.ranks
            self.count_step(event.step, event.micro_batch_sizes, *numbers)
        elif isinstance(event, (Retried, SizeChanged)):
            self._add_steps()
            self._size = event.new_size
            if len(self._setbacks) < _MOST_ROWS:
                self._setbacks.append(_make_setback(event))
                if time.monotonic() >= self._rests_until:
                    self._write()
        elif isinstance(event, StepFailed):  # the run has failed, unless another step follows
            self._add_steps()
            stopped = event.reason.startswith(KeyboardInterrupt.__name__)
            self._outcome, self._reason = "interrupted" if stopped else "failed", _shorten(event.reason)
            self._write()

    def count_step(  # noqa: PLR0917 - called in every step
        self,
        step: int,
        sizes: Sequence[int],
        retries: int,
        peak_bytes: int,
        seconds: float,
        ranks: Sequence[RankStep] = (),
    ) -> None:
        """Note a finished step; they are added up later, since each object that a step touches costs it time."""
        if self._is_over:
            return
        self._steps.append((step, sizes, retries, peak_bytes, seconds, ranks))
        if time.monotonic() >= self._due_at:
            self._write()
        elif len(self._steps) * (1 + len(ranks)) >= _MOST_WAITING:
            self._add_steps()

    def _add_steps(self) -> None:
        """Add steps to the last range; one of another size, or with retries after one without, begins a range."""
        if self._steps:
            self._outcome, self._reason = "running", ""
        steps, self._steps = self._steps, []
        for step, sizes, retries, peak_bytes, seconds, ranks in steps:
            # By the size that is allowed: with batches of many lengths, the largest that ran differs in each step.
            last = self._ranges[-1][1] if self._ranges else None
            is_alike = last is not None and self._range_size == self._size and (last.retries > 0) == (retries > 0)
            if last is None or step != self._next_step or not (is_alike or len(self._ranges) >= _MOST_ROWS):
                last, self._range_size = _Sum(), self._size
                self._ranges.append((step, last))
            last.add(sum(sizes), max(sizes, default=0), retries, peak_bytes, seconds)
            self._next_step = step + 1
            if ranks:
                self._ranks = self._ranks or [_Sum() for _ in ranks]
                for total, one in zip(self._ranks, ranks, strict=False):
                    total.add(one.samples, one.micro_batch_size, one.retries, one.peak_bytes, one.seconds)

    def finish(self) -> None:
        """Write the end, if anything has happened."""
        self._add_steps()
        if not self._is_over and (self._ranges or self._setbacks or self._outcome != "running"):
            self._outcome = "finished" if self._outcome == "running" else self._outcome
            self._write()
        self._is_over = True

    def _write(self) -> None:
        """Append what the file does not have yet; the last range is written again for as long as it grows."""
        if os.getpid() != self._pid:
            self._is_over = True  # in a forked child, whose parent has the run
            return
        began = time.monotonic()
        self._add_steps()
        first = max(self._ranges_written - 1, 0)
        self._has_plan = self._has_plan or self._ledger.begin_run(self._plan)
        written = self._ledger.update_run(self._describe(first)) if self._has_plan else "not now"
        if written == "written":
            self._ranges_written, self._setbacks_written = len(self._ranges), len(self._setbacks)
        self._is_over = written == "forgotten"  # the user has deleted the plan, and does not want the run back
        now = time.monotonic()
        wait_s = min(_LEAST_WAIT_S + _PART_OF_AGE * (now - self._began), _MOST_WAIT_S)
        self._rests_until = now + (now - began) / _MOST_OF_TIME
        self._due_at = max(now + wait_s * (1 + _PART_OF_RANK * len(self._ranks)), self._rests_until)

    def _describe(self, first: int) -> RunUpdate:
        return RunUpdate(
            id=self._id,
            plan_id=runs_id(self._plan),
            pid=self._pid,
            started_at=self._started_at,
            last_seen_at=time.time(),
            outcome=self._outcome,
            reason=self._reason,
            first_range=first,
            ranges=tuple(_make_range(step, total) for step, total in self._ranges[first:]),
            setbacks=tuple(self._setbacks[self._setbacks_written :]),
            ranks=tuple(RankTotal(**vars(total)) for total in self._ranks),
        )


def _make_range(first_step: int, total: _Sum) -> StepRange:
    fields = vars(total).copy()
    last_step = first_step + fields.pop("steps") - 1
    return StepRange(first_step=first_step, last_step=last_step, **fields)


def _make_setback(event: Retried | SizeChanged) -> Setback:
    common: dict[str, Any] = {"step": event.step, "new_size": event.new_size, "reason": _shorten(event.reason)}
    if isinstance(event, Retried):
        return Setback(kind="retry", old_size=event.failed_size, used_bytes=event.used_bytes, **common)
    return Setback(kind="size", old_size=event.old_size, **common)


def _shorten(text: str) -> str:
    """Return a text's first line, of at most 300 characters and without paths."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")[:_LONGEST_REASON]
    return _PATH.sub("<path>", line)[:_LONGEST_REASON]
