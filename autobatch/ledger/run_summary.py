"""What is to be written of a run, and how steps add up to it.

Covers counting in memory, and which part of it was not written yet. Does not cover when and where it is written
(``keeping``, ``store``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from autobatch._bounds import LISTED, Count, Moment, Text
from autobatch.events import Retried, SizeChanged
from autobatch.events.run_history import Outcome, Setback, StepRange
from autobatch.ledger.failure_reason import shorten
from autobatch.records import Record

__all__ = ["RunNotes", "Tally"]

_MOST_ROWS = 4096
"""Ranges of a run, and its setbacks. A run that retries every few steps for weeks is told in full for so long; after
that its steps add up in the last range and further setbacks are only counted there, as retries."""


class RunNotes(Record):
    """What is new of a run.

    Attributes:
        run_id: Of a run that the ledger has.
        last_seen_at: Seconds since 1970, UTC.
        outcome: So far.
        reason: The first line of the error that ended it.
        first_range: The place in the run of the first of ``ranges``, counted from 0; what is at these places is
            replaced, so the last range can grow, and writing twice does no harm.
        ranges: In order.
        first_setback: As ``first_range``, for ``setbacks``.
        setbacks: In order.
    """

    run_id: Text
    last_seen_at: Moment
    outcome: Outcome = "running"
    reason: Text = ""
    first_range: Count = 0
    ranges: Annotated[tuple[StepRange, ...], LISTED] = ()
    first_setback: Count = 0
    setbacks: Annotated[tuple[Setback, ...], LISTED] = ()


@dataclass
class _Count:
    """A ``StepRange`` that still grows; ``pace`` is the most samples that were allowed in a micro-batch."""

    pace: int
    first_step: int
    last_step: int
    micro_batch_size: int = 0
    retries: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    samples: int = 0

    def as_range(self) -> StepRange:
        fields = vars(self).copy()
        del fields["pace"]
        return StepRange(**fields)


class Tally:
    """Steps and setbacks of one run, of which those that were written are forgotten, all but the last range."""

    def __init__(self, size: int) -> None:
        """Nothing has happened; ``size`` is the plan's micro-batch size."""
        self._pace = size
        self._counts: list[_Count] = []
        self._first_range = 0
        self._setbacks: list[Setback] = []
        self._first_setback = 0

    def add_step(self, step: int, sizes: Sequence[int], retries: int, peak_bytes: int, seconds: float) -> None:
        """Count a step: with the last ones, or in a new range where the pace, or having retries, changed."""
        # By the pace, not by the largest micro-batch that came of it: with batches of any length that is another one
        # in each step, and each step would be a range.
        count = self._counts[-1] if self._counts else None
        alike = count is not None and count.pace == self._pace and (count.retries > 0) == (retries > 0)
        if count is None or step != count.last_step + 1 or not (alike or self._is_full()):
            count = _Count(self._pace, step, step)
            self._counts.append(count)
        count.last_step = step
        count.micro_batch_size = max(count.micro_batch_size, *sizes) if sizes else count.micro_batch_size
        count.retries += retries
        count.peak_bytes = max(count.peak_bytes, peak_bytes)
        count.seconds += seconds
        count.samples += sum(sizes)

    def _is_full(self) -> bool:
        return self._first_range + len(self._counts) >= _MOST_ROWS

    def add_setback(self, event: Retried | SizeChanged) -> None:
        """Note that memory was short, or came back."""
        self._pace = event.new_size
        if self._first_setback + len(self._setbacks) < _MOST_ROWS:
            self._setbacks.append(_describe(event))

    def note(self, run_id: str, now: float, outcome: Outcome, reason: str) -> RunNotes:
        """What was not written yet; the last range is among it as long as it may grow."""
        return RunNotes(
            run_id=run_id,
            last_seen_at=now,
            outcome=outcome,
            reason=reason,
            first_range=self._first_range,
            ranges=tuple(count.as_range() for count in self._counts),
            first_setback=self._first_setback,
            setbacks=tuple(self._setbacks),
        )

    def forget_written(self) -> None:
        """What ``note`` gave last is in the ledger."""
        self._first_range += max(len(self._counts) - 1, 0)
        self._counts = self._counts[-1:]
        self._first_setback += len(self._setbacks)
        self._setbacks = []


def _describe(event: Retried | SizeChanged) -> Setback:
    if isinstance(event, Retried):
        return Setback(
            step=event.step,
            kind="retry",
            old_size=event.failed_size,
            new_size=event.new_size,
            used_bytes=event.used_bytes,
            reason=shorten(event.reason),
        )
    return Setback(
        step=event.step,
        kind="size",
        old_size=event.old_size,
        new_size=event.new_size,
        reason=shorten(event.reason),
    )
