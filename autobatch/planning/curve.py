"""Fits peak memory as a function of the micro-batch size to a few trials: a convex, piecewise linear curve."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, Strict

from autobatch._bounds import LONGEST_LIST, Bytes
from autobatch._formatting import format_bytes
from autobatch.errors import InvalidArgument
from autobatch.records import Record, Trial

UNLIMITED = sys.maxsize
"""The largest size of ``MemoryCurve.largest`` if memory does not grow with the size."""

_Point = tuple[int, int]


def _check_knots(knots: tuple[_Point, ...]) -> tuple[_Point, ...]:
    if any(next_size <= size or next_peak < peak for (size, peak), (next_size, next_peak) in pairwise(knots)):
        raise ValueError("knots must go up in size and never down in bytes")
    if any(_bend(*triple) < 0 for triple in zip(knots, knots[1:], knots[2:], strict=False)):
        raise ValueError("knots must bend up, not down")
    return knots


_Knot = tuple[Annotated[int, Strict(), Field(ge=0, le=2**31)], Bytes]
_Knots = Annotated[tuple[_Knot, ...], Field(min_length=2, max_length=LONGEST_LIST), AfterValidator(_check_knots)]
"""``(size, bytes)`` at the ends of straight pieces, in order of size. The outer pieces extend beyond them."""


class Line(NamedTuple):
    """A straight line up to a point ``(size, peak)``, coming from ``run`` samples and ``rise`` bytes below it."""

    size: int
    peak: int
    run: int
    rise: int

    def reach(self, limit: int, steepness: int = 1) -> int:
        if self.rise <= 0:
            return UNLIMITED
        return self.size + (limit - self.peak) * self.run // (self.rise * steepness)

    def height(self, size: int) -> int:
        return self.peak + (size - self.size) * self.rise // self.run

    def passes(self, size: int, peak: int, tolerance: int) -> bool:
        return abs((peak - self.peak) * self.run - (size - self.size) * self.rise) <= tolerance * self.run


class MemoryCurve(Record):
    """The most bytes held at once during an optimizer step, by micro-batch size.

    The curve is convex because it is a maximum: each point of the program holds ``constant + slope * size`` bytes. The
    optimizer's step does not depend on the size, so it is a floor under the growing part.

    Attributes:
        allocated: Knots of the growing part, in bytes of tensors.
        reserved: The same, in bytes that the allocator holds: what meets the limit.
        allocated_floor: Bytes of tensors at any size: resident ones, or the optimizer's step if that takes more.
        reserved_floor: The same, as the allocator holds it.
    """

    allocated: _Knots
    reserved: _Knots
    allocated_floor: Bytes = 0
    reserved_floor: Bytes = 0

    def __repr__(self) -> str:
        """``MemoryCurve(2: 1.1 GiB, 43: 18.7 GiB)``: reserved bytes at the ends."""
        ends = [self.reserved[0][0], self.reserved[-1][0]]
        return f"MemoryCurve({', '.join(f'{size}: {format_bytes(self.peak_reserved(size))}' for size in ends)})"

    def peak_allocated(self, n: int) -> int:
        """Return the bytes in tensors at once with micro-batches of ``n`` samples, rounded up."""
        return max(self.allocated_floor, _evaluate(self.allocated, n))

    def peak_reserved(self, n: int) -> int:
        """Return the bytes held by the allocator at once with micro-batches of ``n`` samples, rounded up."""
        return max(self.reserved_floor, _evaluate(self.reserved, n))

    def growing_reserved(self, n: int) -> int:
        """Return the part that depends on the size, also where the optimizer's step hides it."""
        return _evaluate(self.reserved, n)

    def largest(self, limit: int) -> int:
        """Return the most samples whose reserved peak is within the limit: 0 if none fits, ``UNLIMITED`` if all do."""
        if self.peak_reserved(1) > limit:
            return 0
        pieces = pairwise(self.reserved)
        return min(Line(end, high, end - start, high - low).reach(limit) for (start, low), (end, high) in pieces)


def fit_curve(trials: Sequence[Trial]) -> MemoryCurve:
    """Fit the curve to what the trials measured.

    The CUDA allocator takes segments, so reserved bytes are a staircase. The curve is the greatest convex function
    below the points, moved up until no point lies above it: a measured size is never under-predicted. One trial alone
    gives the line to the resident bytes at size 0, which is steeper than linear memory.
    """
    measured = [trial for trial in trials if ran(trial)]
    if not measured:
        raise InvalidArgument(f"a memory curve needs a trial that ran, not {len(trials)} that ran out of memory")
    resident = min(trial.resident_bytes for trial in measured)
    plateaus = [trial for trial in measured if _optimizer_leads(trial)]
    return MemoryCurve(
        allocated=_fit_knots([(trial.micro_batch_size, growing_allocated(trial)) for trial in measured], resident),
        reserved=_fit_knots([(trial.micro_batch_size, growing_reserved(trial)) for trial in measured], resident),
        allocated_floor=max([resident, *(max(trial.peak_allocated, trial.optimizer_peak) for trial in plateaus)]),
        reserved_floor=max([resident, *map(_peak_reserved, plateaus)]),
    )


def ran(trial: Trial) -> bool:
    return trial.outcome != "oom"


def growing_allocated(trial: Trial) -> int:
    """Return the bytes in tensors that depend on the size: the backward's peak, even if the optimizer's is higher."""
    return (trial.backward_allocated or 0) if _optimizer_leads(trial) else trial.peak_allocated


def growing_reserved(trial: Trial) -> int:
    """Return the bytes held by the allocator that depend on the size.

    If the backward's peak is the higher one, later growth of the allocator is fragmentation, which depends on the size.
    """
    hidden = trial.backward_reserved if _optimizer_leads(trial) else None
    return _peak_reserved(trial) if hidden is None else hidden


def _optimizer_leads(trial: Trial) -> bool:
    return trial.backward_allocated is not None and trial.optimizer_peak > trial.backward_allocated


def _peak_reserved(trial: Trial) -> int:
    # Without a caching allocator a device reports no reserved bytes, and holds nothing but tensors.
    return max(trial.peak_reserved, trial.peak_allocated)


def _fit_knots(points: Sequence[_Point], resident: int) -> tuple[_Point, ...]:
    sizes, peaks = zip(*sorted(points), strict=True)
    # A size needs at least what a smaller one did, and the most of its own trials.
    rising = [*dict(zip(sizes, accumulate(peaks, max), strict=True)).items()]
    if len(rising) == 1:
        [(size, peak)] = rising
        return ((0, min(resident, peak)), (size, peak))
    if rising[0][0] == 1 and len(rising) > 2:
        # One sample is another program (views of size-1 dimensions skip copies), so its point must not tilt the line.
        others = _cover(rising[1:])
        if _evaluate(others, 1) >= rising[0][1]:
            return others
    return _cover(rising)


def _cover(points: Sequence[_Point]) -> tuple[_Point, ...]:
    """Return the greatest convex function below the points, moved up until no point lies above it."""
    hull: list[_Point] = []
    for point in points:
        while len(hull) > 1 and _bend(hull[-2], hull[-1], point) <= 0:
            hull.pop()
        hull.append(point)
    shift = max(peak - _evaluate(hull, size) for size, peak in points)
    return tuple((size, peak + shift) for size, peak in hull)


def _bend(first: _Point, middle: _Point, last: _Point) -> int:
    """Return a positive number if the slope rises at the middle point, 0 on a line, a negative one if it falls."""
    rise, run = middle[1] - first[1], middle[0] - first[0]
    return (last[1] - middle[1]) * run - rise * (last[0] - middle[0])


def _evaluate(knots: Sequence[_Point], n: int) -> int:
    # A convex piecewise linear function is the maximum of its pieces, each extended in both directions.
    return max(
        peak - (size - n) * (next_peak - peak) // (next_size - size)  # minus a floor: rounded up, on either side
        for (size, peak), (next_size, next_peak) in pairwise(knots)
    )
