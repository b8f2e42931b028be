"""How a target batch is divided: over ranks, then into micro-batches of nearly one size.

Covers arithmetic on samples and the choice of the size among those that ran. Does not cover the plan itself (``plan``)
nor which sizes to run (``search``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from autobatch.errors import InvalidArgument
from autobatch.planning.evidence import Question, largest_fitting, smallest_as_fast
from autobatch.records import Trial

__all__ = ["Objective", "balance", "choose_size", "divide_evenly", "least_size", "spread", "useful_sizes"]

Objective = Literal["throughput", "memory"]


def choose_size(question: Question, trials: Sequence[Trial], objective: Objective = "throughput") -> int | None:
    """The micro-batch size that a plan may promise: one that has run and fits.

    ``"throughput"`` takes the largest: the rates of single trials are too noisy to overrule fewer, fuller steps, and
    what crawls near the limit is told by its outcome (``"thrash"``). ``"memory"`` takes the smallest that is no slower.

    Returns:
        ``None`` where not even the smallest size fits.
    """
    return largest_fitting(question, trials) if objective == "throughput" else smallest_as_fast(question, trials)


def spread(total: int, parts: int) -> tuple[int, ...]:
    """``total`` samples in so many parts that differ by at most one, larger first; parts beyond ``total`` are 0.

    Raises:
        InvalidArgument: There is nothing to spread over, or less than nothing to spread.
    """
    _check_total(total)
    if parts < 1:
        raise InvalidArgument(f"{total} samples cannot be spread over {parts} parts")
    size, larger = divmod(total, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


@lru_cache(maxsize=256)
def balance(total: int, largest: int, smallest: int = 1) -> tuple[int, ...]:
    """The fewest parts of at most ``largest`` samples that sum to ``total``, as equal as can be, larger first.

    ``balance(256, 100)`` is ``(86, 85, 85)``: as many steps as ``(100, 100, 56)`` and less memory. 0 samples need no
    part. As the parts are few and equal, no other division has a larger smallest part.

    Args:
        total: Samples to divide.
        largest: The most samples of a part.
        smallest: The fewest samples of a part: what the model can run.

    Raises:
        InvalidArgument: ``largest`` is less than 1, or ``total`` less than 0; or each division has a part of fewer than
            ``smallest`` samples: ``largest`` is less than ``least_size(total, smallest)``, or ``total`` than
            ``smallest``.
    """
    _check_total(total)
    _check_largest(largest)
    steps = -(-total // largest)
    if total and total // steps < smallest:
        raise InvalidArgument(
            f"{total} samples cannot be divided into parts of at least {smallest} and at most {largest}"
        )
    return spread(total, steps) if total else ()


@lru_cache(maxsize=256)
def least_size(total: int, smallest: int) -> int:
    """The least size that allows a division into parts of at least ``smallest`` samples each.

    ``least_size(9, 2)`` is 3, as 9 samples in parts of at most 2 leave one alone. Any larger size allows a division
    too. A ``total`` below ``smallest`` stays whole.

    Raises:
        InvalidArgument: ``total`` or ``smallest`` is less than 1.
    """
    _check_positive(total)
    if smallest < 1:
        raise InvalidArgument(f"a micro-batch must have at least one sample, not at least {smallest}")
    return -(-total // max(total // smallest, 1))


def divide_evenly(total: int, largest: int, smallest: int = 1) -> tuple[int, int]:
    """``(size, steps)`` with ``size * steps == total`` exactly and ``size`` as large as ``largest`` allows.

    For frameworks that own the loop and know one size and one number of steps only. A prime ``total`` above
    ``largest`` leaves ``(1, total)``.

    Raises:
        InvalidArgument: ``total`` or ``largest`` is less than 1; or no divisor is from ``smallest`` to ``largest``.
    """
    _check_positive(total)
    _check_largest(largest)
    small = (divisor for divisor in range(1, math.isqrt(total) + 1) if total % divisor == 0)
    size = max(part for divisor in small for part in (divisor, total // divisor) if part <= largest)
    if size < smallest:
        raise InvalidArgument(f"{total} samples have no divisor from {smallest} to {largest}")
    return size, total // size


def useful_sizes(total: int, bound: int) -> tuple[int, ...]:
    """The sizes that a balanced plan can have, ascending: ``ceil(total / steps)`` for any steps, up to ``bound``.

    Any other size needs as many steps as the next smaller useful one, and more memory. There are at most
    ``2 * sqrt(total)`` of them; 1 is always one, and 2 where ``total`` and ``bound`` allow it.

    Raises:
        InvalidArgument: ``total`` or ``bound`` is less than 1.
    """
    _check_positive(total)
    _check_largest(bound)
    sizes = []
    steps = 1
    while steps < total:
        quotient = (total - 1) // steps
        sizes.append(quotient + 1)  # ceil(total / steps), which stays the same up to the next value of `steps`
        steps = (total - 1) // quotient + 1
    sizes.append(1)
    return tuple(size for size in reversed(sizes) if size <= bound)


def _check_total(total: int) -> None:
    if total < 0:
        raise InvalidArgument(f"{total} samples cannot be divided")


def _check_positive(total: int) -> None:
    if total < 1:
        raise InvalidArgument(f"a batch must have at least one sample, not {total}")


def _check_largest(largest: int) -> None:
    if largest < 1:
        raise InvalidArgument(f"a micro-batch must have at least one sample, not at most {largest}")
