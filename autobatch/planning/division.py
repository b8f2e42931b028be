"""Divides a target batch among ranks, and a rank's share into micro-batches; lists the sizes that are worth running."""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from autobatch._bounds import SHORTEST
from autobatch._formatting import plural, show_value
from autobatch.errors import InvalidArgument

_GOLDEN = (5**0.5 - 1) / 2

Objective = Literal["throughput", "memory"]

Share: TypeAlias = Literal["equal", "speed"] | Sequence[int]
"""How ranks share a target batch: evenly to one sample, in proportion to their speed, or by these numbers."""

_RANKS_SHOWN = 16

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
    if total < 1:
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
    return -(-total // max(total // smallest, 1))


def useful_sizes(total: int, bound: int) -> tuple[int, ...]:
    """Return the sizes of balanced plans, ascending: ``ceil(total / steps)`` for any steps, up to ``bound``.

    Any other size needs as many steps as the next smaller useful one, and more memory. There are at most
    ``2 * sqrt(total)`` of them. 1 is always among them, and 2 if ``total`` and ``bound`` allow it.
    """
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
    halves = (size >> times for times in reversed(range(COMPILED_SIZES)))
    return tuple(half for half in halves if half > 1 or half == size)


def divide_evenly(total: int, largest: int) -> tuple[int, int]:
    """Return ``(size, steps)`` with ``size * steps == total`` and ``size`` as large as ``largest`` allows."""
    small = (divisor for divisor in range(1, math.isqrt(total) + 1) if total % divisor == 0)
    size = max(part for divisor in small for part in (divisor, total // divisor) if part <= largest)
    return size, total // size


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
    unlike = []
    for index, (row, (low, high)) in enumerate(zip(anywhere, bounds, strict=True)):
        choices = (row + (index - row) % n, row + (index - row) % n - n)
        unlike.append(next((choice for choice in choices if low <= choice < high), row))
    distances = {after - before for before, after in pairwise(unlike)}
    return anywhere if len(distances) == 1 < n - 1 else unlike


def share_target(target: int, share: Share, rates: Sequence[float]) -> tuple[int, ...]:
    """Return the samples of each rank, at least one, which sum to ``target``.

    Of an ``"equal"`` share the first ranks have one more if need be. ``"speed"`` is in proportion to ``rates``, the
    samples a second of each rank. Other shares read only their number.
    """
    ranks = len(rates)
    if target < ranks:
        raise InvalidArgument(
            f"target_batch={target} is less than one sample for each of {ranks} ranks: pass target_batch={ranks} or "
            f"more, or run on fewer ranks"
        )
    if isinstance(share, str) and share == "equal":
        return spread(target, ranks)
    if isinstance(share, str) and share == "speed":
        return _apportion(target, [_read_rate(rank, rate) for rank, rate in enumerate(rates)], least=1)
    return _check_shares(target, share, ranks)


def share_batch(samples: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Return the samples of each rank in a batch of another size than the target, in proportion to its shares.

    Each rank has at least one if there are enough.
    """
    return _apportion(samples, list(map(Fraction, shares)), least=min(1, samples // len(shares)))


def find_slowest(seconds: Sequence[float]) -> int | None:
    if not seconds or min(seconds) <= SHORTEST or max(seconds) == min(seconds):
        return None
    return max(range(len(seconds)), key=seconds.__getitem__)


def seconds_by_speed(samples: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds of the slowest rank if samples were divided by speed; 0 if a speed is unknown."""
    if not samples or min(samples) < 1 or min(seconds) <= SHORTEST:
        return 0.0
    rates = [count / taken for count, taken in zip(samples, seconds, strict=True)]
    shares = share_target(sum(samples), "speed", rates)
    return max(share / rate for share, rate in zip(shares, rates, strict=True))


def _apportion(total: int, weights: Sequence[Fraction], least: int) -> tuple[int, ...]:
    """Return whole numbers in proportion to the weights that sum to ``total``: it rounds the largest remainders up."""
    quotas = _quotas(total, weights, least)
    parts = [math.floor(quota) for quota in quotas]
    # sorted() is stable, so the first ranks of equal remainders are rounded up.
    by_remainder = sorted(range(len(parts)), key=lambda rank: parts[rank] - quotas[rank])
    for rank in by_remainder[: total - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


def _quotas(total: int, weights: Sequence[Fraction], least: int) -> list[Fraction]:
    proportional = list(weights)
    while True:
        scale = (total - least * (len(weights) - len(proportional))) / sum(proportional, Fraction())
        enough = [weight for weight in proportional if scale * weight >= least]
        if len(enough) == len(proportional):
            return [max(Fraction(least), scale * weight) for weight in weights]
        proportional = enough  # the others get the least, which is more than their part, so less is left for these


def _read_rate(rank: int, rate: Any) -> Fraction:
    is_number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
    if not is_number or not 0 < rate <= sys.float_info.max:
        raise InvalidArgument(
            f"share='speed' needs the samples a second of each rank, and {show_value(rate)} is none for rank {rank}: "
            f"pass share='equal', or a number of samples for each rank"
        )
    return Fraction(float(rate))


def _check_shares(target: int, share: Any, ranks: int) -> tuple[int, ...]:
    if not isinstance(share, Sequence) or isinstance(share, str | bytes | bytearray | memoryview):
        raise InvalidArgument(
            f"share={show_value(share)} must be 'equal', 'speed' or a number of samples for each rank, such as "
            f"{_show_shares(spread(target, ranks))}"
        )
    shares = tuple(as_index(samples) for samples in share)
    for rank, samples in enumerate(shares):
        if samples < 1:
            raise InvalidArgument(
                f"share={show_value(share)} has {show_value(share[rank])} for rank {rank}: each rank needs a whole "
                f"number of samples, at least 1"
            )
    if len(shares) != ranks:
        counts = plural(len(shares), "number")
        raise InvalidArgument(f"share={show_value(share)} has {counts} for {ranks} ranks: pass one for each rank")
    if sum(shares) != target:
        raise InvalidArgument(
            f"share={show_value(share)} makes {show_value(sum(shares))} samples, not target_batch={target}: pass "
            f"{_show_shares(share_batch(target, shares))} for these proportions"
        )
    return shares


def as_index(value: Any) -> int:
    """Return a whole number, of Python, NumPy or torch, as an int; -1 for all else."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


def _show_shares(shares: Sequence[int]) -> str:
    shown = [str(samples) for samples in shares[:_RANKS_SHOWN]]
    return f"[{', '.join([*shown, '...'] if len(shares) > _RANKS_SHOWN else shown)}]"
