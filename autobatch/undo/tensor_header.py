"""Recognises the parameters and buffers of lazy modules that have no shape yet."""

from __future__ import annotations

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

UNDISTURBED = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - no public way to ask what has no shape yet
LAZY = frozenset((UninitializedParameter, UninitializedBuffer))


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Whether it is a lazy module's parameter or buffer that has no shape yet; few questions may be asked of one."""
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)
