"""Finds the device of a model, the ``Device`` object that measures it, and the memory that this process may use.

Each torch device has one object in the process, since it has one allocator. A wrong device or size raises
``InvalidArgument``.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch

from autobatch._arguments import SIZES, parse_bytes, read_bytes
from autobatch._formatting import format_bytes, show_value
from autobatch.errors import InvalidArgument
from autobatch.memory.cpu import CpuDevice
from autobatch.memory.cuda import CudaDevice
from autobatch.memory.device import Device, UnmonitoredDevice
from autobatch.records import Record

DEFAULT_HEADROOM = 0.05  # of the budget, for longer batches and for fragmentation


def find_device(parameters: Sequence[torch.Tensor], model_name: str, device: Any | None) -> Device:
    home = _find_home(parameters, model_name)
    asked = parse_device(home if device is None else device)
    if isinstance(asked, Device):
        return asked
    if asked.type != home.type or asked.index not in (None, home.index or 0):
        raise InvalidArgument(
            f"device={str(device)!r}, but the model is on {home}; move the model first, or leave device= out"
        )
    return device_for(home)


def open_device(device: Any) -> Device:
    asked = parse_device(device)
    if isinstance(asked, Device):
        return asked
    if not is_here(asked) or asked.type == "meta":
        raise InvalidArgument(f"device={show_value(device)} is not here: torch has no memory of it in this process")
    return device_for(asked)


def is_here(device: torch.device) -> bool:
    try:
        torch.empty(0, device=device)
    except torch.OutOfMemoryError:
        raise
    # Backends raise different errors if they are missing. ImportError comes from packages such as hpu.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        return False
    return True


def device_for(torch_device: torch.device) -> Device:
    if torch_device.type == "cuda" and torch_device.index is None:
        torch_device = torch.device("cuda", torch.cuda.current_device())
    return _make_device(torch_device)


@cache
def _make_device(torch_device: torch.device) -> Device:
    if torch_device.type == "cpu":
        return CpuDevice()
    return CudaDevice(torch_device) if torch_device.type == "cuda" else UnmonitoredDevice(torch_device)


def has_own_memory(device: Device) -> bool:
    """Return whether what is moved to the host frees memory of the device."""
    return isinstance(device, CudaDevice) and not device.shares_host_memory


def _find_home(parameters: Sequence[torch.Tensor], model_name: str) -> torch.device:
    if not parameters:
        raise InvalidArgument(f"{model_name} has no parameters: there is nothing to train")
    # "cpu" and "cpu:0" are the same device.
    devices = {torch.device("cpu") if p.device.type == "cpu" else p.device for p in parameters}
    if len(devices) > 1:
        raise InvalidArgument(
            f"{model_name} has parameters on several devices: {', '.join(sorted(map(str, devices)))}; a budget is one "
            f"device's, so move them to one"
        )
    [home] = devices
    if home.type == "meta":
        refuse_meta_model(model_name)
    return home


def refuse_meta_model(model_name: str) -> NoReturn:
    raise InvalidArgument(
        f"{model_name} is on the meta device, which has no memory to run in; move it with to_empty() first"
    )


def parse_device(device: Any) -> torch.device | Device:
    """Return a torch device by its name, or the user's ``Device`` object. It need not be here."""
    if isinstance(device, Device) and not isinstance(device, type):
        return device
    try:
        if isinstance(device, (str, torch.device)):
            return torch.device(device)
    except RuntimeError:  # torch has no such device, and its list of all backends would not help here
        pass
    raise InvalidArgument(
        f"device={show_value(device)} is no device: pass a torch.device, a name such as 'cuda:0' or 'cpu', or leave it "
        f"out"
    )


class Allowance(Record):
    """Bytes that a process may hold on a device. Both are 0 if neither the user nor the device gives a number."""

    budget_bytes: int
    headroom_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def limit_bytes(self) -> int:
        return self.budget_bytes - self.headroom_bytes


def find_allowance(device: Device, budget: Any | None, headroom: Any | None) -> Allowance:
    available, warnings = device.available_bytes(), list[str]()
    budget_bytes = available if budget is None else parse_bytes("budget", budget)
    if 0 < available < budget_bytes:
        warnings.append(
            f"budget={show_value(budget)} is more than is available now: {format_bytes(available)} are the budget"
        )
        budget_bytes = available
    if device.torch_device.type == "cuda" and not device.measures:
        lost = "" if budget is None else f", and budget={show_value(budget)} is not enforced"
        warnings.append(
            f"PYTORCH_NO_CUDA_MEMORY_CACHING is set: memory is not measured, sizes are found by running out{lost}"
        )
    headroom_bytes = parse_headroom(headroom, budget_bytes)
    return Allowance(
        budget_bytes=budget_bytes, headroom_bytes=headroom_bytes if budget_bytes else 0, warnings=tuple(warnings)
    )


def parse_headroom(value: Any, budget_bytes: int) -> int:
    """Return the bytes to leave free, from an int, a text or a fraction of the budget."""
    if value is None:
        value = DEFAULT_HEADROOM
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        fraction: Any = value
        if not 0 <= fraction < 1:
            raise InvalidArgument(
                f"headroom={show_value(value)}: a fraction must be at least 0 and less than 1, such as 0.1; for bytes "
                f"pass an int or '512MiB'"
            )
        # NumPy's float32 would round the product, up to the whole budget.
        return int(budget_bytes * float(fraction))
    is_zero = isinstance(value, numbers.Integral) and not isinstance(value, bool) and value == 0
    size = 0 if is_zero else read_bytes(value)
    if size is None:
        raise InvalidArgument(f"headroom={show_value(value)} is not a size: {SIZES}; a fraction is a float such as 0.1")
    if budget_bytes and size >= budget_bytes:
        raise InvalidArgument(
            f"headroom={show_value(value)} leaves nothing of a budget of {format_bytes(budget_bytes)}"
        )
    return size
