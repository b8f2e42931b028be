"""Every random number generator a training step may draw from, remembered and put back.

Covers torch's CPU generator, the device's own, Python's ``random`` and NumPy's global generator. Does not cover
generator objects that the user made and passes around.
"""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["HostRandomState", "RandomState"]


@dataclass(frozen=True)
class HostRandomState:
    """Python's and NumPy's global generators at one moment, by value.

    Reading NumPy's takes 90 us, fifty times what torch's takes (2 CPU cores), so it is not done for every micro-batch.
    """

    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> HostRandomState:
        """Remember both as they are now."""
        numpy = sys.modules.get("numpy.random")  # a step that never imported it cannot draw from it
        return cls(random.getstate(), None if numpy is None else numpy.get_state())

    def is_current(self) -> bool:
        """Whether nothing has been drawn from either since."""
        return pickle.dumps(self) == pickle.dumps(self.capture())

    def restore(self) -> None:
        """Put both back."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


class RandomState:
    """The generators' states at one moment, by value.

    Attributes:
        cpu: torch's, of the CPU.
        host: Python's and NumPy's.
    """

    __slots__ = ("_device", "_device_state", "cpu", "host")

    def __init__(self, device: torch.device, host: HostRandomState | None = None) -> None:
        """Remember all generators as they are now.

        Args:
            device: Whose own generator is meant.
            host: Stands for Python's and NumPy's, where somebody remembered them before.
        """
        self.cpu, self._device = torch.default_generator.get_state(), device
        self._device_state = None if device.type == "cpu" else _read(device)
        self.host = host or HostRandomState.capture()

    def is_current(self) -> bool:
        """Whether nothing has been drawn from any of them since."""
        state = None if self._device_state is None else _read(self._device)
        same = state is None or (self._device_state is not None and torch.equal(state, self._device_state))
        return same and torch.equal(torch.default_generator.get_state(), self.cpu) and self.host.is_current()

    def restore(self) -> None:
        """Put all generators back, bit for bit."""
        torch.set_rng_state(self.cpu)
        if self._device_state is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_state, *_which(self._device))
        self.host.restore()


def _read(device: torch.device) -> torch.Tensor:
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(*_which(device))
    return state


def _which(device: torch.device) -> tuple[torch.device, ...]:
    # There is one MPS device, and before torch 2.13 its functions take none.
    return () if device.type == "mps" else (device,)
