"""What both ways of getting memory share: two pools, what is reserved, and the retry after a refusal.

Covers the order in which the allocator tries: a free block, new memory, new memory after its caches went back to the
driver. Does not cover events of other streams, which hold a block back until they are done.
"""

from __future__ import annotations

from typing import Protocol

from autobatch.prediction.allocator.block_pool import ADDRESS_BITS, NO_BLOCK, UNIT, BlockPool
from autobatch.prediction.allocator.settings import MIB

__all__ = ["LARGEST_SMALL", "SMALL_SEGMENT", "CachingAllocator", "Memory", "Reservation"]

LARGEST_SMALL = MIB // UNIT
"""Units of the largest request that the small pool serves (``kSmallSize``)."""

SMALL_SEGMENT = 2 * MIB // UNIT
"""Units that the small pool asks for at a time (``kSmallBuffer``), and the step of large segments."""


class Reservation:
    """How much the driver has given, and the most that it will; in units."""

    __slots__ = ("_capacity", "peak", "reserved")

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self.reserved = 0
        self.peak = 0

    def grow(self, size: int) -> bool:
        """Ask for more; False where the driver refuses."""
        reserved = self.reserved + size
        if self._capacity is not None and reserved > self._capacity:
            return False
        self.reserved = reserved
        self.peak = max(self.peak, reserved)
        return True

    def shrink(self, size: int) -> None:
        """Give back."""
        self.reserved -= size


class Memory(Protocol):
    """Where new memory comes from and goes back to."""

    @property
    def small(self) -> BlockPool:
        """Free blocks of up to 1 MiB."""

    @property
    def large(self) -> BlockPool:
        """Free blocks of more."""

    @property
    def reservation(self) -> Reservation:
        """What the driver has given."""

    def grow(self, pool: BlockPool, size: int) -> int:
        """A block of new memory for a request that no free block serves, or ``NO_BLOCK``."""

    def make_room(self, pool: BlockPool, size: int) -> bool:
        """Give large free blocks back for this request; whether asking again is worth it."""

    def release(self) -> None:
        """Give back all that can be given back."""


class CachingAllocator:
    """Takes and gives blocks, and counts how often the caches had to go for it."""

    __slots__ = ("_large", "_small", "alloc_retries", "memory")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._small = memory.small
        self._large = memory.large
        self.alloc_retries = 0

    def take(self, size: int) -> int:
        """A block of at least ``size`` units, or ``NO_BLOCK``: out of memory."""
        pool = self._small if size <= LARGEST_SMALL else self._large
        block = pool.take(size)
        return self._take_new(pool, size) if block == NO_BLOCK else block

    def give(self, block: int) -> None:
        """Free a block that was handed out."""
        # No block of the large pool is this small, and one of the small pool is never larger than what was asked for.
        (self._small if block >> ADDRESS_BITS <= LARGEST_SMALL else self._large).give(block)

    def _take_new(self, pool: BlockPool, size: int) -> int:
        block = self.memory.grow(pool, size)
        if block == NO_BLOCK and self.memory.make_room(pool, size):
            block = self.memory.grow(pool, size)
        if block != NO_BLOCK:
            return block
        self.memory.release()
        self.alloc_retries += 1
        return self.memory.grow(pool, size)
