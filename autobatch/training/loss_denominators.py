"""Divides each micro-batch's losses by the step's totals, known before or corrected once at the end.

The rule of exactness: each term of a step's loss is (sum of losses over all micro-batches) / (sum of counts). No factor
1/K appears anywhere.

1. ``weigh`` or the number of samples gives all totals before the first backward pass, one for each term.
2. If only the step's own ``Mean`` or ``Sum`` states counts, the total is known after the last micro-batch. Losses are
   divided by a power of two near it, which rounds nothing. Before the update the gradients are multiplied by
   power / total. This needs one denominator for all terms, as their gradients cannot be separated once they are added.
3. Losses in bfloat16 or float16 with one denominator go the same way: their gradients would round the factor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from autobatch.batch.cut import MicroBatch
from autobatch.errors import InvalidArgument
from autobatch.step.losses import Term, read_terms
from autobatch.training.micro_batches import sum_weights

__all__ = ["Denominators", "DividedLoss"]

_EXACT_IN_FLOAT32 = 2**24
_SIZE = attrgetter("size")
_WIDE = frozenset((torch.float32, torch.float64))

DividedLoss = tuple[torch.Tensor, float, float, "float | None"]
"""A micro-batch's part of the step's loss: a 0-dim tensor with a graph, and what it is still to be multiplied by; its
count and the unit that it was divided by, or 0 and ``None`` where it was divided by the total."""


_MOST_EXPECTED = 16
"""How many times what a first micro-batch tells the step before is believed without a scaler: of float16's range that
takes 4 of 40 bits (2^-24 to 65504) to either side. With a scaler gradients are far from the lower end."""


@dataclass(frozen=True)
class Denominators:
    """The totals of a step's counts, as known before its first micro-batch.

    Attributes:
        weights: Total of each term; the name ``""`` means every term.
        samples: Samples of all micro-batches.
        weighed: Whether ``weigh`` gave the weights; else they are numbers of samples.
        are_exact: Whether the totals are the same however the samples are divided: sums of whole numbers are, up to
            2^24 also where ``weigh`` counts in float32; sums of class weights differ in their last bits.
        unit: Divisor of losses if the total is not known before; ``None``: a number near to the total.
        expected: Sum of the counts if they are like those of the last step; 0 before the first step.
        is_scaled: Whether losses are scaled before their backward passes.
    """

    weights: Mapping[str, float]
    samples: int
    weighed: bool
    are_exact: bool
    unit: float | None = None
    expected: float = 0.0
    is_scaled: bool = False

    def with_common_unit(self) -> Denominators:
        """The same on every rank that has the same totals, for gradients that are summed before they are corrected."""
        return replace(self, unit=_power_of_two_near(self.weights.get("") or self.samples or 1))

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch], *, weighed: bool) -> Denominators:
        """Sum the weights of a step's micro-batches."""
        samples = sum(map(_SIZE, micro_batches))
        if not weighed:
            return _count_samples(samples)
        weights = sum_weights(micro_batches)
        counts = [count for micro_batch in micro_batches for count in micro_batch.weights.values()]
        are_exact = all(count.is_integer() and count <= _EXACT_IN_FLOAT32 for count in counts)
        return cls(weights, samples, weighed=True, are_exact=are_exact)

    def divide(self, micro_batch: MicroBatch, loss: Any, unit: float | None) -> DividedLoss | None:
        """Divide the losses of a micro-batch, such that those of all micro-batches add up to the step's loss.

        Args:
            micro_batch: The one that was run.
            loss: The step's return value for it.
            unit: Divisor of earlier micro-batches if the total is not known; ``None`` at first.

        Returns:
            ``None`` where the step states a count of 0.

        Raises:
            InvalidArgument: It is not a loss; or its counts or terms contradict those of ``weigh``, or need ``weigh``.
        """
        total = self.weights.get("")
        if total and type(loss) is torch.Tensor and loss.dtype in _WIDE and not loss.ndim and loss.requires_grad:
            return loss, micro_batch.weights[""] / total, 0.0, None  # nearly every step, in every micro-batch
        return self._divide_terms(micro_batch, read_terms(loss), unit)

    def _divide_terms(self, micro_batch: MicroBatch, terms: Sequence[Term], unit: float | None) -> DividedLoss | None:
        weights, is_narrow, is_stated = micro_batch.weights, False, False
        for term in terms:
            is_narrow |= term.is_narrow
            is_stated |= term.count is not None
        if is_stated and not self.weighed:
            count = _find_common_count(terms, micro_batch.size)
            return self._divide_by_unit(micro_batch.size, terms, count, unit)
        if is_narrow and "" in weights:
            for term in terms:
                _check_count(term, weights[""])
            return self._divide_by_unit(micro_batch.size, terms, weights[""], unit)
        if "" not in weights:
            _check_names(terms, weights)
        parts = [part for term in terms if (part := self._divide_by_total(term, weights)) is not None]
        return (functools.reduce(torch.add, parts), 1.0, 0.0, None) if parts else None

    def _divide_by_total(self, term: Term, weights: Mapping[str, float]) -> torch.Tensor | None:
        name = term.name if term.name in weights else ""
        if term.count is not None:
            _check_count(term, weights[name])
        if term.kind == "per step":
            return term.divide(self._average_part(weights), 1.0)
        # 0 x nan is nan
        return term.divide(weights[name], self.weights[name]) if weights[name] else None

    def _average_part(self, weights: Mapping[str, float]) -> float:
        """The part of the step that these weights are, averaged over the terms; all micro-batches' add up to 1."""
        parts = [weights[name] / total for name, total in self.weights.items() if total > 0]
        return math.fsum(parts) / len(parts)

    def _divide_by_unit(self, size: int, terms: Sequence[Term], count: float, unit: float | None) -> DividedLoss | None:
        if count == 0:
            return None
        if unit is None:
            unit = self.unit or self._choose_unit(size, count)
        parts = [term.divide(count, unit) for term in terms]
        return functools.reduce(torch.add, parts), 1.0, count, unit

    def _choose_unit(self, size: int, count: float) -> float:
        """Near to the total, as far as the first micro-batch and the step before tell.

        Not by the first micro-batch alone: where it has few tokens and the others many, their losses would be
        multiplied by the ratio, and in float16 the gradients of every step would overflow. Nor by the step before
        alone: where it had many tokens and this one has few, gradients would be divided by the ratio, and be lost.
        """
        if size == self.samples:
            return count  # a lone micro-batch is the whole: nothing has to be corrected
        if self.weighed:
            return _power_of_two_near(self.weights[""])
        own = count * self.samples / size
        most = math.inf if self.is_scaled else _MOST_EXPECTED * own
        return _power_of_two_near(min(max(own, self.expected), most))


@functools.lru_cache(maxsize=256)
def _count_samples(samples: int) -> Denominators:
    return Denominators({"": float(samples)}, samples, weighed=False, are_exact=True)


def _power_of_two_near(number: float) -> float:
    return math.ldexp(1.0, round(math.log2(number)))


def _find_common_count(terms: Sequence[Term], samples: int) -> float:
    counts = {t.name: float(samples) if t.count is None else t.count for t in terms if t.has_count}
    first, *rest = counts.values()
    if any(not math.isclose(first, other, rel_tol=1e-6) for other in rest):
        stated = ", ".join(f"{name!r}: {count:g}" for name, count in counts.items())
        raise InvalidArgument(
            f"step() states different counts for its terms ({stated}), and their totals must be known before the first "
            f"backward pass: pass weigh= that returns a dict of counts by term"
        )
    return first


def _check_names(terms: Sequence[Term], weights: Mapping[str, float]) -> None:
    named = {term.name for term in terms if term.has_count}
    missing = [name for name, weight in weights.items() if weight > 0 and name not in named]
    unknown = named - weights.keys()
    if missing or unknown:
        raise InvalidArgument(
            f"weigh() gives counts for the terms {sorted(weights)}, and step() returned {sorted(named)}: the "
            f"names must be the same (PerStep terms have no count)"
        )


def _check_count(term: Term, weight: float) -> None:
    if term.count is not None and not math.isclose(term.count, weight, rel_tol=1e-5):
        name = f" of the term {term.name!r}" if term.name else ""
        raise InvalidArgument(
            f"step() states a count{name} of {term.count:g} for a micro-batch for which weigh() gives {weight:g}: let "
            f"weigh= count the same (by term, as a dict, where terms have different counts), or leave weigh= out"
        )
