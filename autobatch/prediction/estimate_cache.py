"""Caches what an estimate has computed: for one card, and for all cards together.

A prediction judges the same few sizes on some thirty cards. The bytes of tensors are the same on all of them, and so is
a simulation where kernels take equal workspaces. Does not cover what is computed (``estimate``). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autobatch.prediction.allocator import AllocatorPeak
from autobatch.prediction.timeline import TracedStep

__all__ = ["CardCache", "Measured", "SharedCache"]

_STEPS = 32
"""Most searches look at no more sizes; of a ResNet-50 each takes some 0.3 MB."""

Measured = dict[tuple[str, int], int]
"""Quantities by their names and the samples."""


@dataclass
class CardCache:
    """Results for one card; all but ``measured`` by samples."""

    measured: Measured = field(default_factory=dict)
    peaks: dict[int, AllocatorPeak] = field(default_factory=dict)
    kernels: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # blocks, and bytes of each


@dataclass
class SharedCache:
    """Results that are the same on every card."""

    measured: Measured = field(default_factory=dict)
    simulated: dict[tuple[Any, ...], AllocatorPeak] = field(default_factory=dict)  # by what decides over it
    _steps: dict[int, TracedStep] = field(default_factory=dict)

    def step(self, n: int, make: Callable[[int], TracedStep]) -> TracedStep:
        """What ``make`` returns for ``n`` samples, of which the latest are remembered."""
        if n not in self._steps:
            if len(self._steps) >= _STEPS:
                self._steps.clear()
            self._steps[n] = make(n)
        return self._steps[n]
