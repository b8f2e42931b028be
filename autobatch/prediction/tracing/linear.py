"""Adds the bias of a linear layer in place where CUDA does: its input has three dimensions or more, not contiguous.

Covers ``aten/src/ATen/native/Linear.cpp`` (torch 2.13), which adds it out of place to tensors of a subclass, as fake
ones are: a temporary as large as the result, in each ``nn.MultiheadAttention(batch_first=True)``. Does not cover other
operators that treat subclasses so.
"""

from __future__ import annotations

import torch

__all__ = ["register"]

_linear = torch.ops.aten.linear.default


def _apply(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    result: torch.Tensor
    if bias is None or inputs.dim() < 3 or inputs.is_contiguous():
        result = _linear.decompose(inputs, weight, bias)
    else:
        result = _linear.decompose(inputs, weight).add_(bias)
    return result


def register() -> torch.library.Library:
    """Run linear layers so on the fake device, for as long as the result is referenced."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("linear", _apply, "AutogradPrivateUse1")
    return library
