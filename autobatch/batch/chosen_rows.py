"""Chooses the few rows of a batch that stand for all of it, as in the check of whether a split is exact.

Covers indices alone, by the number of rows. Does not cover taking the rows (``layout``), nor the largest samples of a
dataset (``largest``), nor which divisions are compared (``exactness.partitions``).
"""

from __future__ import annotations

from itertools import pairwise

__all__ = ["choose_rows", "spread_evenly"]

_GOLDEN = (5**0.5 - 1) / 2


def choose_rows(n: int, count: int) -> list[int]:
    """Indices of ``n`` samples, in order, among them such as may belong together: apart they would not show it.

    Where there are enough, rows 2i and 2i + 1, and row i and the row as far into the other half of the batch.
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
    """``n`` of the indices below ``count``, one from each of ``n`` equal ranges, the first and no fixed distance apart.

    At a fixed distance, samples that repeat with a period (one of each class in turn) could all be alike. Where in its
    range an index lies follows the golden ratio, whose multiples are spread over 0 to 1 without a period; and where
    ranges are long enough, each index leaves another remainder when divided by ``n``, so that a period of ``n``, or of
    a divisor of it, is seen whole.
    """
    bounds = [index * count // n for index in range(n + 1)]
    return [_choose_between(low, high, index, n) for index, (low, high) in enumerate(pairwise(bounds))]


def _choose_between(low: int, high: int, index: int, n: int) -> int:
    anywhere = low + int(index * _GOLDEN % 1 * (high - low))
    above = anywhere + (index - anywhere) % n
    return next((chosen for chosen in (above, above - n) if low <= chosen < high), anywhere)
