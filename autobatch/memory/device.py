"""Defines the protocol through which all other modules see a device's memory, and frees what is no longer used.

``CudaDevice``, ``CpuDevice`` and ``UnmonitoredDevice`` are the real devices, ``autobatch.testing.FakeDevice`` is
simulated; any other object with these methods will do.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autobatch._user_errors import contextmanager
from autobatch.records import DeviceInfo, MemoryUsage

__all__ = ["Device", "UnmonitoredDevice", "collecting_new_objects", "drop_stale_references", "end_failed_backward"]


@runtime_checkable
class Device(Protocol):
    """A device's memory: measured, limited and given back. All sizes are bytes.

    Attributes:
        torch_device: Where tensors live.
        measures: Whether ``usage`` reports bytes; if not, running out of memory is the only signal.
    """

    torch_device: torch.device
    measures: bool

    def describe(self) -> DeviceInfo:
        """Name, total and who else is on it, as of now."""
        ...

    def available_bytes(self) -> int:
        """What this process may have now: what is free to it plus what it already holds; 0 where that is not known."""
        ...

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Enforce a budget inside the ``with`` block: an allocation beyond it raises ``torch.OutOfMemoryError``.

        Entering twice narrows nothing: the inner budget holds inside, the outer one is put back at the end.
        """
        ...

    def limit_bytes(self, budget_bytes: int) -> int:
        """What ``limit`` would enforce for a step that begins now: the budget, or less where less is available."""
        return min(budget_bytes, self.available_bytes())

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors too, on a device that only sees what is made inside ``limit``."""
        return

    def move_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this device; one that is already there is not copied."""
        return tensor.to(self.torch_device)

    def micro_batch(self, samples: int) -> AbstractContextManager[None] | None:
        """A range around the forward and backward of one micro-batch; a fake device takes its memory there.

        ``None`` unless torch's profiler runs, as a ``record_function`` costs 15 us.
        """
        if torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001 - what torch's own modules read
            return torch.profiler.record_function(f"autobatch micro-batch of {samples}")
        return None

    def reset_peak(self) -> None:
        """Start a new measurement: peaks begin at what is held now."""
        return

    def usage(self) -> MemoryUsage:
        """What is held now and the peaks since the last reset."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        return

    def reclaim(self) -> None:
        """Free what nothing refers to. Never call it inside an ``except`` block: the failed frames are alive there."""
        drop_stale_references()


class UnmonitoredDevice(Device):
    """Any torch device (MPS, XPU...) with nothing measured and nothing enforced: sizes are found by running out."""

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

    def usage(self) -> MemoryUsage:
        """All zero: not known."""
        return MemoryUsage()

    def synchronize(self) -> None:
        """Wait, where the backend's module can."""
        self._call("synchronize")

    def reclaim(self) -> None:
        """Free what nothing refers to, then empty the device's cache where it has one."""
        super().reclaim()
        self._call("empty_cache")

    def _call(self, name: str) -> None:
        # torch.mps, torch.xpu...; a backend from outside torch registers its own. "meta" has none.
        module: Any = getattr(torch, self.torch_device.type, None)
        if hasattr(module, name):
            getattr(module, name)()


def drop_stale_references() -> None:
    """Break cycles that hold tensors, and free the graph of a failed backward pass."""
    end_failed_backward()
    gc.collect()


def end_failed_backward() -> None:
    """Free the graph of a backward pass of this thread that raised an error.

    After an error torch's engine leaves the nodes that were ready to run, and with them the rest of the graph and what
    it has saved, in this thread's queue until the thread's next backward pass (``Engine::thread_main`` in
    torch/csrc/autograd/engine.cpp). So there is one, of a single number, which no dispatch mode sees.
    """
    with _disable_current_modes(), torch.inference_mode(mode=False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """While this lasts, garbage collections look only at objects made inside it.

    A full collection takes 0.1 to 0.2 s in a process that has imported torch and SciPy, several times as long as a
    trial of a small model. Where the user has frozen objects nothing is changed: to unfreeze ours would be to unfreeze
    theirs.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
