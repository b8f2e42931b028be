"""Chooses how many samples run together at each of a few lengths, and divides samples of mixed lengths by that.

The lengths that are tried are *edges*: the longest, its half, its quarter and so on. A micro-batch has as many samples
as ran at the edge above its longest one, so nothing untried runs.

One number, the *scale*, shrinks all edges at once, after a shortage or when less is free. It is the most samples at the
shortest edge.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from autobatch.errors import InvalidArgument
from autobatch.planning.curve import MemoryCurve
from autobatch.records import SizeAtLength

_MOST_HALVINGS = 6
"""1/64 of the longest: what is shorter runs as many together as there, and takes little time."""

_STEPS = 16
"""After a shortage all edges go down by sixteenths; below one sixteenth they are halved."""


def halve_lengths(longest: int, size: int, bound: int) -> tuple[int, ...]:
    """Return the edges, longest first: halves, until ``bound`` samples take no more than ``size`` of the longest do.

    Half as long, a sample takes at most half the memory beside what all share: activations grow with the length, and
    attention's with its square.
    """
    edges = [longest]
    while size << (len(edges) - 1) < bound and len(edges) <= _MOST_HALVINGS and edges[-1] > 1:
        edges.append(-(-edges[-1] // 2))
    return tuple(edges)


def edge_above(sizes: Sequence[SizeAtLength], length: int) -> SizeAtLength:
    """Return the shortest edge of at least this length; raises InvalidArgument beyond the longest."""
    index = bisect_left(sizes, length, key=lambda size: size.length)
    if index == len(sizes):
        raise InvalidArgument(f"a length of {length} is beyond the longest that was tried, {sizes[-1].length}")
    return sizes[index]


def divide_by_length(
    lengths: Sequence[int], sizes: Sequence[SizeAtLength], scale: int, smallest: int = 1
) -> tuple[int, ...]:
    """Return how many samples each micro-batch has; ``lengths`` are those of the samples, the longest first.

    As few micro-batches as can be, each as nearly the same part of what was tried as whole samples allow. ``scale`` is
    the most samples at the shortest edge now. What would be fewer than ``smallest`` joins the micro-batch before it.
    """
    division = _divide_greedily(lengths, sizes, scale, smallest)
    low, high = 0, scale
    while high - low > 1:
        middle = (low + high) // 2
        fewer = _divide_greedily(lengths, sizes, middle, smallest)
        if len(fewer) == len(division):
            division, high = fewer, middle
        else:
            low = middle
    return division


def _divide_greedily(
    lengths: Sequence[int], sizes: Sequence[SizeAtLength], scale: int, smallest: int
) -> tuple[int, ...]:
    parts: list[int] = []
    done = 0
    while done < len(lengths):
        most = max(edge_above(sizes, lengths[done]).micro_batch_size * scale // sizes[0].micro_batch_size, smallest)
        parts.append(min(most, len(lengths) - done))
        done += parts[-1]
    if len(parts) > 1 and parts[-1] < smallest:
        parts[-2:] = [sum(parts[-2:])]
    return tuple(parts)


def scale_of(samples: int, length: int, sizes: Sequence[SizeAtLength]) -> int:
    """Return the least scale at which so many samples, the longest of this length, are one micro-batch."""
    most = sizes[0].micro_batch_size
    if samples == 1:  # one sample is run at any scale
        return 1
    return min(-(-samples * most // edge_above(sizes, length).micro_batch_size), most)


def scale_ladder(most: int) -> tuple[int, ...]:
    return tuple(sorted({-(-most * step // _STEPS) for step in range(1, _STEPS + 1)}))


def scale_curve(curve: MemoryCurve | None, sizes: Sequence[SizeAtLength]) -> MemoryCurve | None:
    """Return a curve of samples at the longest edge, as one of scales: each edge holds about what the longest does."""
    longest, most = sizes[-1].micro_batch_size, sizes[0].micro_batch_size
    if curve is None or longest == most:
        return curve

    def stretch(knots: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Return the last straight piece, which leads to the largest sizes, from no samples to the scale."""
        (start, low), (end, high) = knots[-2:]
        rise = -(-(high - low) * longest // (end - start))
        peak = high - (end - longest) * (high - low) // (end - start)
        return ((0, max(peak - rise, 0)), (most, max(peak, 0)))

    return curve.model_copy(update={"allocated": stretch(curve.allocated), "reserved": stretch(curve.reserved)})
