"""Runs ``rms_norm`` as CUDA does: one kernel, which keeps its input and a number a row, not each step of the formula.

Covers the rule of ``rms_norm_symint`` in ``aten/src/ATen/native/layer_norm.cpp`` (torch 2.13): the kernel runs where
the weight, if there is one, has the input's dtype. Does not cover layer norms and group norms, which are one kernel on
every device.
"""

# ruff: noqa: SLF001 - torch's own operators

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["register"]

_aten = torch.ops.aten


def _normalize(
    inputs: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    result: torch.Tensor
    if weight is None or weight.dtype == inputs.dtype:
        result = _aten._fused_rms_norm.default(inputs, normalized_shape, weight, eps)[0]
    else:
        result = _aten.rms_norm.default.decompose(inputs, normalized_shape, weight, eps)
    return result


def register() -> torch.library.Library:
    """Run them so on the fake device, for as long as the result is referenced."""
    library = torch.library.Library("aten", "IMPL")
    if hasattr(_aten, "_fused_rms_norm"):
        library.impl("rms_norm", _normalize, "AutogradPrivateUse1")
    return library
