"""Says which operators take memory on a card that no tensor shows: sums a buffer, products a handle of cuBLAS.

Covers what decides over the sizes, which are those of one card (``kernel_blocks``, ``cards``), and the buffers of norms
and of backward passes of fused attention. Does not cover cuDNN (``cudnn``), biases of convolutions in channels last,
nor what does not grow linearly with the samples: sorts, among them the one in the backward pass of an embedding of more
than 3072 indices, which briefly takes up to 1.1 times the size of the incoming gradient; partial sums of a norm's
weight over more than 65,536 rows; flash attention that has to be deterministic.
"""

# ruff: noqa: SLF001 - torch's own operators

from __future__ import annotations

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
_NORMS = tuple(
    getattr(getattr(_aten, name, None), "default", None) for name in ("native_layer_norm", "_fused_rms_norm")
)
_NORM_BACKWARDS = tuple(
    getattr(getattr(_aten, name, None), "default", None)
    for name in ("native_layer_norm_backward", "_fused_rms_norm_backward")
)
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default
_FLOAT32_BYTES = 4
_TILE, _TILE_HEADER = 64, 16
"""Rows and columns of a tile in which a query's gradient is added up, and bytes of its lock and counter."""
_FLASH_ROWS, _FLASH_COLUMNS = 128, 32
"""The same of flash attention: queries are rounded up to the first, widths to the second, above 128 to twice that."""


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
    """What norms and backward passes of fused attention take beside their results: bytes of buffers, and their order.

    The order has the number of a buffer, from 1, where it is made, its negative where it is freed, and 0 where the
    results are made; it is empty where nothing is taken. By torch's ``native/transformers/cuda/attention_backward.cu``
    and ``native/cuda/layer_norm_kernel.cu``; sizes and order are the real allocator's (torch 2.13, compute capability
    8.0).
    """
    if func in _NORMS:
        return _norm_buffers(args[0])
    if func in _NORM_BACKWARDS:
        return _norm_buffers(args[1], args[0])
    if func is _FLASH_BACKWARD:
        return _flash_buffers(*args[:5])
    if func is _ATTENTION_BACKWARD:
        return _efficient_buffers(*args[:3])
    return [], []


def _norm_buffers(inputs: torch.Tensor, gradient: torch.Tensor | None = None) -> tuple[list[int], list[int]]:
    """Copies of what is not contiguous: of the input to the end, of the gradient once the results are made."""
    sizes, order = [], [0]
    if gradient is not None and not gradient.is_contiguous():
        sizes.append(gradient.nbytes)
        order += [1, -1]
    if not inputs.is_contiguous():
        sizes.append(inputs.nbytes)
        order = [len(sizes), *order, -len(sizes)]
    return sizes, order if sizes else []


def _efficient_buffers(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> tuple[list[int], list[int]]:
    """Of memory-efficient attention: a copy of a gradient that is not contiguous, to the end; in it sums, then tiles.

    In float32 the sums, a number a query, are those of the result times its gradient, and laid out anew. The tiles hold
    the query's gradient in float32, in half precision with wide heads those of keys and values, too
    (``mem_eff_attention/kernel_backward.h``).
    """
    samples, heads, queries, width = query.shape
    sums = samples * heads * queries * _FLOAT32_BYTES
    tiles = samples * heads * _tile_bytes(queries, key.shape[2], width, is_half=gradient.dtype != torch.float32)
    sizes = [gradient.nbytes, gradient.nbytes, sums, sums, tiles]
    copy, product, summed, laid_out, tiled = range(1, 6)
    if gradient.dtype != torch.float32:
        order = [0, summed, tiled, -summed, -tiled]
    elif heads == 1 or queries == 1:  # the sums are laid out so already
        order = [0, product, summed, -product, tiled, -summed, -tiled]
    else:
        order = [0, product, summed, laid_out, -summed, -product, tiled, -laid_out, -tiled]
    return sizes, order if gradient.transpose(1, 2).is_contiguous() else [copy, *order, -copy]


def _tile_bytes(queries: int, keys: int, width: int, *, is_half: bool) -> int:
    """For one head of one sample."""
    rows = _TILE if width <= _TILE else 2 * _TILE
    columns = 2 * _TILE if is_half and _TILE < width <= 2 * _TILE else _TILE
    tile_bytes = rows * columns * _FLOAT32_BYTES + _TILE_HEADER
    of_keys = _round_up(keys, _TILE) * _round_up(width, 2 * _TILE) * _FLOAT32_BYTES
    return -(-queries // rows) * -(-width // columns) * tile_bytes + 2 * of_keys * (is_half and width > 2 * _TILE)


def _flash_buffers(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, _value: torch.Tensor, result: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Of flash attention: copies of gradient and result that are not contiguous, then sums in float32.

    A number a query, and the query's gradient, in whole tiles (``mha_bwd`` in ``flash_attn/flash_api.cpp``). Where
    several heads share one of keys, the gradients of keys and values for each of them come last.
    """
    samples, heads, queries, width = query.shape
    rows = samples * heads * _round_up(queries, _FLASH_ROWS) * _FLOAT32_BYTES
    columns = _round_up(width, _FLASH_COLUMNS if width <= 4 * _FLASH_COLUMNS else 2 * _FLASH_COLUMNS)
    shared = [samples * heads * key.shape[2] * width * key.element_size()] * 2 if key.shape[1] != heads else []
    copied = [part.nbytes for part in (gradient, result) if not part.transpose(1, 2).is_contiguous()]
    sizes = [*copied, rows, rows * columns, *shared]
    first, last = len(copied) + 1, len(sizes)
    copies = range(1, first)
    return sizes, [*copies, 0, *range(first, last + 1), *range(-last, -first + 1), *(-copy for copy in copies)]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
