"""What a test may ask of the stand-in card while it runs: other tenants, planned failures, counts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_COUNT = ctypes.c_ulonglong
_LIBRARY = ctypes.CDLL(None)  # what is preloaded is found among the names of the process


def is_loaded() -> bool:
    """Whether this process runs on the stand-in card."""
    return hasattr(_LIBRARY, "standin_counts")


def _call(name: str, *arguments: Any, result: Any = None) -> Any:
    function = getattr(_LIBRARY, f"standin_{name}")
    function.restype = result
    return function(*arguments)


class Counts(NamedTuple):
    """What the driver saw since the process began; bytes are the first card's."""

    launches: int
    mallocs: int
    frees: int
    refusals: int
    used_bytes: int
    peak_bytes: int


def counts() -> Counts:
    """What the driver saw."""
    numbers = (_COUNT * len(Counts._fields))()
    _call("counts", numbers)
    return Counts(*numbers)


@contextmanager
def memory_fails(first: int, count: int = 1) -> Iterator[None]:
    """Refuse the first-th ``cudaMalloc`` (or ``cuMemCreate``) inside the block, and those after it up to ``count``.

    torch's allocator asks up to three times before it raises: three refusals are an out-of-memory error, one is a
    retry. 0 as ``first`` refuses none; ``memory_calls`` then says how many there were.
    """
    _call("fail_memory", _COUNT(first), _COUNT(count))
    try:
        yield
    finally:
        _call("fail_memory", _COUNT(0), _COUNT(0))


def memory_calls() -> int:
    """How often memory was asked for since the last failure was planned."""
    return int(_call("memory_calls", result=_COUNT))


@contextmanager
def launch_fails(first: int, count: int = 1) -> Iterator[None]:
    """Let the first-th launch of a kernel inside the block fail for memory, and those after it up to ``count``."""
    out_of_memory = 2  # cudaErrorMemoryAllocation
    _call("fail_launch", _COUNT(first), _COUNT(count), out_of_memory)
    try:
        yield
    finally:
        _call("fail_launch", _COUNT(0), _COUNT(0), 0)


def launch_calls() -> int:
    """How many kernels were launched since the last failure was planned."""
    return int(_call("launch_calls", result=_COUNT))


@contextmanager
def tenant(byte_count: int, pid: int = 4242) -> Iterator[None]:
    """Another process that holds so much of each card inside the block."""
    _call("set_tenant", ctypes.c_uint(pid), ctypes.c_size_t(byte_count))
    try:
        yield
    finally:
        _call("set_tenant", ctypes.c_uint(pid), ctypes.c_size_t(0))


def zero_reads(*, whether: bool) -> None:
    """Read a few bytes back as zeros, which is safe while kernels write nothing; or as what the memory holds."""
    _call("zero_reads", int(whether))
