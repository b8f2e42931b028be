"""Enforces a budget on the CPU: live tensors are counted, and passing the budget raises an out-of-memory error.

Covers what ``live_storage`` counts, against the container's limit or the RAM. So a training job in a container meets an
error that can be retried instead of the kernel's out-of-memory killer. Does not cover memory that is not in tensors.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from autobatch.memory.device import Device
from autobatch.memory.host_limit import read_host_memory
from autobatch.memory.live_storage import LiveStorage, StorageBudget
from autobatch.records import DeviceInfo, MemoryUsage

__all__ = ["CpuDevice"]

_STORAGE = LiveStorage()
"""One count for the process, as it has one heap: a tensor that one device object has seen counts for all."""

_FAR = 4
"""A step this many times smaller than what is available cannot run out of it, longer batches included."""

_READ_AGAIN_SECONDS = 1.0


class _Innermost(threading.local):
    """The budget in force. One a thread: torch's dispatch modes, which enforce it, are of one thread too."""

    budget: StorageBudget | None = None


_INNERMOST = _Innermost()


class CpuDevice(Device):
    """The host's memory behind the ``Device`` protocol; all objects of this class share one count and one budget.

    A ``limit`` holds in the thread that entered it. What other threads make is counted only by ``watch``.
    """

    measures = True
    counting_takes_time = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._read_at, self._available = -math.inf, 0

    def describe(self) -> DeviceInfo:
        """Total is the container's limit where there is one."""
        return DeviceInfo(kind="cpu", name="CPU", total_bytes=read_host_memory().total_bytes)

    def available_bytes(self) -> int:
        """What the host can still give plus what our counted tensors hold."""
        return read_host_memory().available_bytes + _STORAGE.live_bytes

    @contextmanager
    def limit(self, budget_bytes: int) -> Iterator[None]:
        """Count every operator's result inside the block, and raise ``torch.OutOfMemoryError`` beyond the budget."""
        budget_bytes = self.limit_bytes(budget_bytes)
        if _INNERMOST.budget is None:
            _INNERMOST.budget = StorageBudget(_STORAGE, budget_bytes)
            try:
                with _INNERMOST.budget:
                    yield
            finally:
                _INNERMOST.budget = None
            return
        outer, _INNERMOST.budget.budget_bytes = _INNERMOST.budget.budget_bytes, budget_bytes
        try:
            yield
        finally:
            _INNERMOST.budget.budget_bytes = outer

    def needs_limit(self, expected_bytes: int, budget_bytes: int) -> bool:
        """Not where four times the step would still fit, both in the budget and in what the host has now.

        Counting costs about 10 us an operator (torch 2.13, 2 cores), which more than doubles the time of a model of
        small layers, and a job that needs 1 GiB of 24 gains nothing by it.
        """
        if time.monotonic() - self._read_at > _READ_AGAIN_SECONDS:
            self._read_host()
        return _FAR * expected_bytes > min(budget_bytes, self._available) - _STORAGE.live_bytes

    def limit_bytes(self, budget_bytes: int) -> int:
        """The budget, or what the host had at most a second ago, as others may have taken from it since.

        A reading takes a dozen files, 0.3 to 1 ms. After ``reclaim`` the host is read again at once.
        """
        if time.monotonic() - self._read_at > _READ_AGAIN_SECONDS:
            self._read_host()
        return min(budget_bytes, self._available)

    def _read_host(self) -> None:
        self._read_at, self._available = time.monotonic(), self.available_bytes()

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before, or outside, any ``limit`` block."""
        _STORAGE.add(tensors)

    def reset_peak(self) -> None:
        """The peak begins at what is live now."""
        _STORAGE.peak_bytes = _STORAGE.live_bytes

    def usage(self) -> MemoryUsage:
        """Allocated and reserved are the same here: freed memory goes back to the C library at once."""
        live, peak = _STORAGE.live_bytes, _STORAGE.peak_bytes
        return MemoryUsage(allocated=live, reserved=live, peak_allocated=peak, peak_reserved=peak)

    def reclaim(self) -> None:
        """Free what nothing refers to; the host is read again at the next step."""
        super().reclaim()
        self._read_at = -math.inf
