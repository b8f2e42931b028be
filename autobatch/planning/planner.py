"""Divides a target batch over ranks, and then into micro-batches of nearly one size.

Covers arithmetic on samples and the choice of the size among those that ran. Does not cover the plan itself
(``plan_record``) nor which sizes to run (``next_trial``). What is less than one sample raises ``InvalidArgument``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from autobatch.errors import InvalidArgument
from autobatch.planning.evidence import Question, largest_fitting, smallest_as_fast
from autobatch.records import Trial

__all__ = ["Objective", "balance", "choose_size", "least_size", "spread", "useful_sizes"]

Objective = Literal["throughput", "memory"]


def choose_size(question: Question, trials: Sequence[Trial], objective: Objective = "throughput") -> int | None:
    """The micro-batch size that a plan may promise: one that has run and fits; ``None`` where none does.

    ``"throughput"`` takes the largest: the rates of single trials are too noisy to overrule fewer, fuller steps, and
    what crawls near the limit has the outcome ``"thrash"``. ``"memory"`` takes the smallest that is no slower.
    """
    return largest_fitting(question, trials) if objective == "throughput" else smallest_as_fast(question, trials)


def spread(total: int, parts: int) -> tuple[int, ...]:
    """``total`` samples in so many parts that differ by at most one, larger first; parts beyond ``total`` are 0."""
    if total < 0:
        raise InvalidArgument(f"{total} samples cannot be divided")
    if parts < 1:
        raise InvalidArgument(f"{total} samples cannot be spread over {parts} parts")
    size, larger = divmod(total, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


@lru_cache(maxsize=256)
def balance(total: int, largest: int, smallest: int = 1) -> tuple[int, ...]:
    """The fewest parts of at most ``largest`` samples that sum to ``total``, as equal as can be, larger first.

    ``balance(256, 100)`` is ``(86, 85, 85)``: as many steps as ``(100, 100, 56)`` and less memory. 0 samples need no
    part. As the parts are few and equal, no other division has a larger smallest part.

    Raises:
        InvalidArgument: Each division has a part of fewer than ``smallest`` samples, the fewest that the model can
            run: ``largest`` is less than ``least_size(total, smallest)``, or ``total`` than ``smallest``.
    """
    _check_largest(largest)
    steps = -(-total // largest)
    if total > 0 and total // steps < smallest:
        raise InvalidArgument(
            f"{total} samples cannot be divided into parts of at least {smallest} and at most {largest}"
        )
    return spread(total, steps) if total else ()


@lru_cache(maxsize=256)
def least_size(total: int, smallest: int) -> int:
    """The least size that allows a division into parts of at least ``smallest`` samples each.

    ``least_size(9, 2)`` is 3, as 9 samples in parts of at most 2 leave one alone. Any larger size allows a division
    too. A ``total`` below ``smallest`` stays whole.
    """
    _check_total(total)
    if smallest < 1:
        raise InvalidArgument(f"a micro-batch must have at least one sample, not at least {smallest}")
    return -(-total // max(total // smallest, 1))


def useful_sizes(total: int, bound: int) -> tuple[int, ...]:
    """The sizes that a balanced plan can have, ascending: ``ceil(total / steps)`` for any steps, up to ``bound``.

    Any other size needs as many steps as the next smaller useful one, and more memory. There are at most
    ``2 * sqrt(total)`` of them; 1 is always one, and 2 where ``total`` and ``bound`` allow it.
    """
    _check_total(total)
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
    if total < 1:
        raise InvalidArgument(f"a batch must have at least one sample, not {total}")


def _check_largest(largest: int) -> None:
    if largest < 1:
        raise InvalidArgument(f"a micro-batch must have at least one sample, not at most {largest}")
