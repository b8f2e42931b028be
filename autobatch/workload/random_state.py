"""Every random number generator a training step may draw from, remembered and put back.

Covers torch's CPU generator, the device's own, Python's ``random`` and NumPy's global generator. Does not cover
generator objects that the user made and passes around.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["RandomState"]


@dataclass(frozen=True)
class RandomState:
    """The generators' states at one moment, by value."""

    cpu: torch.Tensor
    device: torch.device
    device_state: torch.Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """Remember all generators as they are now; ``device`` says whose own generator is meant."""
        numpy = sys.modules.get("numpy.random")  # a step that never imported it cannot draw from it
        return cls(
            cpu=torch.get_rng_state(),
            device=device,
            device_state=_read(device),
            python=random.getstate(),
            numpy=None if numpy is None else numpy.get_state(),
        )

    def restore(self) -> None:
        """Put all generators back, bit for bit."""
        torch.set_rng_state(self.cpu)
        if self.device_state is not None:
            torch.get_device_module(self.device).set_rng_state(self.device_state, *_which(self.device))
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


def _read(device: torch.device) -> torch.Tensor | None:
    if device.type == "cpu":
        return None
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(*_which(device))
    return state


def _which(device: torch.device) -> tuple[torch.device, ...]:
    # There is one MPS device, and before torch 2.13 its functions take none.
    return () if device.type == "mps" else (device,)
