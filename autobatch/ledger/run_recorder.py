"""Records the steps of a plan: the hook that a ``Runner`` calls for the ledger.

Steps add up in memory. The first step, changes of the size, an error of a step and the end are written at once. Other
steps are written a second later, in long runs up to ten seconds later. A kill loses no more than that.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Sequence
from typing import Any

from autobatch.events import Event, Retried, SizeChanged, StepFailed, StepFinished
from autobatch.events.run_history import RankTotal, Run, Setback, StepRange, add_up, join_runs
from autobatch.events.runner_events import RankStep
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.store import hide_paths, runs_id
from autobatch.plan import Plan

_LEAST_WAIT_S, _MOST_WAIT_S, _PART_OF_AGE = 1.0, 10.0, 0.005  # so that the file of a run of weeks stays small
_PART_OF_RANK = 0.1  # of a line: with many ranks it is long, and written less often
_MOST_OF_TIME = 0.01  # a slow disk must not slow the steps down
_MOST_WAITING = 1000  # steps, and rows of their ranks, that are not added up yet
_LONGEST_REASON = 300
_NOTHING: dict[str, Any] = {"ranges": (), "setbacks": (), "ranks": ()}


class RunRecorder:
    """Records one run of a plan. Rank 0 records for all ranks; a forked child records nothing."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        run = _RunFile(plan, ledger)
        self._take = run.take
        weakref.finalize(self, run.finish)  # also at the end of the process

    def __call__(self, event: Event, /) -> None:
        self._take(event)


class _RunFile:
    """The run's file, and the part of the run that the file lacks."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan, self._ledger = plan, ledger
        self._new = Run(
            id=secrets.token_hex(8), plan_id=runs_id(plan), pid=os.getpid(), started_at=time.time(), last_seen_at=0
        )
        self._began = time.monotonic()
        self._size = plan.micro_batch_size  # the most in a micro-batch now
        self._steps: list[tuple[dict[str, Any], Sequence[RankStep]]] = []  # not in the part yet
        self._has_plan = False  # in the ledger
        self._due_at = self._rests_until = -float("inf")
        self._is_over = not ledger.is_enabled

    def take(self, event: Event) -> None:
        if self._is_over:
            return
        if isinstance(event, StepFinished):
            self._count(event)
        elif isinstance(event, (Retried, SizeChanged)):
            self._add_up(setbacks=(_make_setback(event),))
            self._size = event.new_size
            if time.monotonic() >= self._rests_until:
                self._write()
        elif isinstance(event, StepFailed):  # the run has failed, unless another step follows
            stopped = event.reason.startswith(KeyboardInterrupt.__name__)
            self._add_up(outcome="interrupted" if stopped else "failed", reason=_shorten(event.reason))
            self._write()

    def _count(self, event: StepFinished) -> None:
        fields = {
            "first_step": event.step,
            "last_step": event.step,
            "allowed_size": self._size,
            "samples": sum(event.micro_batch_sizes),
            "micro_batch_size": max(event.micro_batch_sizes, default=0),
            "retries": event.retries,
            "peak_bytes": event.peak_bytes,
            "held_bytes": event.held_bytes,
            "seconds": event.seconds,
        }
        self._steps.append((fields, event.ranks))
        if time.monotonic() >= self._due_at:
            self._write()
        elif len(self._steps) * (1 + len(event.ranks)) >= _MOST_WAITING:
            self._add_up()

    def _add_up(self, **fields: Any) -> None:
        """Move the waiting steps, and then these fields, into the part that the file lacks."""
        steps, self._steps = self._steps, []
        ranks = zip(*(rows for _, rows in steps if rows), strict=False)
        more = {**_NOTHING, "ranks": tuple(RankTotal(steps=len(rank), **add_up(rank)) for rank in ranks)}
        if steps:
            more.update(ranges=tuple(StepRange(**fields) for fields, _ in steps), outcome="running", reason="")
        self._new = join_runs([self._new, self._new.model_copy(update={**more, **fields})])

    def finish(self) -> None:
        """Write the end, if anything has happened."""
        if self._is_over:
            return
        self._add_up()
        if self._new.outcome == "running" and (self._has_plan or self._new.ranges or self._new.setbacks):
            self._add_up(outcome="finished")
        if self._new.outcome != "running":
            self._write()
        self._is_over = True

    def _write(self) -> None:
        if os.getpid() != self._new.pid:
            self._is_over = True  # in a forked child, whose parent has the run
            return
        began = time.monotonic()
        self._add_up(last_seen_at=time.time())
        ranks = len(self._new.ranks)
        self._has_plan = self._has_plan or self._ledger.begin_run(self._plan)
        written = self._ledger.update_run(self._new) if self._has_plan else "not now"
        if written == "written":
            # In one assignment: after an interrupt before it the next line has the same number, and replaces this one.
            self._new = self._new.model_copy(update={"line": self._new.line + 1, **_NOTHING})
        self._is_over = written == "forgotten"  # the user has deleted the plan, and does not want the run back
        now = time.monotonic()
        wait_s = min(_LEAST_WAIT_S + _PART_OF_AGE * (now - self._began), _MOST_WAIT_S)
        self._rests_until = now + (now - began) / _MOST_OF_TIME
        self._due_at = max(now + wait_s * (1 + _PART_OF_RANK * ranks), self._rests_until)


def _make_setback(event: Retried | SizeChanged) -> Setback:
    sizes: dict[str, Any] = {"kind": "size", "new_size": event.new_size}
    if isinstance(event, Retried):
        sizes.update(kind="retry", old_size=event.failed_size, used_bytes=event.used_bytes)
    else:
        sizes.update(old_size=event.old_size)
    return Setback(step=event.step, reason=_shorten(event.reason), **sizes)


def _shorten(text: str) -> str:
    """Return a text's first line, of at most 300 characters and without paths."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")[:_LONGEST_REASON]
    return hide_paths(line)[:_LONGEST_REASON]
