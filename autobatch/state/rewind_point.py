"""What an attempt that failed may have changed besides gradients: generators and buffers, by value.

Covers the state that makes a repeated forward pass draw the same numbers and see the same statistics. It is taken
before every micro-batch, so it is small and stays on the device. Does not cover gradients (``accumulation``) nor
parameters, which no forward or backward pass may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from autobatch.state.random_state import RandomState
from autobatch.storages import place_of

__all__ = ["RewindPoint"]


class RewindPoint:
    """Generators and buffers at one moment.

    Buffers are kept by value: running statistics are written without a change of ``_version``, so nothing cheaper tells
    whether they moved. A buffer whose elements overlap (``expand``) is not copied: torch refuses to write into it.

    Attributes:
        random: The generators.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, begun: RewindPoint | None = None) -> None:
        """Remember both as they are now.

        Args:
            modules: ``[*model.modules()]``, walked once for many checkpoints.
            device: Whose own generator is meant.
            begun: An earlier one, whose word is taken for Python's and NumPy's generators; see ``holds``.
        """
        self.random: RandomState = RandomState.capture(device, None if begun is None else begun.random.host)
        self._is_whole = begun is None
        self._standing = [(module, dict(module._buffers)) for module in modules if module._buffers]
        # The alias stands for the memory: whoever assigns to ``.data`` gives the same buffer another.
        aliases = [(buffer, buffer.detach()) for _, buffers in self._standing for buffer in _present(buffers)]
        self._values = [(buffer, alias, None if _overlaps(alias) else alias.clone()) for buffer, alias in aliases]

    def holds(self) -> bool:
        """Whether ``restore`` leads back here: not if an earlier one's word was taken and those have moved since."""
        return self._is_whole or self.random.host.is_current()

    @torch.no_grad()
    def restore(self) -> None:
        """Put both back bit for bit, in place; allocates nothing."""
        self.random.restore()
        for module, buffers in self._standing:
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, alias, value in self._values:
            if place_of(buffer) != place_of(alias):
                buffer.data = alias
            if value is not None:
                buffer.copy_(value)

    def forget(self) -> None:
        """Let go of the copies; from here on ``restore`` puts back no values."""
        self._values = []


def _present(buffers: Mapping[str, torch.Tensor | None]) -> list[torch.Tensor]:
    return [buffer for buffer in buffers.values() if buffer is not None]


def _overlaps(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
