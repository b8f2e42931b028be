"""Records the random number generators that a training step may draw from, and restores them.

They are torch's CPU generator, the device's, Python's ``random`` and NumPy's global generator. Generator objects that
the user made belong to ``keep=``.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """The generators' states at one moment, by value.

    Attributes:
        cpu: State of torch's CPU generator.
        of_device: State of the device's generator; ``None`` for the CPU.
        python: Python's, as ``random.getstate`` returns it.
        numpy: NumPy's; ``None`` where it is not imported.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.cpu, self.of_device = device, torch.get_rng_state(), None
        if device.type != "cpu":
            self.of_device = torch.get_device_module(device).get_rng_state(*_which(device))
        self.python: Any = random.getstate()
        numpy = sys.modules.get("numpy.random")  # while it is not loaded, nothing has seeded it
        self.numpy: Any = None if numpy is None else numpy.get_state(legacy=False)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.of_device is not None:
            torch.get_device_module(self._device).set_rng_state(self.of_device, *_which(self._device))
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    # There is one MPS device, and before torch 2.13 its functions take none.
    return () if device.type == "mps" else (device,)
