"""Knows what CUDA's kernels do that fake tensors do not show: fused operators, and memory that no tensor shows.

Sizes of cuBLAS's workspaces and of the buffers of sums follow from the card (``workspaces``). Not counted, as they do
not grow linearly: sorts, partial sums of a norm's weight over more than 65,536 rows, deterministic flash attention.
"""

# ruff: noqa: SLF001 - torch's own operators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from autobatch.prediction.cudnn import Convolution

_aten = torch.ops.aten
_GROUPED = getattr(getattr(_aten, "_grouped_mm", None), "default", None)
_ALIGNED_BYTES = 16  # the rows of a grouped product are padded to a multiple of it
_PRODUCTS = frozenset((
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.addmv.default,
    _aten.mv.default, _aten.dot.default, _GROUPED,
))  # fmt: skip
_SUMS = frozenset((_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.linalg_vector_norm.default))
_NORM = _aten.linalg_vector_norm.default
_ATTENTION_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default
_NORMS = (_aten.native_layer_norm.default, getattr(getattr(_aten, "_fused_rms_norm", None), "default", None))
_NORM_BACKWARDS = (
    _aten.native_layer_norm_backward.default,
    getattr(getattr(_aten, "_fused_rms_norm_backward", None), "default", None),
)
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default
_FLOAT32_BYTES = 4
_TILE, _TILE_HEADER = 64, 16
"""Rows and columns of a tile that adds up a query's gradient, and bytes of its lock and counter."""
_FLASH_ROWS, _FLASH_COLUMNS = 128, 32
"""Flash attention rounds queries up to the first, widths to the second, widths above 128 to twice that."""


def uses_cublas(func: Any) -> bool:
    return func in _PRODUCTS


def find_sum(func: Any, args: tuple[Any, ...], result: Any) -> tuple[int, int] | None:
    """Find how many numbers each result of a sum adds up, and bytes of the results in float32.

    ``None`` for other operators, and for sums over the densest dimension, which take next to nothing.
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
    """Find the buffers of norms and of backward passes of fused attention: their bytes, and their order.

    Entry ``k`` of the order makes buffer ``k - 1``, ``-k`` frees it, and 0 makes the results. Sizes and order are those
    of the real allocator (torch 2.13, compute capability 8.0; ``native/transformers/cuda/attention_backward.cu`` and
    ``native/cuda/layer_norm_kernel.cu``).
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
    """Copies of what is not contiguous: of the input to the end, of the gradient after the results."""
    sizes, order = [], [0]
    if gradient is not None and not gradient.is_contiguous():
        sizes.append(gradient.nbytes)
        order += [1, -1]
    if not inputs.is_contiguous():
        sizes.append(inputs.nbytes)
        order = [len(sizes), *order, -len(sizes)]
    return sizes, order if sizes else []


def _efficient_buffers(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> tuple[list[int], list[int]]:
    """Memory-efficient attention takes a copy of a gradient that is not contiguous, sums, then tiles.

    In float32 the sums, a number a query, add up the result times its gradient, and are copied to another layout. The
    tiles hold the query's gradient in float32; in half precision with wide heads also those of keys and values
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
    rows = _TILE if width <= _TILE else 2 * _TILE
    columns = 2 * _TILE if is_half and _TILE < width <= 2 * _TILE else _TILE
    tile_bytes = rows * columns * _FLOAT32_BYTES + _TILE_HEADER
    of_keys = _round_up(keys, _TILE) * _round_up(width, 2 * _TILE) * _FLOAT32_BYTES
    return -(-queries // rows) * -(-width // columns) * tile_bytes + 2 * of_keys * (is_half and width > 2 * _TILE)


def _flash_buffers(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, _value: torch.Tensor, result: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Flash attention takes copies of gradient and result that are not contiguous, then sums in float32.

    The sums are a number a query, and the query's gradient, in whole tiles (``mha_bwd`` of
    ``flash_attn/flash_api.cpp``). If several heads share a head of keys, the gradients of keys and
    values for each head come last.
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


def register() -> torch.library.Library:
    """Run ``rms_norm`` and ``linear`` as CUDA does on the fake device, as long as the result is referenced."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("rms_norm", _normalize, "AutogradPrivateUse1")
    library.impl("linear", _apply_linear, "AutogradPrivateUse1")
    return library


def _normalize(
    inputs: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    # One kernel, which keeps its input and a number a row (rms_norm_symint in native/layer_norm.cpp).
    result: torch.Tensor
    if weight is None or weight.dtype == inputs.dtype:
        result = _aten._fused_rms_norm.default(inputs, normalized_shape, weight, eps)[0]
    else:
        result = _aten.rms_norm.default.decompose(inputs, normalized_shape, weight, eps)
    return result


def _apply_linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    # CUDA adds the bias in place (native/Linear.cpp), but not to a tensor of a subclass, as fake ones are.
    result: torch.Tensor
    if bias is None or inputs.dim() < 3 or inputs.is_contiguous():
        result = _aten.linear.default.decompose(inputs, weight, bias)
    else:
        result = _aten.linear.default.decompose(inputs, weight).add_(bias)
    return result


def find_grouped_product(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None:
    """Shape, strides and dtype of a grouped product on a card; ``None`` for another operator.

    Fake tensors refuse all dtypes but bfloat16. CUDA takes float32 and float16 too (``native/cuda/GroupedBlas.cpp``).
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
    row = _round_up(shape[-1], _ALIGNED_BYTES // dtype.itemsize)
    return shape, (row * shape[-2], row, 1)[-len(shape) :], dtype


# -------------------------------------------------------------------------------------------------------- convolutions

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


class CudnnCall(NamedTuple):
    """One call of cuDNN."""

    convolution: Convolution
    copied_bytes: tuple[int, ...]  # of each tensor in another layout, which is copied for the call


class _Given(NamedTuple):
    """The arguments of a convolution; one dimension of space becomes two."""

    inputs: torch.Tensor
    weight: torch.Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int


def find_calls(func: Any, args: tuple[Any, ...], result: Any) -> list[CudnnCall]:
    """List the calls of an operator in order; empty for other operators, and if torch has its own kernel."""
    if func is _FORWARD:
        given = _read(args[0], args[1], *args[3:7], args[8])
        outputs, kinds = _with_two_dimensions(result), ["forward"]
    elif func is _BACKWARD:
        given = _read(args[1], args[2], *args[4:8], args[9])
        outputs = _with_two_dimensions(args[0])
        kinds = [kind for kind, wanted in zip(("input gradient", "weight gradient"), args[10], strict=False) if wanted]
    else:
        return []
    if not _runs_in_cudnn(given):
        return []
    return [_describe(kind, given, outputs) for kind in kinds]


def find_layout(func: Any, args: tuple[Any, ...]) -> torch.memory_format | None:
    """Find how a convolution's results lie on a card; ``None`` for channels first, as fake tensors have it."""
    if func is not _FORWARD and func is not _BACKWARD:
        return None
    inputs, weight = args[:2] if func is _FORWARD else args[1:3]
    layout = _choose_layout(inputs, weight)
    return None if layout is torch.contiguous_format else layout


def _choose_layout(inputs: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Channels last if input or weight are, except in float64 (``cudnn_conv_suggest_memory_format``)."""
    if inputs.dim() not in _LAYOUTS or torch.float64 in (inputs.dtype, weight.dtype):
        return torch.contiguous_format
    last = _LAYOUTS[inputs.dim()]
    is_last = suggest_memory_format(inputs) == last or suggest_memory_format(weight) == last
    return last if is_last else torch.contiguous_format


def _read(inputs: torch.Tensor, weight: torch.Tensor, *options: Any) -> _Given:
    stride, padding, dilation, transposed, groups = options
    space = inputs.dim() - 2
    sizes = [tuple(values) * space if len(values) == 1 else tuple(values) for values in (stride, padding, dilation)]
    if space == 1:
        sizes = [(neutral, *values) for neutral, values in zip((1, 0, 1), sizes, strict=True)]
    stride, padding, dilation = sizes
    inputs, weight = _with_two_dimensions(inputs), _with_two_dimensions(weight)
    return _Given(inputs, weight, stride, padding, dilation, transposed, groups)


def _with_two_dimensions(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def _runs_in_cudnn(given: _Given) -> bool:
    if not torch.backends.cudnn.enabled or given.inputs.dtype not in _DTYPES or not given.inputs.numel():
        return False
    is_depthwise = (
        not given.transposed
        and given.inputs.shape[1] == given.groups > 1
        and given.weight.shape[0] % given.inputs.shape[1] == 0
    )
    # Depthwise with channels first: torch's own kernel, except some sizes in float16.
    return not is_depthwise or _choose_layout(given.inputs, given.weight) is not torch.contiguous_format


def _describe(kind: Any, given: _Given, outputs: torch.Tensor) -> CudnnCall:
    """The call for one pass; a transposed convolution is the input gradient of an ordinary one."""
    inputs, layout = given.inputs, _choose_layout(given.inputs, given.weight)
    read = {"forward": (inputs, given.weight), "input gradient": (outputs, given.weight)}.get(kind, (outputs, inputs))
    if given.transposed:
        kind = {"forward": "input gradient", "input gradient": "forward"}.get(kind, kind)
        inputs = outputs
    convolution = Convolution(
        kind,
        tuple(inputs.shape),
        tuple(given.weight.shape),
        given.stride,
        given.padding,
        given.dilation,
        _DTYPES[given.inputs.dtype],
        channels_last=layout is not torch.contiguous_format,
        tf32=torch.backends.cudnn.allow_tf32,
        deterministic=torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    copied = [tensor.numel() * tensor.itemsize for tensor in read if not tensor.is_contiguous(memory_format=layout)]
    return CudnnCall(convolution, tuple(copied))
