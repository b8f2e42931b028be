"""Chooses the partitions that are compared: of a few samples every kind, of many the one that a step would run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from autobatch._bounds import LONGEST_LIST
from autobatch.planning.division import balance

Sizes = tuple[int, ...]
"""A partition into neighbours: the number of samples of each part."""

Parts = tuple[Sequence[int], ...]
"""A partition: the samples of each part."""


class Planned(NamedTuple):
    """The division that a step will run."""

    target: int
    size: int  # of its micro-batches, which are known to fit
    most: int  # samples that should fit at once; fewer are compared if they do not
    smallest: int = 1  # samples that the model can run


_SMALLEST_HALVED = 16
"""A part of so many samples is not halved again: the comparison of a few samples has looked at smaller ones."""


def ranges_of(sizes: Sizes) -> tuple[range, ...]:
    """Return the samples of each part of neighbours."""
    return tuple(range(start, stop) for start, stop in pairwise([0, *accumulate(sizes)]))


def crossings(samples: int) -> tuple[Parts, Parts]:
    """Return two partitions in few parts of unlike sizes: the first sample, then rows, or columns, of a square.

    Each two samples are in different parts once.
    """
    width = max(1, math.ceil(math.sqrt(samples - 1)))
    others = range(1, samples)
    rows = [others[start : start + width] for start in range(0, len(others), width)]
    columns = [[0, *others[::width]], *([*others[start::width]] for start in range(1, width))]
    by_row = (range(1), *rows)
    return by_row, tuple(columns) if len(columns) > 1 else by_row


def partitions_of(samples: int, smallest: int) -> list[Sizes]:
    """Return the partitions of a few samples: a small part first, halves, and the smallest parts there can be.

    All are needed. A mean that is stated with a wrong count looks right in two halves, and fails only in uneven parts.
    Two samples that depend on each other show it only if they are in different parts.
    """
    if samples < 2 * smallest:
        return []
    uneven, halves = (smallest, samples - smallest), (samples - samples // 2, samples // 2)
    return [*dict.fromkeys([uneven, halves, _finest(samples, smallest)])]


def _finest(samples: int, smallest: int) -> Sizes:
    """Return single samples; if two are the fewest, cuts after 3, 5, 7 and so on: rows 2i and 2i + 1 may be a pair."""
    first = smallest if smallest == 1 or samples < 2 * smallest + 1 else smallest + 1
    parts, rest = divmod(samples - first, smallest)
    return (first, *[smallest] * (parts - 1), smallest + rest)


def divisions_of(planned: Planned, compared: int) -> Iterator[Sizes]:
    """Yield the partitions to compare at full size: the best choice first, then what to try if memory runs out.

    The plan's own of the whole target; planned micro-batches if at least two fit at once; else what retries would run.
    """
    target, size, most, smallest = planned
    wholes, fewer = [min(target, most)], min(size, target)
    while fewer > compared:
        wholes.append(fewer)
        fewer //= 2
    for whole in dict.fromkeys(whole for whole in wholes if whole > compared):
        if whole == target > size:
            yield balance(target, size, smallest)[:LONGEST_LIST]  # more than a verdict can list
        elif whole >= 2 * size:
            yield (size,) * min(whole // size, LONGEST_LIST)
        elif sizes := halvings(whole, smallest):
            yield sizes


def halvings(samples: int, smallest: int) -> Sizes:
    """Return a half, a quarter, an eighth and so on, to see a dependence on any size; empty without two parts."""
    rest = samples
    sizes: list[int] = []
    while rest >= 2 * smallest and (rest > _SMALLEST_HALVED or not sizes):
        sizes.append(rest - rest // 2)
        rest //= 2
    return (*sizes, rest) if sizes else ()
