"""Defines ``Run``: the steps that a plan's run took, its shortages of memory and its end."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import model_validator

from autobatch._bounds import LISTED, Bytes, Count, Moment, Samples, Seconds, Text
from autobatch.records import Record

Outcome = Literal["running", "finished", "interrupted", "failed"]


class StepRange(Record):
    """Consecutive steps of one size; steps with retries are in a range without others.

    Attributes:
        first_step: Number of the first step, from 0.
        last_step: Number of the last step, included.
        micro_batch_size: Most samples in a micro-batch.
        retries: Number of retries in all of these steps.
        peak_bytes: Most bytes in tensors at once in any of them.
        seconds: Duration of all of them.
        samples: Number of samples in all of them.
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
    """A change of the micro-batch size.

    Attributes:
        step: Number of the step, from 0.
        kind: ``"retry"`` if the step was undone, ``"size"`` if the size changed between two steps.
        old_size: Most samples in a micro-batch before.
        new_size: Most samples in a micro-batch from then on.
        used_bytes: Bytes held on the device after the clean-up; 0 if not measured.
        reason: Reason in words.
    """

    step: Count
    kind: Literal["retry", "size"]
    old_size: Samples
    new_size: Samples
    used_bytes: Bytes = 0
    reason: Text = ""


class RankTotal(Record):
    """Totals of one of several ranks in a run.

    Attributes:
        steps: Number of steps.
        samples: Number of samples in all of them.
        micro_batch_size: Most samples in a micro-batch.
        retries: Number of times that this rank ran out of memory.
        peak_bytes: Most bytes in tensors at once.
        seconds: Duration of all steps, without waiting for other ranks.
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
        id: Id of the run.
        plan_id: Id of the plan; with several ranks, of rank 0's.
        pid: Number of the process; with several ranks, of rank 0's.
        started_at: Time of the start: seconds since 1970, UTC.
        last_seen_at: Time of the last write.
        outcome: ``"interrupted"`` if the user stopped a step (Ctrl-C). A process that was killed leaves
            ``"running"``, and ``last_seen_at`` grows old.
        reason: First line of the error that ended the run.
        ranges: Steps of this process (of rank 0), in order.
        setbacks: Changes of the size in this process (on rank 0), in order.
        ranks: Totals of each rank; empty with one rank.
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
        """Number of committed steps."""
        return sum(part.last_step - part.first_step + 1 for part in self.ranges)

    @property
    def retries(self) -> int:
        """Number of retries, on any rank."""
        return sum(part.retries for part in self.ranks or self.ranges)

    @property
    def peak_bytes(self) -> int:
        """Most bytes in tensors at once in any step, on any rank."""
        return max((part.peak_bytes for part in self.ranks or self.ranges), default=0)


class RunUpdate(Run):
    """One line of a run's file: its totals, the ranges that have grown, and the setbacks since the line before.

    Attributes:
        first_range: Position of the first of these ranges in the run; they replace what was there.
    """

    first_range: Count = 0
