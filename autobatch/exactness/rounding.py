"""Decides for each parameter by itself whether two gradients differ by more than rounding.

Covers the scale on which a difference is judged. One norm over all parameters would hide a small part that is wholly
wrong; and a parameter whose true gradient is 0 (the bias of an attention's keys, a bias before a normalisation) holds
nothing but rounding, so that any two of its gradients differ by 100 %. Therefore each parameter is judged on its own
gradient, or on a multiple of its own rounding noise where that is more. Does not cover how the noise is measured
(``measurement``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TOLERANCE", "Scales", "relate"]

TOLERANCE = 1e-4
"""Exact splits measure up to 6e-5 in float32 (a deep convolutional network with GroupNorm), most of them below 1e-6;
the mildest wrong one known here is beyond 1e-3. Before that is said of any, it is measured again in float64."""

_NOISES = 100.0
"""A difference of fewer roundings than this is none. Whole and split differ by up to 10 of them on parameters without
a true gradient (biases of attention keys, 16 samples in up to 16 parts, torch 2.13 on the CPU)."""


@dataclass(frozen=True)
class Scales:
    """On what scale each parameter's difference is judged.

    Attributes:
        sizes: The norm of each parameter's whole gradient.
        noise: The norm of its rounding noise; empty where that was not measured.
        before: What there was of it in a measurement with more rounding, which the whole difference must not shrink to.
    """

    sizes: Sequence[float]
    noise: Sequence[float] = ()
    before: Sequence[float] = ()

    def floor(self, index: int) -> float:
        """The least scale of a parameter: with it, a difference of ``_NOISES`` roundings is just within tolerance."""
        return _NOISES / TOLERANCE * self.noise[index] if self.noise else 0.0

    def judge(self, apart: Sequence[float]) -> list[float]:
        """The relative error of each parameter; more than ``TOLERANCE`` is a difference."""
        return [relate(one, self._scale(index, one)) for index, one in enumerate(apart)]

    def report(self, apart: Sequence[float]) -> dict[int, float]:
        """How far each parameter is off that differs, by index: relative to its own gradient, 1 where it has none."""
        judged = self.judge(apart)
        return {
            index: relate(apart[index], size if size > self.floor(index) else apart[index])
            for index, size in enumerate(self.sizes)
            if judged[index] > TOLERANCE
        }

    def divisors(self) -> list[float]:
        """What brings all parameters to one scale, those without a gradient of their own to next to nothing."""
        largest = max((size for size in self.sizes if math.isfinite(size)), default=0.0)
        return [max(size, self.floor(index)) or largest for index, size in enumerate(self.sizes)]

    def _scale(self, index: int, apart: float) -> float:
        before = self.before[index] if self.before else 0.0
        return max(self.sizes[index], self.floor(index), before) or apart


def relate(apart: float, scale: float) -> float:
    """``apart / scale``; 0 of nothing, infinite where that is no number."""
    if apart == 0:
        return 0.0
    error = apart / scale if scale else math.inf
    return error if math.isfinite(error) else math.inf
