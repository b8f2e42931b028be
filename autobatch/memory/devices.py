"""Finds the device of a model, or one that a user names, and the ``Device`` that measures its memory.

Covers the choice and its errors. There is one object for each torch device in the process, as there is one allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument
from autobatch.memory.cpu import CpuDevice
from autobatch.memory.cuda import CudaDevice
from autobatch.memory.device import Device
from autobatch.memory.unmonitored import UnmonitoredDevice

__all__ = ["device_for", "find_device", "open_device"]


def find_device(parameters: Sequence[torch.Tensor], model_name: str, device: Any | None) -> Device:
    """The memory of the one device that all parameters are on, or the ``Device`` object that stands in for it.

    Raises:
        InvalidArgument: No parameters, or parameters on the meta device or on several; or ``device`` is none, or not
            theirs.
    """
    home = _find_home(parameters, model_name)
    if device is None:
        return device_for(home)
    if isinstance(device, Device) and not isinstance(device, type):
        return device
    asked = _parse_device(device)
    if asked.type != home.type or asked.index not in (None, home.index or 0):
        raise InvalidArgument(
            f"device={str(device)!r}, but the model is on {home}; move the model first, or leave device= out"
        )
    return device_for(home)


def open_device(device: Any) -> Device:
    """The memory of a device that a user names, or the ``Device`` object that stands in for it.

    Raises:
        InvalidArgument: It is none, or torch cannot use it here.
    """
    if isinstance(device, Device) and not isinstance(device, type):
        return device
    asked = _parse_device(device)
    try:
        torch.empty(0, device=asked)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, NotImplementedError):  # each backend's own way to say that it is missing
        asked = torch.device("meta")
    if asked.type == "meta":
        raise InvalidArgument(f"device={show_value(device)} is not here: torch has no memory of it in this process")
    return device_for(asked)


def device_for(torch_device: torch.device) -> Device:
    """The memory of a torch device; ``"cuda"`` without an index is the current card."""
    if torch_device.type == "cuda" and torch_device.index is None:
        torch_device = torch.device("cuda", torch.cuda.current_device())
    return _make_device(torch_device)


@cache
def _make_device(torch_device: torch.device) -> Device:
    if torch_device.type == "cpu":
        return CpuDevice()
    return CudaDevice(torch_device) if torch_device.type == "cuda" else UnmonitoredDevice(torch_device)


def _find_home(parameters: Sequence[torch.Tensor], model_name: str) -> torch.device:
    if not parameters:
        raise InvalidArgument(f"{model_name} has no parameters: there is nothing to train")
    # There is one CPU, whether it was named "cpu" or "cpu:0".
    devices = {torch.device("cpu") if p.device.type == "cpu" else p.device for p in parameters}
    if len(devices) > 1:
        raise InvalidArgument(
            f"{model_name} has parameters on several devices: {', '.join(sorted(map(str, devices)))}; a budget is one "
            f"device's, so move them to one"
        )
    [home] = devices
    if home.type == "meta":
        raise InvalidArgument(
            f"{model_name} is on the meta device, which has no memory to run in; move it with to_empty() first"
        )
    return home


def _parse_device(device: Any) -> torch.device:
    try:
        if isinstance(device, (str, torch.device)):
            return torch.device(device)
    except RuntimeError:  # torch knows no such device; its own list of them would not help here
        pass
    raise InvalidArgument(
        f"device={show_value(device)} is no device: pass a torch.device, a name such as 'cuda:0' or 'cpu', or leave it "
        f"out"
    )
