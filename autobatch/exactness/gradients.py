"""Gradients of all parameters, and how far two of them are apart.

Covers comparison in float64 without a second copy. Does not cover where gradients come from (``measurement``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Gradients", "distance", "distance_between", "relate", "size_of", "take_gradients"]

_COORDINATES = 2**18
"""How many numbers of a gradient a diagnosis looks at: 2 MiB for each part. The verdict itself looks at all."""

_CHUNK = 2**18
"""How many numbers are made float64 at a time: the copy of a whole layer would be the most that a check holds."""


@dataclass(frozen=True, eq=False)
class Gradients:
    """One gradient of every parameter, in real numbers, ``None`` where there is none."""

    tensors: tuple[torch.Tensor | None, ...]

    def numbers(self, like: Gradients) -> torch.Tensor:
        """About 2**18 of its numbers, float64 on the host; ``like`` says where, so that all come from one place."""
        size = sum(tensor.numel() for tensor in like.tensors if tensor is not None)
        stride = max(1, -(-size // _COORDINATES))
        parts = [
            torch.zeros(-(-other.numel() // stride), dtype=torch.float64) if own is None else _spaced(own, stride)
            for own, other in zip(self.tensors, like.tensors, strict=True)
            if other is not None
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _spaced(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    return tensor.reshape(-1)[::stride].to("cpu", torch.float64)


def size_of(gradients: Gradients) -> float:
    """The Euclidean norm over all parameters, in float64; nan where any number is."""
    return math.sqrt(sum(_square(tensor) for tensor in gradients.tensors if tensor is not None))


def distance(found: Gradients, expected: Gradients) -> float:
    """``|found - expected| / |expected|`` over all parameters, in float64; infinite where that is no number."""
    return relate(distance_between(found, expected), size_of(expected))


def distance_between(found: Gradients, expected: Gradients) -> float:
    """``|found - expected|``: the Euclidean norm over all parameters, in float64."""
    pairs = zip(found.tensors, expected.tensors, strict=True)
    return math.sqrt(sum(_square_difference(one, other) for one, other in pairs))


def relate(apart: float, scale: float) -> float:
    """``apart / scale``; 0 of nothing, infinite where that is no number."""
    if apart == 0:
        return 0.0
    error = apart / scale if scale else math.inf
    return error if math.isfinite(error) else math.inf


def _square_difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None:
        present = one if other is None else other
        return 0.0 if present is None else _square(present)
    return _sum_squares(_double(first) - second for first, second in zip(_chunks(one), _chunks(other), strict=True))


def _square(tensor: torch.Tensor) -> float:
    return _sum_squares(_double(chunk) for chunk in _chunks(tensor))


def _sum_squares(chunks: Iterable[torch.Tensor]) -> float:
    # Read once, at the end: each reading waits for the device.
    return float(sum(chunk.square().sum() for chunk in chunks))


def _chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if tensor.numel() <= _CHUNK:
        return (tensor,)
    chunks: Sequence[torch.Tensor] = tensor.reshape(-1).split(_CHUNK)
    return chunks


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "mps" else tensor.double()  # MPS knows no float64


def take_gradients(parameters: Sequence[torch.Tensor]) -> Gradients:
    """What stands in ``.grad``, which is ``None`` afterwards: sparse ones dense, complex ones as pairs."""
    return Gradients(tuple(_take(parameter) for parameter in parameters))


def _take(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return None
    gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
