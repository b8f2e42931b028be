"""Memory as the allocator gets it by default: segments of ``cudaMalloc``, whose sizes never change.

Covers segments of one stream, at addresses that only rise. Does not cover the addresses of a real driver, which may use
those of freed segments again: they decide only between free blocks of equal size.
"""

from __future__ import annotations

from autobatch.prediction.allocator.block_pool import ADDRESS_BITS, ADDRESS_MASK, NO_BLOCK, UNIT, BlockPool, LimitedPool
from autobatch.prediction.allocator.caching_allocator import LARGEST_SMALL, SMALL_SEGMENT, Reservation
from autobatch.prediction.allocator.settings import MIB, AllocatorSettings, make_split_limit

__all__ = ["FixedSegments"]

_LEAST_LARGE = 10 * MIB // UNIT
"""Units from which on a request gets a segment of its own (``kMinLargeAlloc``)."""


class FixedSegments:
    """Segments of 2 MiB for small blocks; for large ones 20 MiB, or what one block needs, rounded to 2 MiB.

    Args:
        settings: The allocator's settings.
        capacity: The most that may be reserved, in units; None: no end.
    """

    def __init__(self, settings: AllocatorSettings, capacity: int | None) -> None:
        self.small = BlockPool(least_rest=1)
        self.large = _make_large_pool(settings)
        self.reservation = Reservation(capacity)
        self.segments: dict[int, int] = {}
        self._large_segment = settings.large_segment // UNIT
        self._next_address = 0

    def grow(self, pool: BlockPool, size: int) -> int:
        """A block of a new segment, or ``NO_BLOCK`` where the driver refuses."""
        segment = self._segment_for(size)
        if not self.reservation.grow(segment):
            return NO_BLOCK
        start = self._next_address
        self._next_address += segment + 1  # one unit apart, so that blocks of two segments are no neighbours
        self.segments[start] = segment
        block = segment << ADDRESS_BITS | start
        pool.give(block)
        return pool.take_block(block, size)

    def make_room(self, pool: BlockPool, size: int) -> bool:
        """With ``max_split_size``: give back large free blocks, which a smaller request could not use anyway."""
        if not isinstance(self.large, LimitedPool) or pool is not self.large:
            return False
        chosen = self.large.largest_first(size)
        for block in chosen:
            self._release_block(self.large, block)
        return sum(block >> ADDRESS_BITS for block in chosen) >= max(size, self.large.split_limit.limit)

    def release(self) -> None:
        """Give back every segment of which no part is in use."""
        for pool in (self.large, self.small):
            for block in [*pool.blocks]:
                if self.segments.get(block & ADDRESS_MASK) == block >> ADDRESS_BITS:
                    self._release_block(pool, block)

    def _release_block(self, pool: BlockPool, block: int) -> None:
        pool.drop(block)
        self.reservation.shrink(self.segments.pop(block & ADDRESS_MASK))

    def _segment_for(self, size: int) -> int:
        if size <= LARGEST_SMALL:
            return SMALL_SEGMENT
        if size < _LEAST_LARGE:
            return self._large_segment
        return -(-size // SMALL_SEGMENT) * SMALL_SEGMENT


def _make_large_pool(settings: AllocatorSettings) -> BlockPool:
    least_rest = LARGEST_SMALL + 1  # a large block is worth splitting when more than 1 MiB remains
    split_limit = make_split_limit(settings)
    return BlockPool(least_rest) if split_limit is None else LimitedPool(least_rest, split_limit)
