"""Predicts the bytes of a trial from those of earlier trials and from the simulation of ``prediction.prior``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from pydantic import Field, model_validator

from autobatch._bounds import Bytes
from autobatch.records import Record

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
    """Predicted bytes of a trial at some sizes, with straight lines in between and nothing beyond.

    Attributes:
        points: ``(size, bytes)``, ascending in size.
        largest_to_train: Largest size whose training is predicted to fit in a new process, in which the allocator
            divides its segments differently. 0 if unknown.
        is_confirmed: Whether the first step, of two samples, held the predicted bytes.
    """

    points: tuple[tuple[int, Bytes], ...] = Field(default=(), max_length=10_000)
    largest_to_train: int = Field(default=0, ge=0)
    is_confirmed: bool = False

    @model_validator(mode="after")
    def _check_points(self) -> Forecast:
        if any(following <= size for (size, _), (following, _) in pairwise(self.points)):
            raise ValueError("points must ascend in size")
        return self

    def predict(self, size: int) -> int | None:
        """Return the bytes of a trial at this size; ``None`` outside of the points."""
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
        """Return the bytes of a trial at this size: the largest smaller trial, plus the predicted difference.

        ``None`` without a prediction.
        """
        then = self.predict(size)
        known = max((at for at in peaks if at < size and self.predict(at) is not None), default=0)
        if then is None:
            return None
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
