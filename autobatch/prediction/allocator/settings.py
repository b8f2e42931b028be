"""What can be set on the CUDA caching allocator, and how it rounds sizes.

Covers the entries of ``PYTORCH_CUDA_ALLOC_CONF`` that change what is allocated from one stream. Does not cover garbage
collection, private pools of CUDA graphs and a list of divisions by size.

The rules and constants are those of torch's ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, field_validator, model_validator

from autobatch.prediction.allocator.block_pool import UNIT, SplitLimit
from autobatch.records import Record

__all__ = ["MIB", "AllocatorSettings", "make_split_limit", "round_sizes"]

MIB = 2**20


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


def round_sizes(sizes: Sequence[int], settings: AllocatorSettings) -> list[int]:
    """What each request takes up before a block is found for it, in units of 512 bytes; 0 stays 0."""
    divisions = settings.roundup_power2_divisions
    if divisions > 1:
        return [_round_to_division(size, divisions) for size in sizes]
    return [-(-size // UNIT) for size in sizes]


def make_split_limit(settings: AllocatorSettings) -> SplitLimit | None:
    """``max_split_size`` in units; None where every block may be split."""
    if settings.max_split_size is None:
        return None
    return SplitLimit(settings.max_split_size // UNIT, settings.max_non_split_rounding // UNIT)


def _round_to_division(size: int, divisions: int) -> int:
    if size <= UNIT * divisions:
        return -(-size // UNIT)
    step = (1 << size.bit_length() - 1) // divisions
    return -(-size // step) * step // UNIT
