"""Defines ``Run``: how a plan's steps went, when memory was short, what each rank did, how it ended."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import model_validator

from autobatch._bounds import LISTED, Bytes, Count, Moment, Samples, Seconds, Text
from autobatch.records import Record

__all__ = ["Outcome", "RankTotal", "Run", "Setback", "StepRange"]

Outcome = Literal["running", "finished", "interrupted", "failed"]


class StepRange(Record):
    """Consecutive steps that went alike.

    Attributes:
        first_step: Counted from 0.
        last_step: The last of them, itself included.
        micro_batch_size: The most samples in a micro-batch.
        retries: Of all of them together; steps with retries are a range of their own.
        peak_bytes: Most bytes in tensors at once in any of them.
        seconds: Of all of them together.
        samples: Of all of them together.
    """

    first_step: Count
    last_step: Count
    micro_batch_size: Count
    retries: Count = 0
    peak_bytes: Bytes = 0
    seconds: Seconds = 0.0
    samples: Count = 0

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> StepRange:
        if self.last_step < self.first_step:
            raise ValueError(f"last_step={self.last_step} is before first_step={self.first_step}")
        return self


class Setback(Record):
    """Memory was short, or came back.

    Attributes:
        step: Which step of the run, counted from 0.
        kind: ``"retry"`` where the step was undone, ``"size"`` where the size changed between two steps.
        old_size: The most samples in a micro-batch before.
        new_size: The most from here on.
        used_bytes: Held on the device after the clean-up; 0 where that was not measured.
        reason: In words.
    """

    step: Count
    kind: Literal["retry", "size"]
    old_size: Samples
    new_size: Samples
    used_bytes: Bytes = 0
    reason: Text = ""


class RankTotal(Record):
    """All that one of several ranks did in a run; its place in the run is its number.

    Attributes:
        steps: That it took part in.
        samples: Of all of them together.
        micro_batch_size: The most samples in a micro-batch, in any of them.
        retries: How often memory ended there.
        peak_bytes: Most bytes in tensors at once in any of them.
        seconds: Of all of them together, without those in which it waited for other ranks.
    """

    steps: Count
    samples: Count = 0
    micro_batch_size: Count = 0
    retries: Count = 0
    peak_bytes: Bytes = 0
    seconds: Seconds = 0.0


class Run(Record):
    """The steps of one process, or of several ranks together, with one plan.

    Attributes:
        id: Of the run.
        plan_id: Of the plan.
        pid: The process, as its own system numbers it; of several ranks the first one's.
        started_at: Seconds since 1970, UTC.
        last_seen_at: When it last wrote anything.
        outcome: ``"interrupted"`` where the user stopped a step (Ctrl-C). ``"running"`` also where the process ended
            without a word: ``last_seen_at`` then grows old.
        reason: The first line of the error that ended it.
        ranges: How its steps went, in order; with several ranks those of the first.
        setbacks: When memory was short, in order; with several ranks on the first.
        ranks: What each rank did, by rank; empty where there is one.
    """

    id: Text
    plan_id: Text
    pid: Count
    started_at: Moment
    last_seen_at: Moment
    outcome: Outcome = "running"
    reason: Text = ""
    ranges: Annotated[tuple[StepRange, ...], LISTED] = ()
    setbacks: Annotated[tuple[Setback, ...], LISTED] = ()
    ranks: Annotated[tuple[RankTotal, ...], LISTED] = ()

    @property
    def steps(self) -> int:
        """How many steps were committed."""
        return sum(part.last_step - part.first_step + 1 for part in self.ranges)

    @property
    def retries(self) -> int:
        """How often a step had to begin again with less, on any rank."""
        return sum(part.retries for part in self.ranks or self.ranges)

    @property
    def peak_bytes(self) -> int:
        """Most bytes in tensors at once in any step, on any rank."""
        return max((part.peak_bytes for part in self.ranks or self.ranges), default=0)


class RunUpdate(Run):
    """What is new of a run: its own fields, its totals, its last ranges and the setbacks since the update before.

    Attributes:
        first_range: Position of the first of these ranges in the run; they replace what was there.
    """

    first_range: Count = 0
