"""Divides a target batch into micro-batches of nearly one size, and lists the sizes that are worth running.

A number of samples below 1 raises ``InvalidArgument``.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from autobatch.errors import InvalidArgument

_GOLDEN = (5**0.5 - 1) / 2

Objective = Literal["throughput", "memory"]

COMPILED_SIZES = 3
"""Number of sizes of a compiled step. A batch in balanced parts has at most two sizes, so these are six graphs.
``torch._dynamo.config.recompile_limit`` allows eight: two are left for evaluation or the epoch's short last batch.
"""


@lru_cache(maxsize=256)
def balance(total: int, largest: int, smallest: int = 1) -> tuple[int, ...]:
    """Return the fewest parts of at most ``largest`` samples that sum to ``total``, as equal as possible, larger first.

    ``balance(256, 100)`` is ``(86, 85, 85)``: as many steps as ``(100, 100, 56)`` and less memory. No other division
    has a larger smallest part, so InvalidArgument is raised if that is less than ``smallest``.
    """
    _check_samples(max(total, 1), largest)
    if total < 1:
        if total < 0:
            raise InvalidArgument(f"{total} samples cannot be divided")
        return ()
    steps = -(-total // largest)
    if total // steps < smallest:
        raise InvalidArgument(
            f"{total} samples cannot be divided into parts of at least {smallest} and at most {largest}"
        )
    return spread(total, steps)


def spread(total: int, parts: int) -> tuple[int, ...]:
    """Return parts that sum to ``total``, as equal as possible, larger first: ``spread(5, 4)`` is ``(2, 1, 1, 1)``."""
    size, larger = divmod(total, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


@lru_cache(maxsize=256)
def least_size(total: int, smallest: int) -> int:
    """Return the least size that allows a division into parts of at least ``smallest`` samples each.

    ``least_size(9, 2)`` is 3, since 9 samples in parts of at most 2 leave one alone. Any larger size allows a division
    too. A ``total`` below ``smallest`` stays whole.
    """
    _check_samples(total)
    if smallest < 1:
        raise InvalidArgument(f"a micro-batch must have at least one sample, not at least {smallest}")
    return -(-total // max(total // smallest, 1))


def useful_sizes(total: int, bound: int) -> tuple[int, ...]:
    """Return the sizes of balanced plans, ascending: ``ceil(total / steps)`` for any steps, up to ``bound``.

    Any other size needs as many steps as the next smaller useful one, and more memory. There are at most
    ``2 * sqrt(total)`` of them. 1 is always among them, and 2 if ``total`` and ``bound`` allow it.
    """
    _check_samples(total, bound)
    sizes = []
    steps = 1
    while steps < total:
        quotient = (total - 1) // steps
        sizes.append(quotient + 1)  # ceil(total / steps), the same up to the next value of `steps`
        steps = (total - 1) // quotient + 1
    sizes.append(1)
    return tuple(size for size in reversed(sizes) if size <= bound)


def eager_ladder(target: int, size: int) -> tuple[int, ...]:
    """Return the sizes to choose from if a new size costs nothing: ``useful_sizes`` up to the plan's, ascending."""
    sizes = useful_sizes(target, size)
    return sizes if sizes[-1] == size else (*sizes, size)


def compiled_ladder(size: int) -> tuple[int, ...]:
    """Return a few sizes if each new one is compiled: ``size``, its half and its quarter, ascending.

    One sample is left out: ``torch.compile`` specializes on it even if sizes are dynamic.
    """
    if size < 1:
        raise InvalidArgument(f"a micro-batch must have at least one sample, not {size}")
    halves = (size >> times for times in reversed(range(COMPILED_SIZES)))
    return tuple(half for half in halves if half > 1 or half == size)


def divide_evenly(total: int, largest: int) -> tuple[int, int]:
    """Return ``(size, steps)`` with ``size * steps == total`` and ``size`` as large as ``largest`` allows."""
    small = (divisor for divisor in range(1, math.isqrt(total) + 1) if total % divisor == 0)
    size = max(part for divisor in small for part in (divisor, total // divisor) if part <= largest)
    return size, total // size


def _check_samples(total: int, largest: int = 1) -> None:
    if total < 1:
        raise InvalidArgument(f"a batch must have at least one sample, not {total}")
    if largest < 1:
        raise InvalidArgument(f"a micro-batch must have at least one sample, not at most {largest}")


def choose_rows(n: int, count: int) -> list[int]:
    """Choose ``n`` of ``count`` samples that show what all are like, in order; beyond the count each several times.

    Samples that belong together are chosen together: four or more are rows 2i and 2i + 1. If the batch is large enough,
    half of them are half a batch further on (of an odd half, one of the two).
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
    """Choose ``n`` of the indices below ``count``, one from each of ``n`` equal ranges, the first among them.

    Samples may repeat with a period (one of each class in turn), so the distance is not fixed: multiples of the golden
    ratio are spread without a period. Each index has another remainder when divided by ``n`` if the distance varies.
    """
    bounds = [*pairwise(index * count // n for index in range(n + 1))]
    anywhere = [low + int(index * _GOLDEN % 1 * (high - low)) for index, (low, high) in enumerate(bounds)]
    unlike = [_move_row(row, bounds[index], (index - row) % n, n) for index, row in enumerate(anywhere)]
    distances = {after - before for before, after in pairwise(unlike)}
    return anywhere if len(distances) == 1 < n - 1 else unlike


def _move_row(row: int, bounds: tuple[int, int], distance: int, back: int) -> int:
    choices = (row + distance, row + distance - back)
    return next((choice for choice in choices if bounds[0] <= choice < bounds[1]), row)
