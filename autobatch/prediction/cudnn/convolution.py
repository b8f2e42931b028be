"""Describes one convolution as cuDNN is called for it; a transposed one is the gradient of an ordinary one."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Pass = Literal["forward", "input gradient", "weight gradient"]

_ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


class Convolution(NamedTuple):
    """One call of cuDNN; sizes of space are two or three numbers."""

    kind: Pass
    inputs: tuple[int, ...]  # samples, channels, space; also of the input's gradient
    weight: tuple[int, ...]  # channels out, channels in by group, space
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # on either side
    dilation: tuple[int, ...]
    dtype: str = "float32"  # of all three tensors
    channels_last: bool = False  # whether all three tensors are laid out so
    tf32: bool = True  # torch.backends.cudnn.allow_tf32
    deterministic: bool = False  # torch.backends.cudnn.deterministic, or torch.use_deterministic_algorithms()

    @property
    def groups(self) -> int:
        """Number of groups of channels."""
        return self.inputs[1] // self.weight[1]

    @property
    def outputs(self) -> tuple[int, ...]:
        """Sizes of the output, or of its gradient."""
        space = zip(self.inputs[2:], self.weight[2:], self.stride, self.padding, self.dilation, strict=True)
        sizes = [
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in space
        ]
        return (self.inputs[0], self.weight[0], *sizes)

    def byte_counts(self) -> tuple[int, int, int]:
        """Bytes of input, output and weight."""
        item = _ITEM_BYTES[self.dtype]
        return item * math.prod(self.inputs), item * math.prod(self.outputs), item * math.prod(self.weight)
