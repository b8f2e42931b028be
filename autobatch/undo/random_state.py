"""Records the random number generators that a training step may draw from, and restores them.

They are torch's CPU generator, the device's, Python's ``random`` and NumPy's global generator. Generator objects that
the user made belong to ``keep=``.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class HostRandomState:
    """Python's and NumPy's global generators at one moment, by value.

    Attributes:
        python: Python's, as ``random.getstate`` returns it.
        numpy: NumPy's; ``None`` where it is not imported.
    """

    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> HostRandomState:
        numpy = sys.modules.get("numpy.random")  # while it is not loaded, nothing has seeded it
        return cls(random.getstate(), None if numpy is None else numpy.get_state(legacy=False))

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


class RandomState:
    """The generators' states at one moment, by value."""

    __slots__ = ("_cpu", "_device", "_device_state", "_host")

    def __init__(self, device: torch.device) -> None:
        self._cpu, self._device = torch.get_rng_state(), device
        self._device_state = None if device.type == "cpu" else _read(device)
        self._host = HostRandomState.capture()

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._device_state is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_state, *_which(self._device))
        self._host.restore()


def _read(device: torch.device) -> torch.Tensor:
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(*_which(device))
    return state


def _which(device: torch.device) -> tuple[torch.device, ...]:
    # There is one MPS device, and before torch 2.13 its functions take none.
    return () if device.type == "mps" else (device,)
