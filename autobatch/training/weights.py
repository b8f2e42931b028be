"""Divides each micro-batch's losses by the step's totals, and sums the loss of the step.

The rule of exactness: each term of a step's loss is (sum of losses over all micro-batches) / (sum of counts). No factor
1/K appears anywhere.

1. ``weigh`` or the number of samples gives all totals before the first backward pass, one for each term.
2. If only the step's own ``Mean`` or ``Sum`` states counts, the total is known after the last micro-batch. Losses are
   divided by a power of two near it, which rounds nothing. Before the update the gradients are multiplied by
   power / total. This needs one denominator for all terms, as their gradients cannot be separated once they are added.
3. Losses in bfloat16 or float16 with one denominator go the same way: their gradients would round the factor.
4. One of several ranks does not know the total of all before they sum their gradients. It divides by what it expects,
   and its part of the sum is multiplied by expected / total: by 1 in a step of the whole target. Only terms with
   denominators of their own, and sharded parameters, need the totals of all ranks before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from autobatch.batch.samples import MicroBatch
from autobatch.errors import InvalidArgument
from autobatch.step.losses import Term, read_terms

_EXACT_IN_FLOAT32 = 2**24
_WIDE = frozenset((torch.float32, torch.float64))

_STATED_FOR_SOME = "the step states a count (Mean, Sum) for one micro-batch and none for another: always state it"

_MOST_EXPECTED = 16
"""How many times what a first micro-batch tells the step before is believed without a scaler: of float16's range that
takes 4 of 40 bits (2^-24 to 65504) to either side. With a scaler gradients are far from the lower end."""

_Divided = tuple[torch.Tensor, float, "float | None"]
"""A micro-batch's part of the step's loss; its count and the unit that it was divided by, or 0 and ``None`` if it was
divided by the total."""


class StepLoss:
    """The loss of one step: its denominators, known before the first micro-batch, and its running sum.

    Attributes:
        weights: Total of each term over all ranks, or what is expected of it; the name ``""`` means every term.
        samples: Samples of all micro-batches, of all ranks, or what is expected of them.
        are_exact: Whether the totals are the same however the samples are divided: sums of whole numbers are, up to
            2^24 also where ``weigh`` counts in float32; sums of class weights differ in their last bits.
        value: The sum of the divided losses so far; at the end the mean over all samples.
        counted: The sum of the counts of losses that were divided by ``unit``.
        unit: Divisor of losses whose total is not known before; ``None`` if it is, or is expected.
        expected: This rank's own total where losses are divided by an expected one; ``None`` where they are not.
        common_unit: Unit of every rank, for gradients that are summed before they are corrected; ``None``: each
            chooses its own.
    """

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        weighed: bool,
        counted_per_sample: float = 0.0,
        is_scaled: bool = False,
    ) -> None:
        self._weighed, self._per_sample, self._is_scaled = weighed, counted_per_sample, is_scaled
        self._is_shared = False
        self.common_unit: float | None = None
        self.expected: float | None = None
        self.count_again(micro_batches)
        self.restart()

    def count_again(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Sum the denominators of these micro-batches, unless they are those of all ranks.

        Sums of other parts may be rounded otherwise, and the step has to equal one that used these micro-batches from
        the start.
        """
        if self._is_shared:
            return
        self.samples = sum([micro_batch.size for micro_batch in micro_batches])
        self.weights: Mapping[str, float] = {"": float(self.samples)}
        self.are_exact = True
        if self._weighed:
            self.weights = sum_weights(micro_batches)
            counts = [count for micro_batch in micro_batches for count in micro_batch.weights.values()]
            self.are_exact = all(count.is_integer() and count <= _EXACT_IN_FLOAT32 for count in counts)

    def share(self, weights: Mapping[str, float], samples: int) -> None:
        """Divide by the totals of all ranks, however often this rank's samples are cut again."""
        self.weights, self.samples, self._is_shared = weights, samples, True

    def expect(self, share: int, target: int) -> None:
        """Divide by the total that all ranks have if each has so much of its share of the target as this one.

        With a full share that is the target. It depends on this step's samples alone, so that a resumed run has it too.
        """
        self.expected = self.weights.get("", 0.0)
        total = self.expected * target / max(share, 1)
        is_whole = not self._weighed and self.samples == share
        self.weights = {"": total if is_whole else _power_of_two_near(total or 1.0)}
        self.samples, self._is_shared = round(self.samples * target / max(share, 1)), True

    def divisor(self) -> tuple[float, float | None]:
        """Return this rank's own total and what its losses were divided by; ``None``: by the total of all ranks."""
        if self.unit is not None or self.expected is None:
            return self.counted, self.unit
        return self.expected, self.weights[""]

    def use_common_unit(self) -> None:
        """Choose the unit that is the same on every rank with the same totals."""
        self.common_unit = _power_of_two_near(self.weights.get("") or self.samples or 1)

    def restart(self) -> None:
        self.value: torch.Tensor | None = None
        self.unit: float | None = None
        self.counted, self._has_stated_none = 0.0, False

    def divide(self, micro_batch: MicroBatch, loss: Any) -> torch.Tensor | None:
        """Return a micro-batch's part of the step's loss, a 0-dim tensor with a graph, and add it to ``value``.

        Return ``None`` if the step states a count of 0.
        """
        total = self.weights.get("")
        divided: _Divided | None
        if total and type(loss) is torch.Tensor and loss.dtype in _WIDE and not loss.ndim and loss.requires_grad:
            divided = loss * (micro_batch.weights[""] / total), 0.0, None  # nearly every step, in every micro-batch
        else:
            divided = self._divide_terms(micro_batch, read_terms(loss))
        if divided is None:
            self._has_stated_none = True
        elif self.value is None:  # no memory is allocated for the sum: it begins as the first part
            self.value, self.counted, self.unit = divided[0].detach(), *divided[1:]
        else:
            self._add(*divided)
        if self._has_stated_none and self.value is not None and self.unit is None:
            raise InvalidArgument(_STATED_FOR_SOME)  # the others' mean would be over these samples too
        return None if divided is None else divided[0]

    def _add(self, part: torch.Tensor, count: float, unit: float | None) -> None:
        assert self.value is not None  # noqa: S101 - narrows for mypy
        if unit is not self.unit and (unit is None or self.unit is None):
            raise InvalidArgument(_STATED_FOR_SOME)
        if self.value.dtype is part.dtype:
            self.value.add_(part.detach())
        else:
            self.value = self.value + part.detach()
        self.counted += count

    def correct(self) -> float:
        """Divide the loss by the true total if that was not known before; returns the gradients' factor."""
        factor = 1.0 if self.unit is None else self.unit / self.counted
        if factor != 1 and self.value is not None:
            self.value = self.value * factor
        return factor

    def _divide_terms(self, micro_batch: MicroBatch, terms: Sequence[Term]) -> _Divided | None:
        weights, is_narrow, is_stated = micro_batch.weights, False, False
        for term in terms:
            is_narrow |= term.is_narrow
            is_stated |= term.count is not None
        if is_stated and not self._weighed:
            return self._divide_by_unit(micro_batch.size, terms, _find_common_count(terms, micro_batch.size))
        if is_narrow and "" in weights:
            for term in terms:
                _check_count(term, weights[""])
            return self._divide_by_unit(micro_batch.size, terms, weights[""])
        check_names(terms, weights)
        parts = [part for term in terms if (part := self._divide_by_total(term, weights)) is not None]
        return (functools.reduce(torch.add, parts), 0.0, None) if parts else None

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

    def _divide_by_unit(self, size: int, terms: Sequence[Term], count: float) -> _Divided | None:
        if count == 0:
            return None
        unit = self.unit or self.common_unit or self._choose_unit(size, count)
        parts = [term.divide(count, unit) for term in terms]
        return functools.reduce(torch.add, parts), count, unit

    def _choose_unit(self, size: int, count: float) -> float:
        """Near to the total, as far as the first micro-batch and the step before tell.

        Not by the first micro-batch alone: where it has few tokens and the others many, their losses would be
        multiplied by the ratio, and in float16 the gradients of every step would overflow. Nor by the step before
        alone: where it had many tokens and this one has few, gradients would be divided by the ratio, and be lost.
        """
        if size == self.samples:
            return count  # a lone micro-batch is the whole: nothing has to be corrected
        if self._weighed:
            return _power_of_two_near(self.weights[""])
        own = count * self.samples / size
        most = math.inf if self._is_scaled else _MOST_EXPECTED * own
        return _power_of_two_near(min(max(own, self._per_sample * self.samples), most))


def _power_of_two_near(number: float) -> float:
    return math.ldexp(1.0, round(math.log2(number)))


def _find_common_count(terms: Sequence[Term], samples: int) -> float:
    counts = {t.name: float(samples) if t.count is None else t.count for t in terms if t.has_count}
    first, *rest = counts.values()
    if any(not math.isclose(first, other, rel_tol=1e-6) for other in rest):
        stated = ", ".join(f"{name!r}: {count:g}" for name, count in counts.items())
        raise InvalidArgument(
            f"the step states different counts for its terms ({stated}), and their totals must be known before the "
            f"first backward pass: pass weigh= that returns a dict of counts by term"
        )
    return first


def check_names(terms: Sequence[Term], weights: Mapping[str, float]) -> None:
    """Refuse counts by term that name other terms than the step returns."""
    if "" in weights:  # one count for all terms
        return
    named = {term.name for term in terms if term.has_count}
    missing = [name for name, weight in weights.items() if weight > 0 and name not in named]
    unknown = named - weights.keys()
    if named == {""}:
        raise InvalidArgument(
            f"weigh() gives counts for the terms {sorted(weights)}, and the step returned one loss without a name: let "
            f"weigh() return one number, or the step a dict of losses with these names"
        )
    if missing or unknown:
        raise InvalidArgument(
            f"weigh() gives counts for the terms {sorted(weights)}, and the step returned {sorted(named)}: the "
            f"names must be the same (PerStep terms have no count)"
        )


def _check_count(term: Term, weight: float) -> None:
    if term.count is not None and not math.isclose(term.count, weight, rel_tol=1e-5):
        name = f" of the term {term.name!r}" if term.name else ""
        raise InvalidArgument(
            f"the step states a count{name} of {term.count:g} for a micro-batch for which weigh() gives {weight:g}: "
            f"let weigh= count the same (by term, as a dict, where terms have different counts), or leave weigh= out"
        )


def sum_weights(micro_batches: Iterable[MicroBatch]) -> dict[str, float]:
    weights = [micro_batch.weights for micro_batch in micro_batches]
    for other in weights[1:]:
        if other.keys() != weights[0].keys():
            raise InvalidArgument(
                f"weigh() gave counts for {_name(weights[0])} in one micro-batch and for {_name(other)} in another: "
                f"name the same terms each time, with 0 where there is nothing to count"
            )
    return {name: math.fsum(weight[name] for weight in weights) for name in weights[0]} if weights else {}


def check_additive(micro_batches: Sequence[MicroBatch], smaller: Sequence[MicroBatch]) -> None:
    """Refuse a ``weigh`` under which the same samples weigh differently when they are cut differently."""
    whole, parts = sum_weights(micro_batches), sum_weights(smaller)
    for name in whole:
        if not math.isclose(whole[name], parts.get(name, math.nan), rel_tol=1e-5):
            raise InvalidArgument(
                f"weigh() is not additive: it gave {whole[name]:g} for {[p.size for p in micro_batches]} samples and "
                f"{parts.get(name, math.nan):g} for the same samples as {[p.size for p in smaller]}; it must count "
                f"something, such as tokens, that adds up"
            )


def _name(weights: Mapping[str, float]) -> str:
    return ", ".join(map(repr, weights)) if set(weights) != {""} else "everything"
