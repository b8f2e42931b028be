"""Gradients of the same few samples, whole and in parts, each from the code that trains.

Covers runs that all begin from the same buffers and generators, and their comparison. Does not cover why two gradients
differ (``diagnosis``) nor what makes a step repeatable (``stillness``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch

from autobatch.accumulation.progress import Shortage
from autobatch.accumulation.transaction import Accumulation
from autobatch.batch.layout import Layout
from autobatch.errors import DoesNotFit
from autobatch.exactness.gradients import Gradients, distance, distance_between, relate, size_of, take_gradients
from autobatch.memory.device import Device
from autobatch.planning.planner import balance
from autobatch.state.rewind_point import RewindPoint
from autobatch.step.workload import Workload

__all__ = ["Measurement", "Sizes", "partitions_of", "ranges_of"]

Sizes = tuple[int, ...]


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
class _Division:
    """What is kept of the gradient of one division."""

    apart: float
    numbers: torch.Tensor | None


@dataclass(eq=False)
class Measurement:
    """Runs of one still workload on the same samples, each from the same state. Only the whole gradient is kept whole.

    Attributes:
        workload: What is run; its gradients are overwritten.
        device: Where.
        layout: The samples.
        checkpoint: Buffers and generators at the start of each run.
        diagnoses: Whether numbers of each division are kept, to be looked at.
        renews: Whether both are put back before each part of a run too, not only before the run.
    """

    workload: Workload
    device: Device
    layout: Layout
    checkpoint: RewindPoint
    diagnoses: bool = False
    renews: bool = False
    _whole: Gradients | None = None
    _size: float | None = None
    _alone: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    _divisions: dict[Sizes, _Division] = field(default_factory=dict)

    def whole(self) -> Gradients:
        """All samples at once; no gradients where nothing counts.

        Raises:
            DoesNotFit: Memory ended, here and in all that follow.
        """
        if self._whole is None:
            self._whole = self._run([self.layout]) or self._nothing()
        return self._whole

    def size(self) -> float:
        """The Euclidean norm of the whole gradient."""
        if self._size is None:
            self._size = size_of(self.whole())
        return self._size

    def release(self) -> None:
        """Keep the whole gradient no longer; where it is asked for it is run anew."""
        self._whole = None

    def error(self, sizes: Sizes, scale: float = 0.0) -> float:
        """The relative error of consecutive parts of these sizes, accumulated as a training step would.

        Args:
            sizes: A division of the samples.
            scale: Relative to this, where it is more than the size of the whole gradient.
        """
        apart = self.apart(sizes)
        return relate(apart, max(self.size(), scale))

    def errors(self, partitions: Sequence[Sizes]) -> list[float]:
        """The relative error of each division against the whole."""
        return [self.error(sizes) for sizes in partitions]

    def apart(self, sizes: Sizes) -> float:
        """How far this division's gradient is from the whole's: the Euclidean norm."""
        return self._divide(sizes).apart

    def repeat_error(self) -> float:
        """The relative error of all samples at once, run anew."""
        return distance(self._run([self.layout]) or self._nothing(), self.whole())

    def numbers(self, sizes: Sizes) -> torch.Tensor:
        """Numbers of one division's gradient."""
        numbers = self._divide(sizes).numbers
        assert numbers is not None  # noqa: S101 - only a diagnosis asks
        return numbers

    def whole_numbers(self) -> torch.Tensor:
        """Numbers of the whole gradient."""
        return self.whole().numbers(self.whole())

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
        return replace(self, renews=True, _whole=None, _size=None, _alone={}, _divisions={})

    def anew(self) -> Measurement:
        """The same, to be measured again because something in the model was changed."""
        checkpoint = RewindPoint([*self.workload.model.modules()], self.device.torch_device)
        return replace(self, checkpoint=checkpoint, _whole=None, _size=None, _alone={}, _divisions={})

    def _divide(self, sizes: Sizes) -> _Division:
        if sizes not in self._divisions:
            whole = self.whole()
            found = self._run([self.part(start, stop) for start, stop in ranges_of(sizes)]) or self._nothing()
            numbers = found.numbers(whole) if self.diagnoses else None
            self._divisions[sizes] = _Division(distance_between(found, whole), numbers)
        return self._divisions[sizes]

    def _nothing(self) -> Gradients:
        return Gradients((None,) * len(self.workload.parameters()))

    def _run(self, parts: list[Layout]) -> Gradients | None:
        parameters = self.workload.parameters()
        for parameter in parameters:
            parameter.grad = None
        self.checkpoint.restore()
        done = Accumulation(self._step_workload(), self.device, _end).run(parts, self.layout.count)
        if done is None:
            return None
        return take_gradients(parameters)

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
