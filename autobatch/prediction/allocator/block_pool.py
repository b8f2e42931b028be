"""Free blocks of one pool of the CUDA caching allocator: best fit, splitting and merging.

Covers one pool on one stream. Does not cover where its memory comes from (``fixed_segments``, ``expandable_segments``).

A block is one int, ``size << ADDRESS_BITS | address``, both in units of 512 bytes, the smallest block there is. So a
sorted list of ints is ordered as the allocator orders its blocks, by size and then by address, and nothing is made for
an event but ints: with an object for each block the same replay took several times as long.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["ADDRESS_BITS", "ADDRESS_MASK", "NO_BLOCK", "UNIT", "BlockPool", "LimitedPool", "SplitLimit"]

UNIT = 512
"""Bytes of the smallest block (``kMinBlockSize``); every size is a multiple of it."""

ADDRESS_BITS = 48
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1

NO_BLOCK = -1
"""There is none that fits."""


class BlockPool:
    """Blocks that are free, found by size, by where they begin and by where they end.

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
            The block, cut to ``size`` where the rest is worth keeping, or ``NO_BLOCK``.
        """
        blocks = self.blocks
        index = bisect_left(blocks, size << ADDRESS_BITS)
        return self._cut(blocks.pop(index), size) if index < len(blocks) else NO_BLOCK

    def take_block(self, block: int, size: int) -> int:
        """The same with this free block, which is large enough."""
        return self._cut(self.blocks.pop(bisect_left(self.blocks, block)), size)

    def give(self, block: int) -> None:
        """Take back a block, or take up new memory; it merges with what is free on either side."""
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
        """Forget a free block: its memory goes back to the driver."""
        start = block & ADDRESS_MASK
        del self.blocks[bisect_left(self.blocks, block)]
        del self.starting[start]
        del self._ending[start + (block >> ADDRESS_BITS)]

    def start_of_free_before(self, address: int) -> int:
        """Where the free memory begins that ends at this address; the address itself where there is none."""
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
        kept = rest << ADDRESS_BITS | (start + size)
        insort(self.blocks, kept)
        self.starting[start + size] = self._ending[start + found] = kept
        return size << ADDRESS_BITS | start


class SplitLimit:
    """``max_split_size_mb``: large blocks are neither split nor given to small requests.

    Args:
        limit: Units from which on a block is handed out whole.
        rounding: Units by which a request that large may be exceeded (``max_non_split_rounding_mb``).
    """

    __slots__ = ("_rounding", "limit")

    def __init__(self, limit: int, rounding: int) -> None:
        self.limit = limit
        self._rounding = rounding

    def refuses(self, block: int, size: int) -> bool:
        """Whether this block, though large enough, may not serve a request of ``size`` units."""
        found = block >> ADDRESS_BITS
        return found >= self.limit if size < self.limit else found >= size + self._rounding


class LimitedPool(BlockPool):
    """A pool with a limit on splitting.

    Args:
        least_rest: As for any pool.
        split_limit: The limit.
    """

    __slots__ = ("split_limit",)

    def __init__(self, least_rest: int, split_limit: SplitLimit) -> None:
        super().__init__(least_rest)
        self.split_limit = split_limit

    def take(self, size: int) -> int:
        """As for any pool, but only the best fitting block is looked at: where it is not allowed, there is none."""
        index = bisect_left(self.blocks, size << ADDRESS_BITS)
        if index == len(self.blocks) or self.split_limit.refuses(self.blocks[index], size):
            return NO_BLOCK
        return self._cut(self.blocks.pop(index), size)

    def largest_first(self, size: int) -> list[int]:
        """The free blocks that go back to the driver so that ``size`` more units can be asked for.

        The smallest that is large enough, or else large ones, the largest first, until there is enough or there are no
        more of them.
        """
        wanted = max(size, self.split_limit.limit)
        index = bisect_left(self.blocks, wanted << ADDRESS_BITS)
        if index < len(self.blocks):
            return [self.blocks[index]]
        chosen: list[int] = []
        for block in reversed(self.blocks):
            if wanted <= 0 or block >> ADDRESS_BITS < self.split_limit.limit:
                break
            chosen.append(block)
            wanted -= block >> ADDRESS_BITS
        return chosen

    def _cut(self, block: int, size: int) -> int:
        if size < self.split_limit.limit:
            return super()._cut(block, size)
        start = block & ADDRESS_MASK
        del self.starting[start]
        del self._ending[start + (block >> ADDRESS_BITS)]
        return block
