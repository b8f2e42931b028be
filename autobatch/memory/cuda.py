"""Measures and limits the memory of a CUDA (or ROCm) card through torch's caching allocator.

Memory outside of it (the CUDA context, NCCL's buffers, other libraries) shows only in what the driver has free.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from autobatch._user_errors import contextmanager
from autobatch.memory import nvml
from autobatch.memory.device import Device
from autobatch.memory.host_limit import read_host_memory
from autobatch.records import DeviceInfo, MemoryUsage

_MAPPED_BEYOND = 18 * 2**20
"""Bytes beyond the limit: torch compares a request of n x 2 MiB with it, but expandable segments map n x 20 MiB."""
_SYSTEM_SHARE = 16
"""Share of an integrated card's memory that is left to the system: 0.5 GiB of 8 and 8 GiB of 128."""
_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with the allocator's settings. The first one that is set counts."""


@dataclass
class _CardLimits:
    """The ``limit`` blocks on one card. The allocator has one limit for all threads."""

    entered: dict[object, tuple[int, int]] = field(default_factory=dict)  # each block's thread and bytes, in order
    before_bytes: int = 0  # the limit before the first block
    lock: threading.Lock = field(default_factory=threading.Lock)

    def in_force(self) -> int:
        return min([self.before_bytes, *dict(self.entered.values()).values()])


_LIMITS: dict[int, _CardLimits] = {}


class CudaDevice(Device):
    """One card, or one MIG slice, behind the ``Device`` protocol."""

    def __init__(self, torch_device: torch.device) -> None:
        """Take a card. ``"cuda"`` without an index is the current one."""
        # Without torch's cache (the variable set to anything) nothing is counted and limits have no effect.
        self.measures = "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
        index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        self.torch_device = torch.device("cuda", index)
        # The driver of Windows and WSL moves memory of a full card to the host.
        self.may_spill = sys.platform == "win32" or "microsoft" in platform.uname().release.lower()

    @property
    def total_bytes(self) -> int:
        """Total memory, of which the allocator takes fractions. Reading it creates no CUDA context."""
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def describe(self) -> DeviceInfo:
        properties = torch.cuda.get_device_properties(self.torch_device)
        reading = nvml.query(str(properties.uuid))
        return DeviceInfo(
            kind="cuda",
            name=properties.name,
            total_bytes=self.total_bytes,
            uuid=reading.uuid if reading else f"GPU-{properties.uuid}",
            tenants=reading.tenants if reading else (),
            driver=reading.driver if reading else "",
        )

    @cached_property
    def shares_host_memory(self) -> bool:
        """Whether the card shares the host's memory (GB10, Jetson): running out hangs the machine without an error."""
        return bool(getattr(torch.cuda.get_device_properties(self.torch_device), "is_integrated", False))

    def available_bytes(self) -> int:
        """Return the driver's free memory plus what our allocator holds, within the limit set for this process.

        An integrated card has no more than the host has available, less a reserve for the system.
        """
        free, total = torch.cuda.mem_get_info(self.torch_device)
        if self.shares_host_memory:
            free = max(min(free, read_host_memory().available_bytes) - total // _SYSTEM_SHARE, 0)
        limits = self._limits()
        limit = limits.in_force() if limits.entered else self._limit_bytes()
        return min(free + self.usage().reserved, limit)

    @contextmanager
    def limit(self, budget_bytes: int) -> Iterator[None]:
        """Let the allocator hold no more than the budget inside the block. The whole card as a budget means unlimited.

        An integrated card may hold no more than is available now. The cache gives back what it holds beyond the budget:
        torch hands out cached blocks without a look at the limit. Of several threads' budgets the smallest holds, and
        never more than the limit from before the first block, which is back after the last one.
        """
        limits, block = self._limits(), object()
        if self.shares_host_memory:
            budget_bytes = min(budget_bytes, self.available_bytes())
        try:
            with limits.lock:
                if not limits.entered:
                    limits.before_bytes = self._limit_bytes()
                limits.entered[block] = threading.get_ident(), budget_bytes
                self._set_limit(limits.in_force(), is_ours=True)
            if self.usage().reserved > budget_bytes:
                torch.cuda.empty_cache()
            yield
        finally:
            with limits.lock:
                if limits.entered.pop(block, None):
                    self._set_limit(limits.in_force(), is_ours=bool(limits.entered))

    def _limits(self) -> _CardLimits:
        return _LIMITS.setdefault(self.torch_device.index, _CardLimits())

    def _limit_bytes(self) -> int:
        # torch divides the bytes by the total, so the product is exact.
        return round(torch.cuda.get_per_process_memory_fraction(self.torch_device) * self.total_bytes)

    def _set_limit(self, limit_bytes: int, *, is_ours: bool) -> None:
        if is_ours and limit_bytes < self.total_bytes and uses_expandable_segments():
            limit_bytes = max(limit_bytes - _MAPPED_BEYOND, 0)
        torch.cuda.set_per_process_memory_fraction(find_fraction(limit_bytes, self.total_bytes), self.torch_device)

    def move_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy without waiting if the source is pinned: torch reuses pinned memory only after it was read."""
        pinned = tensor.device.type == "cpu" and tensor.is_pinned()
        return tensor.to(self.torch_device, non_blocking=pinned)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def usage(self) -> MemoryUsage:
        """Return the allocator's counts. ``alloc_retries`` counts since the process began."""
        # memory_stats() sorts a table of 150 names first: 240 us, and this takes 45.
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        if not stats:  # the card is unused
            return MemoryUsage()
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return MemoryUsage(
            allocated=allocated["current"],
            reserved=reserved["current"],
            peak_allocated=allocated["peak"],
            peak_reserved=reserved["peak"],
            alloc_retries=stats["num_alloc_retries"],
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def reclaim(self) -> None:
        super().reclaim()
        torch.cuda.empty_cache()
        if empty := getattr(torch.accelerator, "empty_host_cache", None):  # of pinned memory; older releases lack it
            empty()


def find_fraction(limit_bytes: int, total_bytes: int) -> float:
    """Return the fraction of the total, from 0 to 1 (unlimited), that torch turns into exactly this many bytes.

    The allocator truncates ``fraction * total`` (``setMemoryFraction`` in torch's ``CUDACachingAllocator.cpp``), so the
    plain quotient can lose one byte, and with it the last 2 MiB segment. The next double loses none.
    """
    return 1.0 if limit_bytes >= total_bytes else math.nextafter(limit_bytes / total_bytes, 1.0)


def uses_expandable_segments() -> bool:
    """Return whether segments grow. Then torch maps memory in units of 20 MiB."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001 - the only one without a snapshot
    if read is not None:
        settings = str(read())
    else:  # older versions of torch report only the environment
        settings = next((os.environ[name] for name in _SETTINGS if name in os.environ), "")
    return "expandable_segments:True" in "".join(settings.split()).split(",")
