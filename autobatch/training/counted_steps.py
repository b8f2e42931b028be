"""Decides which steps near a CPU's budget are counted, by what earlier counted steps took.

Covers what makes steps alike (micro-batch size, mode, trained parameters, the batch's sizes) and what a counted step
took. The rule is in ``planning.counted_growth``. Does not cover devices whose limit costs no time, such as CUDA, where
torch's allocator enforces it: there each step is counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch

from autobatch.batch.joining import JoinedLayout
from autobatch.batch.layout import Layout
from autobatch.memory.device import Device
from autobatch.planning.counted_growth import CountedGrowth
from autobatch.records import MemoryUsage
from autobatch.step.workload import Workload
from autobatch.torch_internals.storages import bytes_of

__all__ = ["CountedSteps"]

_IS_TRAINED, _GRADIENT = attrgetter("requires_grad"), attrgetter("grad")


class CountedSteps:
    """The memory that the counted steps of one workload took."""

    def __init__(self, workload: Workload, device: Device, budget_bytes: int) -> None:
        """Begin with no counted step."""
        self._workload, self._device, self._budget_bytes = workload, device, budget_bytes
        self._growth = CountedGrowth()
        self._step: tuple[Hashable, Sequence[float]] | None = None
        self._parameters: Sequence[torch.Tensor] = ()
        self._before, self._gradient_bytes = MemoryUsage(), 0

    def cover(self, layouts: Sequence[Layout], size: int, *, update: bool) -> bool:
        """Whether the coming step can run uncounted: enough like it were counted, and what they took is free."""
        if not self._device.counting_takes_time:
            return False
        self._step = self._describe(layouts, size, update=update)
        return self._step is not None and self._growth.covers(
            *self._step, self._device.usage().allocated, self._device.limit_bytes(self._budget_bytes)
        )

    def begin(self, layouts: Sequence[Layout], size: int, *, update: bool) -> MemoryUsage:
        """Begin a counted step; returns what is held."""
        if self._device.counting_takes_time:
            self._parameters = self._workload.parameters()
            self._step = self._describe(layouts, size, update=update)
            self._gradient_bytes = _bytes_of_gradients(self._parameters)
        self._device.reset_peak()
        self._before = self._device.usage()
        return self._before

    def end(self, *, is_skipped: bool) -> MemoryUsage:
        """End a counted step; returns what was held at most. A skipped one is not counted."""
        after = self._device.usage()
        if self._step is not None and not is_skipped:
            left = after.allocated - _bytes_of_gradients(self._workload.parameters())
            self._growth.add(
                *self._step,
                held_bytes=self._before.allocated,
                peak_bytes=after.peak_allocated,
                left_bytes=left - (self._before.allocated - self._gradient_bytes),
            )
        return after

    def add_shortage(self) -> None:
        """Note that the step ran out of memory: what it takes in the end is that of a smaller size."""
        if self._step is not None:
            self._growth.add_shortage(*self._step)
            self._step = None

    def _describe(
        self, layouts: Sequence[Layout], size: int, *, update: bool
    ) -> tuple[Hashable, Sequence[float]] | None:
        """The kind and the sizes of a step; ``None`` where a batch holds more than plain tensors, numbers and texts."""
        micro_batches, lengths = 0, []
        sizes: list[float] = []
        for layout in layouts:
            shown = layout.parts[0] if type(layout) is JoinedLayout else layout  # samples of all have the same size
            if shown.spec is None:
                return None
            count = -(-layout.count // size)
            micro_batches += count
            lengths.append((len(shown.leaves), shown is layout))  # joined micro-batches are copies
            sizes.append(-(-layout.count // count))
            sizes.extend(map(_size_of, shown.leaves, repeat(shown.count)))
        sizes.append(micro_batches > 1)  # from the second one on there is a gradient beside the one it is added to
        kind = (
            size,
            update,
            self._workload.model.training,
            torch.is_autocast_enabled(self._device.torch_device.type),
            tuple(map(_IS_TRAINED, self._parameters)),
            all(map(is_, map(_GRADIENT, self._parameters), repeat(None))),
            *lengths,
        )
        return kind, sizes


def _size_of(leaf: Any, samples: int) -> float:
    """A tensor's bytes a sample, a text's length, a number itself."""
    if isinstance(leaf, torch.Tensor):
        return leaf.nbytes / samples if leaf.ndim and leaf.shape[0] == samples else leaf.nbytes
    if isinstance(leaf, str | bytes):
        return len(leaf)
    return leaf if isinstance(leaf, int | float) else 0


def _bytes_of_gradients(parameters: Iterable[torch.Tensor]) -> int:
    return sum(bytes_of(gradient) for gradient in map(_GRADIENT, parameters) if gradient is not None)
