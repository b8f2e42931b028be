"""Moves parameters for a while, to see what their own values hide, and restores them bit for bit.

A policy begins equal to its reference, and a new adapter, a gate or a last layer begins at 0: then part of a loss, or
of its gradient, is 0, and a comparison says nothing about it. A step along the gradient, and one against it, ends that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from autobatch._user_errors import contextmanager
from autobatch.exactness.measurement import Measurement

__all__ = ["reversed_values", "stepping"]

_CHANGE = 0.3
"""How much of the loss a step would change if the loss were a line."""

_MOST = 0.3
"""How much of its norm each parameter moves at most."""

_OF_NO_LOSS = 0.01
"""The same, where the loss is 0."""


@contextmanager
def stepping(measured: Measurement) -> Iterator[Callable[[], None]]:
    """Move each parameter against its gradient, and along it once the function is called.

    It takes a copy of the parameters. What a measurement measured before is not valid any more.
    """
    gradients, sizes, loss = measured.whole(), measured.scales().sizes, abs(measured.whole_loss())
    found = zip(measured.workload.parameters(), gradients, sizes, strict=True)
    moving = [(parameter, gradient, size) for parameter, gradient, size in found if gradient is not None and size > 0]
    scales = [_scale_of(parameter) for parameter, _, _ in moving]
    slope = math.fsum(scale * size for scale, (_, _, size) in zip(scales, moving, strict=True))
    part = min(_MOST, _CHANGE * loss / slope if loss else _OF_NO_LOSS) if slope and math.isfinite(loss) else 0.0
    saved = [(parameter, parameter.data.clone()) for parameter, _, _ in moving]
    try:
        for (parameter, gradient, size), scale in zip(moving, scales, strict=True):
            _add(parameter, gradient, -part * scale / size)
        del gradients, found, moving
        measured.release()
        yield lambda: _mirror(saved)
    finally:
        for parameter, values in saved:
            parameter.data.copy_(values)


def _scale_of(parameter: torch.Tensor) -> float:
    """The norm of a parameter, or what it would be of one that is all zeros."""
    norm = float(torch.linalg.vector_norm(parameter.detach()))
    return norm or math.sqrt(parameter.numel() / (parameter.shape[-1] if parameter.ndim > 1 else 1))


@torch.no_grad()
def _add(parameter: torch.Tensor, gradient: torch.Tensor, factor: float) -> None:
    gradient = torch.view_as_complex(gradient) if parameter.is_complex() else gradient
    parameter.data.add_(gradient, alpha=factor)


@torch.no_grad()
def _mirror(saved: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for parameter, values in saved:
        parameter.data.neg_().add_(values, alpha=2)


@contextmanager
def reversed_values(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Reverse the order of each parameter's values: others of the same scale, without a copy."""
    for parameter in parameters:
        _reverse(parameter)
    try:
        yield
    finally:
        for parameter in parameters:
            _reverse(parameter)


@torch.no_grad()
def _reverse(parameter: torch.Tensor) -> None:
    parameter.data.copy_(parameter.data.reshape(-1).flip(0).view(parameter.shape))
