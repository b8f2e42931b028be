"""Holds what a search asks and what its trials have shown: which sizes are settled, which are open, how bytes grow.

Does not cover which size is tried next (``next_trial``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from pydantic import Field, model_validator

from autobatch.planning.curve import Line, growing_allocated, growing_reserved
from autobatch.planning.forecast import Forecast
from autobatch.records import Record, Trial

__all__ = ["Evidence", "Question", "draw_line", "fits"]


class Question(Record):
    """What a search is to find: the largest useful size that stays within a limit."""

    bound: int = Field(ge=1)  # no size above this is tried: a rank's share of the target, or what the user allows
    limit_bytes: int = Field(ge=0)
    measures: bool = True  # where not, trials carry no bytes, and running out of memory is the only signal
    smallest_probe: int = Field(default=1, ge=1, le=2)  # where 2, one sample is tried only after 2 has failed
    candidates: tuple[int, ...] = ()  # the sizes worth answering with, ascending; empty: all up to the bound
    expected: int = Field(default=0, ge=0)  # the answer of a prediction: where to begin, and with a line where to end
    expects_no_more: bool = True  # whether the prediction says that the next candidate does not fit
    forecast: Forecast = Forecast()  # of the bytes of trials near that answer

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


class Evidence:
    """What is settled and what is open. Failures below a size that fits settle nothing: memory may not be monotone.

    ``answers`` are the candidates that fit, ``lowest`` the largest of them or 0, ``limiting`` the smallest above it
    that does not fit, ``open`` the candidates between them, ``peaks`` the bytes that grow with the size, by size,
    ``held`` all bytes, and ``forecast`` is empty where a trial has refuted it.
    """

    def __init__(self, question: Question, trials: Sequence[Trial]) -> None:
        self.question, self.trials = question, trials
        self.failing = {trial.micro_batch_size for trial in trials if not fits(question, trial)}
        self.fitting = {trial.micro_batch_size for trial in trials} - self.failing
        sizes = question.sizes
        self.answers = [size for size in self.fitting if size in sizes]
        self.lowest = max(self.answers, default=0)
        self.limiting = min((size for size in self.failing if size > self.lowest), default=None)
        self.measured = [trial for trial in trials if trial.outcome == "fits" and question.measures]
        self.peaks = {trial.micro_batch_size: growing_reserved(trial) for trial in self.measured}
        self.held = {trial.micro_batch_size: max(trial.peak_reserved, trial.peak_allocated) for trial in self.measured}
        is_refuted = self.failing or not question.forecast.agrees(self.held)
        self.forecast = Forecast() if is_refuted else question.forecast
        end = len(sizes) if self.limiting is None else bisect_left(sizes, self.limiting)
        if self.forecast.largest_to_train:
            end = min(end, bisect_right(sizes, self.forecast.largest_to_train))
        self.open = sizes[bisect_right(sizes, self.lowest) : end]

    def safe_reach(self, size: int, peak: int) -> int:
        """The largest size within the limit on the line from what is resident at 0, steeper than linear memory is."""
        resident = min(trial.resident_bytes for trial in self.measured)
        return Line(size, peak, size, peak - resident).reach(self.question.limit_bytes)

    def snap(self, size: int, above: int) -> int:
        """The largest open candidate up to ``size``, so that the trial can be the answer; if none is left, ``size``."""
        index = bisect_right(self.open, size)
        return self.open[index - 1] if index and self.open[index - 1] > above else size


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
