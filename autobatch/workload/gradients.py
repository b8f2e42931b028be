"""What stands in ``.grad``: set aside, stamped, and put back or added, without copies.

Covers dense and sparse gradients of leaf parameters; ``None`` stays ``None``. Does not cover gradients in reduced
precision that want a wider accumulator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["GradientStamps", "GradientsAside"]


class GradientsAside:
    """Gradients from before a step: references moved out of the way, so that the step begins with none."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take every ``.grad`` away and remember it."""
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def put_back(self) -> None:
        """As it was, whatever stands there now."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    @torch.no_grad()
    def add(self) -> None:
        """Add the earlier gradients to the new ones, in place into the earlier ones, as ``backward`` itself does.

        An earlier sparse gradient cannot take a dense one: there the new one takes the sum and stays, as in
        ``backward``.
        """
        for parameter, gradient in self._gradients:
            new = parameter.grad
            if gradient is None:
                continue
            if new is not None and gradient.is_sparse and not new.is_sparse:
                new.add_(gradient)
                continue
            if new is not None:
                gradient.add_(new)
            parameter.grad = gradient


class GradientStamps:
    """Which gradient stood where and how often it had been written: enough to see whether a backward pass touched any.

    torch either writes ``.grad`` in place, which raises its ``_version``, or puts another tensor there
    (``torch/csrc/autograd/functions/accumulate_grad.h``). The stamp holds the old reference, so an address cannot come
    back.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Stamp every parameter's gradient."""
        self._stamps = [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]

    def unchanged(self) -> bool:
        """Whether every ``.grad`` is the same tensor, written as often as when it was stamped."""
        return all(p.grad is grad and (grad is None or grad._version == version) for p, grad, version in self._stamps)

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter, _, _ in self._stamps:
            parameter.grad = None
        self._stamps = []
