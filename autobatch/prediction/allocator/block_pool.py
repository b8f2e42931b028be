"""Holds the free blocks of one pool of the CUDA caching allocator: best fit, splitting, merging, and unmapped gaps.

Covers one pool on one stream. Does not cover when memory is asked of the driver (``caching_allocator``).

A block is one int, ``size << ADDRESS_BITS | address``, both in units of 512 bytes, the smallest block. So a sorted list
of ints has the allocator's order, by size and then by address, and no object is made for an event: with an object for
each block the same simulation took several times as long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

__all__ = ["ADDRESS_BITS", "ADDRESS_MASK", "NO_BLOCK", "UNIT", "BlockPool", "ExpandablePool"]

UNIT = 512
"""Bytes of the smallest block (``kMinBlockSize``); every size is a multiple of it."""

ADDRESS_BITS = 48
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1

NO_BLOCK = -1
"""No block is large enough."""

_ENDLESS = 1 << (ADDRESS_BITS - 1)


class BlockPool:
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
        """Hand out the smallest block that is large enough, the one at the lowest address of several; all in units.

        Returns:
            The block, cut to ``size`` where the rest is worth splitting off, or ``NO_BLOCK``.
        """
        blocks = self.blocks
        index = bisect_left(blocks, size << ADDRESS_BITS)
        return self._cut(blocks.pop(index), size) if index < len(blocks) else NO_BLOCK

    def take_block(self, block: int, size: int) -> int:
        """Hand out this free block, which is large enough."""
        return self._cut(self.blocks.pop(bisect_left(self.blocks, block)), size)

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

    def drop(self, block: int) -> None:
        """Remove a free block: its memory goes back to the driver."""
        start = block & ADDRESS_MASK
        del self.blocks[bisect_left(self.blocks, block)]
        del self.starting[start]
        del self._ending[start + (block >> ADDRESS_BITS)]

    def start_of_free_before(self, address: int) -> int:
        """Where the free memory begins that ends at this address; the address itself where none does."""
        block = self._ending.get(address)
        return address if block is None else block & ADDRESS_MASK

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


class ExpandablePool(BlockPool):
    """Free blocks of one range of addresses (``expandable_segments``), and the gaps between them that are not mapped.

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
            self._map(gap, mapped)
            block = self.starting[start]
        return self.take_block(block, size)

    def release(self) -> int:
        """Unmap every page that is free as a whole; returns how many units those are."""
        released = 0
        for block in [*self.blocks]:
            start = block & ADDRESS_MASK
            end = start + (block >> ADDRESS_BITS)
            first, last = -(-start // self.page) * self.page, end // self.page * self.page
            if first < last:
                self.drop(block)
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
        # The last gap is endless, so one is always found.
        starts = map(self.start_of_free_before, self._gap_starts)
        return next(start for start in starts if self._reaches(start, start + size))

    def _reaches(self, start: int, end: int) -> bool:
        reached = start
        while reached < end:
            free = self.starting.get(reached, 0) >> ADDRESS_BITS or self.gaps.get(reached, 0)
            if not free:
                return False
            reached += free
        return True

    def _map(self, gap: int, size: int) -> None:
        length = self._remove_gap(gap)
        if length > size:
            self._add_gap(gap + size, length - size)
        self.give(size << ADDRESS_BITS | gap)

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
