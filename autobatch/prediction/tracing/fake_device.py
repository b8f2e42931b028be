"""Registers a GPU that is not there: a torch device whose tensors have shapes, dtypes and lifetimes, but no memory.

The device takes torch's one free backend slot (PrivateUse1), for good. Fake ``cuda`` tensors abort the process on
builds without CUDA, and fail in the backward pass on CUDA builds without a GPU (torch 2.11 and 2.13).
"""

# ruff: noqa: SLF001 - torch has no public names for what those who add devices need

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autobatch.errors import InvalidArgument
from autobatch.prediction.tracing import attention, autocast, kernels, recurrent
from autobatch.torch_internals import OLDEST_TO_PREDICT, format_release

DEVICE_TYPE = "fakegpu"
DEVICE = f"{DEVICE_TYPE}:0"

_ONE_KERNEL = ("silu_backward", "mish_backward", "_fused_rms_norm")
"""Operators of one kernel that torch decomposes on other devices: five temporaries of the largest activations, which
put the peak reserved of some networks 40 % too high."""

_WAITS = ("synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
"""Functions of ``torch.cuda`` that change no tensor; they raise without a card, and must not run in a child."""

_IS_CUDA: Any = vars(torch._C.TensorBase)["is_cuda"].__get__

# A function of Python that does nothing: ctypes then raises an error that is already set.
_PROBE = ctypes.pythonapi.PyErr_Occurred
_PROBE.restype, _PROBE.argtypes = None, ()
_rescued: list[BaseException] = []


class _FakeGpu:  # the module ``torch.fakegpu``, which torch asks about the device
    is_present = False  # only while a step is traced; else others would take it for this machine's accelerator

    def is_available(self) -> bool:
        return self.is_present

    is_initialized = is_available

    def device_count(self) -> int:
        return int(self.is_present)

    def current_device(self) -> int:
        return 0

    def device(self, index: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Do nothing: random numbers have no values here, and no state."""

    def manual_seed_all(self, seed: int) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_module = _FakeGpu()
_registered: list[Any] = []  # torch holds hooks and guards by reference only


def register() -> None:
    """Register the device with torch, once in a process."""
    name = torch._C._get_privateuse1_backend_name()
    if name == DEVICE_TYPE and _registered:
        return
    if name != "privateuseone":
        raise InvalidArgument(
            f"another package has registered the device {name!r} in this process, and torch has one slot for such "
            f"devices (PrivateUse1): predict in a process that does not import it"
        )
    acc = getattr(torch._C, "_acc", None)
    if acc is None:
        raise InvalidArgument(
            f"torch {torch.__version__} lets no device be registered from Python: predict with torch "
            f"{format_release(OLDEST_TO_PREDICT)} or newer, or run fit() on a GPU"
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
    hooks, guard, library = Hooks(), Guard(), torch.library.Library("aten", "IMPL")
    torch.utils.backend_registration.rename_privateuse1_backend(DEVICE_TYPE)
    torch._register_device_module(DEVICE_TYPE, _module)
    acc.register_python_privateuseone_hook(hooks)
    acc.register_python_privateuseone_device_guard(guard)
    for operator in _ONE_KERNEL:
        library.impl(operator, _never_run, "PrivateUse1")
    libraries = (
        attention.register(),
        autocast.register(DEVICE_TYPE),
        kernels.register(),
        recurrent.register(DEVICE_TYPE),
    )
    _registered.extend((hooks, guard, library, *libraries))


def _never_run(*_: Any) -> torch.Tensor:
    # It only has to exist: fake tensors stop on their way to a kernel.
    raise InvalidArgument("a fake tensor reached a kernel that has nothing to compute with")


def _rescue_error(probe: Callable[[], None] = _PROBE, rescued: list[BaseException] = _rescued) -> None:
    """Catch an error that unwinds through C++.

    Autograd asks the guard for its type also while an error of the backward pass unwinds. Python calls nothing while an
    error is set, and in a destructor that aborts the process (torch 2.13). ctypes raises the error, so we can catch it.
    """
    try:
        probe()
    except BaseException as error:  # noqa: BLE001 - `original_errors` raises it again
        rescued.append(error)


@contextmanager
def original_errors() -> Iterator[None]:
    """Let errors of backward passes leave this block as they were raised."""
    _rescued.clear()
    try:
        yield
        return
    except BaseException:
        if not _rescued:
            raise
    raise _rescued.pop(0)


@contextmanager
def present() -> Iterator[None]:
    """Show the device to torch, and run backward passes in the calling thread.

    torch starts one thread a device at the first backward pass of a process. It has none for a device that came later,
    and stops with an internal assertion (``torch/csrc/autograd/engine.cpp``).
    """
    register()
    _module.is_present = True
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _module.is_present = False


class DeviceNames(TorchFunctionMode):
    """Makes devices of ``types`` mean the fake one: ``.to("cuda")``, ``.cuda()``, ``device="cuda"``, ``is_cuda``."""

    def __init__(self, types: Collection[str]) -> None:
        super().__init__()
        self._types = frozenset(types)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
    """Make ``torch.cuda.synchronize()`` and the like do nothing."""
    before = {name: getattr(torch.cuda, name) for name in _WAITS}
    vars(torch.cuda).update(dict.fromkeys(_WAITS, lambda *_, **__: None))
    try:
        yield
    finally:
        vars(torch.cuda).update(before)
