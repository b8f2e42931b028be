"""Devices whose memory is not read or limited here: MPS, XPU and whatever else torch knows.

Covers moving tensors, waiting and giving memory back. Does not cover budgets and peaks: running out of memory is the
only signal there, and what is found is found by trying.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch

from autobatch.memory.reference_leaks import drop_stale_references
from autobatch.records import DeviceInfo, MemoryUsage
from autobatch.torch_internals.profiler_range import profile_range

__all__ = ["UnmonitoredDevice"]


class UnmonitoredDevice:
    """Any torch device behind the ``Device`` protocol, with nothing measured and nothing enforced."""

    measures = False
    counting_takes_time = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def describe(self) -> DeviceInfo:
        """The device's type is all that is known everywhere."""
        kind = self.torch_device.type
        return DeviceInfo(kind=kind, name=kind.upper(), total_bytes=self.available_bytes())

    def available_bytes(self) -> int:
        """What Metal recommends as the most for MPS, 0 (not known) elsewhere."""
        return torch.mps.recommended_max_memory() if self.torch_device.type == "mps" else 0

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Enforces nothing."""
        return nullcontext()

    def limit_bytes(self, budget_bytes: int) -> int:
        """Any budget: nothing is enforced."""
        return budget_bytes

    def needs_limit(self, expected_bytes: int, budget_bytes: int) -> bool:
        """Never: nothing is enforced."""
        return False

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts nothing."""

    def move_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this device; the copy is waited for."""
        return tensor.to(self.torch_device)

    def micro_batch(self, samples: int) -> AbstractContextManager[None] | None:
        """A range in torch's profiler."""
        return profile_range(f"autobatch micro-batch of {samples}")

    def reset_peak(self) -> None:
        """There is no peak."""

    def usage(self) -> MemoryUsage:
        """All zero: not known."""
        return MemoryUsage()

    def synchronize(self) -> None:
        """Wait, where the device's module can."""
        _call(self._module(), "synchronize")

    def reclaim(self) -> None:
        """Let go of what nobody uses any more, then empty the device's cache where it has one."""
        drop_stale_references()
        _call(self._module(), "empty_cache")

    def _module(self) -> ModuleType | None:
        # torch.mps, torch.xpu...; a backend from outside torch registers its own. "meta" has none.
        return getattr(torch, self.torch_device.type, None)


def _call(module: ModuleType | None, name: str) -> None:
    function = getattr(module, name, None)
    if function is not None:
        function()
