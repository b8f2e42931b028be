"""Says which operators take memory on a card that no tensor shows: sums a buffer, products a handle of cuBLAS.

Covers what decides over the sizes, which are those of one card (``reductions``, ``cards``). Does not cover cuDNN
(``cudnn``), biases of convolutions in channels last, nor sorts.
"""

# ruff: noqa: SLF001 - torch's own operators

from __future__ import annotations

from typing import Any

import torch

__all__ = ["attention_buffers", "find_sum", "uses_cublas"]

_aten = torch.ops.aten
_PRODUCTS = frozenset((
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.addmv.default,
    _aten.mv.default, _aten.dot.default, getattr(getattr(_aten, "_grouped_mm", None), "default", None),
))  # fmt: skip
_SUMS = frozenset((_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.linalg_vector_norm.default))
_NORM = _aten.linalg_vector_norm.default
_ATTENTION_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default
_FLOAT32_BYTES = 4
_TILE, _TILE_HEADER = 64, 16
"""Rows and columns of a tile in which a query's gradient is added up, and bytes of its lock and counter."""


def uses_cublas(func: Any) -> bool:
    """Whether an operator takes a handle of cuBLAS, which makes its workspace at its first use in a thread."""
    return func in _PRODUCTS


def find_sum(func: Any, args: tuple[Any, ...], result: Any) -> tuple[int, int] | None:
    """How many numbers each result of a sum adds up, and bytes of the results in float32, in which that is done.

    ``None`` where there is no sum, or where the dimension that lies densest in memory is gone with it: such a sum takes
    next to nothing.
    """
    if func not in _SUMS or not isinstance(result, torch.Tensor):
        return None
    added, position = args[0], 2 if func is _NORM else 1
    dims = args[position] if len(args) > position else None
    results = result.numel()
    if not isinstance(dims, (list, tuple)) or not dims or not results or added.numel() <= results:
        return None
    gone = {dim % added.dim() for dim in dims}
    densest = min((dim for dim in range(added.dim()) if added.shape[dim] > 1), key=added.stride)
    return None if densest in gone else (added.numel() // results, _FLOAT32_BYTES * results)


def attention_buffers(func: Any, args: tuple[Any, ...]) -> list[list[int]]:
    """Bytes of what memory-efficient attention in float32 takes in its backward pass, at two moments one after another.

    A copy of a gradient that is not contiguous, at both; beside it the product of the result and its gradient, then
    tiles. By ``_efficient_attention_backward`` of torch's ``native/transformers/cuda/attention_backward.cu`` and
    ``mem_eff_attention/kernel_backward.h``, for cards of compute capability 8.0 and more.
    """
    if func is not _ATTENTION_BACKWARD or args[0].dtype != torch.float32:
        return []
    gradient, query = args[:2]
    samples, heads, queries, width = query.shape
    tiles = samples * heads * -(-queries // _TILE) * -(-width // _TILE)
    copied = [] if gradient.transpose(1, 2).is_contiguous() else [gradient.nbytes]
    return [[*copied, gradient.nbytes], [*copied, tiles * (_TILE * _TILE * _FLOAT32_BYTES + _TILE_HEADER)]]
