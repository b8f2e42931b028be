"""Memory as ``expandable_segments:True`` gets it: one range of addresses for each pool, mapped page by page.

Covers the choice of the block, pages that are mapped only where they are missing, and pages that go back from anywhere.
Does not cover the end of the range, which is an eighth larger than the device: here it has none. A limit that was set
with ``set_per_process_memory_fraction`` counts the whole request; here, as by the driver, only pages not yet mapped do.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from autobatch.prediction.allocator.block_pool import ADDRESS_BITS, ADDRESS_MASK, NO_BLOCK, UNIT, BlockPool, SplitLimit
from autobatch.prediction.allocator.caching_allocator import SMALL_SEGMENT, Reservation
from autobatch.prediction.allocator.settings import AllocatorSettings, make_split_limit

__all__ = ["ExpandablePool", "ExpandableSegments"]

_ENDLESS = 1 << (ADDRESS_BITS - 1)


class ExpandablePool(BlockPool):
    """Free blocks of one range, and the gaps between them that are not mapped.

    Args:
        page: Units that are mapped at a time.
        split_limit: Which blocks are refused to which requests, where that is set; here all are split nevertheless.
    """

    __slots__ = ("_gap_starts", "_split_limit", "gaps", "page")

    def __init__(self, page: int, split_limit: SplitLimit | None = None) -> None:
        super().__init__(least_rest=1)
        self.page = page
        self._split_limit = split_limit
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
        if self._split_limit is not None and self._split_limit.refuses(blocks[index], size):
            return NO_BLOCK
        return self._cut(blocks.pop(index), size)

    def grow(self, size: int, reservation: Reservation) -> int:
        """Map what is missing of the lowest place where free memory and gaps make up ``size`` units.

        Pages that were mapped before the driver refused stay mapped, as free blocks.
        """
        start = self._find_place(size)
        block = self.starting.get(start, 0)
        while (held := block >> ADDRESS_BITS) < size:
            gap = start + held
            mapped = min(self.gaps[gap], -(-(size - held) // self.page) * self.page)
            if not reservation.grow(mapped):
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
                self._keep(start, first)
                self._keep(last, end)
                self._unmap(first, last)
                released += last - first
        return released

    def _growable(self, block: int) -> int:
        size = block >> ADDRESS_BITS
        return size + self.gaps.get((block & ADDRESS_MASK) + size, 0)

    def _find_place(self, size: int) -> int:
        # The last gap has no end, so the loop always comes to a place.
        return next(
            start for start in map(self.start_of_free_before, self._gap_starts) if self._reaches(start, start + size)
        )

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

    def _keep(self, start: int, end: int) -> None:
        if start < end:
            self.give((end - start) << ADDRESS_BITS | start)

    def _add_gap(self, start: int, length: int) -> None:
        insort(self._gap_starts, start)
        self.gaps[start] = length

    def _remove_gap(self, start: int) -> int:
        del self._gap_starts[bisect_left(self._gap_starts, start)]
        return self.gaps.pop(start)


class ExpandableSegments:
    """The two ranges, with pages of 2 MiB for small blocks and 20 MiB for large ones.

    Args:
        settings: The allocator's settings.
        capacity: The most that may be mapped, in units; None: no end.
    """

    def __init__(self, settings: AllocatorSettings, capacity: int | None) -> None:
        self.small = ExpandablePool(SMALL_SEGMENT)
        self.large = ExpandablePool(settings.large_segment // UNIT, make_split_limit(settings))
        self.reservation = Reservation(capacity)

    def grow(self, pool: BlockPool, size: int) -> int:
        """A block for which pages were mapped, or ``NO_BLOCK`` where the driver refuses."""
        ranged = self.small if pool is self.small else self.large
        return ranged.grow(size, self.reservation)

    def make_room(self, pool: BlockPool, size: int) -> bool:
        """Nothing: single blocks go back to the driver only where segments are fixed."""
        return False

    def release(self) -> None:
        """Unmap every free page of both ranges."""
        self.reservation.shrink(self.large.release() + self.small.release())
