"""Defines the protocol through which all other modules see a device's memory.

Covers what a device must be able to do. Does not cover how: ``cuda``, ``cpu`` and ``unmonitored`` are the real ones,
``autobatch.testing.FakeDevice`` is simulated.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch

from autobatch.records import DeviceInfo, MemoryUsage

__all__ = ["Device", "profile_micro_batch"]


@runtime_checkable
class Device(Protocol):
    """A device's memory: measured, limited and given back. All sizes are bytes."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""

    @property
    def measures(self) -> bool:
        """Whether ``usage`` reports bytes; if not, running out of memory is the only signal."""

    def describe(self) -> DeviceInfo:
        """Name, total and who else is on it, as of now."""

    def available_bytes(self) -> int:
        """What this process may have now: what is free to it plus what it already holds; 0 where that is not known."""

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Enforce a budget inside the ``with`` block: an allocation beyond it raises ``torch.OutOfMemoryError``.

        Entering twice narrows nothing: the inner budget holds inside, the outer one is put back at the end.
        """

    def needs_limit(self, expected_bytes: int, budget_bytes: int) -> bool:
        """Whether a step that is expected to peak at so many bytes has to be run inside ``limit``.

        False only where enforcing costs time and the step cannot come near the budget.
        """

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors too, on a device that only sees what is made inside ``limit``."""

    def move_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this device; one that is already there is not copied."""

    def micro_batch(self, samples: int) -> AbstractContextManager[None] | None:
        """A range in a profile around the forward and backward of one micro-batch; a fake device takes memory there."""

    def reset_peak(self) -> None:
        """Start a new measurement: peaks begin at what is held now."""

    def usage(self) -> MemoryUsage:
        """What is held now and the peaks since the last reset."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""

    def reclaim(self) -> None:
        """Free what nothing refers to. Never call it inside an ``except`` block: the failed frames are alive there."""


def profile_micro_batch(samples: int) -> AbstractContextManager[None] | None:
    """A ``record_function`` while torch's profiler runs; else nothing, as that would cost 15 us a micro-batch."""
    if torch._C._autograd._profiler_enabled():  # noqa: SLF001 - what torch/autograd/profiler.py itself asks
        return torch.profiler.record_function(f"autobatch micro-batch of {samples}")
    return None
