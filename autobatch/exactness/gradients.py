"""Gradients of all parameters, and how far two of them are apart, parameter by parameter.

Covers comparison in float64 without a second copy. Does not cover where gradients come from (``measurement``) nor from
where on a difference counts (``rounding``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Gradients", "distances", "norms", "take_gradients", "total"]

_COORDINATES = 2**18
"""How many numbers of a gradient a diagnosis looks at: 2 MiB for each part. The verdict itself looks at all."""

_CHUNK = 2**16
"""How many numbers are made float64 at a time: the copy of a whole layer would be the most that a check holds."""


@dataclass(frozen=True, eq=False)
class Gradients:
    """One gradient of every parameter, in real numbers, ``None`` where there is none."""

    tensors: tuple[torch.Tensor | None, ...]

    def numbers(self, like: Gradients, scales: Sequence[float]) -> torch.Tensor:
        """About 2**18 of its numbers, float64 on the host, each divided by the scale of its parameter.

        Args:
            like: Where numbers are taken, so that all come from the same elements.
            scales: One a parameter. Without them the largest gradient would hide all others.
        """
        size = sum(tensor.numel() for tensor in like.tensors if tensor is not None)
        stride = max(1, -(-size // _COORDINATES))
        parts = [
            torch.zeros(-(-other.numel() // stride), dtype=torch.float64)
            if own is None
            else _spaced(own, stride) / (scale or 1.0)
            for own, other, scale in zip(self.tensors, like.tensors, scales, strict=True)
            if other is not None
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _spaced(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    return tensor.reshape(-1)[::stride].to("cpu", torch.float64)


def norms(gradients: Gradients) -> list[float]:
    """The Euclidean norm of each parameter's gradient, in float64; nan where any number is, 0 where there is none."""
    return _roots([None if tensor is None else _square(tensor) for tensor in gradients.tensors])


def distances(found: Gradients, expected: Gradients) -> list[float]:
    """``|found - expected|`` of each parameter: the Euclidean norm, in float64."""
    pairs = zip(found.tensors, expected.tensors, strict=True)
    return _roots([_square_difference(one, other) for one, other in pairs])


def total(sizes: Iterable[float]) -> float:
    """The Euclidean norm over all parameters, from those of each; nan where any is."""
    return math.sqrt(sum(size * size for size in sizes))


def _roots(squares: Sequence[torch.Tensor | None]) -> list[float]:
    # Read once a device, at the end: each reading waits for it.
    roots = [0.0] * len(squares)
    for device in {square.device for square in squares if square is not None}:
        here = [(index, square) for index, square in enumerate(squares) if square is not None]
        here = [(index, square) for index, square in here if square.device == device]
        values = torch.stack([square for _, square in here]).sqrt().tolist()
        for (index, _), value in zip(here, values, strict=True):
            roots[index] = value
    return roots


def _square_difference(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        present = one if other is None else other
        return None if present is None else _square(present)
    return _sum_squares(_double(first) - second for first, second in zip(_chunks(one), _chunks(other), strict=True))


def _square(tensor: torch.Tensor) -> torch.Tensor:
    return _sum_squares(_double(chunk) for chunk in _chunks(tensor))


def _sum_squares(chunks: Iterator[torch.Tensor]) -> torch.Tensor:
    result = next(chunks).square().sum()
    for chunk in chunks:
        result = result + chunk.square().sum()
    return result


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
