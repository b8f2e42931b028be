"""Moves tensors to devices whose memory is neither read nor limited: MPS, XPU and any other that torch knows.

Running out of memory is the only signal there, so sizes are found by trying them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from autobatch.memory.device import Device
from autobatch.memory.reference_leaks import drop_stale_references
from autobatch.records import DeviceInfo, MemoryUsage

__all__ = ["UnmonitoredDevice"]


class UnmonitoredDevice(Device):
    """Any torch device behind the ``Device`` protocol, with nothing measured and nothing enforced."""

    measures = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def describe(self) -> DeviceInfo:
        """The type of the device, which is all that every backend has."""
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

    def usage(self) -> MemoryUsage:
        """All zero: not known."""
        return MemoryUsage()

    def synchronize(self) -> None:
        """Wait, where the backend's module can."""
        self._call("synchronize")

    def reclaim(self) -> None:
        """Free what nothing refers to, then empty the device's cache where it has one."""
        drop_stale_references()
        self._call("empty_cache")

    def _call(self, name: str) -> None:
        # torch.mps, torch.xpu...; a backend from outside torch registers its own. "meta" has none.
        module: Any = getattr(torch, self.torch_device.type, None)
        if hasattr(module, name):
            getattr(module, name)()
