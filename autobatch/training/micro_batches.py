"""Cuts batches into micro-batches of consecutive samples, and counts what each weighs.

Covers which batches can be cut, joining micro-batches that have to be cut anew, whether weights add up, and whether
trimming leaves samples as long as they were. Does not cover running a micro-batch (``accumulation``) nor what its
losses are divided by (``loss_denominators``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import torch

from autobatch.batch.chosen_groups import PickedLayout
from autobatch.batch.example import refuse_meta
from autobatch.batch.joining import JoinedLayout
from autobatch.batch.layout import Layout
from autobatch.batch.trimming import SortedLayout
from autobatch.errors import InvalidArgument
from autobatch.planning.lengths import divide_by_length, scale_of
from autobatch.planning.planner import balance, least_size
from autobatch.step.workload import Workload

__all__ = [
    "MicroBatch",
    "check_additive",
    "cut",
    "find_least_size",
    "find_scale",
    "join",
    "refuse_graphs",
    "rows_of",
    "sum_weights",
]


class MicroBatch(NamedTuple):
    """Samples ``start`` to ``stop`` of one of the given batches.

    Attributes:
        layout: The batch.
        start: The first sample.
        stop: The one after the last.
        size: Samples in it.
        weights: What they count for, by term; the name ``""`` stands for every term.
        counts: Whether any term is a mean over something in it.
        leaves: The leaves of the batch's spec, if it has one, cut to these samples; cleared once it has run.
    """

    layout: Layout
    start: int
    stop: int
    size: int
    weights: Mapping[str, float]
    counts: bool
    leaves: list[Any]


# The class itself would be a Python call for each; these are made in every step.
_make = partial(tuple.__new__, MicroBatch)


def cut(
    workload: Workload, ranges: Iterable[tuple[Layout, int, int]], largest: int | None, smallest: int = 1
) -> list[MicroBatch]:
    """Cut samples into the fewest micro-batches of at most ``largest``, of sizes as equal as possible.

    Args:
        workload: Weighs each micro-batch.
        ranges: Each a batch, the first sample and the one after the last. No micro-batch has samples of two batches.
        largest: The most samples of a micro-batch, exceeded only where the batch cannot be cut otherwise without a
            micro-batch below ``smallest``. ``None``: as many as a batch has. Of samples in order of their lengths the
            most at the shortest length that was tried, and in proportion at others (``planning.lengths``).
        smallest: The fewest samples that the model can run. A smaller batch is one micro-batch; its error is the
            model's own.

    Raises:
        InvalidArgument: ``weigh`` gave no count, or a sample has another length once it is trimmed.
    """
    micro_batches: list[MicroBatch] = []
    for layout, start, stop in ranges if largest is not None else _separate(ranges):
        if type(layout) is SortedLayout and largest is not None:
            sizes, starts, stops, weights = _divide_by_length(layout, start, stop, largest, smallest)
        else:
            sizes, starts, stops, weights = _divide(start, stop, largest or layout.count, smallest)
        counts: Iterable[bool] = repeat(True)
        # Samples are not taken out of the batch where nothing is counted in them.
        if workload.weigh is not None or type(layout) is SortedLayout:
            # As it was given: sorted, it would be a copy.
            if type(layout) is SortedLayout and largest is None and stop - start == layout.count:
                layout = Layout(layout.batch, layout.count, layout.lists)  # noqa: PLW2901 - the same batch
            answers: _Answers = {}
            # No generator: of a StopIteration of the user's it would make a RuntimeError.
            weights = tuple([_weigh(workload, layout, *bounds, answers) for bounds in zip(starts, stops, strict=True)])
            if type(layout) is SortedLayout:
                layout.check_trimmed(answers)
            counts = [max(weighed.values()) > 0 for weighed in weights]
        leaves = map(list, layout.split_leaves(start, sizes))
        micro_batches += map(_make, zip(repeat(layout), starts, stops, sizes, weights, counts, leaves, strict=False))
    return micro_batches


def _separate(ranges: Iterable[tuple[Layout, int, int]]) -> Iterator[tuple[Layout, int, int]]:
    """The same, where all samples of joined batches are to be counted: joined they would be a copy of all."""
    for layout, start, stop in ranges:
        if type(layout) is JoinedLayout and stop - start == layout.count:
            yield from ((part, 0, part.count) for part in layout.parts)
        else:
            yield layout, start, stop


_Bounds = tuple[int, ...]
_Answers = dict[tuple[int, int], Any]


def _weigh(workload: Workload, layout: Layout, start: int, stop: int, answers: _Answers) -> Mapping[str, float]:
    """What a part of a batch weighs; ``answers`` gets its lengths, where it is trimmed: a copy, which is made once."""
    is_trimmed = type(layout) is SortedLayout and layout.is_trimmed(start)
    if workload.weigh is None and not is_trimmed:
        return {"": float(stop - start)}
    part = layout.take(start, stop)
    if type(layout) is SortedLayout and is_trimmed:
        answers[start, stop] = layout.ask(part)
    return workload.weights_of(part, stop - start)


@lru_cache(maxsize=256)
def _divide(
    start: int, stop: int, largest: int, smallest: int
) -> tuple[_Bounds, _Bounds, _Bounds, tuple[Mapping[str, float], ...]]:
    """Sizes, first samples, those after the last, and weights by samples of the micro-batches of a range."""
    total = stop - start
    sizes = balance(total, max(largest, least_size(total, smallest)), min(total, smallest))
    bounds = tuple(accumulate(sizes, initial=start))
    return sizes, bounds[:-1], bounds[1:], tuple({"": float(size)} for size in sizes)


def _divide_by_length(
    layout: SortedLayout, start: int, stop: int, scale: int, smallest: int
) -> tuple[_Bounds, _Bounds, _Bounds, tuple[Mapping[str, float], ...]]:
    """The same of samples in order of their lengths."""
    sizes = divide_by_length(layout.values[start:stop], layout.sizes, scale, smallest)
    bounds = tuple(accumulate(sizes, initial=start))
    return sizes, bounds[:-1], bounds[1:], tuple({"": float(size)} for size in sizes)


def find_scale(micro_batch: MicroBatch) -> int:
    """The least ``largest`` with which ``cut`` makes such a micro-batch."""
    layout = micro_batch.layout
    if type(layout) is not SortedLayout:
        return micro_batch.size
    return scale_of(micro_batch.size, layout.values[micro_batch.start], layout.sizes)


def rows_of(micro_batches: Iterable[MicroBatch]) -> tuple[tuple[int, ...], ...]:
    """The samples of each micro-batch, as rows of its batch; those of a second one are counted on.

    Of batches whose samples are sorted, or grouped by the user.
    """
    firsts, samples, rows = dict[int, int](), 0, list[tuple[int, ...]]()
    for micro_batch in micro_batches:
        layout = micro_batch.layout
        if isinstance(layout, PickedLayout):
            picked = layout.rows[micro_batch.start : micro_batch.stop]
            rows.append(tuple(layout.before + row for row in picked))
            continue
        assert isinstance(layout, SortedLayout)  # noqa: S101 - narrows for mypy
        if id(layout) not in firsts:
            firsts[id(layout)], samples = samples, samples + layout.count
        first = firsts[id(layout)]
        rows.append(tuple(first + row for row in layout.order[micro_batch.start : micro_batch.stop]))
    return tuple(rows)


def find_least_size(ranges: Iterable[tuple[Layout, int, int]], smallest: int) -> int:
    """The smallest size into which all ranges can be cut without a micro-batch below ``smallest``."""
    return max(least_size(stop - start, smallest) for _, start, stop in ranges)


def join(micro_batches: Iterable[MicroBatch]) -> list[tuple[Layout, int, int]]:
    """The ranges of samples of these micro-batches, neighbours of the same batch as one."""
    joined: list[tuple[Layout, int, int]] = []
    for micro_batch in micro_batches:
        if joined and joined[-1][0] is micro_batch.layout and joined[-1][2] == micro_batch.start:
            joined[-1] = (micro_batch.layout, joined[-1][1], micro_batch.stop)
        else:
            joined.append((micro_batch.layout, micro_batch.start, micro_batch.stop))
    return joined


def sum_weights(micro_batches: Iterable[MicroBatch]) -> dict[str, float]:
    """The total of each term.

    Raises:
        InvalidArgument: ``weigh`` named other terms for one micro-batch than for another.
    """
    weights = [micro_batch.weights for micro_batch in micro_batches]
    for other in weights[1:]:
        if other.keys() != weights[0].keys():
            raise InvalidArgument(
                f"weigh() gave counts for {_name(weights[0])} in one micro-batch and for {_name(other)} in another: "
                f"name the same terms each time, with 0 where there is nothing to count"
            )
    return {name: math.fsum(weight[name] for weight in weights) for name in weights[0]} if weights else {}


def check_additive(micro_batches: Sequence[MicroBatch], smaller: Sequence[MicroBatch]) -> None:
    """Refuse a ``weigh`` under which the same samples weigh differently when they are cut differently.

    Raises:
        InvalidArgument: The totals differ.
    """
    whole, parts = sum_weights(micro_batches), sum_weights(smaller)
    for name in whole:
        if not math.isclose(whole[name], parts.get(name, math.nan), rel_tol=1e-5):
            raise InvalidArgument(
                f"weigh() is not additive: it gave {whole[name]:g} for {[p.size for p in micro_batches]} samples and "
                f"{parts.get(name, math.nan):g} for the same samples as {[p.size for p in smaller]}; it must count "
                f"something, such as tokens, that adds up"
            )


def refuse_graphs(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse a batch whose graph micro-batches cannot reach: each is cut off from what computed the batch.

    Raises:
        InvalidArgument: A tensor was computed from one that requires a gradient (a view of a leaf was not), or is on
            the meta device.
    """
    for tensor in tensors:
        if tensor.is_meta:
            refuse_meta(tensor)
        if not tensor.requires_grad:
            continue
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor  # noqa: SLF001 - no public equivalent
        if base.grad_fn is not None:
            raise InvalidArgument(
                f"a tensor of shape {tuple(tensor.shape)} in the batch carries a graph, from which micro-batches are "
                f"cut off: compute it inside step(), or detach() it"
            )


def _name(weights: Mapping[str, float]) -> str:
    return ", ".join(map(repr, weights)) if set(weights) != {""} else "everything"
