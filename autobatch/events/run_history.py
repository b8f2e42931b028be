"""Defines the record ``Run``: the steps that a plan's run took, its shortages of memory and its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import model_validator

from autobatch._bounds import LISTED, Bytes, Count, Moment, Samples, Seconds, Text
from autobatch.records import Record

Outcome = Literal["running", "finished", "interrupted", "failed"]

_MOST_ROWS = 4096
"""Ranges and setbacks of a run: later steps add up in the last range, later setbacks are its retries."""


class StepTotals(Record):
    """Totals of some steps."""

    samples: Count = 0
    micro_batch_size: Count = 0  # most samples in a micro-batch
    retries: Count = 0
    peak_bytes: Bytes = 0  # most bytes in tensors at once
    held_bytes: Bytes = 0  # most bytes that the allocator held at once; 0 if unknown
    seconds: Seconds = 0.0


class StepRange(StepTotals):
    """Consecutive steps of one size; steps with retries are in a range without others."""

    first_step: Count
    last_step: Count  # included
    allowed_size: Count = 0  # most samples that a micro-batch could have; 0 if unknown

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> StepRange:
        if self.last_step < self.first_step:
            raise ValueError(f"last_step={self.last_step} is before first_step={self.first_step}")
        return self


class RankTotal(StepTotals):
    """Totals of one of several ranks in a run. ``seconds`` is without waiting for other ranks."""

    steps: Count


class Setback(Record):
    """A change of the micro-batch size."""

    step: Count
    kind: Literal["retry", "size"]  # "retry" if the step was undone, "size" if it changed between two steps
    old_size: Samples
    new_size: Samples
    used_bytes: Bytes = 0  # held on the device after the clean-up; 0 if not measured
    reason: Text = ""


class Run(Record):
    """The steps of one process, or of several ranks together, with one plan; or a part of them."""

    id: Text
    plan_id: Text  # with several ranks, of rank 0's plan
    line: Count = 0  # in the run's file; a line that is written again, perhaps with more in it, keeps its number
    pid: Count  # with several ranks, of rank 0's process
    started_at: Moment
    last_seen_at: Moment  # of the last write; a process that was killed leaves "running", and this grows old
    outcome: Outcome = "running"  # "interrupted" if the user stopped a step (Ctrl-C)
    reason: Text = ""  # first line of the error that ended the run
    ranges: Annotated[tuple[StepRange, ...], LISTED] = ()  # of this process (of rank 0), in order, as are setbacks
    setbacks: Annotated[tuple[Setback, ...], LISTED] = ()
    ranks: Annotated[tuple[RankTotal, ...], LISTED] = ()  # empty with one rank

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

    @property
    def held_bytes(self) -> int:
        """Most bytes that the allocator held at once in any step, on any rank."""
        return max((part.held_bytes for part in self.ranks or self.ranges), default=0)


def add_up(parts: Sequence[StepTotals]) -> dict[str, Any]:
    return {
        "samples": sum(part.samples for part in parts),
        "micro_batch_size": max(part.micro_batch_size for part in parts),
        "retries": sum(part.retries for part in parts),
        "peak_bytes": max(part.peak_bytes for part in parts),
        "held_bytes": max(part.held_bytes for part in parts),
        "seconds": sum(part.seconds for part in parts),
    }


def join_ranges(ranges: Iterable[StepRange]) -> tuple[StepRange, ...]:
    """Return these steps in as few ranges as can be, in the same order."""
    groups: list[list[StepRange]] = []
    for part in ranges:
        last = groups[-1][-1] if groups else None
        # By the size that is allowed: with batches of many lengths, the largest that ran differs in each step.
        is_alike = last and (last.allowed_size, last.retries > 0) == (part.allowed_size, part.retries > 0)
        if last and part.first_step == last.last_step + 1 and (is_alike or len(groups) >= _MOST_ROWS):
            groups[-1].append(part)
        else:
            groups.append([part])
    return tuple(group[0].model_copy(update={"last_step": group[-1].last_step, **add_up(group)}) for group in groups)


def join_lines(lines: Iterable[Run]) -> Run | None:
    """Return the run that a file's lines make; of lines with the same number the last one counts."""
    latest = {part.line: part for part in lines}
    return join_runs([*latest.values()]) if latest else None


def join_runs(parts: Sequence[Run]) -> Run:
    """Return one run of at least one part, in their order; its end is that of the last part."""
    totals = zip(*(part.ranks for part in parts if part.ranks), strict=False)
    ranks = (RankTotal.model_construct(steps=sum(one.steps for one in rank), **add_up(rank)) for rank in totals)
    return parts[-1].model_copy(
        update={
            "ranges": join_ranges(steps for part in parts for steps in part.ranges),
            "setbacks": tuple(setback for part in parts for setback in part.setbacks)[:_MOST_ROWS],
            "ranks": tuple(ranks),
        }
    )
