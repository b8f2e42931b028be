"""Simulates what a sequence of allocations reserves in CUDA's caching allocator, and whether it runs in so much memory.

Covers several streams, none of which takes what another one has freed, with fixed or expandable segments and torch's
default settings. Does not cover the other entries of ``PYTORCH_CUDA_ALLOC_CONF``, garbage collection, blocks whose end
waits for another stream (``record_stream``), private pools of CUDA graphs, nor what lies outside the allocator (the
context, NCCL). The rules are those of torch's ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence

from autobatch.errors import InvalidArgument
from autobatch.prediction.block_pool import ADDRESS_BITS, MIB_UNITS, NO_BLOCK, UNIT, ExpandablePool, FixedPool
from autobatch.prediction.timeline import most_alive
from autobatch.records import Record

__all__ = ["AllocatorPeak", "CachingAllocator", "find_least_capacity", "simulate"]

_RESOLUTION = 2 * MIB_UNITS * UNIT
"""The driver hands out no fewer bytes, so no capacity in between makes a difference."""


_Pools = tuple[FixedPool | ExpandablePool, FixedPool | ExpandablePool]
"""For small and for large blocks."""


class AllocatorPeak(Record):
    """The most that a simulation took, up to the end or to where memory ran out."""

    allocated: int = 0  # most bytes in blocks at once (memory_stats()["allocated_bytes.all.peak"])
    reserved: int = 0  # most bytes that the allocator held at once ("reserved_bytes.all.peak")
    alloc_retries: int = 0  # how often the caches had to go back to the driver ("num_alloc_retries")
    peak_position: int | None = None  # where in the order `allocated` was first reached
    oom_position: int | None = None  # where in the order no memory was left; None if it ran
    allocated_at_end: int = 0  # bytes in blocks after the last entry

    @property
    def out_of_memory(self) -> bool:
        """Whether it did not run to the end."""
        return self.oom_position is not None


class CachingAllocator:
    """A small and a large pool for each stream, what the driver has given for them, and the retry after it refuses.

    ``reserved`` is in units, and ``peak_reserved`` the most of them; the driver gives up to ``capacity`` bytes.
    """

    def __init__(self, capacity: int | None, *, expandable: bool = False) -> None:
        self._expandable = expandable
        self._pools: dict[int, _Pools] = {0: self._make_pools()}  # by stream
        self.small, self.large = self._pools[0]
        self._capacity = None if capacity is None else capacity // UNIT
        self.reserved = self.peak_reserved = self.alloc_retries = 0

    def allocate(self, size: int, stream: int = 0) -> int:
        """A block of at least ``size`` units, or ``NO_BLOCK``: out of memory."""
        if stream not in self._pools:
            self._pools[stream] = self._make_pools()
        pool = self._pools[stream][size > MIB_UNITS]  # kSmallSize
        block = pool.take(size)
        if block == NO_BLOCK and (block := pool.grow(size, self._reserve)) == NO_BLOCK:
            self.release_cached()
            self.alloc_retries += 1
            block = pool.grow(size, self._reserve)
        return block

    def free(self, block: int, stream: int = 0) -> None:
        """Free a block that was handed out to that stream."""
        # No block of the large pool is this small, and one of the small pool is never larger than what was asked for.
        self._pools[stream][block >> ADDRESS_BITS > MIB_UNITS].give(block)

    def release_cached(self) -> None:
        """Give back to the driver all that can be given back."""
        self.reserved -= sum(small.release() + large.release() for small, large in self._pools.values())

    def _make_pools(self) -> _Pools:
        if self._expandable:
            return ExpandablePool(2 * MIB_UNITS), ExpandablePool(20 * MIB_UNITS)
        return FixedPool(least_rest=1), FixedPool(least_rest=MIB_UNITS + 1)

    def _reserve(self, size: int) -> bool:
        reserved = self.reserved + size
        if self._capacity is not None and reserved > self._capacity:
            return False
        self.reserved = reserved
        self.peak_reserved = max(self.peak_reserved, reserved)
        return True


def simulate(
    order: Sequence[int],
    sizes: Sequence[int],
    *,
    capacity: int | None = None,
    expandable_segments: bool = False,
    released_at: int = 0,
    streams: Sequence[int] = (),
) -> AllocatorPeak:
    """Make the allocations in their order, as ``TracedStep`` has it, and return what they took at most.

    What has no bytes gets no block. The driver gives no more than ``capacity``, where that is not None. Before the
    entry ``released_at`` the caches go back to the driver, and peaks are those from there on. ``streams`` says for each
    block on which stream it is allocated; by default all are on one.

    Raises:
        InvalidArgument: The order frees a block that is not allocated, allocates one that is, or names one without a
            size; or a size is negative.
    """
    rounded = _round(order, sizes)
    return _run(order, rounded, streams, capacity, expandable=expandable_segments, released_at=released_at)


def find_least_capacity(
    order: Sequence[int], sizes: Sequence[int], *, expandable_segments: bool = False, streams: Sequence[int] = ()
) -> int:
    """Bytes in which a timeline runs, perhaps with retries, and in 2 MiB less it does not; arguments as ``simulate``.

    More memory does not always help: a retry that comes later can leave other holes. Of 47 394 short random orders 40
    ran in some capacity and not in a larger one (with expandable segments 12 of 37 124). The capacity is found by
    bisection, so in those few one above it fails, or one below it does.
    """
    rounded = _round(order, sizes)
    fails = (most_alive(order, rounded) * UNIT - 1) // _RESOLUTION
    runs = _run(order, rounded, streams, None, expandable=expandable_segments).reserved // _RESOLUTION
    while runs - fails > 1:
        middle = (fails + runs) // 2
        if _run(order, rounded, streams, middle * _RESOLUTION, expandable=expandable_segments).out_of_memory:
            fails = middle
        else:
            runs = middle
    return runs * _RESOLUTION


def _run(
    order: Sequence[int],
    rounded: Sequence[int],
    streams: Sequence[int],
    capacity: int | None,
    *,
    expandable: bool,
    released_at: int = 0,
) -> AllocatorPeak:
    allocator = CachingAllocator(capacity, expandable=expandable)
    allocate, free = allocator.allocate, allocator.free
    held = [0] * len(rounded)
    stream_of = streams or held.copy()
    allocated = peak = 0
    peak_position = oom_position = None
    for position, entry in enumerate(order):
        if position == released_at:
            allocator.release_cached()
            peak, peak_position, allocator.peak_reserved = allocated, None, allocator.reserved
        if entry < 0:
            block = held[-entry - 1]
            if block:
                allocated -= block >> ADDRESS_BITS
                free(block, stream_of[-entry - 1])
        elif size := rounded[entry - 1]:
            block = allocate(size, stream_of[entry - 1])
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
        allocated_at_end=allocated * UNIT,
    )


def _round(order: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Sizes in units, of an order that is possible."""
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
    return [-(-size // UNIT) for size in sizes]
