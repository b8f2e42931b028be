"""The user's words for a device, taken for the fake one while a step is traced.

Covers ``.to("cuda")``, ``.cuda()``, ``device="cuda"``, ``is_cuda`` and the same with the device that the model is on;
calls that only wait or count (``torch.cuda.synchronize()``), which are left out.
Does not cover what a step asks torch about the machine (``torch.cuda.is_available()``), nor comparisons of
``tensor.device.type`` with a word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autobatch.prediction.tracing.fake_device import DEVICE, DEVICE_TYPE

__all__ = ["DeviceNames", "without_waiting"]

_IS_CUDA: Any = vars(torch._C.TensorBase)["is_cuda"].__get__  # noqa: SLF001 - the property itself, no public twin

_WAITS = ("synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
"""Functions of ``torch.cuda`` that change no tensor. Without a card they raise; in a child of a process that has one
they must not run."""


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


@contextmanager
def without_waiting() -> Iterator[None]:
    """While this lasts, ``torch.cuda.synchronize()`` and the like do nothing."""
    before = {name: getattr(torch.cuda, name) for name in _WAITS}
    for name in _WAITS:
        setattr(torch.cuda, name, _do_nothing)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch.cuda, name, function)


def _do_nothing(*_: Any, **__: Any) -> None:
    """Nothing is running on the fake device, and nothing is cached there."""
