"""Pieces of batches: consecutive samples that will be one micro-batch, and what they count for.

Covers which batches can be divided, dividing, joining what has to be divided anew, and whether weights add up. Does not
cover running a piece (``transaction``) nor what its losses are divided by (``shares``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from autobatch.batch.example import refuse_meta
from autobatch.batch.layout import Layout
from autobatch.errors import InvalidBatch
from autobatch.planning.planner import balance, least_size
from autobatch.step.workload import Workload

__all__ = ["Piece", "check_additive", "cut", "find_least_size", "join", "refuse_graphs", "sum_weights"]


class Piece:
    """Samples ``start`` to ``stop`` of one of the given batches.

    Attributes:
        layout: The batch.
        start: The first sample.
        stop: The one after the last.
        size: Samples in it.
        weights: What they count for, by term; the name ``""`` stands for every term.
        counts: Whether any term is a mean over something in it.
        leaves: The leaves of the batch's spec, if it has one, cut to these samples.
    """

    __slots__ = ("counts", "layout", "leaves", "size", "start", "stop", "weights")

    def __init__(
        self, layout: Layout, start: int, stop: int, weights: Mapping[str, float], leaves: Sequence[Any] = ()
    ) -> None:
        self.layout, self.start, self.stop, self.weights, self.leaves = layout, start, stop, weights, leaves
        self.size = stop - start
        self.counts = weights.get("", 0) > 0 or max(weights.values()) > 0


def cut(
    workload: Workload, ranges: Iterable[tuple[Layout, int, int]], largest: int | None, smallest: int = 1
) -> list[Piece]:
    """Samples ``(batch, start, stop)`` of batches as the fewest pieces of at most ``largest``, as equal as can be.

    Args:
        workload: Says what a piece counts for.
        ranges: Each a batch, the first sample and the one after the last. No piece has samples of two batches.
        largest: The most samples of a piece; more only where no division has but pieces of at least ``smallest``.
            ``None``: as many as a batch has.
        smallest: The fewest samples that the model can run. A batch of fewer is one piece, and the model's own error.

    Raises:
        InvalidBatch: ``weigh`` gave no count.
    """
    pieces = []
    for layout, start, stop in ranges:
        total, first = stop - start, start
        most = max(largest or layout.count, least_size(total, smallest))
        sizes = balance(total, most, min(total, smallest))
        for size, leaves in zip(sizes, layout.split_leaves(start, sizes), strict=True):
            # Taken only for somebody to count in it.
            weighed = workload.weigh is not None
            weights = workload.weights_of(layout.take(first, first + size), size) if weighed else {"": float(size)}
            pieces.append(Piece(layout, first, first + size, weights, leaves))
            first += size
    return pieces


def find_least_size(ranges: Iterable[tuple[Layout, int, int]], smallest: int) -> int:
    """The least size into which all ranges can be cut with no piece below ``smallest``."""
    return max(least_size(stop - start, smallest) for _, start, stop in ranges)


def join(pieces: Iterable[Piece]) -> list[tuple[Layout, int, int]]:
    """Neighbours of the same batch as one range, so that the rest of a batch is divided anew as a whole."""
    joined: list[tuple[Layout, int, int]] = []
    for piece in pieces:
        if joined and joined[-1][0] is piece.layout and joined[-1][2] == piece.start:
            joined[-1] = (piece.layout, joined[-1][1], piece.stop)
        else:
            joined.append((piece.layout, piece.start, piece.stop))
    return joined


def sum_weights(pieces: Iterable[Piece]) -> dict[str, float]:
    """The total of each term.

    Raises:
        InvalidBatch: ``weigh`` named other terms for one piece than for another.
    """
    weights = [piece.weights for piece in pieces]
    for other in weights[1:]:
        if other.keys() != weights[0].keys():
            raise InvalidBatch(
                f"weigh() gave counts for {_name(weights[0])} in one micro-batch and for {_name(other)} in another: "
                f"name the same terms each time, with 0 where there is nothing to count"
            )
    return {name: math.fsum(weight[name] for weight in weights) for name in weights[0]} if weights else {}


def check_additive(pieces: Sequence[Piece], smaller: Sequence[Piece]) -> None:
    """The same samples must count the same, however they are divided.

    Raises:
        InvalidBatch: They do not, so ``weigh`` does not count.
    """
    whole, parts = sum_weights(pieces), sum_weights(smaller)
    for name in whole:
        if not math.isclose(whole[name], parts.get(name, math.nan), rel_tol=1e-5):
            raise InvalidBatch(
                f"weigh() is not additive: it gave {whole[name]:g} for {[p.size for p in pieces]} samples and "
                f"{parts.get(name, math.nan):g} for the same samples as {[p.size for p in smaller]}; it must count "
                f"something, such as tokens, that adds up"
            )


def refuse_graphs(tensors: Iterable[torch.Tensor]) -> None:
    """No micro-batch can hand its gradient back to what made the batch: each is cut off, and run when it is its turn.

    Raises:
        InvalidBatch: A tensor was computed from something that wants a gradient (a view of a leaf is none), or has no
            values.
    """
    for tensor in tensors:
        if tensor.is_meta:
            refuse_meta(tensor)
        if not tensor.requires_grad:
            continue
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor  # noqa: SLF001 - no public twin
        if base.grad_fn is not None:
            raise InvalidBatch(
                f"a tensor of shape {tuple(tensor.shape)} in the batch carries a graph, from which micro-batches are "
                f"cut off: compute it inside step(), or detach() it"
            )


def _name(weights: Mapping[str, float]) -> str:
    return ", ".join(map(repr, weights)) if set(weights) != {""} else "everything"
