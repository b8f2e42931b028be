"""Holds the question of a search, and what its trials and a prediction show: settled and open sizes, growing bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from pydantic import Field, model_validator

from autobatch._bounds import Bytes
from autobatch.planning.curve import Line, growing_allocated, growing_reserved
from autobatch.records import Record, Trial

FIRST_SIZE = 2
"""Samples in the one micro-batch of the first step, which makes the optimizer's state."""
_RESERVE = 50
"""A trial may take 1/50 more than predicted. Near the limit, those of benchmarks/card_models.py took 1.7 % at most."""
_AGREES = 10
"""A prediction with an error of more than a tenth belongs to another step."""


class Expected(NamedTuple):
    """Bytes that a trial will reserve; ``at_most`` includes the reserve."""

    likely: int
    at_most: int


class Forecast(Record):
    """Predicted bytes of a trial at some sizes, with straight lines in between and nothing beyond."""

    points: tuple[tuple[int, Bytes], ...] = Field(default=(), max_length=10_000)  # (size, bytes), ascending in size
    # Training in a new process: the allocator divides its segments differently there. 0 if unknown.
    largest_to_train: int = Field(default=0, ge=0)
    is_confirmed: bool = False  # whether the first step, of two samples, held the predicted bytes

    @model_validator(mode="after")
    def _check_points(self) -> Forecast:
        if any(following <= size for (size, _), (following, _) in pairwise(self.points)):
            raise ValueError("points must ascend in size")
        return self

    def predict(self, size: int) -> int | None:
        index = bisect_left(self.points, size, key=lambda point: point[0])
        if index == len(self.points):
            return None
        end, high = self.points[index]
        if end == size:
            return high
        if index == 0:
            return None
        start, low = self.points[index - 1]
        return low + (high - low) * (size - start) // (end - start)

    def agrees(self, peaks: Mapping[int, int]) -> bool:
        """Return whether the measured bytes, by size, are near the prediction; ``is_confirmed`` before any."""
        predicted = {size: bytes_then for size in peaks if (bytes_then := self.predict(size)) is not None}
        if not predicted:
            return self.is_confirmed and not peaks
        return all(abs(peaks[size] - held) * _AGREES <= held for size, held in predicted.items())

    def expect(self, size: int, peaks: Mapping[int, int]) -> Expected | None:
        """Return the bytes of the largest smaller trial, plus the predicted difference."""
        if (then := self.predict(size)) is None:
            return None
        known = max((at for at in peaks if at < size and self.predict(at) is not None), default=0)
        measured, predicted = (peaks[known], self.predict(known) or 0) if known else (0, 0)
        more = max(then - predicted, 0)
        if predicted:  # the relative error stays the same
            more = more * measured // predicted
        likely = measured + more
        return Expected(likely, max(likely, then) + more // _RESERVE)

    def largest(self, sizes: Sequence[int], peaks: Mapping[int, int], limit_bytes: int) -> int | None:
        """Return the largest of these ascending sizes that surely stays within the limit; ``None`` if none does."""
        for size in reversed(sizes):
            expected = self.expect(size, peaks)
            if expected is not None and expected.at_most <= limit_bytes:
                return size
        return None


class Question(Record):
    """The question of a search: the largest useful size within a limit."""

    bound: int = Field(ge=1)  # no size above this is tried: a rank's share of the target, or what the user allows
    limit_bytes: int = Field(ge=0)
    measures: bool = True  # whether trials carry bytes; if not, running out of memory is the only signal
    smallest_probe: int = Field(default=1, ge=1, le=2)  # if 2, one sample is tried only after 2 has failed
    candidates: tuple[int, ...] = ()  # possible answers, ascending; empty: all up to the bound
    expected: int = Field(default=0, ge=0)  # answer of a prediction, where the search begins and may end
    expects_no_more: bool = True  # whether the prediction says that the next candidate does not fit
    forecast: Forecast = Forecast()  # predicted bytes of trials near that answer

    @model_validator(mode="after")
    def _check_candidates(self) -> Question:
        start = [*range(1, min(self.bound, 2) + 1)]  # a search may have to begin and end here
        candidates = [*self.candidates]
        if candidates and self.smallest_probe > 1 and candidates[0] in (2, 3):
            start = candidates[:1]  # a batch of an odd number of samples cannot be divided into parts of 2
        if candidates and (candidates != sorted({*candidates, *start}) or candidates[-1] > self.bound):
            raise ValueError(f"candidates must ascend from {start} to at most {self.bound}, not {candidates}")
        return self

    @property
    def sizes(self) -> Sequence[int]:
        return self.candidates or range(1, self.bound + 1)


def fits(question: Question, trial: Trial) -> bool:
    """Return whether the trial ran, without thrashing and within the limit."""
    within = max(trial.peak_reserved, trial.peak_allocated) <= question.limit_bytes
    return trial.outcome == "fits" and (within or not question.measures)


class Evidence:
    """Settled and open sizes. A failure below a size that fits settles nothing: memory may not be monotone."""

    def __init__(self, question: Question, trials: Sequence[Trial]) -> None:
        self.question, self.trials = question, trials
        self.failing = {trial.micro_batch_size for trial in trials if not fits(question, trial)}
        self.fitting = {trial.micro_batch_size for trial in trials} - self.failing
        sizes = question.sizes
        self.answers = [size for size in self.fitting if size in sizes]  # candidates that fit
        self.lowest = max(self.answers, default=0)
        self.limiting = min((size for size in self.failing if size > self.lowest), default=None)
        self.measured = [trial for trial in trials if trial.outcome == "fits" and question.measures]
        # By size: bytes that grow with it, and all bytes.
        self.peaks = {trial.micro_batch_size: growing_reserved(trial) for trial in self.measured}
        self.held = {trial.micro_batch_size: max(trial.peak_reserved, trial.peak_allocated) for trial in self.measured}
        is_refuted = self.failing or not question.forecast.agrees(self.held)
        self.forecast = Forecast() if is_refuted else question.forecast
        end = len(sizes) if self.limiting is None else bisect_left(sizes, self.limiting)
        if self.forecast.largest_to_train:
            end = min(end, bisect_right(sizes, self.forecast.largest_to_train))
        self.open = sizes[bisect_right(sizes, self.lowest) : end]

    def safe_reach(self, size: int, peak: int) -> int:
        resident = min(trial.resident_bytes for trial in self.measured)
        return Line(size, peak, size, peak - resident).reach(self.question.limit_bytes)

    def snap(self, size: int, above: int) -> int:
        """Return the largest open candidate up to ``size``, so that the trial can be the answer, or else ``size``."""
        index = bisect_right(self.open, size)
        return self.open[index - 1] if index and self.open[index - 1] > above else size


def draw_line(peaks: dict[int, int], trials: Sequence[Trial]) -> Line:
    """Draw a line through the largest of at least two measured sizes and the largest of at most 7/8 of it.

    Reserved bytes are a staircase: the line avoids close sizes, and is at least as steep as the bytes in tensors. One
    sample is another program: the line takes it only if there is just one other size.
    """
    largest = max(peaks)
    others = [size for size in peaks if size != largest and (size > 1 or len(peaks) == 2)]
    other = max((size for size in others if size <= largest * 7 // 8), default=min(others))
    tensors = {trial.micro_batch_size: growing_allocated(trial) for trial in trials}
    rise = max(peaks[largest] - peaks[other], tensors[largest] - tensors[other])
    return Line(largest, peaks[largest], largest - other, rise)
