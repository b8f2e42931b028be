"""Measures the gradient of the same few samples, whole and in parts, each by the code that trains.

Covers runs that all begin with the same buffers and generators, and their comparison. Does not cover why two gradients
differ (``diagnosis``) nor what makes a step repeatable (``determinism``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch

from autobatch.batch.layout import Layout, tensors_of
from autobatch.batch.tree import as_leaf, map_tensors
from autobatch.errors import DoesNotFit
from autobatch.exactness.gradients import (
    TOLERANCE,
    Gradients,
    Scales,
    bound_noise,
    distances,
    norms,
    sample_values,
    take_gradients,
)
from autobatch.exactness.sample_numbers import SampleNumbers
from autobatch.memory.device import Device
from autobatch.state.module_state import ModuleState
from autobatch.state.rewind_point import RewindPoint, StepState
from autobatch.step.losses import states_counts
from autobatch.step.workload import Step, Workload
from autobatch.training.accumulation import Accumulation
from autobatch.training.accumulation_state import Shortage

__all__ = ["Measurement", "Sizes", "ranges_of"]

Sizes = tuple[int, ...]
"""A partition: how many samples each of its parts has."""

_FACTOR = 1.1
"""Not a power of two, so that every number of the backward pass is rounded differently."""


def ranges_of(sizes: Sizes) -> list[tuple[int, int]]:
    """Where each part begins and ends."""
    return [*pairwise([0, *accumulate(sizes)])]


@dataclass(eq=False)
class Measurement:
    """Runs of one deterministic workload on the same samples; gradients of parts are reduced to a few numbers.

    Attributes:
        workload: What is run; its gradients are overwritten.
        rewind_point: Buffers and generators at the start of each run.
        outside: What modules that the step can reach outside the model held, such as a teacher.
        random: Draws the step's random numbers, by sample.
        before: See ``Scales.before``.
        diagnoses: Whether values of each partition's gradient are stored for ``values``.
        renews: Whether the model is rewound before each part of a run too, not only before the run.
        states_counts: Whether the step said itself what a loss was divided by.
    """

    workload: Workload
    device: Device
    layout: Layout
    rewind_point: RewindPoint
    outside: ModuleState
    random: SampleNumbers
    before: Sequence[float] = ()
    diagnoses: bool = False
    renews: bool = False
    states_counts: bool = False
    _whole: Gradients | None = None
    _scales: Scales | None = None
    _alone: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    _differences: dict[Sizes, list[float]] = field(default_factory=dict)
    _values: dict[Sizes, torch.Tensor] = field(default_factory=dict)

    def whole(self) -> Gradients:
        """The gradient of all samples at once. Where memory ends this and all methods that follow raise DoesNotFit."""
        if self._whole is None:
            self._whole = self._run([(0, self.layout.count)])
        return self._whole

    def scales(self) -> Scales:
        """The scale on which each parameter is judged; without its noise until that was needed."""
        if self._scales is None:
            self._scales = Scales(norms(self.whole()), before=self.before)
        return self._scales

    def judge_against(self, before: Sequence[float]) -> None:
        """Judge differences from here on also relative to an earlier measurement; see ``Scales.before``."""
        self.before = before
        self._scales = replace(self.scales(), before=before)

    def release(self) -> None:
        """Free the whole gradient; it is measured again when it is needed."""
        self._whole = None

    def differences(self, sizes: Sizes) -> list[float]:
        """How far this partition's gradient is from the whole one, parameter by parameter."""
        while sizes not in self._differences:
            whole = self.whole()
            found = self._run(ranges_of(sizes))
            if not self._forget_if_learned():
                if self.diagnoses:
                    self._values[sizes] = self._sample(found)
                self._differences[sizes] = distances(found, whole)
        return self._differences[sizes]

    def error(self, sizes: Sizes) -> float:
        """The relative error of the worst parameter, of consecutive parts accumulated as training would.

        More than ``TOLERANCE`` only where it is more than the parameter's rounding noise as well.
        """
        return self._judge(self.differences(sizes))

    def errors(self, partitions: Sequence[Sizes]) -> list[float]:
        """The relative error of each partition."""
        for sizes in partitions:
            self.differences(sizes)
        return [self.error(sizes) for sizes in partitions]  # measures again what a later partition has made void

    def repeat_error(self) -> float:
        """The relative error of all samples at once, run again."""
        return self._judge(distances(self._run([(0, self.layout.count)]), self.whole()))

    def values(self, sizes: Sizes) -> torch.Tensor:
        """Values of one partition's gradient, as ``sample_values`` picks them; needs ``diagnoses``."""
        self.differences(sizes)
        return self._values[sizes]

    def whole_values(self) -> torch.Tensor:
        """Values of the whole gradient."""
        return self._sample(self.whole())

    def alone(self, start: int, stop: int) -> torch.Tensor | None:
        """Values of one part's gradient, as if it were the whole batch; ``None`` where it counts for nothing."""
        while (start, stop) not in self._alone:
            self.whole()  # first: a part's random numbers are rows of the whole's
            found = self._run([(start, stop)]) if self._counts(self.part(start, stop)) else None
            if not self._forget_if_learned():
                self._alone[start, stop] = None if found is None else self._sample(found)
        return self._alone[start, stop]

    def part(self, start: int, stop: int) -> Layout:
        """Samples ``start`` to ``stop`` as a batch."""
        # Leaves: a registered type's own ``take`` may compute them from tensors that require a gradient.
        batch = map_tensors(self.layout.take(start, stop), as_leaf)
        return Layout(batch, stop - start, self.layout.lists)

    def renewed(self) -> Measurement:
        """The same with buffers restored before every part."""
        return replace(self._empty(), renews=True)

    def anew(self) -> Measurement:
        """The same, measured again because something in the model or in its random numbers was changed."""
        return replace(
            self._empty(), rewind_point=RewindPoint([*self.workload.model.modules()], self.device.torch_device)
        )

    def forget_parts(self) -> None:
        """Measure all partitions again."""
        self._alone, self._differences, self._values = {}, {}, {}

    def _empty(self) -> Measurement:
        return replace(self, _whole=None, _scales=None, _alone={}, _differences={}, _values={})

    def _forget_if_learned(self) -> bool:
        """A part may show that random numbers are used otherwise than the whole did: then all is measured again."""
        learned = self.random.take_learned()
        if learned:
            self._whole, self._scales = None, None
            self.forget_parts()
        return learned

    def _judge(self, apart: list[float]) -> float:
        worst = max(self.scales().judge(apart), default=0.0)
        if worst <= TOLERANCE:
            return worst
        self._measure_noise()
        return max(self.scales().judge(apart))

    def _measure_noise(self) -> None:
        """Multiply the loss by a factor and divide the gradient by it: all that differs is rounding.

        Another order of the samples would do as well, but a step that couples samples may depend on their order, and
        that must not pass for noise.
        """
        scales = self.scales()
        if scales.noise:
            return
        found = self._run([(0, self.layout.count)], _FACTOR)
        for tensor in found:
            if tensor is not None:
                tensor.div_(_FACTOR)
        self._scales = replace(scales, noise=bound_noise(distances(found, self.whole()), scales.sizes))

    def _sample(self, found: Gradients) -> torch.Tensor:
        self._measure_noise()
        return sample_values(found, self.whole(), self.scales().divisors())

    def _run(self, ranges: Sequence[tuple[int, int]], factor: float = 1.0) -> Gradients:
        self.rewind_point.restore()
        parameters = self.workload.parameters()  # only now: what the last run has made is gone
        for parameter in parameters:
            parameter.grad = None
        parts = [self.part(start, stop) for start, stop in ranges]
        # What counts for nothing is not run.
        run = [range_ for range_, part in zip(ranges, parts, strict=True) if self._counts(part)]
        workload = self.workload.around(self._make_step(iter(run)), weigh=self.workload.weigh)
        scale = None if factor == 1 else lambda loss: loss * factor
        state = StepState(self.workload.model, self.device.torch_device, records=False)
        accumulation = Accumulation(workload, self.device, _end, scale, known_state=state, owns_batches=True)
        recorder = self.rewind_point.record(tensors_of(self.layout.batch))
        try:
            with recorder:
                done = accumulation.run(parts, self.layout.count)
            self.random.end()
        finally:
            recorder.stop()
            # After each run, as another rewind point may follow, or none. The model stays: a diagnosis looks at it.
            self.rewind_point.restore_outside()
            self.outside.put_back()
        return [None] * len(parameters) if done is None else take_gradients(parameters)

    def _counts(self, part: Layout) -> bool:
        return any(weight > 0 for weight in self.workload.weights_of(part.batch, part.count).values())

    def _make_step(self, ranges: Iterator[tuple[int, int]]) -> Step:
        """The user's step, with the same state at its start and the random numbers of its samples."""
        step = self.workload.step

        def run(model: Any, batch: Any) -> Any:
            if self.renews:
                self.rewind_point.restore()
            self.random.begin(*next(ranges), self.layout.count)
            returned = step(model, batch)
            self.states_counts = self.states_counts or states_counts(returned)
            return returned

        return run


def _end(shortage: Shortage) -> NoReturn:
    raise DoesNotFit(shortage.reason)
