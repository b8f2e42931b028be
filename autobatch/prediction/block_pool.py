"""Holds the free blocks of one pool of the CUDA caching allocator: best fit, splitting, merging, segments and pages.

Covers one pool on one stream, with fixed or expandable segments. Does not cover when memory is asked of the driver
(``allocator``).

A block is one int, ``size << ADDRESS_BITS | address``, both in units of 512 bytes, the smallest block. So a sorted list
of ints has the allocator's order, by size and then by address, and no object is made for an event: with an object for
each block the same simulation took several times as long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

__all__ = ["ADDRESS_BITS", "ADDRESS_MASK", "MIB_UNITS", "NO_BLOCK", "UNIT", "ExpandablePool", "FixedPool"]

UNIT = 512
"""Bytes of the smallest block (``kMinBlockSize``); every size is a multiple of it."""
MIB_UNITS = 2**20 // UNIT
"""2**20 bytes in units, as all sizes here."""

ADDRESS_BITS = 48
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1

NO_BLOCK = -1
"""No block is large enough."""

_ENDLESS = 1 << (ADDRESS_BITS - 1)


class _BlockPool:
    """Free blocks, found by size, by where they begin and by where they end.

    Two blocks are neighbours when one begins where the other ends, so whoever adds memory leaves a gap between
    segments that must not merge.

    Args:
        least_rest: Units that must remain for a block to be split; with less, all of it is handed out.
    """

    __slots__ = ("_ending", "_least_rest", "blocks", "starting")

    def __init__(self, least_rest: int) -> None:
        self._least_rest = least_rest
        self._ending: dict[int, int] = {}
        self.starting: dict[int, int] = {}
        self.blocks: list[int] = []

    def take(self, size: int) -> int:
        """Hand out the smallest block of at least ``size`` units, the one at the lowest address of several.

        Returns:
            The block, cut to ``size`` where the rest is worth splitting off, or ``NO_BLOCK``.
        """
        blocks = self.blocks
        index = bisect_left(blocks, size << ADDRESS_BITS)
        return self._cut(blocks.pop(index), size) if index < len(blocks) else NO_BLOCK

    def give(self, block: int) -> None:
        """Add a freed block or new memory; it merges with what is free on either side."""
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
        """Remove a free block: its memory goes back to the driver."""
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
    """Free blocks of segments of ``cudaMalloc``: of 2 MiB for small blocks; for large ones 20 MiB, or one block's size.

    Addresses only rise. A real driver may use those of freed segments again; they decide only between free blocks of
    equal size.
    """

    __slots__ = ("_next_address", "segments")

    def __init__(self, least_rest: int) -> None:
        super().__init__(least_rest)
        self.segments: dict[int, int] = {}
        self._next_address = 0

    def grow(self, size: int, reserve: Callable[[int], bool]) -> int:
        """A block of a new segment, or ``NO_BLOCK`` where ``reserve`` (which asks the driver for units) refuses."""
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
        """Give back every segment of which no part is in use; returns how many units those are."""
        free = [block for block in self.blocks if self.segments.get(block & ADDRESS_MASK) == block >> ADDRESS_BITS]
        for block in free:
            self._drop(block)
        return sum(self.segments.pop(block & ADDRESS_MASK) for block in free)


class ExpandablePool(_BlockPool):
    """Free blocks of one range of addresses (``expandable_segments``), and the gaps between them that are not mapped.

    The range is endless here; torch's is an eighth larger than the device. With ``set_per_process_memory_fraction``
    torch counts a whole request against the limit; here, as by the driver, only pages not yet mapped count.

    Args:
        page: Units that are mapped at a time.
    """

    __slots__ = ("_gap_starts", "gaps", "page")

    def __init__(self, page: int) -> None:
        super().__init__(least_rest=1)
        self.page = page
        self.gaps = {0: _ENDLESS}
        self._gap_starts = [0]

    def take(self, size: int) -> int:
        """The best fitting block, where one next to a gap counts as large as it could grow.

        So a block that could still grow is left alone while the next larger one could grow less.
        """
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
        """Map what is missing at the lowest address where free memory and gaps make up ``size`` units.

        Pages that were mapped before ``reserve`` (which asks the driver for units) refused stay mapped, as free blocks.
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
        """Unmap every page that is free as a whole; returns how many units those are."""
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
        """The lowest address; the last gap is endless, so one is always found."""
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
