"""What each micro-batch's losses are divided by: the step's totals, known before or corrected once at the end.

Covers the one rule of exactness: term t of micro-batch i is part of (sum of losses over all micro-batches) / (sum of
counts), and there is no factor 1/K anywhere. Does not cover running micro-batches (``transaction``).

Where ``weigh`` or the number of samples gives the counts, all totals are known before the first backward pass, and each
term has its own. Where only the step's own ``Mean`` or ``Sum`` states them, the total is not known until the last
micro-batch: then losses are divided by a power of two near it, which rounds nothing, and the gradients are multiplied
by power / total once, before the update. That works for one denominator only, since gradients of different terms cannot
be told apart once they are added.

The same is done where losses are bfloat16 or float16 and have one denominator: their gradients would round the factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autobatch.errors import InvalidStep
from autobatch.step.losses import Term, read_terms
from autobatch.training.micro_batches import Piece, sum_weights

__all__ = ["Share", "Totals"]

_EXACT_IN_FLOAT32 = 2**24
_WIDE = frozenset((torch.float32, torch.float64))

Share = tuple[torch.Tensor, float, "float | None"]
"""What one micro-batch adds to the step's loss: a 0-dim tensor with a graph; what it counts for where it was divided by
a unit, else 0; and that unit, instead of which others are divided by the total."""


@dataclass(frozen=True)
class Totals:
    """What is known of a step's counts before its first micro-batch.

    Attributes:
        weights: The total of each term; the name ``""`` stands for every term.
        samples: Samples of all pieces.
        weighed: Whether ``weigh`` said so; else the weights are numbers of samples.
        are_exact: Whether the totals are the same however the samples are divided: sums of whole numbers are, up to
            2^24 also where ``weigh`` counts in float32, and sums of class weights are not, in their last bits.
    """

    weights: Mapping[str, float]
    samples: int
    weighed: bool
    are_exact: bool

    @classmethod
    def of(cls, pieces: Sequence[Piece], *, weighed: bool) -> Totals:
        """Of the pieces that a step's batches were divided into."""
        samples = 0
        for piece in pieces:
            samples += piece.size
        if not weighed:
            return cls({"": float(samples)}, samples, weighed=False, are_exact=True)
        weights = sum_weights(pieces)
        are_exact = all(w.is_integer() and w <= _EXACT_IN_FLOAT32 for piece in pieces for w in piece.weights.values())
        return cls(weights, samples, weighed=True, are_exact=are_exact)

    def share(self, piece: Piece, loss: Any, unit: float | None) -> Share | None:
        """The part of the step's loss that the losses of a piece are.

        Args:
            piece: What was run.
            loss: What the step returned for it.
            unit: What earlier pieces were divided by where the total is not known, ``None`` at first.

        Returns:
            ``None`` where the piece counts for nothing by the step's own word.

        Raises:
            InvalidStep: It is no loss; or its counts or terms do not go with ``weigh``'s, or need one that is missing.
        """
        total = self.weights.get("")
        if total and type(loss) is torch.Tensor and loss.dtype in _WIDE and not loss.ndim and loss.requires_grad:
            return loss * (piece.weights[""] / total), 0.0, None  # nearly every step, in every micro-batch
        return self._share_terms(piece, read_terms(loss), unit)

    def _share_terms(self, piece: Piece, terms: Sequence[Term], unit: float | None) -> Share | None:
        is_narrow = is_stated = False
        for term in terms:
            is_narrow |= term.is_narrow
            is_stated |= term.count is not None
        if is_stated and not self.weighed:
            return self._share_by_unit(piece, terms, _common_count(piece, terms), unit)
        if is_narrow and "" in piece.weights:
            for term in terms:
                _check_count(term, piece.weights[""])
            return self._share_by_unit(piece, terms, piece.weights[""], unit)
        if "" not in piece.weights:
            _check_names(piece, terms)
        total: torch.Tensor | None = None
        for term in terms:
            name = term.name if term.name in piece.weights else ""
            if term.count is not None:
                _check_count(term, piece.weights[name])
            if term.kind == "per step":
                part = term.multiply(self._part_of(piece))
            elif piece.weights[name]:
                part = term.divide(piece.weights[name], self.weights[name])
            else:  # 0 x nan is nan
                continue
            total = part if total is None else total + part
        return None if total is None else (total, 0.0, None)

    def _part_of(self, piece: Piece) -> float:
        """How much of the step a piece is: 0 where it counts for nothing, and 1 over all, however they are divided."""
        parts = [piece.weights[name] / total for name, total in self.weights.items() if total > 0]
        return math.fsum(parts) / len(parts)

    def _share_by_unit(self, piece: Piece, terms: Sequence[Term], count: float, unit: float | None) -> Share | None:
        if count == 0:
            return None
        if unit is None:
            # A lone piece is the whole: nothing is left to correct.
            unit = count if piece.size == self.samples else _power_of_two_near(count * self.samples / piece.size)
        parts = [term.multiply(count / unit) if term.kind == "per step" else term.divide(count, unit) for term in terms]
        return _add(parts), count, unit


def _power_of_two_near(number: float) -> float:
    return math.ldexp(1.0, round(math.log2(number)))


def _add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _common_count(piece: Piece, terms: Sequence[Term]) -> float:
    counts = {
        term.name: float(piece.size) if term.count is None else term.count for term in terms if term.kind != "per step"
    }
    first, *rest = counts.values()
    if any(not math.isclose(first, other, rel_tol=1e-6) for other in rest):
        stated = ", ".join(f"{name!r}: {count:g}" for name, count in counts.items())
        raise InvalidStep(
            f"step() states different counts for its terms ({stated}), and their totals must be known before the first "
            f"backward pass: pass weigh= that returns a dict of counts by term"
        )
    return first


def _check_names(piece: Piece, terms: Sequence[Term]) -> None:
    named = {term.name for term in terms if term.kind != "per step"}
    missing = [name for name, weight in piece.weights.items() if weight > 0 and name not in named]
    unknown = named - piece.weights.keys()
    if missing or unknown:
        raise InvalidStep(
            f"weigh() gives counts for the terms {sorted(piece.weights)}, and step() returned {sorted(named)}: the "
            f"names must be the same (a PerStep term has no count)"
        )


def _check_count(term: Term, weight: float) -> None:
    if term.count is not None and not math.isclose(term.count, weight, rel_tol=1e-5):
        name = f" of the term {term.name!r}" if term.name else ""
        raise InvalidStep(
            f"step() states a count{name} of {term.count:g} for a micro-batch for which weigh() gives {weight:g}: let "
            f"weigh= count the same (by term, as a dict, where terms have different counts), or leave weigh= out"
        )
