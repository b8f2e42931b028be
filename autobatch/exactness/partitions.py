"""Chooses the partitions that are compared: of a few samples every kind, of many the one that a step would run.

Choosing the 20 hardest samples of a micro-batch shows with more than 20 of them only, so that many are compared too.
Does not cover the comparison itself (``compare_split``).
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from autobatch._bounds import LONGEST_LIST
from autobatch.planning.planner import balance

__all__ = ["Sizes", "divide_at_full_size", "halvings", "partitions_of", "ranges_of", "wholes_of"]

Sizes = tuple[int, ...]
"""A partition: how many samples each of its parts has."""

_SMALLEST_HALVED = 16
"""A part of so many samples is not halved again: the comparison of a few samples has looked at smaller ones."""


def ranges_of(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """Where each part begins and ends."""
    return tuple(pairwise([0, *accumulate(sizes)]))


def partitions_of(samples: int, smallest: int) -> list[Sizes]:
    """The partitions of a few samples: a small part first, halves, and the smallest parts there can be.

    All are needed: a mean that is stated with a wrong count looks right in two halves, and fails only in uneven parts;
    and two samples that depend on each other show it only where they are in different parts.
    """
    if samples < 2 * smallest:
        return []
    uneven, halves = (smallest, samples - smallest), (samples - samples // 2, samples // 2)
    return [*dict.fromkeys([uneven, halves, _finest(samples, smallest)])]


def _finest(samples: int, smallest: int) -> Sizes:
    """Single samples; where two are the fewest, cuts after 3, 5, 7 and so on, as rows 2i and 2i + 1 may be a pair."""
    first = smallest if smallest == 1 or samples < 2 * smallest + 1 else smallest + 1
    parts, rest = divmod(samples - first, smallest)
    return (first, *[smallest] * (parts - 1), smallest + rest)


def wholes_of(target: int, size: int, most: int, compared: int) -> Sizes:
    """How many samples to compare at once, the best choice first and then what to try where memory ends.

    Of a step of ``target`` samples in micro-batches of ``size``, of which ``most`` should fit; more than were compared.
    """
    wholes, fewer = [min(target, most)], min(size, target)
    while fewer > compared:
        wholes.append(fewer)
        fewer //= 2
    return tuple(dict.fromkeys(whole for whole in wholes if whole > compared))


def divide_at_full_size(target: int, size: int, whole: int, smallest: int) -> Sizes:
    """The one partition of ``whole`` samples that is compared; it may leave out a remainder of them.

    The plan's own partition, where the whole target is compared; planned micro-batches, where at least two fit at once;
    else what retries would run. ``smallest`` is the fewest samples that the model can run.
    """
    if whole < 2 * size:
        return balance(target, size, smallest) if whole == target > size else halvings(whole, smallest)
    sizes = balance(target, size, smallest) if whole == target else (size,) * (whole // size)
    return sizes[:LONGEST_LIST]  # more than a verdict can list


def halvings(samples: int, smallest: int) -> Sizes:
    """A half, a quarter, an eighth and so on, to see a dependence on any size in one pass; empty without two parts."""
    rest = samples
    sizes: list[int] = []
    while rest >= 2 * smallest and (rest > _SMALLEST_HALVED or not sizes):
        sizes.append(rest - rest // 2)
        rest //= 2
    return (*sizes, rest) if sizes else ()
