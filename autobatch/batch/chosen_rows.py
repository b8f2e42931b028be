"""Chooses the few rows of a batch that stand for all of it, as in the check of whether a split is exact.

Covers indices alone, by the number of rows. Does not cover taking the rows (``layout``), nor the largest samples of a
dataset (``largest``), nor which divisions are compared (``exactness.partitions``).
"""

from __future__ import annotations

from itertools import pairwise

__all__ = ["choose_rows", "spread_evenly"]

_GOLDEN = (5**0.5 - 1) / 2


def choose_rows(n: int, count: int) -> list[int]:
    """Indices of ``n`` of ``count`` samples, in order; beyond the count each of them several times in a row.

    Samples that belong together must be chosen together, or they do not show it. Four or more are therefore rows 2i and
    2i + 1, and where the batch is large enough, also the rows half a batch further on (of an odd half, one of the two).
    """
    if not 4 <= n < count:
        return [index * count // n for index in range(n)]
    pairs, of_half = (n + 1) // 2, count // 4
    if (pairs + 1) // 2 <= of_half:
        firsts = [2 * pair for pair in spread_evenly((pairs + 1) // 2, of_half)]
        firsts += [count // 4 * 2 + first for first in firsts]
    else:
        firsts = [2 * pair for pair in spread_evenly(pairs, count // 2)]
    return [first + side for first in firsts for side in (0, 1)][:n]


def spread_evenly(n: int, count: int) -> list[int]:
    """``n`` of the indices below ``count``, one from each of ``n`` equal ranges, the first among them.

    Not at a fixed distance: samples that repeat with a period (one of each class in turn) could all be alike. Where in
    its range an index lies follows the golden ratio, whose multiples are spread over 0 to 1 without a period; and where
    that leaves no fixed distance, each index has another remainder when divided by ``n``, so that a period of ``n``, or
    of a divisor of it, is seen whole.
    """
    bounds = [*pairwise(index * count // n for index in range(n + 1))]
    anywhere = [low + int(index * _GOLDEN % 1 * (high - low)) for index, (low, high) in enumerate(bounds)]
    unlike = [_move(row, bounds[index], (index - row) % n, n) for index, row in enumerate(anywhere)]
    distances = {after - before for before, after in pairwise(unlike)}
    return anywhere if len(distances) == 1 < n - 1 else unlike


def _move(row: int, bounds: tuple[int, int], distance: int, back: int) -> int:
    """``distance`` rows on, or ``back`` from there, wherever that is inside its range."""
    choices = (row + distance, row + distance - back)
    return next((choice for choice in choices if bounds[0] <= choice < bounds[1]), row)
