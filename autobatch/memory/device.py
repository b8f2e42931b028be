"""The one protocol through which everything above sees a device's memory.

Covers what a device must be able to do. Does not cover how: ``cuda``, ``cpu`` and ``unmeasured`` are the real ones
behind it, ``autobatch.testing.FakeDevice`` the pretended one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch

from autobatch.records import DeviceInfo, MemoryUsage

__all__ = ["Device"]


@runtime_checkable
class Device(Protocol):
    """A device's memory: measured, limited and given back. All sizes are bytes."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""

    @property
    def measures(self) -> bool:
        """Whether ``usage`` tells anything; where not, running out of memory is the only signal."""

    @property
    def counting_takes_time(self) -> bool:
        """Whether ``limit`` runs Python at each operator. Where not, as on CUDA, each step is run inside it."""

    def describe(self) -> DeviceInfo:
        """Name, total and who else is on it, as of now."""

    def available_bytes(self) -> int:
        """What this process may have now: what is free to it plus what it already holds. 0 where it cannot be told."""

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Enforce a budget inside the ``with`` block: an allocation beyond it raises ``torch.OutOfMemoryError``.

        Entering twice narrows nothing: the inner budget holds inside, the outer one is put back at the end.
        """

    def limit_bytes(self, budget_bytes: int) -> int:
        """What ``limit`` would enforce for a step that begins now: the budget, or less where less is available."""

    def needs_limit(self, expected_bytes: int, budget_bytes: int) -> bool:
        """Whether a step that is expected to peak at so many bytes has to be run inside ``limit``.

        False only where enforcing costs time and the step cannot come near the budget.
        """

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make these tensors count, for a device that only sees what is made under its eyes."""

    def move_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this device; one that is already there is not copied."""

    def micro_batch(self, samples: int) -> AbstractContextManager[None] | None:
        """Enclose one micro-batch's forward and backward: a range in a profile, and where a fake takes its memory."""

    def reset_peak(self) -> None:
        """Start a new measurement: peaks begin at what is held now."""

    def usage(self) -> MemoryUsage:
        """What is held now and the peaks since the last reset."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""

    def reclaim(self) -> None:
        """Give back what nobody holds any more. Never call it inside an ``except`` block: frames are alive there."""
