"""Runs operators as CUDA's kernels do where torch does something else with fake tensors.

Covers, of torch 2.13:

- ``rms_norm``: one kernel, which keeps its input and a number a row, not each step of the formula; where the weight, if
  there is one, has the input's dtype (``rms_norm_symint`` in ``aten/src/ATen/native/layer_norm.cpp``). Layer norms and
  group norms are one kernel on every device.
- ``linear``: CUDA adds the bias in place where the input has three dimensions or more and is not contiguous
  (``aten/src/ATen/native/Linear.cpp``), but out of place to tensors of a subclass, as fake ones are: a temporary as
  large as the result, in each ``nn.MultiheadAttention(batch_first=True)``.
- ``grouped_mm``, with which mixtures of experts run all experts at once: fake tensors refuse every dtype but bfloat16,
  though CUDA takes float32 and float16 as well, by one product a group (``aten/src/ATen/native/cuda/GroupedBlas.cpp``).

Does not cover grouped products that are scaled (float8).
"""

# ruff: noqa: SLF001 - torch's own operators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["find_grouped_product", "register"]

_aten = torch.ops.aten
_GROUPED = getattr(getattr(_aten, "_grouped_mm", None), "default", None)
_ALIGNED_BYTES = 16
"""To which the rows of a grouped product are padded."""


def register() -> torch.library.Library:
    """Run ``rms_norm`` and ``linear`` so on the fake device, for as long as the result is referenced."""
    library = torch.library.Library("aten", "IMPL")
    if hasattr(_aten, "_fused_rms_norm"):
        library.impl("rms_norm", _normalize, "AutogradPrivateUse1")
    library.impl("linear", _apply_linear, "AutogradPrivateUse1")
    return library


def _normalize(
    inputs: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    result: torch.Tensor
    if weight is None or weight.dtype == inputs.dtype:
        result = _aten._fused_rms_norm.default(inputs, normalized_shape, weight, eps)[0]
    else:
        result = _aten.rms_norm.default.decompose(inputs, normalized_shape, weight, eps)
    return result


def _apply_linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    result: torch.Tensor
    if bias is None or inputs.dim() < 3 or inputs.is_contiguous():
        result = _aten.linear.default.decompose(inputs, weight, bias)
    else:
        result = _aten.linear.default.decompose(inputs, weight).add_(bias)
    return result


def find_grouped_product(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None:
    """Shape, strides and dtype of a grouped product on a card; ``None`` where this is another operator.

    Raises:
        RuntimeError: The inner dimensions differ, or the groups do, as CUDA says it.
    """
    if func is not _GROUPED:
        return None
    left, right = args[:2]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    dtype = (args[4] if len(args) > 4 else kwargs.get("out_dtype")) or left.dtype
    if left.shape[-1] != right.shape[-2]:
        raise RuntimeError(f"contraction dimension of {tuple(left.shape)} and {tuple(right.shape)} must match")
    groups = {tensor.shape[0] for tensor in (left, right) if tensor.dim() == 3}
    if offsets is not None:
        groups.add(offsets.shape[0])
    if len(groups) != 1:
        raise RuntimeError(f"matrix batch sizes have to match, not be {sorted(groups)}")
    is_stacked = left.dim() == right.dim()
    shape = (*(groups if is_stacked else ()), left.shape[-2], right.shape[-1])
    return shape, _pad_rows(shape, dtype), dtype


def _pad_rows(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    aligned = _ALIGNED_BYTES // dtype.itemsize
    row = -(-shape[-1] // aligned) * aligned
    return (row * shape[-2], row, 1)[-len(shape) :]
