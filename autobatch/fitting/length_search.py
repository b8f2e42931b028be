"""Finds how many samples run together at shorter lengths: one trial at each, after the search at the longest.

The shortest length goes first, with as many samples as surely fit. Its trial and those at the longest show what a
sample takes at lengths between them, and so which numbers to confirm.
"""

from __future__ import annotations

from collections.abc import Callable

from autobatch.planning.curve import MemoryCurve, growing_reserved, ran
from autobatch.planning.lengths import choose_size, halve_lengths, keep_useful
from autobatch.records import SizeAtLength, Trial


def search_lengths(
    try_size: Callable[[int, int], Trial],
    longest: SizeAtLength,
    curve: MemoryCurve | None,
    limit_bytes: int,
    bound: int,
) -> tuple[SizeAtLength, ...]:
    """How many samples run at each length, the shortest first.

    Args:
        try_size: Runs a trial of a length and a number of samples.
        longest: The size that the search found for the longest samples.
        curve: Memory against samples of the longest length; ``None`` where the device does not measure.
        limit_bytes: Bytes that a step may hold.
        bound: The most samples of a micro-batch.
    """
    edges = halve_lengths(longest.length, longest.micro_batch_size, bound)
    found, measured, resident = {longest.length: longest}, dict[int, float](), 0
    if curve is not None:
        (size, low), (larger, high) = curve.reserved[-2:]
        measured[longest.length] = (high - low) / (larger - size)
        resident = high - round(larger * measured[longest.length])
    for index, length in enumerate([*edges[:0:-1][:1], *edges[1:-1]]):
        is_shortest = index == 0
        least = max(kept.micro_batch_size for edge, kept in found.items() if edge >= length)
        halvings = edges.index(length)
        size = longest.micro_batch_size << halvings
        if not is_shortest and measured:
            size = choose_size(measured, resident, limit_bytes, length)
        size = min(size, bound)
        if size <= least:
            continue
        trial = try_size(length, size)
        tried = trial.length or length
        if trial.outcome != "fits" or tried in found:
            continue
        found[tried] = SizeAtLength(length=tried, micro_batch_size=size, peak_bytes=trial.peak_reserved)
        if is_shortest and curve is not None and ran(trial):
            measured[tried] = max(growing_reserved(trial) - resident, 0) / size
    return keep_useful([*found.values()])
