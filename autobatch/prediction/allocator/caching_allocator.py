"""Serves allocations as the CUDA caching allocator does: two pools, memory from the driver, the retry after a refusal.

Covers one stream, with fixed or expandable segments and torch's default settings. Does not cover the other entries of
``PYTORCH_CUDA_ALLOC_CONF``, garbage collection, events of other streams, and private pools of CUDA graphs. The rules
and constants are those of torch's ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from autobatch.prediction.allocator.block_pool import (
    ADDRESS_BITS,
    ADDRESS_MASK,
    NO_BLOCK,
    UNIT,
    BlockPool,
    ExpandablePool,
)

__all__ = ["MIB", "CachingAllocator", "ExpandableSegments", "FixedSegments"]

MIB = 2**20

_LARGEST_SMALL = MIB // UNIT
"""Units of the largest request that the small pool serves (``kSmallSize``)."""

_SMALL_SEGMENT = 2 * MIB // UNIT
"""Units that the small pool asks for at a time (``kSmallBuffer``), and the step of large segments."""

_LEAST_LARGE = 10 * MIB // UNIT
"""Units from which on a request gets a segment of its own (``kMinLargeAlloc``)."""


_LARGE_SEGMENT = 20 * MIB // UNIT
"""Units that are asked for when a request is between 1 and 10 MiB, and the page of the expandable large pool."""


class CachingAllocator(ABC):
    """A small and a large pool, what the driver has given for them, and the order in which memory is looked for.

    Args:
        small: Free blocks of up to 1 MiB.
        large: Larger ones.
        capacity: The most bytes that the driver gives; None: no limit.

    Attributes:
        reserved: Units that the driver has given, and ``peak_reserved`` the most of them.
        alloc_retries: How often all caches had to go back to the driver.
    """

    def __init__(self, small: BlockPool, large: BlockPool, capacity: int | None) -> None:
        self._small, self._large = small, large
        self._capacity = None if capacity is None else capacity // UNIT
        self.reserved = self.peak_reserved = self.alloc_retries = 0

    def allocate(self, size: int) -> int:
        """A block of at least ``size`` units, or ``NO_BLOCK``: out of memory."""
        pool = self._small if size <= _LARGEST_SMALL else self._large
        block = pool.take(size)
        return self._allocate_new(pool, size) if block == NO_BLOCK else block

    def free(self, block: int) -> None:
        """Free a block that was handed out."""
        # No block of the large pool is this small, and one of the small pool is never larger than what was asked for.
        (self._small if block >> ADDRESS_BITS <= _LARGEST_SMALL else self._large).give(block)

    def reserve(self, size: int) -> bool:
        """Ask the driver for more units; False where it refuses."""
        reserved = self.reserved + size
        if self._capacity is not None and reserved > self._capacity:
            return False
        self.reserved = reserved
        self.peak_reserved = max(self.peak_reserved, reserved)
        return True

    @abstractmethod
    def release_cached(self) -> None:
        """Give back to the driver all that can be given back."""

    @abstractmethod
    def _grow(self, pool: BlockPool, size: int) -> int:
        """A block of new memory for a request that no free block serves, or ``NO_BLOCK``."""

    def _allocate_new(self, pool: BlockPool, size: int) -> int:
        block = self._grow(pool, size)
        if block != NO_BLOCK:
            return block
        self.release_cached()
        self.alloc_retries += 1
        return self._grow(pool, size)


class FixedSegments(CachingAllocator):
    """The default: segments of ``cudaMalloc`` of 2 MiB for small blocks; for large ones 20 MiB, or one block's size.

    Addresses only rise. A real driver may use those of freed segments again; they decide only between free blocks of
    equal size.
    """

    def __init__(self, capacity: int | None) -> None:
        self.small = BlockPool(least_rest=1)
        self.large = BlockPool(_LARGEST_SMALL + 1)  # split where more than 1 MiB remains
        super().__init__(self.small, self.large, capacity)
        self.segments: dict[int, int] = {}
        self._next_address = 0

    def release_cached(self) -> None:
        """Give back every segment of which no part is in use."""
        for pool in (self.large, self.small):
            for block in [*pool.blocks]:
                if self.segments.get(block & ADDRESS_MASK) == block >> ADDRESS_BITS:
                    pool.drop(block)
                    self.reserved -= self.segments.pop(block & ADDRESS_MASK)

    def _grow(self, pool: BlockPool, size: int) -> int:
        segment = self._segment_for(size)
        if not self.reserve(segment):
            return NO_BLOCK
        start = self._next_address
        self._next_address += segment + 1  # one unit apart, so that blocks of two segments are no neighbours
        self.segments[start] = segment
        block = segment << ADDRESS_BITS | start
        pool.give(block)
        return pool.take_block(block, size)

    def _segment_for(self, size: int) -> int:
        if size <= _LARGEST_SMALL:
            return _SMALL_SEGMENT
        if size < _LEAST_LARGE:
            return _LARGE_SEGMENT
        return -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT


class ExpandableSegments(CachingAllocator):
    """``expandable_segments:True``: one range of addresses for each pool, in pages of 2 and 20 MiB.

    A range is endless here; torch's is an eighth larger than the device. With ``set_per_process_memory_fraction`` torch
    counts a whole request against the limit; here, as by the driver, only pages not yet mapped count.
    """

    def __init__(self, capacity: int | None) -> None:
        self.small = ExpandablePool(_SMALL_SEGMENT)
        self.large = ExpandablePool(_LARGE_SEGMENT)
        super().__init__(self.small, self.large, capacity)

    def release_cached(self) -> None:
        """Unmap every free page of both ranges."""
        self.reserved -= self.large.release() + self.small.release()

    def _grow(self, pool: BlockPool, size: int) -> int:
        expandable = self.small if pool is self.small else self.large
        return expandable.grow(size, self.reserve)
