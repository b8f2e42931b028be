"""Maps numbers to positions on a chart, and chooses the round numbers to write beside its axes.

Covers linear and logarithmic scales, and ticks for counts and for bytes (binary units, at 1, 2 and 5). Does not cover
drawing (``svg``, ``charts``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

__all__ = ["LinearScale", "LogScale", "Scale", "Tick", "byte_ticks", "choose_scale", "count_ticks"]

_FEWEST, _MOST = 3, 8
_FAR_APART = 200
"""From this ratio on the smaller values of a linear axis lie within a line's width of each other."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class Tick(NamedTuple):
    """A round value of an axis, and how it is written."""

    value: float
    label: str


@dataclass(frozen=True)
class LinearScale:
    """Values from ``low`` to ``high`` at positions from ``start`` to ``end``, in a straight line."""

    low: float
    high: float
    start: float
    end: float

    def position(self, value: float) -> float:
        """Where the value lies; beyond the ends it is at the end."""
        inside = min(max(value, self.low), self.high)
        return self.start + (inside - self.low) / (self.high - self.low) * (self.end - self.start)

    def value(self, position: float) -> float:
        """What lies there."""
        return self.low + (position - self.start) / (self.end - self.start) * (self.high - self.low)


@dataclass(frozen=True)
class LogScale:
    """The same by the values' logarithms, all of which must be positive; less than ``low`` is at its end."""

    low: float
    high: float
    start: float
    end: float

    def position(self, value: float) -> float:
        """Where the value lies; beyond the ends it is at the end."""
        inside = min(max(value, self.low), self.high)
        return self.start + math.log(inside / self.low) / math.log(self.high / self.low) * (self.end - self.start)

    def value(self, position: float) -> float:
        """What lies there."""
        return self.low * math.exp((position - self.start) / (self.end - self.start) * math.log(self.high / self.low))


Scale = LinearScale | LogScale


def choose_scale(values: Iterable[float], start: float, end: float, *, margin: float = 1.12, least: float = 3) -> Scale:
    """A scale on which all positive values are distinct: logarithmic where they are 200 times apart, else from 0.

    It goes beyond the largest value by ``margin`` (1.1 is a tenth of its length); a linear one at least to ``least``
    (3 is enough for three whole numbers).
    """
    positive = [value for value in values if value > 0] or [1.0]
    smallest, largest = min(positive), max(positive)
    if largest >= _FAR_APART * smallest:
        ratio = largest / smallest  # margins as long as on a linear scale
        return LogScale(smallest / ratio ** ((margin - 1) / 2), largest * ratio ** (margin - 1), start, end)
    return LinearScale(0, max(largest * margin, least), start, end)


def count_ticks(scale: Scale) -> tuple[Tick, ...]:
    """Three to eight round numbers within the scale, ascending."""
    if isinstance(scale, LogScale):
        powers = (10.0**power for power in range(-15, 20))
        values: Sequence[float] = _spread_by_powers(tuple(powers), scale.low, scale.high)
    else:
        values = _widest(_decimal_steps(), scale.low, scale.high)
    return tuple(Tick(value, f"{value:.10g}") for value in values)


def byte_ticks(scale: Scale) -> tuple[Tick, ...]:
    """Three to eight round numbers of bytes within the scale, ascending: ``20 MiB``, ``40 MiB``..."""
    if isinstance(scale, LogScale):
        powers = tuple(float(factor * 1024**unit) for unit in range(len(_UNITS)) for factor in (1, 10, 100))
        values: Sequence[float] = _spread_by_powers(powers, scale.low, scale.high)
    else:
        values = _widest(_binary_steps(), scale.low, scale.high)
    # All in the unit of the step: 1500 KiB is not 1.5 MiB.
    spacing = values[1] - values[0]
    shared = None if isinstance(scale, LogScale) else _unit_of(spacing)
    return tuple(Tick(value, _label_bytes(value, _unit_of(value) if shared is None else shared)) for value in values)


def _decimal_steps() -> Iterator[float]:
    """Ascending; each at most 2.5 times the one before, so that one of them gives three to eight ticks."""
    for power in range(-5, 20):  # a rate may be far below one
        for factor in (1, 2, 5):
            yield factor * 10.0**power


def _binary_steps() -> Iterator[float]:
    for unit in range(len(_UNITS)):
        for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500):
            yield float(factor * 1024**unit)


def _widest(steps: Iterable[float], low: float, high: float) -> list[float]:
    """The multiples inside of the largest step that has at least three there."""
    # Not by len(), which ends in an OverflowError for a row of 2^63 numbers.
    step = list(takewhile(lambda step: len(_factors(step, low, high)[:_FEWEST]) >= _FEWEST, steps))[-1]
    return [step * factor for factor in _factors(step, low, high)]


def _factors(step: float, low: float, high: float) -> range:
    return range(math.ceil(low / step), math.floor(high / step) + 1)


def _spread_by_powers(powers: Sequence[float], low: float, high: float) -> list[float]:
    inside = [power for power in powers if low <= power <= high]
    if len(inside) < _FEWEST:
        return sorted(value for power in powers for value in (power, 3 * power) if low <= value <= high)
    return inside[:: -(-len(inside) // _MOST)]


def _unit_of(value: float) -> int:
    return max(unit for unit in range(len(_UNITS)) if unit == 0 or value >= 1024**unit)


def _label_bytes(value: float, unit: int) -> str:
    return f"{value / 1024**unit:.10g} {_UNITS[unit]}" if value else "0"
