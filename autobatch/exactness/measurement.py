"""Gradients of the same few samples, whole and in parts, each from the code that trains.

Covers runs that all begin from the same buffers and generators, and their comparison. Does not cover why two gradients
differ (``diagnosis``) nor what makes a step repeatable (``stillness``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch

from autobatch.accumulation.progress import Shortage
from autobatch.accumulation.transaction import Accumulation
from autobatch.errors import DoesNotFit
from autobatch.memory.device import Device
from autobatch.planning.planner import balance
from autobatch.workload.batches import Layout
from autobatch.workload.checkpoint import Checkpoint
from autobatch.workload.step import Workload

__all__ = ["Gradients", "Measurement", "Sizes", "distance", "partitions_of", "ranges_of", "size_of"]

Sizes = tuple[int, ...]

_COORDINATES = 2**18
"""How many numbers of a gradient a diagnosis looks at: 2 MiB for each part. The verdict itself looks at all."""


def partitions_of(samples: int, smallest: int) -> list[Sizes]:
    """The divisions that are tried: a small part first, a small part last, halves, quarters.

    All are needed: a mean that is stated with a wrong count looks right in two halves, and fails only in uneven parts.
    """
    if samples < 2 * smallest:
        return []
    uneven = (smallest, samples - smallest)
    even = [balance(samples, -(-samples // min(parts, samples // smallest))) for parts in (2, 4)]
    return [*dict.fromkeys([uneven, *even, uneven[::-1]])]


def ranges_of(sizes: Sizes) -> list[tuple[int, int]]:
    """Where each part begins and ends."""
    return [*pairwise([0, *accumulate(sizes)])]


@dataclass(frozen=True, eq=False)
class Gradients:
    """One gradient of every parameter, ``None`` where there is none."""

    tensors: tuple[torch.Tensor | None, ...]

    def numbers(self, like: Gradients) -> torch.Tensor:
        """At most 2**18 of its numbers, float64 on the host; ``like`` says where, so that all come from one place."""
        size = sum(tensor.numel() for tensor in like.tensors if tensor is not None)
        stride = max(1, -(-size // _COORDINATES))
        parts = [
            torch.zeros(-(-other.numel() // stride), dtype=torch.float64) if own is None else _spaced(own, stride)
            for own, other in zip(self.tensors, like.tensors, strict=True)
            if other is not None
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _spaced(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    return tensor.reshape(-1)[::stride].to("cpu", torch.float64)


def size_of(gradients: Gradients) -> float:
    """The Euclidean norm over all parameters, in float64; nan where any number is."""
    return math.sqrt(sum(_square(tensor) for tensor in gradients.tensors if tensor is not None))


def distance(found: Gradients, expected: Gradients) -> float:
    """``|found - expected| / |expected|`` over all parameters, in float64; infinite where that is no number."""
    apart = 0.0
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        if one is not None or other is not None:
            apart += _square(_subtract(one, other))
    if apart == 0:
        return 0.0
    norm = size_of(expected)
    error = math.sqrt(apart) / norm if norm else math.inf
    return error if math.isfinite(error) else math.inf


def _subtract(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
    if one is None or other is None:
        present = one if other is None else other
        assert present is not None  # noqa: S101 - the caller leaves out what has neither
        return present
    return _double(one) - _double(other)


def _square(tensor: torch.Tensor) -> float:
    return float(_double(tensor).square().sum())


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "mps" else tensor.double()  # MPS knows no float64


@dataclass(eq=False)
class Measurement:
    """Runs of one still workload on the same samples, each from the same state.

    Attributes:
        workload: What is run; its gradients are overwritten.
        device: Where.
        layout: The samples.
        checkpoint: Buffers and generators at the start of each run.
        renews: Whether both are put back before each part of a run too, not only before the run.
    """

    workload: Workload
    device: Device
    layout: Layout
    checkpoint: Checkpoint
    renews: bool = False
    _alone: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    _divided: dict[Sizes, Gradients] = field(default_factory=dict)

    def whole(self) -> Gradients:
        """All samples at once."""
        return self.divided((self.layout.count,))

    def divided(self, sizes: Sizes) -> Gradients:
        """Consecutive parts of these sizes, accumulated as a training step would; no gradients where nothing counts.

        Raises:
            DoesNotFit: Memory ended.
        """
        if sizes not in self._divided:
            found = self._run([self.part(start, stop) for start, stop in ranges_of(sizes)])
            self._divided[sizes] = found or Gradients((None,) * len(self.workload.parameters()))
        return self._divided[sizes]

    def again(self) -> Gradients:
        """All samples at once, run anew."""
        return self._run([self.layout]) or self.whole()

    def alone(self, start: int, stop: int) -> torch.Tensor | None:
        """Numbers of one part's own gradient, as if it were the whole batch; ``None`` where it counts for nothing."""
        if (start, stop) not in self._alone:
            found = self._run([self.part(start, stop)])
            self._alone[start, stop] = None if found is None else found.numbers(self.whole())
        return self._alone[start, stop]

    def part(self, start: int, stop: int) -> Layout:
        """Samples ``start`` to ``stop`` as a batch."""
        return Layout(self.layout.take(start, stop), stop - start, self.layout.lists)

    def renewed(self) -> Measurement:
        """The same with buffers put back before every part."""
        return Measurement(self.workload, self.device, self.layout, self.checkpoint, renews=True)

    def anew(self) -> Measurement:
        """The same, to be measured again because something in the model was changed."""
        checkpoint = Checkpoint([*self.workload.model.modules()], self.device.torch_device)
        return Measurement(self.workload, self.device, self.layout, checkpoint, self.renews)

    def errors(self, partitions: Sequence[Sizes]) -> list[float]:
        """The relative error of each division against the whole."""
        return [distance(self.divided(sizes), self.whole()) for sizes in partitions]

    def _run(self, parts: list[Layout]) -> Gradients | None:
        parameters = self.workload.parameters()
        for parameter in parameters:
            parameter.grad = None
        self.checkpoint.restore()
        done = Accumulation(self._step_workload(), self.device, _end).run(parts, self.layout.count)
        if done is None:
            return None
        return Gradients(tuple(_take(parameter) for parameter in parameters))

    def _step_workload(self) -> Workload:
        if not self.renews:
            return self.workload
        step = self.workload.step

        def renew(model: Any, batch: Any) -> Any:
            self.checkpoint.restore()
            return step(model, batch)

        return replace(self.workload, step=renew)


def _end(shortage: Shortage) -> NoReturn:
    raise DoesNotFit(shortage.reason)


def _take(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return None
    return gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach()
