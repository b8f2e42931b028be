"""Serves allocations as the CUDA caching allocator does: two pools, memory from the driver, the retry after a refusal.

Covers one stream, with fixed or expandable segments, and the settings of ``PYTORCH_CUDA_ALLOC_CONF`` that change what
is allocated there. Does not cover garbage collection, events of other streams, private pools of CUDA graphs, and a list
of divisions by size. The rules and constants are those of torch's ``c10/core/AllocatorConfig.h`` and
``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence

from pydantic import Field, field_validator, model_validator

from autobatch.prediction.allocator.block_pool import (
    ADDRESS_BITS,
    ADDRESS_MASK,
    NO_BLOCK,
    NO_LIMIT,
    UNIT,
    BlockPool,
    ExpandablePool,
)
from autobatch.records import Record

__all__ = ["MIB", "AllocatorSettings", "CachingAllocator", "ExpandableSegments", "FixedSegments", "round_sizes"]

MIB = 2**20

_LARGEST_SMALL = MIB // UNIT
"""Units of the largest request that the small pool serves (``kSmallSize``)."""

_SMALL_SEGMENT = 2 * MIB // UNIT
"""Units that the small pool asks for at a time (``kSmallBuffer``), and the step of large segments."""

_LEAST_LARGE = 10 * MIB // UNIT
"""Units from which on a request gets a segment of its own (``kMinLargeAlloc``)."""


class AllocatorSettings(Record):
    """Settings of the allocator; the defaults are torch's.

    Attributes:
        max_split_size: Bytes from which on a block is not split (``max_split_size_mb``); None: every block may be. More
            than ``large_segment``: else torch takes the rest of a segment for one that it may free.
        max_non_split_rounding: Bytes by which a request that large may be exceeded (``max_non_split_rounding_mb``).
        roundup_power2_divisions: Steps into which each power of two is divided to round sizes up to, a power of two;
            0 or 1: sizes are rounded to 512 bytes alone.
        large_segment: Bytes that are asked for when a request is between 1 and 10 MiB, and the page of the expandable
            large pool (``large_segment_size_mb``).
    """

    max_split_size: int | None = None
    max_non_split_rounding: int = Field(default=20 * MIB, ge=20 * MIB)
    roundup_power2_divisions: int = Field(default=0, ge=0)
    large_segment: int = Field(default=20 * MIB, ge=20 * MIB, multiple_of=2 * MIB)

    @field_validator("roundup_power2_divisions")
    @classmethod
    def _check_divisions(cls, divisions: int) -> int:
        if divisions & (divisions - 1):
            raise ValueError("a power of two is divided into 2, 4, 8... parts")
        return divisions

    @model_validator(mode="after")
    def _check_split_size(self) -> AllocatorSettings:
        if self.max_split_size is not None and self.max_split_size <= self.large_segment:
            raise ValueError(f"max_split_size must be more than large_segment, which is {self.large_segment} bytes")
        return self

    def split_limit(self) -> tuple[int, int]:
        """``max_split_size`` and ``max_non_split_rounding`` in units."""
        limit = NO_LIMIT if self.max_split_size is None else self.max_split_size // UNIT
        return limit, self.max_non_split_rounding // UNIT


def round_sizes(sizes: Sequence[int], settings: AllocatorSettings) -> list[int]:
    """What each request takes up before a block is found for it, in units of 512 bytes; 0 stays 0."""
    divisions = settings.roundup_power2_divisions
    if divisions > 1:
        return [_round_to_division(size, divisions) for size in sizes]
    return [-(-size // UNIT) for size in sizes]


def _round_to_division(size: int, divisions: int) -> int:
    if size <= UNIT * divisions:
        return -(-size // UNIT)
    step = (1 << size.bit_length() - 1) // divisions
    return -(-size // step) * step // UNIT


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
        self._capacity = NO_LIMIT if capacity is None else capacity // UNIT
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
        if reserved > self._capacity:
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

    def _release_available(self, pool: BlockPool, size: int) -> bool:
        """Give large free blocks back for this request; whether asking again is worth it."""
        return False

    def _allocate_new(self, pool: BlockPool, size: int) -> int:
        block = self._grow(pool, size)
        if block == NO_BLOCK and self._release_available(pool, size):
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

    def __init__(self, settings: AllocatorSettings, capacity: int | None) -> None:
        self.small = BlockPool(least_rest=1)
        self.large = BlockPool(_LARGEST_SMALL + 1, *settings.split_limit())  # split where more than 1 MiB remains
        super().__init__(self.small, self.large, capacity)
        self.segments: dict[int, int] = {}
        self._large_segment = settings.large_segment // UNIT
        self._next_address = 0

    def release_cached(self) -> None:
        """Give back every segment of which no part is in use."""
        for pool in (self.large, self.small):
            for block in [*pool.blocks]:
                if self.segments.get(block & ADDRESS_MASK) == block >> ADDRESS_BITS:
                    self._release(pool, block)

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

    def _release_available(self, pool: BlockPool, size: int) -> bool:
        """With ``max_split_size``, large free blocks go back: a smaller request could not use them anyway.

        The smallest that is large enough, or else the largest first until there is enough.
        """
        limit = pool.split_limit
        missing = max(size, limit)
        index = bisect_left(pool.blocks, missing << ADDRESS_BITS)
        for block in pool.blocks[index : index + 1] or pool.blocks[::-1]:
            if missing <= 0 or block >> ADDRESS_BITS < limit:
                break
            self._release(pool, block)
            missing -= block >> ADDRESS_BITS
        return missing <= 0

    def _release(self, pool: BlockPool, block: int) -> None:
        pool.drop(block)
        self.reserved -= self.segments.pop(block & ADDRESS_MASK)

    def _segment_for(self, size: int) -> int:
        if size <= _LARGEST_SMALL:
            return _SMALL_SEGMENT
        if size < _LEAST_LARGE:
            return self._large_segment
        return -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT


class ExpandableSegments(CachingAllocator):
    """``expandable_segments:True``: one range of addresses for each pool, in pages of 2 and 20 MiB.

    A range is endless here; torch's is an eighth larger than the device. With ``set_per_process_memory_fraction`` torch
    counts a whole request against the limit; here, as by the driver, only pages not yet mapped count.
    """

    def __init__(self, settings: AllocatorSettings, capacity: int | None) -> None:
        self.small = ExpandablePool(_SMALL_SEGMENT)
        self.large = ExpandablePool(settings.large_segment // UNIT, *settings.split_limit())
        super().__init__(self.small, self.large, capacity)

    def release_cached(self) -> None:
        """Unmap every free page of both ranges."""
        self.reserved -= self.large.release() + self.small.release()

    def _grow(self, pool: BlockPool, size: int) -> int:
        expandable = self.small if pool is self.small else self.large
        return expandable.grow(size, self.reserve)
