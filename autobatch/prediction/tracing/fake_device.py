"""A GPU that is not there: a torch device whose tensors have shapes, dtypes and lifetimes, but no memory.

Covers the registration of the device with torch and what torch's Python code asks of a device. It is torch's one free
backend slot (PrivateUse1), so it works on every build; fake ``cuda`` tensors abort the process on builds without CUDA,
and fail in the backward pass on CUDA builds without a GPU (measured with torch 2.13 and 2.11). Does not cover which
kernels CUDA would choose (``attention``, ``autocast``).

The registration stays for the life of the process, since torch has no way back: ``torch.accelerator`` then names this
device, though as one that is not available. Nothing else changes for tensors on other devices.
"""

# ruff: noqa: SLF001 - what torch keeps for those who add devices has no public names

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from autobatch.errors import CannotPredict
from autobatch.prediction.tracing import attention, autocast, recurrent

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["DEVICE", "DEVICE_TYPE", "errors_told", "present", "register"]

DEVICE_TYPE = "fakegpu"
DEVICE = f"{DEVICE_TYPE}:0"

_UNNAMED = "privateuseone"

_ONE_KERNEL = ("silu_backward", "mish_backward")
"""Operators that are one kernel on CPU and CUDA and that torch writes out in several for any other device: five
temporaries of the largest activations, which put the peak reserved of some networks 40 % too high."""

# Any function of Python's own that does nothing: calling it through ctypes raises an error that is already set.
_PROBE = ctypes.pythonapi.PyErr_Occurred
_PROBE.restype, _PROBE.argtypes = None, ()
_rescued: list[BaseException] = []


class _FakeGpu:
    """The module ``torch.fakegpu``, which torch's own code asks about the device.

    Attributes:
        is_present: Only while a step is traced; else torch and others would take it for this machine's accelerator.
    """

    is_present = False

    def is_available(self) -> bool:
        return self.is_present

    def is_initialized(self) -> bool:
        return self.is_present

    def device_count(self) -> int:
        return int(self.is_present)

    def current_device(self) -> int:
        return 0

    def device(self, index: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Random numbers on it have no values, so there is no state to set."""

    def manual_seed_all(self, seed: int) -> None:
        """See ``set_rng_state``."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_module = _FakeGpu()
_kept: list[Any] = []  # torch holds hooks and guards by reference only


def register() -> None:
    """Tell torch of the device, once in a process.

    Raises:
        CannotPredict: Another package has taken torch's one slot for such devices.
    """
    name = torch._C._get_privateuse1_backend_name()
    if name == DEVICE_TYPE and _kept:
        return
    if name != _UNNAMED:
        raise CannotPredict(
            f"another package has registered the device {name!r} in this process, and torch has one slot for such "
            f"devices (PrivateUse1): predict in a process that does not import it"
        )
    acc = getattr(torch._C, "_acc", None)
    if acc is None:
        raise CannotPredict(
            f"torch {torch.__version__} lets no device be registered from Python: predict with torch 2.13, or run "
            f"fit() on a GPU"
        )

    class Hooks(acc.PrivateUse1Hooks):  # type: ignore[name-defined, misc]
        def is_available(self) -> bool:
            return _module.is_present

        def has_primary_context(self, device_index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    class Guard(acc.DeviceGuard):  # type: ignore[name-defined, misc]
        def type_(self) -> Any:
            _rescue_error()
            return device_type

    device_type = torch._C._autograd.DeviceType.PrivateUse1
    _kept.extend((Hooks(), Guard()))
    torch.utils.backend_registration.rename_privateuse1_backend(DEVICE_TYPE)
    torch._register_device_module(DEVICE_TYPE, _module)
    acc.register_python_privateuseone_hook(_kept[0])
    acc.register_python_privateuseone_device_guard(_kept[1])
    _kept.extend((attention.register(), autocast.register(DEVICE_TYPE), recurrent.register(DEVICE_TYPE)))
    _kept.append(_register_kernels())


def _register_kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for name in _ONE_KERNEL:
        library.impl(name, _never_run, "PrivateUse1")
    return library


def _never_run(*_: Any) -> torch.Tensor:
    """That a kernel is there is all: fake tensors stop on their way to it."""
    raise CannotPredict("a fake tensor reached a kernel that has nothing to compute with")


def _rescue_error(probe: Callable[[], None] = _PROBE, rescued: list[BaseException] = _rescued) -> None:
    """Take an error that is on its way through C++ out of Python's hands, and keep it.

    Autograd asks the guard for its type also while an error of the backward pass unwinds: from a hook, from
    recomputation, from an operator. Python calls nothing while an error is set, and in a destructor that aborts the
    process (measured with torch 2.13). ctypes raises an error that is set as any other, so it can be caught.
    """
    try:
        probe()
    except BaseException as error:  # noqa: BLE001 - whatever it is, `errors_told` raises it again
        rescued.append(error)


@contextmanager
def errors_told() -> Iterator[None]:
    """Errors of backward passes on the device leave this block as they were raised."""
    _rescued.clear()
    try:
        yield
    except Exception:
        if not _rescued:
            raise
    else:
        return
    raise _rescued.pop(0)


@contextmanager
def present() -> Iterator[None]:
    """While this lasts, the device is there for whoever asks, and backward passes run in the calling thread.

    torch's autograd starts one thread a device at its first backward pass in a process. It has none for a device that
    came later, and stops with an internal assertion (``torch/csrc/autograd/engine.cpp``).
    """
    register()
    _module.is_present = True
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _module.is_present = False
