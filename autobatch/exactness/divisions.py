"""Lists the divisions of a few samples that a check tries, and where their parts begin and end.

Covers sizes alone. Does not cover running them (``measurement``).
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from autobatch.planning.planner import balance

__all__ = ["Sizes", "partitions_of", "ranges_of"]

Sizes = tuple[int, ...]


def partitions_of(samples: int, smallest: int) -> list[Sizes]:
    """The divisions that are tried: a small part first, a small part last, halves, quarters.

    All are needed: a mean that is stated with a wrong count looks right in two halves, and fails only in uneven parts.
    """
    if samples < 2 * smallest:
        return []
    uneven = (smallest, samples - smallest)
    even = [balance(samples, -(-samples // min(parts, samples // smallest))) for parts in (2, 4)]
    return [*dict.fromkeys([uneven, *even, uneven[::-1]])]


def ranges_of(sizes: Sizes) -> list[tuple[int, int]]:
    """Where each part begins and ends."""
    return [*pairwise([0, *accumulate(sizes)])]
