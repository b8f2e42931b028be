"""Says which operators take memory on a card that no tensor shows: sums a buffer, products a handle of cuBLAS.

Covers what decides over the sizes, which are those of one card (``reductions``, ``cards``), and the buffers of layer
norms and of backward passes of fused attention. Does not cover cuDNN (``cudnn``), biases of convolutions in channels
last, nor sorts, also those of the gradient of a large embedding: beyond 3072 indices it takes, for a moment, up to 1.1
times what came in, which is no line in the samples.
"""

# ruff: noqa: SLF001 - torch's own operators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["find_buffers", "find_sum", "uses_cublas"]

_aten = torch.ops.aten
_PRODUCTS = frozenset((
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.addmv.default,
    _aten.mv.default, _aten.dot.default, getattr(getattr(_aten, "_grouped_mm", None), "default", None),
))  # fmt: skip
_SUMS = frozenset((_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.linalg_vector_norm.default))
_NORM = _aten.linalg_vector_norm.default
_ATTENTION_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default
_LAYER_NORMS = {_aten.native_layer_norm.default: 1, _aten.native_layer_norm_backward.default: 2}
"""How many of their arguments they copy where these are not contiguous."""
_FLOAT32_BYTES = 4
_TILE, _TILE_HEADER = 64, 16
"""Rows and columns of a tile in which a query's gradient is added up, and bytes of its lock and counter."""
_FLASH_ROWS, _FLASH_COLUMNS = 128, 32
"""The same of flash attention: queries and widths are rounded up to multiples of these."""


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


def find_buffers(func: Any, args: tuple[Any, ...]) -> tuple[list[int], list[int]]:
    """What layer norms and backward passes of fused attention take: bytes of buffers, and their order.

    The order has the number of a buffer, from 1, where it is made, its negative where it is freed, and 0 where the
    results are made; it is empty for other operators. By torch's ``native/transformers/cuda/attention_backward.cu``
    and ``native/cuda/layer_norm_kernel.cu``, in the order of the real allocator (torch 2.13).
    """
    if func in _LAYER_NORMS:
        return _copies(args[: _LAYER_NORMS[func]])
    if func is _FLASH_BACKWARD:
        return _flash_buffers(*args[:5])
    if func is _ATTENTION_BACKWARD and args[0].dtype == torch.float32:
        return _efficient_buffers(*args[:2])
    return [], []


def _copies(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Of those that are not contiguous, to the end."""
    sizes = [tensor.nbytes for tensor in tensors if not tensor.is_contiguous()]
    copies = range(1, len(sizes) + 1)
    return sizes, [*copies, 0, *(-copy for copy in copies)] if sizes else []


def _efficient_buffers(gradient: torch.Tensor, query: torch.Tensor) -> tuple[list[int], list[int]]:
    """Of memory-efficient attention, for cards of compute capability 8.0 and more.

    A copy of a gradient that is not contiguous lasts to the end. In it first the product of the result and its
    gradient, summed up for each query and laid out anew, then tiles (``mem_eff_attention/kernel_backward.h``).
    """
    samples, heads, queries, width = query.shape
    tiles = samples * heads * -(-queries // _TILE) * -(-width // _TILE)
    sums = samples * heads * queries * _FLOAT32_BYTES
    sizes = [gradient.nbytes, gradient.nbytes, sums, sums, tiles * (_TILE * _TILE * _FLOAT32_BYTES + _TILE_HEADER)]
    copy, product, summed, laid_out, tiled = range(1, 6)
    order = [0, product, summed, laid_out, -summed, -product, tiled, -laid_out, -tiled]
    if heads == 1 or queries == 1:  # the sums are laid out so already
        order = [0, product, summed, -product, tiled, -summed, -tiled]
    return sizes, order if gradient.transpose(1, 2).is_contiguous() else [copy, *order, -copy]


def _flash_buffers(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, _value: torch.Tensor, result: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Of flash attention: copies of gradient and result that are not contiguous, then sums in float32.

    A number a query, and the query's gradient, in whole tiles (``mha_bwd`` in ``flash_attn/flash_api.cpp``). Where
    several heads share one of keys, the gradients of keys and values for each of them come before.
    """
    samples, heads, queries, width = query.shape
    rows = samples * heads * -(-queries // _FLASH_ROWS) * _FLASH_ROWS * _FLOAT32_BYTES
    columns = -(-width // _FLASH_COLUMNS) * _FLASH_COLUMNS
    shared = [samples * heads * key.shape[2] * width * key.element_size()] * 2 if key.shape[1] != heads else []
    copied = [part.nbytes for part in (gradient, result) if not part.transpose(1, 2).is_contiguous()]
    sizes = [*copied, rows, rows * columns, *shared]
    first, last = len(copied) + 1, len(sizes)
    copies = range(1, first)
    return sizes, [*copies, 0, *range(first, last + 1), *range(-last, -first + 1), *(-copy for copy in copies)]
