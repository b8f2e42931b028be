"""Simulates what a sequence of allocations reserves, and whether it runs in so much memory.

Covers the peaks, the retries, and the least capacity in which a sequence runs. Does not cover what lies outside the
allocator (the context, NCCL), nor the allocator's own rules (``caching_allocator``).
"""

from __future__ import annotations

from collections.abc import Sequence

from autobatch.errors import InvalidArgument
from autobatch.prediction.allocator.block_pool import ADDRESS_BITS, NO_BLOCK, UNIT
from autobatch.prediction.allocator.caching_allocator import MIB, ExpandableSegments, FixedSegments
from autobatch.prediction.timeline import most_alive
from autobatch.records import Record

__all__ = ["AllocatorPeak", "find_least_capacity", "simulate"]

_RESOLUTION = 2 * MIB
"""The driver hands out no fewer bytes, so no capacity in between makes a difference."""


class AllocatorPeak(Record):
    """The most that a simulation took.

    Attributes:
        allocated: Most bytes in blocks at once (``memory_stats()["allocated_bytes.all.peak"]``).
        reserved: Most bytes that the allocator held at once (``"reserved_bytes.all.peak"``).
        alloc_retries: How often the caches had to go back to the driver (``"num_alloc_retries"``).
        peak_position: Where in the order ``allocated`` was first reached; None if nothing was allocated.
        oom_position: Where in the order no memory was left; None if it ran. The peaks are those up to there.
    """

    allocated: int = 0
    reserved: int = 0
    alloc_retries: int = 0
    peak_position: int | None = None
    oom_position: int | None = None

    @property
    def out_of_memory(self) -> bool:
        """Whether it did not run to the end."""
        return self.oom_position is not None


def simulate(
    order: Sequence[int], sizes: Sequence[int], *, capacity: int | None = None, expandable_segments: bool = False
) -> AllocatorPeak:
    """Make the allocations in their order and return what they took at most.

    Args:
        order: ``k + 1`` where block ``k`` is allocated, ``-(k + 1)`` where it is freed.
        sizes: Requested bytes of each block; what has no bytes gets no block.
        capacity: The most bytes that the driver gives; None: no limit.
        expandable_segments: Whether ``expandable_segments:True`` is set.

    Raises:
        InvalidArgument: The order frees a block that is not allocated, allocates one that is, or names one without a
            size; or a size is negative.
    """
    _check(order, sizes)
    return _run(order, _round(sizes), capacity, expandable=expandable_segments)


def find_least_capacity(order: Sequence[int], sizes: Sequence[int], *, expandable_segments: bool = False) -> int:
    """Bytes in which a timeline runs, perhaps with retries, and in 2 MiB less it does not; arguments as ``simulate``.

    More memory does not always help: a retry that comes later can leave other holes. Of 47 394 short random orders 40
    ran in some capacity and not in a larger one (with expandable segments 12 of 37 124). The capacity is found by
    bisection, so in those few one above it fails, or one below it does.
    """
    _check(order, sizes)
    rounded = _round(sizes)
    fails = (most_alive(order, rounded) * UNIT - 1) // _RESOLUTION
    runs = _run(order, rounded, None, expandable=expandable_segments).reserved // _RESOLUTION
    while runs - fails > 1:
        middle = (fails + runs) // 2
        if _run(order, rounded, middle * _RESOLUTION, expandable=expandable_segments).out_of_memory:
            fails = middle
        else:
            runs = middle
    return runs * _RESOLUTION


def _round(sizes: Sequence[int]) -> list[int]:
    return [-(-size // UNIT) for size in sizes]


def _run(order: Sequence[int], rounded: Sequence[int], capacity: int | None, *, expandable: bool) -> AllocatorPeak:
    allocator = (ExpandableSegments if expandable else FixedSegments)(capacity)
    allocate, free = allocator.allocate, allocator.free
    held = [0] * len(rounded)
    allocated = peak = 0
    peak_position = oom_position = None
    for position, entry in enumerate(order):
        if entry < 0:
            block = held[-entry - 1]
            if block:
                allocated -= block >> ADDRESS_BITS
                free(block)
        elif size := rounded[entry - 1]:
            block = allocate(size)
            if block == NO_BLOCK:
                oom_position = position
                break
            held[entry - 1] = block
            allocated += block >> ADDRESS_BITS
            if allocated > peak:
                peak, peak_position = allocated, position
    return AllocatorPeak(
        allocated=peak * UNIT,
        reserved=allocator.peak_reserved * UNIT,
        alloc_retries=allocator.alloc_retries,
        peak_position=peak_position,
        oom_position=oom_position,
    )


def _check(order: Sequence[int], sizes: Sequence[int]) -> None:
    if sizes and min(sizes) < 0:
        raise InvalidArgument(f"block {sizes.index(min(sizes)) + 1} has {min(sizes)} bytes; a size cannot be negative")
    count = len(sizes)
    allocated = bytearray(count + 1)
    for position, entry in enumerate(order):
        block = abs(entry)
        if block > count or not block:
            raise InvalidArgument(f"order[{position}] is {entry}, but there are sizes for blocks 1 to {count}")
        if allocated[block] == (entry > 0):
            what = "is allocated again" if entry > 0 else "is freed, but it is not allocated"
            raise InvalidArgument(f"order[{position}] is {entry}: block {block} {what}")
        allocated[block] = entry > 0
