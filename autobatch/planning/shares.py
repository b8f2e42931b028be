"""Computes how many samples of a batch each rank runs: evenly, in proportion to speed, or as the user says.

The batch is the target, or a smaller last one of an epoch. Shares that do not sum to the target raise
``InvalidArgument``.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from autobatch._bounds import SHORTEST
from autobatch._formatting import plural, show_value
from autobatch.errors import InvalidArgument
from autobatch.planning.division import spread

Share: TypeAlias = Literal["equal", "speed"] | Sequence[int]
"""How ranks share a target batch: evenly to one sample, in proportion to their speed, or by these numbers."""

_RANKS_SHOWN = 16


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
    """Return the rank that takes longest; ``None`` if some were not timed or all take the same."""
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
    """Return exact shares before rounding: in proportion to the weights, but none below ``least``."""
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
    shares = tuple(_as_whole(samples) for samples in share)
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


def _as_whole(value: Any) -> int:
    try:
        return 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return 0


def _show_shares(shares: Sequence[int]) -> str:
    shown = [str(samples) for samples in shares[:_RANKS_SHOWN]]
    return f"[{', '.join([*shown, '...'] if len(shares) > _RANKS_SHOWN else shown)}]"
