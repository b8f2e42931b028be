"""Defines the protocol of a device's memory, and frees unused memory.

``CudaDevice``, ``CpuDevice`` and ``UnmonitoredDevice`` are real devices, ``autobatch.testing.FakeDevice`` is simulated.
Any other object with these methods works too.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autobatch._user_errors import contextmanager
from autobatch.records import DeviceInfo, MemoryUsage

ONE_AT_A_TIME = threading.RLock()
"""Held by ``fit``, ``verify`` and traces, which change settings of the whole process and restore them."""

if hasattr(os, "register_at_fork"):  # in a forked child the thread that held it is not there to release it
    os.register_at_fork(after_in_child=ONE_AT_A_TIME._at_fork_reinit)  # type: ignore[attr-defined]  # noqa: SLF001 - as concurrent.futures does


@runtime_checkable
class Device(Protocol):
    """A device's memory: measured, limited and given back. All sizes are bytes.

    Attributes:
        torch_device: Device of the tensors.
        measures: Whether ``usage`` reports bytes. If not, an out-of-memory error is the only signal.
    """

    torch_device: torch.device
    measures: bool

    def describe(self) -> DeviceInfo:
        """Return its name, its total and its other processes, as of now."""
        ...

    def available_bytes(self) -> int:
        """Return the free memory plus what this process holds already; 0 if that is unknown."""
        ...

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Enforce a budget inside the ``with`` block: an allocation beyond it raises ``torch.OutOfMemoryError``.

        An inner block has its own budget, smaller or larger. The outer budget is back when it ends.
        """
        ...

    def limit_bytes(self, budget_bytes: int) -> int:
        """Return what ``limit`` would enforce now: the budget, or less if less is available."""
        return min(budget_bytes, self.available_bytes())

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors too, on a device that sees only what ``limit`` sees."""
        return

    def move_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on this device. A tensor that is already there is not copied."""
        return tensor.to(self.torch_device)

    def micro_batch(self, samples: int) -> AbstractContextManager[None] | None:
        """Return a range around forward and backward of one micro-batch. A fake device takes its memory there.

        ``None`` unless torch's profiler runs: a ``record_function`` costs 15 us.
        """
        if torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001 - what torch's own modules read
            return torch.profiler.record_function(f"autobatch micro-batch of {samples}")
        return None

    def reset_peak(self) -> None:
        """Start a new measurement. Peaks begin at what is held now."""
        return

    def usage(self) -> MemoryUsage:
        """Return what is held now, and the peaks since the last reset."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        return

    def reclaim(self) -> None:
        """Free what nothing refers to. Call it after an ``except`` block, where the failed frames are gone."""
        end_failed_backward()
        gc.collect()  # cycles may hold tensors


class UnmonitoredDevice(Device):
    """Any other torch device (MPS, XPU...). Nothing is measured or enforced, so sizes are found by running out."""

    measures = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def describe(self) -> DeviceInfo:
        kind = self.torch_device.type
        return DeviceInfo(kind=kind, name=kind.upper(), total_bytes=self.available_bytes())

    def available_bytes(self) -> int:
        """Return the most that Metal recommends for MPS, and 0 (unknown) elsewhere."""
        return torch.mps.recommended_max_memory() if self.torch_device.type == "mps" else 0

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        return nullcontext()

    def limit_bytes(self, budget_bytes: int) -> int:
        return budget_bytes

    def usage(self) -> MemoryUsage:
        return MemoryUsage()

    def synchronize(self) -> None:
        self._call("synchronize")

    def reclaim(self) -> None:
        super().reclaim()
        self._call("empty_cache")

    def _call(self, name: str) -> None:
        # torch.mps, torch.xpu...; a backend outside of torch registers its own. "meta" has none.
        module: Any = getattr(torch, self.torch_device.type, None)
        if hasattr(module, name):
            getattr(module, name)()


def end_failed_backward() -> None:
    """Free the graph of a backward pass of this thread that raised an error.

    torch's engine keeps the nodes that were ready to run, with their saved tensors, until the thread's next backward
    pass (``Engine::thread_main`` in torch/csrc/autograd/engine.cpp). So this runs one of a single number.
    """
    with _disable_current_modes(), torch.inference_mode(mode=False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Let garbage collections look only at objects that are made inside this block.

    A full collection takes 0.1 to 0.2 s in a process with torch and SciPy. If the user has frozen objects, this does
    nothing: to unfreeze ours would unfreeze theirs.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
