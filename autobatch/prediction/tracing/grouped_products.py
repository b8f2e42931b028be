"""Says what grouped matrix products return on a card: in any dtype, with rows padded to 16 bytes.

Covers ``torch.nn.functional.grouped_mm``, with which mixtures of experts run all experts at once. Fake tensors refuse
every dtype but bfloat16, though CUDA takes float32 and float16 as well, by one product a group
(``aten/src/ATen/native/cuda/GroupedBlas.cpp``, torch 2.13). Does not cover scaled ones (float8).
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["find_grouped_product"]

_GROUPED = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)
_ALIGNED_BYTES = 16


def find_grouped_product(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None:
    """Shape, strides and dtype of what it returns; ``None`` where this is another operator.

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
