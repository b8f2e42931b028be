"""Compares two gradients parameter by parameter, and decides whether they differ by more than rounding.

One norm over all parameters would hide a small part that is wholly wrong. And a parameter whose true gradient is 0 (the
bias of an attention's keys, a bias before a normalization) holds only rounding noise, so any two of its gradients
differ by 100 %. So each parameter is judged relative to its own gradient, or to a multiple of its own noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

_norm: Callable[..., torch.Tensor] = torch.linalg.vector_norm

# One gradient per parameter, strided and real; ``None`` equals a gradient of 0.
Gradients = Sequence[torch.Tensor | None]
# Exact splits measure up to 6e-5 in float32 (a deep convolutional network with GroupNorm), most of them below 1e-6;
# the mildest wrong one known here is beyond 1e-3. Before a split is called wrong it is measured again in float64.
TOLERANCE = 1e-4
# A difference below this multiple of the rounding noise does not count. Whole and split differ by up to 10 times the
# noise on parameters without a true gradient (biases of attention keys, 16 samples in 2 to 16 parts, torch 2.13).
_NOISES = 100.0
# A run-to-run difference above this part of the largest gradient is not rounding: the step keeps moving state.
_MOST_NOISE = 1e-6
# Number of values of a gradient that a diagnosis looks at: 2 MiB for each part. The verdict itself looks at all.
_SAMPLED_VALUES = 2**18
_CHUNK = 2**18  # number of values that are subtracted at a time: a whole layer would dominate the check's memory


def take_gradients(parameters: Sequence[torch.Tensor]) -> Gradients:
    """Move the gradients out of ``.grad``, which is ``None`` afterwards: sparse ones dense, complex ones as pairs."""
    taken = []
    for parameter in parameters:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            gradient = gradient.detach() if gradient.layout is torch.strided else gradient.detach().to_dense()
            gradient = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
        taken.append(gradient)
    return taken


def sample_values(gradients: Gradients, like: Gradients, scales: Sequence[float]) -> torch.Tensor:
    """Pick about 2**18 values, each divided by its parameter's scale; the same elements for the same ``like``."""
    size = sum(tensor.numel() for tensor in like if tensor is not None)
    stride = max(1, -(-size // _SAMPLED_VALUES))
    parts = [
        torch.zeros(-(-other.numel() // stride), dtype=torch.float64)
        if own is None
        else own.reshape(-1)[::stride].to("cpu", torch.float64) / (scale or 1.0)
        for own, other, scale in zip(gradients, like, scales, strict=True)
        if other is not None
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


@torch.no_grad()
def distances(found: Gradients, expected: Gradients) -> list[float]:
    """Return ``|found - expected|`` of each parameter: the Euclidean norm, in float64."""
    apart = [_distance(one, other) for one, other in zip(found, expected, strict=True)]
    return [float(norm) for norm in apart]  # read only now: each read waits for the device


def norms(gradients: Gradients) -> list[float]:
    """Return the Euclidean norm of each parameter's gradient, in float64; nan if any value is."""
    return distances(gradients, [None] * len(gradients))


def _distance(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | float:
    one, other = (other, one) if one is None else (one, other)
    if one is None:
        return 0.0
    wide = torch.float32 if one.device.type == "mps" else torch.float64  # MPS has no float64
    if one.numel() <= _CHUNK:
        return _norm(one if other is None else one - other, dtype=wide)
    others = repeat(0.0) if other is None else other.reshape(-1).split(_CHUNK)
    chunks = zip(one.reshape(-1).split(_CHUNK), others, strict=False)  # zeros without an end
    return _norm(torch.stack([_norm(chunk - second, dtype=wide) for chunk, second in chunks]))


@dataclass(frozen=True)
class Scales:
    """The scale on which each parameter's difference is judged."""

    sizes: Sequence[float]  # norm of each parameter's whole gradient
    noise: Sequence[float] = ()  # norm of its rounding noise; empty if that was not measured

    def with_noise(self, apart: Sequence[float], least: float) -> Scales:
        """Return scales that know how much of a difference can be rounding, of which two runs differ by ``apart``."""
        return Scales(self.sizes, [max(min(one, _MOST_NOISE * self._largest()), least) for one in apart])

    def floor(self, index: int) -> float:
        """Return the smallest scale of a parameter: it just tolerates a difference of ``_NOISES`` roundings."""
        return _NOISES / TOLERANCE * self.noise[index] if self.noise else 0.0

    def judge(self, apart: Sequence[float]) -> list[float]:
        """Return the relative error of each parameter; more than ``TOLERANCE`` is a difference."""
        return [relate(one, max(self.sizes[index], self.floor(index)) or one) for index, one in enumerate(apart)]

    def report(self, apart: Sequence[float]) -> dict[int, float]:
        """Return the error of each parameter that differs, by index: relative to its own gradient, 1 if it has none."""
        return {
            index: relate(apart[index], self.sizes[index] if self.sizes[index] > self.floor(index) else apart[index])
            for index, error in enumerate(self.judge(apart))
            if error > TOLERANCE
        }

    def divisors(self) -> list[float]:
        """Return what brings all parameters to one scale, and those that hold only noise to nearly 0."""
        return [max(size, self.floor(index)) or self._largest() for index, size in enumerate(self.sizes)]

    def _largest(self) -> float:
        return max(filter(math.isfinite, self.sizes), default=0.0)


def relate(apart: float, scale: float) -> float:
    """Return ``apart / scale``; 0 for 0 / 0, infinite if the result is not finite."""
    error = 0.0 if apart == 0 else apart / scale if scale else math.inf
    return error if math.isfinite(error) else math.inf


def is_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Return whether two lists of values differ by at most this part of what is expected."""
    return found.shape == expected.shape and bool((found - expected).norm() <= tolerance * expected.norm())
