"""What an attempt that failed may have changed besides gradients: generators and buffers, by value.

Covers the state that makes a repeated forward pass draw the same numbers and see the same statistics. It is taken
before every micro-batch, so it is small and stays on the device. Does not cover gradients (``accumulation``) nor
parameters, which no forward or backward pass may change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from autobatch.workload.random_state import RandomState

__all__ = ["Checkpoint"]


class Checkpoint:
    """Generators and buffers at one moment.

    Buffers are kept by value: running statistics are written without a change of ``_version``, so nothing cheaper tells
    whether they moved. A buffer whose elements overlap (``expand``) is not copied: torch refuses to write into it.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Remember both as they are now; ``modules`` is ``[*model.modules()]``, walked once for many checkpoints."""
        self._random = RandomState.capture(device)
        self._buffers = [
            (module, name, buffer, None if buffer is None or _overlaps(buffer) else buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put both back bit for bit, in place; allocates nothing."""
        self._random.restore()
        for module, name, buffer, value in self._buffers:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)


def _overlaps(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
