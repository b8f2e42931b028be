"""Checks that the counts that a step states add up: the same samples, cut otherwise, must count the same.

A count that is kept from 0, ``max(boxes, 1)``, adds 1 for each micro-batch without a box, and makes the gradient too
small. An example batch need not have such samples, so a Runner checks in steps 1, 2, 4, 8 and so on.

1. ``read_stated`` notes what the step states for each micro-batch.
2. ``find_doubtful`` puts those first that have a loss of exactly 0, then small counts.
3. ``check_counts`` compares the first with its halves, or with its neighbour if it cannot be halved.
4. A difference that repeats itself is refused. Counts that are drawn at random differ each time, and pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autobatch._formatting import plural
from autobatch.batch.cut import Group, divide
from autobatch.batch.samples import MicroBatch
from autobatch.step.losses import counts_of, losses_of

_LOG = logging.getLogger("autobatch")

_ROUNDS = 12
"""Number of times that two counts that differ have to repeat themselves, both.

If a count is drawn at random, the chance of that is p * q with p + q <= 1: at most 1/4. The same state of the
generators would not give both the same draws: a dropout comes between, and kernels draw by size.
"""

_TOLERANCE = 1e-5

Ask = Callable[[MicroBatch], Any]
"""Runs the step on a micro-batch without a gradient; returns its losses."""


class Stated(NamedTuple):
    """Counts that a step stated for one micro-batch, and whether a loss of theirs is exactly 0."""

    micro_batch: MicroBatch
    counts: Mapping[str, float]
    has_zero_loss: bool


class StatedCounts:
    """Decides when counts are compared, and warns once.

    Attributes:
        is_due: Whether the counts of the running step are compared.
    """

    def __init__(self) -> None:
        self.is_due, self._begun, self._has_warned = False, 0, False

    def begin(self) -> None:
        self._begun += 1
        self.is_due = self._begun.bit_count() == 1

    def warn_of_zero_loss(self, doubtful: Sequence[Stated]) -> None:
        """Warn once of a loss of 0 that has a count, if samples cannot run again, as on one of several ranks."""
        for one in doubtful[:1]:
            if one.has_zero_loss and not self._has_warned:
                self._has_warned = True
                _LOG.warning(
                    "a loss of %s is exactly 0, and the step states a count of %s for it: if max(n, 1) keeps that "
                    "count from 0, the gradient is too small; a part without anything to count has to state 0",
                    plural(one.micro_batch.size, "sample"),
                    _show(one.counts),
                )


def read_stated(micro_batch: MicroBatch, returned: Any) -> list[Stated]:
    """Read the counts in the losses that a step returned for a micro-batch; an empty list if it states none."""
    losses, counts = losses_of(returned), counts_of(returned)
    has_zero_loss = any(
        counts[name] > 0 and type(losses[name]) is torch.Tensor and bool((losses[name] == 0).all()) for name in counts
    )
    return [Stated(micro_batch, counts, has_zero_loss)] if counts else []


def find_doubtful(stated: Sequence[Stated]) -> list[Stated]:
    """Return the counts of the micro-batches, the most doubtful first; an empty list for shares of the step.

    Counts are shares if each is below 1 and they add up to at most 1: no ``max(n, 1)`` made them, and their losses may
    be 0.
    """
    totals = _add(one.counts for one in stated)
    if max(totals.values(), default=0) <= 1 + _TOLERANCE and all(max(one.counts.values()) < 1 for one in stated):
        return []
    return sorted(stated, key=lambda one: (not one.has_zero_loss, sum(one.counts.values())))


def check_counts(doubtful: Sequence[Stated], smallest: int, ask: Ask) -> str:
    """Compare the count of the most doubtful micro-batch with that of its halves, or of it and its neighbour together.

    Return the error's text; it is empty if the counts add up, or differ each time.
    """
    if not doubtful:
        return ""
    first = doubtful[0]
    size = first.micro_batch.size
    span, largest, parts = [first], size - size // 2, 2.0
    if size < 2 * smallest:
        after = [one for one in doubtful if _follows(one.micro_batch, first.micro_batch)]
        before = [one for one in doubtful if _follows(first.micro_batch, one.micro_batch)]
        if not after and not before:
            return ""
        span = [first, after[0]] if after else [before[0], first]
        size, largest, parts = max(one.micro_batch.size for one in span), sum(one.micro_batch.size for one in span), 0.5
    # Rounding may change the total of the step by this much, and so may 1e-8 that is added to each count.
    nothing = _TOLERANCE * max(1.0, sum(sum(one.counts.values()) for one in doubtful))
    samples = [one.micro_batch for one in span]
    stated, otherwise = _add(one.counts for one in span), _count_again(samples, largest, ask)
    if _are_same(stated, otherwise, nothing):
        return ""
    for _ in range(_ROUNDS):
        for found, limit in ((stated, size), (otherwise, largest)):
            if not _are_same(found, _count_again(samples, limit, ask), nothing):
                return ""
    is_fixed = not first.has_zero_loss and all(one.counts == first.counts for one in doubtful)
    if is_fixed and otherwise == {name: count * parts for name, count in stated.items()}:
        advice = "the count is the same for every part: compute it from the samples of the part"
    else:
        advice = "do not keep a count from 0, as by max(n, 1): a part without anything to count has to state 0"
    return (
        f"the step states counts that do not add up: {_show(stated)} for {sum(one.size for one in samples)} samples in "
        f"micro-batches of up to {size}, and {_show(otherwise)} for the same in micro-batches of up to {largest}; "
        f"{advice}"
    )


def _count_again(micro_batches: Sequence[MicroBatch], largest: int, ask: Ask) -> dict[str, float]:
    """Return what the step states for these neighbours in micro-batches of at most so many samples."""
    rows = [row for micro_batch in micro_batches for row in micro_batch.rows]
    trims = [micro_batch.trim for micro_batch in micro_batches]
    trim = None if None in trims else max(trims, key=lambda one: one.length if one else 0)
    parts = divide(Group(micro_batches[0].batch, rows), largest)
    return _add(counts_of(ask(part._replace(trim=trim))) for part in parts)


def _add(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals = dict[str, float]()
    for one in counts:
        for name, count in one.items():
            totals[name] = totals.get(name, 0.0) + count
    return totals


def _follows(one: MicroBatch, other: MicroBatch) -> bool:
    return one.batch is other.batch and one.rows[0] == other.rows[-1] + 1


def _are_same(first: Mapping[str, float], second: Mapping[str, float], nothing: float) -> bool:
    pairs = [(first.get(name, 0.0), second.get(name, 0.0)) for name in first.keys() | second.keys()]
    return all(math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=nothing) for one, other in pairs)


def _show(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} ({name})" if name else f"{count:g}" for name, count in counts.items())
