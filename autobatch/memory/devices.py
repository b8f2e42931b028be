"""Which ``Device`` stands behind a torch device.

Covers the choice only. One object a torch device for the whole process, as there is one allocator a device.
"""

from __future__ import annotations

from functools import cache

import torch

from autobatch.memory.cpu import CpuDevice
from autobatch.memory.cuda import CudaDevice
from autobatch.memory.device import Device
from autobatch.memory.unmonitored import UnmonitoredDevice

__all__ = ["device_for"]


def device_for(torch_device: torch.device) -> Device:
    """The memory of a torch device.

    Args:
        torch_device: ``"cuda"`` without an index means the current card.
    """
    if torch_device.type == "cuda" and torch_device.index is None:
        torch_device = torch.device("cuda", torch.cuda.current_device())
    return _open(torch_device)


@cache
def _open(torch_device: torch.device) -> Device:
    if torch_device.type == "cpu":
        return CpuDevice()
    if torch_device.type == "cuda":
        return CudaDevice(torch_device)
    return UnmonitoredDevice(torch_device)
