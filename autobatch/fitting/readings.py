"""Reads the device's memory in each part of one trial, and makes the trial's record.

Does not cover what is run meanwhile (``probe``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from autobatch._user_errors import contextmanager
from autobatch.memory.device import Device
from autobatch.records import MemoryUsage, Phase, Trial
from autobatch.torch_internals.storages import bytes_of

__all__ = ["Readings"]


@dataclass
class Readings:
    """What one trial has measured so far."""

    resident: int = 0  # bytes, as in Trial
    held: int = 0  # bytes, as in Trial
    after_forward: int = 0  # bytes in tensors after the forward pass of the first step
    backward: MemoryUsage = field(default_factory=MemoryUsage)
    optimizer: MemoryUsage = field(default_factory=MemoryUsage)
    retries_before: int = 0  # how often the allocator had freed its cache before the trial
    seconds: float = 0.0  # as in Trial
    phase: Phase = "forward"

    @contextmanager
    def read(self, device: Device, part: str) -> Iterator[None]:
        """A block whose peak is that part's: ``"backward"`` or ``"optimizer"``."""
        device.reset_peak()
        try:
            yield
            device.synchronize()
        finally:
            setattr(self, part, device.usage())

    def summarise(
        self, size: int, device: Device, limit_bytes: int, parameters: Sequence[torch.Tensor], *, has_ended: bool
    ) -> Trial:
        """The trial; ``has_ended``: memory has."""
        has_spilled = bool(self.backward.spilled or self.optimizer.spilled)
        retries = max(device.usage().alloc_retries - self.retries_before, 0)  # the step may reset the statistics
        return Trial(
            micro_batch_size=size,
            outcome="oom" if has_ended else "thrash" if retries > 0 or has_spilled else "fits",
            peak_allocated=max(self.backward.peak_allocated, self.optimizer.peak_allocated),
            peak_reserved=max(self.backward.peak_reserved, self.optimizer.peak_reserved),
            optimizer_peak=self.optimizer.peak_allocated,
            alloc_retries=retries,
            seconds=self.seconds,
            backward_allocated=self.backward.peak_allocated,
            backward_reserved=self.backward.peak_reserved,
            resident_bytes=self.resident,
            held_bytes=self.held,
            ended_in=self._judge_phase(limit_bytes, parameters) if has_ended else None,
        )

    def _judge_phase(self, limit_bytes: int, parameters: Sequence[torch.Tensor]) -> Phase:
        """The phase in which memory ended; of a backward pass that cannot hold all gradients, ``gradients``."""
        gradients = sum(bytes_of(parameter) for parameter in parameters if parameter.requires_grad)
        is_hopeless = 0 < limit_bytes < self.resident + gradients
        is_hopeless = is_hopeless and self.resident < limit_bytes
        return "gradients" if self.phase == "backward" and is_hopeless else self.phase
