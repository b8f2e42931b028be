"""Defines the protocol through which all other modules see a device's memory, with what most devices do alike.

``cuda``, ``cpu`` and ``unmonitored`` are the real devices, ``autobatch.testing.FakeDevice`` is simulated; any other
object with these methods will do.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch

from autobatch.memory.reference_leaks import drop_stale_references
from autobatch.records import DeviceInfo, MemoryUsage

__all__ = ["Device"]


@runtime_checkable
class Device(Protocol):
    """A device's memory: measured, limited and given back. All sizes are bytes.

    Attributes:
        torch_device: Where tensors live.
        measures: Whether ``usage`` reports bytes; if not, running out of memory is the only signal.
        counting_takes_time: Whether ``limit`` runs Python at each operator. Where not, as on CUDA, each step is run
            inside it.
    """

    torch_device: torch.device
    measures: bool
    counting_takes_time: bool = False

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

    def needs_limit(self, expected_bytes: int, budget_bytes: int) -> bool:
        """Whether a step that is expected to peak at so many bytes has to be run inside ``limit``.

        False only where enforcing costs time and the step cannot come near the budget.
        """
        return True

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
        if torch._C._autograd._profiler_enabled():  # noqa: SLF001 - what torch/autograd/profiler.py itself asks
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
