"""Reads the calls of cuDNN that a traced convolution makes, and lays its results out as cuDNN does.

The rules are those of ``aten/src/ATen/native/Convolution.cpp`` (torch 2.13). Fake tensors lose channels last on devices
other than CUDA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from autobatch.prediction.cudnn import Convolution

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
