"""The user's words for a device, taken for the fake one while a step is traced.

Covers ``.to("cuda")``, ``.cuda()``, ``device="cuda"``, ``is_cuda`` and the same with the device that the model is on.
Does not cover what a step asks torch about the machine (``torch.cuda.is_available()``), nor comparisons of
``tensor.device.type`` with a word.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autobatch.prediction.tracing.fake_device import DEVICE, DEVICE_TYPE

__all__ = ["DeviceNames"]

_IS_CUDA: Any = vars(torch._C.TensorBase)["is_cuda"].__get__  # noqa: SLF001 - the property itself, no public twin


class DeviceNames(TorchFunctionMode):
    """While active, devices of ``types`` mean the fake one."""

    def __init__(self, types: Collection[str]) -> None:
        super().__init__()
        self._types = frozenset(types)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function with other devices."""
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0].to(DEVICE)
        if func == _IS_CUDA and args[0].device.type == DEVICE_TYPE:
            return True
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._rename(kwargs["device"])}
        if func is torch.Tensor.to:
            args = (args[0], *map(self._rename, args[1:]))
        return func(*args, **kwargs)

    def _rename(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(DEVICE) if value.type in self._types else value
        if isinstance(value, str):
            return DEVICE if value.partition(":")[0] in self._types else value
        if isinstance(value, int) and not isinstance(value, bool):  # a CUDA index
            return DEVICE
        return value
