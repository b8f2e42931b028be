"""Records the random number generators that a training step may draw from, and restores them.

Covers torch's CPU generator, the device's own, Python's ``random`` and NumPy's global generator. Does not cover
generator objects that the user made and passes around.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import torch

from autobatch.state.generator_marks import copy_python, mark_numpy, mark_python, restore_python

__all__ = ["HostRandomState", "RandomState"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class HostRandomState:
    """Python's and NumPy's global generators at one moment, by value.

    Attributes:
        python: Python's, as ``copy_python`` returns it.
        numpy: NumPy's; ``None`` where it is not imported.
        marks: What differs once one was drawn from; ``None`` where that cannot be seen (``generator_marks``).
    """

    python: Any
    numpy: Any
    marks: tuple[Any, Any] | None = None

    @classmethod
    def capture(cls, earlier: HostRandomState | None = None) -> HostRandomState:
        """Record both as they are now.

        Args:
            earlier: An earlier record; returned if it is still current.
        """
        python, twister = mark_python(), mark_numpy()
        numpy = sys.modules.get("numpy.random")  # a step that never imported it cannot draw from it
        marks = None if python is None or (twister is None and numpy is not None) else (python, twister)
        if earlier is not None and marks is not None and marks == earlier.marks:
            return earlier
        if earlier is not None and earlier.marks and marks and marks[1] == earlier.marks[1]:
            return cls(copy_python(), earlier.numpy, marks)
        state = None if numpy is None else numpy.get_state(legacy=False)
        if state is not None and state.get("has_gauss"):  # nothing shows when a pair's second number is taken
            marks = None
        return cls(copy_python(), state, marks)

    def is_current(self) -> bool:
        """Whether nothing has been drawn from either since."""
        now = self.capture(self)
        if self.marks is not None:
            return now is self
        return pickle.dumps((self.python, self.numpy)) == pickle.dumps((now.python, now.numpy))

    def restore(self) -> None:
        """Restore both."""
        restore_python(self.python)
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
        """Record all generators as they are now.

        Args:
            device: The device whose generator is recorded.
            host: A record of Python's and NumPy's; default: a new one.
        """
        self.cpu, self._device = torch.default_generator.get_state(), device
        self._device_state = None if device == _CPU or device.type == "cpu" else _read(device)
        self.host = host or HostRandomState.capture()

    def is_current(self) -> bool:
        """Whether nothing has been drawn from any of them since."""
        if self._device_state is not None and not _are_equal(_read(self._device), self._device_state):
            return False
        return _are_equal(torch.default_generator.get_state(), self.cpu) and self.host.is_current()

    def restore(self) -> None:
        """Restore all generators, bit for bit."""
        torch.set_rng_state(self.cpu)
        if self._device_state is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_state, *_which(self._device))
        self.host.restore()


def _are_equal(state: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two states, which lie in CPU memory, are the same; not by an operator, for which memory may end."""
    return ctypes.string_at(state.data_ptr(), state.numel()) == ctypes.string_at(other.data_ptr(), other.numel())


def _read(device: torch.device) -> torch.Tensor:
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(*_which(device))
    return state


def _which(device: torch.device) -> tuple[torch.device, ...]:
    # There is one MPS device, and before torch 2.13 its functions take none.
    return () if device.type == "mps" else (device,)
