"""What cuDNN's convolutions take for a moment beside their results.

Covers one rule, found in published peaks of training steps: beyond what the allocator holds for tensors, a network
takes a multiple of what its largest convolution reads and writes, where the kernel is larger than 1 x 1 and the
tensors are not in the layout that tensor cores want (channels last), so that copies are made and Winograd tiles kept.
Does not cover the algorithms that cuDNN chooses for grouped convolutions, which now and then take gigabytes and cannot
be foreseen without the card, nor other kernels' own memory.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["workspaces_of"]

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def workspaces_of(func: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    """Bytes that each kernel of this operator reads and writes beside its weights, where it works on copies of them.

    Args:
        func: The operator.
        args: Its arguments.
        result: What it returned.
    """
    if func is _FORWARD:
        inputs, weight = args[0], args[1]
        return [_copies(inputs, result)] if _is_copied(inputs, weight, args[8]) else []
    if func is _BACKWARD:
        gradient, inputs, weight = args[:3]
        if _is_copied(inputs, weight, args[9]):
            return [_copies(inputs, gradient) for wanted in args[10][:2] if wanted]
    return []


def _is_copied(inputs: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    is_wide = any(size > 1 for size in weight.shape[2:])
    return is_wide and groups == 1 and inputs.dim() == 4 and not inputs.is_contiguous(memory_format=torch.channels_last)


def _copies(inputs: torch.Tensor, outputs: torch.Tensor) -> int:
    return int(inputs.numel() * inputs.element_size() + outputs.numel() * outputs.element_size())
