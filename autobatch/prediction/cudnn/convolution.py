"""Describes one convolution as cuDNN is called for it.

Covers forward passes and both gradients in one to three dimensions, grouped ones too. A transposed convolution is the
gradient of an ordinary one, and is described so. Imports no torch.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

__all__ = ["Convolution", "Pass"]

Pass = Literal["forward", "input gradient", "weight gradient"]

_ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


class Convolution(NamedTuple):
    """One call of cuDNN.

    Attributes:
        kind: What it computes.
        inputs: Sizes of the convolution's input, or of its gradient: samples, channels, and two or three of space.
        weight: Sizes of the weight: channels out, channels in by group, and those of the kernel.
        stride: One number for each dimension of space, as the next two.
        padding: On either side.
        dilation: 1 for a dense kernel.
        dtype: Of all three tensors: ``"float32"``, ``"float64"``, ``"float16"`` or ``"bfloat16"``.
        channels_last: Whether all three are so laid out.
        tf32: Whether float32 may be rounded to TF32: ``torch.backends.cudnn.allow_tf32``, on by default.
        deterministic: ``torch.backends.cudnn.deterministic``, or ``torch.use_deterministic_algorithms``.
    """

    kind: Pass
    inputs: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    dtype: str = "float32"
    channels_last: bool = False
    tf32: bool = True
    deterministic: bool = False

    @property
    def groups(self) -> int:
        """Groups of channels that are convolved apart."""
        return self.inputs[1] // self.weight[1]

    @property
    def outputs(self) -> tuple[int, ...]:
        """Sizes of the convolution's output, or of its gradient."""
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
