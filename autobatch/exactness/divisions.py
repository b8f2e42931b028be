"""Lists the divisions that a check tries, of a few samples and of many, and where their parts begin and end.

Covers sizes alone. Does not cover running them (``measurement``).
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from autobatch._bounds import LONGEST_LIST
from autobatch.planning.planner import balance

__all__ = ["Sizes", "divide_at_full_size", "halvings", "partitions_of", "ranges_of", "wholes_of"]

Sizes = tuple[int, ...]

_SMALLEST_HALVED = 16
"""A part of so many samples is not halved again: the comparison of a few samples has looked at smaller ones."""


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


def wholes_of(target: int, size: int, most: int, compared: int) -> Sizes:
    """How many samples to compare at once, the best choice first and then what to try where memory ends.

    Args:
        target: Samples of the step.
        size: Samples of a micro-batch, which have run.
        most: Samples that should fit at once, at least ``size``.
        compared: Samples that were compared before; fewer than these show nothing new.
    """
    wholes, fewer = [min(target, most)], min(size, target)
    while fewer > compared:
        wholes.append(fewer)
        fewer //= 2
    return tuple(dict.fromkeys(whole for whole in wholes if whole > compared))


def divide_at_full_size(target: int, size: int, whole: int, smallest: int) -> Sizes:
    """The one division of many samples that is compared; it may leave out a remainder of them.

    The plan's own division, where the whole target is compared; planned micro-batches, where at least two fit at once;
    else what retries would run.

    Args:
        target: Samples of the step.
        size: Samples of the plan's micro-batch.
        whole: Samples that are compared, at most ``target``.
        smallest: The fewest samples that the model can run.
    """
    if whole < 2 * size:
        return balance(target, size, smallest) if whole == target > size else halvings(whole, smallest)
    sizes = balance(target, size, smallest) if whole == target else (size,) * (whole // size)
    return sizes[:LONGEST_LIST]  # more than a verdict can list


def halvings(samples: int, smallest: int) -> Sizes:
    """A half, a quarter, an eighth and so on: what depends on the size shows between any two of them.

    One division shows it for all sizes at the cost of one pass. Empty where there are no two parts.
    """
    rest = samples
    sizes: list[int] = []
    while rest >= 2 * smallest and (rest > _SMALLEST_HALVED or not sizes):
        sizes.append(rest - rest // 2)
        rest //= 2
    return (*sizes, rest) if sizes else ()
