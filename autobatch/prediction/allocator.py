"""Simulates CUDA's caching allocator: what a sequence of allocations reserves, and whether it runs in a given memory.

The rules are those of torch's ``c10/cuda/CUDACachingAllocator.cpp`` with default settings, for fixed and for expandable
segments. Each stream has its own pools, and takes nothing that another stream has freed.

A block is one int, ``size << ADDRESS_BITS | address``, both in units of 512 bytes, the smallest block. A sorted list of
ints then has the allocator's order, by size and by address. Objects for blocks took several times as long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from autobatch.records import Record

UNIT = 512  # bytes of the smallest block (kMinBlockSize); all sizes are multiples of it
MIB_UNITS = 2**20 // UNIT  # 2**20 bytes in units
ADDRESS_BITS = 48
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1

NO_BLOCK = -1  # no block is large enough
_ENDLESS = 1 << (ADDRESS_BITS - 1)


class _BlockPool:
    """Free blocks, found by size, by where they begin and by where they end.

    Neighbours merge, so there is a gap between two segments. A block is split if at least ``least_rest`` units remain.
    """

    __slots__ = ("_ending", "_least_rest", "blocks", "starting")

    def __init__(self, least_rest: int) -> None:
        self._least_rest = least_rest
        self._ending: dict[int, int] = {}
        self.starting: dict[int, int] = {}
        self.blocks: list[int] = []

    def take(self, size: int) -> int:
        """Hand out the smallest block of at least ``size`` units, at the lowest address; or ``NO_BLOCK``."""
        blocks = self.blocks
        index = bisect_left(blocks, size << ADDRESS_BITS)
        return self._cut(blocks.pop(index), size) if index < len(blocks) else NO_BLOCK

    def give(self, block: int) -> None:
        """Add a freed block or new memory, merged with its free neighbours."""
        blocks = self.blocks
        start = block & ADDRESS_MASK
        end = start + (block >> ADDRESS_BITS)
        before = self._ending.pop(start, 0)
        if before:
            del blocks[bisect_left(blocks, before)]
            start = before & ADDRESS_MASK
        after = self.starting.pop(end, 0)
        if after:
            del blocks[bisect_left(blocks, after)]
            end += after >> ADDRESS_BITS
        if before or after:
            block = (end - start) << ADDRESS_BITS | start
        insort(blocks, block)
        self.starting[start] = self._ending[end] = block

    def _take_block(self, block: int, size: int) -> int:
        return self._cut(self.blocks.pop(bisect_left(self.blocks, block)), size)

    def _drop(self, block: int) -> None:
        start = block & ADDRESS_MASK
        del self.blocks[bisect_left(self.blocks, block)]
        del self.starting[start]
        del self._ending[start + (block >> ADDRESS_BITS)]

    def _cut(self, block: int, size: int) -> int:
        start = block & ADDRESS_MASK
        found = block >> ADDRESS_BITS
        del self.starting[start]
        rest = found - size
        if rest < self._least_rest:
            del self._ending[start + found]
            return block
        free = rest << ADDRESS_BITS | (start + size)
        insort(self.blocks, free)
        self.starting[start + size] = self._ending[start + found] = free
        return size << ADDRESS_BITS | start


class FixedPool(_BlockPool):
    """Free blocks of segments of ``cudaMalloc``.

    Addresses only rise. A real driver may reuse them; they decide only between free blocks of equal size.
    """

    __slots__ = ("_next_address", "segments")

    def __init__(self, least_rest: int) -> None:
        super().__init__(least_rest)
        self.segments: dict[int, int] = {}
        self._next_address = 0

    def grow(self, size: int, reserve: Callable[[int], bool]) -> int:
        """Take a block of a new segment, or ``NO_BLOCK`` if ``reserve`` (the driver) refuses."""
        # kSmallBuffer for what is up to kSmallSize; below kMinLargeAlloc kLargeBuffer; else in steps of kRoundLarge.
        if size < 10 * MIB_UNITS:
            segment = 2 * MIB_UNITS if size <= MIB_UNITS else 20 * MIB_UNITS
        else:
            segment = -(-size // (2 * MIB_UNITS)) * 2 * MIB_UNITS
        if not reserve(segment):
            return NO_BLOCK
        start = self._next_address
        self._next_address += segment + 1  # one unit apart, so that blocks of two segments are no neighbours
        self.segments[start] = segment
        self.give(segment << ADDRESS_BITS | start)
        return self._take_block(segment << ADDRESS_BITS | start, size)

    def release(self) -> int:
        """Give back all unused segments, and return their units."""
        free = [block for block in self.blocks if self.segments.get(block & ADDRESS_MASK) == block >> ADDRESS_BITS]
        for block in free:
            self._drop(block)
        return sum(self.segments.pop(block & ADDRESS_MASK) for block in free)


class ExpandablePool(_BlockPool):
    """Free blocks of one range of addresses (``expandable_segments``), and the unmapped gaps between them.

    The range is endless here; torch's is an eighth larger than the device. Memory is mapped in pages of ``page`` units.
    """

    __slots__ = ("_gap_starts", "gaps", "page")

    def __init__(self, page: int) -> None:
        super().__init__(least_rest=1)
        self.page = page
        self.gaps = {0: _ENDLESS}
        self._gap_starts = [0]

    def take(self, size: int) -> int:
        """Hand out the best fitting block; one next to a gap counts as large as it could grow."""
        blocks = self.blocks
        index = bisect_left(blocks, size << ADDRESS_BITS)
        last = len(blocks) - 1
        if index > last:
            return NO_BLOCK
        growable = self._growable(blocks[index])
        while index < last and (following := self._growable(blocks[index + 1])) < growable:
            index, growable = index + 1, following
        return self._cut(blocks.pop(index), size)

    def grow(self, size: int, reserve: Callable[[int], bool]) -> int:
        """Map the missing pages at the lowest address where free memory and gaps make up ``size`` units.

        If ``reserve`` (the driver) refuses, the pages that were mapped before stay, as free blocks.
        """
        start = self._find_start(size)
        block = self.starting.get(start, 0)
        while (held := block >> ADDRESS_BITS) < size:
            gap = start + held
            mapped = min(self.gaps[gap], -(-(size - held) // self.page) * self.page)
            if not reserve(mapped):
                return NO_BLOCK
            length = self._remove_gap(gap)
            if length > mapped:
                self._add_gap(gap + mapped, length - mapped)
            self.give(mapped << ADDRESS_BITS | gap)
            block = self.starting[start]
        return self._take_block(block, size)

    def release(self) -> int:
        """Unmap all free pages, and return their units."""
        released = 0
        for block in [*self.blocks]:
            start = block & ADDRESS_MASK
            end = start + (block >> ADDRESS_BITS)
            first, last = -(-start // self.page) * self.page, end // self.page * self.page
            if first < last:
                self._drop(block)
                for rest_start, rest_end in ((start, first), (last, end)):
                    if rest_start < rest_end:
                        self.give((rest_end - rest_start) << ADDRESS_BITS | rest_start)
                self._unmap(first, last)
                released += last - first
        return released

    def _growable(self, block: int) -> int:
        size = block >> ADDRESS_BITS
        return size + self.gaps.get((block & ADDRESS_MASK) + size, 0)

    def _find_start(self, size: int) -> int:
        # The last gap is endless, so an address is always found.
        for gap in self._gap_starts:
            before = self._ending.get(gap)
            start = reached = gap if before is None else before & ADDRESS_MASK
            while reached < start + size:
                free = self.starting.get(reached, 0) >> ADDRESS_BITS or self.gaps.get(reached, 0)
                if not free:
                    break
                reached += free
            else:
                return start
        raise AssertionError

    def _unmap(self, start: int, end: int) -> None:
        if end in self.gaps:
            end += self._remove_gap(end)
        index = bisect_left(self._gap_starts, start) - 1
        before = self._gap_starts[index] if index >= 0 else None
        if before is not None and before + self.gaps[before] == start:
            self.gaps[before] += end - start
        else:
            self._add_gap(start, end - start)

    def _add_gap(self, start: int, length: int) -> None:
        insort(self._gap_starts, start)
        self.gaps[start] = length

    def _remove_gap(self, start: int) -> int:
        del self._gap_starts[bisect_left(self._gap_starts, start)]
        return self.gaps.pop(start)


_Pools = tuple[FixedPool | ExpandablePool, FixedPool | ExpandablePool]  # for small and for large blocks


class AllocatorPeak(Record):
    """The most that a simulation took, up to its end or to the out-of-memory error."""

    allocated: int = 0  # as memory_stats()["allocated_bytes.all.peak"]
    reserved: int = 0  # as "reserved_bytes.all.peak"
    alloc_retries: int = 0  # as "num_alloc_retries": the caches went back to the driver
    peak_position: int | None = None  # the entry at which `allocated` was first reached
    oom_position: int | None = None  # the entry that found no memory; None if all ran
    allocated_at_end: int = 0  # bytes in blocks after the last entry

    @property
    def out_of_memory(self) -> bool:
        return self.oom_position is not None


class CachingAllocator:
    """A small and a large pool for each stream. ``reserved`` is in units; the driver gives up to ``capacity`` bytes."""

    def __init__(self, capacity: int | None, *, expandable: bool = False) -> None:
        self._expandable = expandable
        self._pools: dict[int, _Pools] = {0: self._make_pools()}  # by stream
        self.small, self.large = self._pools[0]
        self._capacity = None if capacity is None else capacity // UNIT
        self.reserved = self.peak_reserved = self.alloc_retries = 0

    def allocate(self, size: int, stream: int = 0) -> int:
        """Allocate at least ``size`` units; ``NO_BLOCK`` if memory ran out."""
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
        # No block of the large pool is this small, and one of the small pool is never larger than what was asked for.
        self._pools[stream][block >> ADDRESS_BITS > MIB_UNITS].give(block)

    def release_cached(self) -> None:
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

    A block of 0 bytes gets no block. The driver gives no more than ``capacity`` bytes. Before the entry ``released_at``
    the caches go back to the driver, and peaks count from there on. ``streams`` has the stream of each block.
    """
    rounded = [-(-size // UNIT) for size in sizes]
    allocator = CachingAllocator(capacity, expandable=expandable_segments)
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
