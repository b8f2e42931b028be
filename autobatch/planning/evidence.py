"""Reads from the trials so far what is known about the question of a search.

Covers which sizes fit, which are still open, and the straight line through what was measured. Does not cover what to
try next (``next_trial``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import Field, model_validator

from autobatch.planning.curve import Line, growing_allocated, growing_reserved
from autobatch.records import Record, Trial

__all__ = ["Evidence", "Question", "draw_line", "fits", "largest_fitting", "smallest_as_fast"]

_AS_FAST = 0.98
"""The share of the best rate that still counts as no slower; timings of one size differ by about as much."""


class Question(Record):
    """What a search is to find: the largest useful size that stays within a limit.

    Attributes:
        bound: No size above this is tried: a rank's share of the target, or what the user allows.
        limit_bytes: What a step may hold at its peak. A trial that ran with more than this does not fit.
        measures: Whether trials carry bytes. Where not, running out of memory is the only signal.
        smallest_probe: 2 for models that cannot run one sample, such as those with BatchNorm on one value per channel.
            Should 1 be a candidate all the same, it is tried only after 2 has failed.
        candidates: The sizes worth answering with, ascending (``planner.useful_sizes``); empty for all up to the
            bound. A search may measure others on its way.
        expected: The answer that a prediction gives, 0 where there is none. It says where to begin, and with a line
            through what was measured where to end; what is answered has been measured all the same.
        expects_no_more: Whether the prediction says that the next candidate does not fit, not only that this one does.
    """

    bound: int = Field(ge=1)
    limit_bytes: int = Field(ge=0)
    measures: bool = True
    smallest_probe: int = Field(default=1, ge=1, le=2)
    candidates: tuple[int, ...] = ()
    expected: int = Field(default=0, ge=0)
    expects_no_more: bool = True

    @model_validator(mode="after")
    def _check_candidates(self) -> Question:
        start = [*range(1, min(self.bound, 2) + 1)]  # where every search may have to begin and to end
        candidates = [*self.candidates]
        if candidates and self.smallest_probe > 1 and candidates[0] in (2, 3):
            start = candidates[:1]  # a batch of an odd number of samples cannot be divided into parts of 2
        if candidates and (candidates != sorted({*candidates, *start}) or candidates[-1] > self.bound):
            raise ValueError(f"candidates must ascend from {start} to at most {self.bound}, not {candidates}")
        return self

    @property
    def sizes(self) -> Sequence[int]:
        """The possible answers, ascending."""
        return self.candidates or range(1, self.bound + 1)


def fits(question: Question, trial: Trial) -> bool:
    """Whether the trial ran, without thrashing and within the limit."""
    within = max(trial.peak_reserved, trial.peak_allocated) <= question.limit_bytes
    return trial.outcome == "fits" and (within or not question.measures)


def largest_fitting(question: Question, trials: Sequence[Trial]) -> int | None:
    """The largest candidate that has run and fits, ``None`` where none has."""
    return Evidence(question, trials).lowest or None


def smallest_as_fast(question: Question, trials: Sequence[Trial]) -> int | None:
    """The smallest candidate that has run, fits, and comes within 2 % of the best rate in samples per second.

    Without rates the largest, since nothing says that a smaller one is as fast. ``None`` where none fits.
    """
    rates: dict[int, float] = {}
    fitting = Evidence(question, trials).fitting
    for trial in trials:
        size = trial.micro_batch_size
        if size in question.sizes and size in fitting:
            rates[size] = max(rates.get(size, 0.0), trial.samples_per_second)
    best = max(rates.values(), default=0.0)
    if best == 0:
        return largest_fitting(question, trials)
    return min(size for size, rate in rates.items() if rate >= _AS_FAST * best)


@dataclass(frozen=True)
class Evidence:
    """What is settled and what is open. Failures below a size that fits settle nothing: memory may not be monotone."""

    question: Question
    trials: Sequence[Trial]

    @cached_property
    def failing(self) -> set[int]:
        """The sizes that did not fit when they were tried, candidates or not."""
        return {trial.micro_batch_size for trial in self.trials if not fits(self.question, trial)}

    @cached_property
    def fitting(self) -> set[int]:
        """The sizes that fit each time they were tried, candidates or not."""
        return {trial.micro_batch_size for trial in self.trials} - self.failing

    @cached_property
    def lowest(self) -> int:
        """The largest candidate that fits, 0 where none is known to."""
        return max((size for size in self.fitting if size in self.question.sizes), default=0)

    @cached_property
    def limiting(self) -> int | None:
        """The smallest size above ``lowest`` that does not fit."""
        return min((size for size in self.failing if size > self.lowest), default=None)

    @cached_property
    def open(self) -> Sequence[int]:
        """The candidates between ``lowest`` and ``limiting``, none of which has been tried."""
        sizes = self.question.sizes
        end = len(sizes) if self.limiting is None else bisect_left(sizes, self.limiting)
        return sizes[bisect_right(sizes, self.lowest) : end]

    @cached_property
    def peaks(self) -> dict[int, int]:
        """The bytes that grow with the size, by size. Those of trials that thrash say little."""
        measured = [trial for trial in self.trials if trial.outcome == "fits"] if self.question.measures else []
        return {trial.micro_batch_size: growing_reserved(trial) for trial in measured}

    @cached_property
    def line(self) -> Line:
        """The line through at least two of the peaks."""
        return draw_line(self.peaks, self.trials)

    def safe_reach(self, size: int, peak: int) -> int:
        """The largest size within the limit on the line from what is resident at 0, steeper than linear memory is."""
        resident = min(trial.resident_bytes for trial in self.trials if trial.outcome == "fits")
        return Line(size, peak, size, peak - resident).reach(self.question.limit_bytes)


def draw_line(peaks: dict[int, int], trials: Sequence[Trial]) -> Line:
    """Through the largest of at least two measured sizes and the largest of at most 7/8 of it.

    Reserved bytes are a staircase, and two close sizes are often on one step: so not through the two largest, and never
    less steep than the bytes in tensors, which know no steps and which the allocator cannot outrun for long. One
    sample is another program, so it only serves where there is but one other size.
    """
    largest = max(peaks)
    others = [size for size in peaks if size != largest and (size > 1 or len(peaks) == 2)]
    other = max((size for size in others if size <= largest * 7 // 8), default=min(others))
    tensors = {trial.micro_batch_size: growing_allocated(trial) for trial in trials}
    rise = max(peaks[largest] - peaks[other], tensors[largest] - tensors[other])
    return Line(largest, peaks[largest], largest - other, rise)
