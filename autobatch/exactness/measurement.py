"""Gradients of the same few samples, whole and in parts, each from the code that trains.

Covers runs that all begin from the same buffers and generators, and their comparison. Does not cover why two gradients
differ (``diagnosis``) nor what makes a step repeatable (``stillness``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from autobatch.batch.layout import Layout, tensors_of
from autobatch.batch.tree import as_leaf, map_tensors
from autobatch.errors import DoesNotFit
from autobatch.exactness.divisions import Sizes, ranges_of
from autobatch.exactness.gradients import Gradients, distances, norms, take_gradients, total
from autobatch.exactness.rounding import TOLERANCE, Scales, bound_noise
from autobatch.exactness.sample_numbers import Numbering
from autobatch.memory.device import Device
from autobatch.state.module_state import ModuleState
from autobatch.state.rewind_point import RewindPoint, StepState
from autobatch.step.losses import Mean, Sum
from autobatch.step.workload import Step, Workload
from autobatch.training.accumulation import Accumulation
from autobatch.training.accumulation_state import Shortage

__all__ = ["Measurement"]

_FACTOR = 1.1
"""No power of two, so that every number of the backward pass is rounded otherwise."""


@dataclass(frozen=True, eq=False)
class _Division:
    """What is kept of the gradient of one division."""

    apart: list[float]
    numbers: torch.Tensor | None


@dataclass(eq=False)
class Measurement:
    """Runs of one still workload on the same samples, each from the same state. Only the whole gradient is kept whole.

    Attributes:
        workload: What is run; its gradients are overwritten.
        device: Where.
        layout: The samples.
        checkpoint: Buffers and generators at the start of each run.
        outside: What modules held that the step can reach outside the model, such as a teacher.
        draws: Has to know which samples are run.
        before: What there was of each parameter's gradient in a measurement with more rounding.
        diagnoses: Whether numbers of each division are kept, to be looked at.
        renews: Whether both are put back before each part of a run too, not only before the run.
        states_counts: Whether the step said itself what a loss was divided by.
    """

    workload: Workload
    device: Device
    layout: Layout
    checkpoint: RewindPoint
    outside: ModuleState
    draws: Numbering
    before: tuple[float, ...] = ()
    diagnoses: bool = False
    renews: bool = False
    states_counts: bool = False
    _whole: Gradients | None = None
    _scales: Scales | None = None
    _alone: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    _divisions: dict[Sizes, _Division] = field(default_factory=dict)

    def whole(self) -> Gradients:
        """All samples at once; no gradients where nothing counts.

        Raises:
            DoesNotFit: Memory ended, here and in all that follow.
        """
        if self._whole is None:
            self._whole = self._run([(0, self.layout.count)])
        return self._whole

    def scales(self) -> Scales:
        """On what scale each parameter is judged; without its noise as long as nobody has asked for that."""
        if self._scales is None:
            self._scales = Scales(norms(self.whole()), before=self.before)
        return self._scales

    def size(self) -> float:
        """The Euclidean norm of the whole gradient."""
        return total(self.scales().sizes)

    def judge_against(self, before: Sequence[float]) -> None:
        """From here on a difference counts where it is one of what each parameter had before, too."""
        self.before = tuple(before)
        self._scales = replace(self.scales(), before=self.before)

    def release(self) -> None:
        """Keep the whole gradient no longer; where it is asked for it is run anew."""
        self._whole = None

    def error(self, sizes: Sizes) -> float:
        """The relative error of the parameter that is worst, of consecutive parts accumulated as training would.

        More than ``TOLERANCE`` only where it is more than the parameter's rounding noise as well.
        """
        return self._judge(self.apart(sizes))

    def errors(self, partitions: Sequence[Sizes]) -> list[float]:
        """The relative error of each division against the whole."""
        for sizes in partitions:
            self._divide(sizes)
        return [self.error(sizes) for sizes in partitions]  # once more what a later division has made void

    def apart(self, sizes: Sizes) -> list[float]:
        """How far this division's gradient is from the whole's, parameter by parameter."""
        return self._divide(sizes).apart

    def repeat_error(self) -> float:
        """The relative error of all samples at once, run anew."""
        return self._judge(distances(self._run([(0, self.layout.count)]), self.whole()))

    def numbers(self, sizes: Sizes) -> torch.Tensor:
        """Numbers of one division's gradient, each on the scale of its parameter."""
        numbers = self._divide(sizes).numbers
        assert numbers is not None  # noqa: S101 - only a diagnosis asks
        return numbers

    def whole_numbers(self) -> torch.Tensor:
        """Numbers of the whole gradient."""
        return self._numbers(self.whole())

    def alone(self, start: int, stop: int) -> torch.Tensor | None:
        """Numbers of one part's own gradient, as if it were the whole batch; ``None`` where it counts for nothing."""
        while (start, stop) not in self._alone:
            self.whole()  # first: a part's draws are rows of the whole's
            counts = self._counts(self.part(start, stop))
            found = self._run([(start, stop)]) if counts else None
            if not self._forget_if_learnt():
                self._alone[start, stop] = None if found is None else self._numbers(found)
        return self._alone[start, stop]

    def part(self, start: int, stop: int) -> Layout:
        """Samples ``start`` to ``stop`` as a batch."""
        # Leaves: a registered type's own ``take`` may compute them from tensors that require a gradient.
        batch = map_tensors(self.layout.take(start, stop), as_leaf)
        return Layout(batch, stop - start, self.layout.lists)

    def renewed(self) -> Measurement:
        """The same with buffers put back before every part."""
        return replace(self, renews=True, _whole=None, _scales=None, _alone={}, _divisions={})

    def anew(self) -> Measurement:
        """The same, to be measured again because something in the model or of the draws was changed."""
        checkpoint = RewindPoint([*self.workload.model.modules()], self.device.torch_device)
        return replace(self, checkpoint=checkpoint, _whole=None, _scales=None, _alone={}, _divisions={})

    def forget_parts(self) -> None:
        """Measure all divisions again."""
        self._alone, self._divisions = {}, {}

    def _divide(self, sizes: Sizes) -> _Division:
        while sizes not in self._divisions:
            whole = self.whole()
            found = self._run(ranges_of(sizes))
            if not self._forget_if_learnt():
                numbers = self._numbers(found) if self.diagnoses else None
                self._divisions[sizes] = _Division(distances(found, whole), numbers)
        return self._divisions[sizes]

    def _forget_if_learnt(self) -> bool:
        """A part may show draws to be of another kind than they looked in the whole: then all is measured again."""
        learnt = self.draws.take_learnt()
        if learnt:
            self._whole, self._scales = None, None
            self.forget_parts()
        return learnt

    def _judge(self, apart: list[float]) -> float:
        worst = max(self.scales().judge(apart), default=0.0)
        if worst <= TOLERANCE:
            return worst
        self._measure_noise()
        return max(self.scales().judge(apart))

    def _measure_noise(self) -> None:
        """The same loss times something and the gradient divided by it: all that differs is rounding.

        Another order of the samples would do as well, but what couples samples may depend on their order, and must not
        pass for noise.
        """
        scales = self.scales()
        if scales.noise:
            return
        found = self._run([(0, self.layout.count)], _FACTOR)
        for tensor in found.tensors:
            if tensor is not None:
                tensor.div_(_FACTOR)
        self._scales = replace(scales, noise=bound_noise(distances(found, self.whole()), scales.sizes))

    def _numbers(self, found: Gradients) -> torch.Tensor:
        self._measure_noise()
        return found.numbers(self.whole(), self.scales().divisors())

    def _run(self, ranges: Sequence[tuple[int, int]], factor: float = 1.0) -> Gradients:
        self.checkpoint.restore()
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
        recorder = self.checkpoint.record(tensors_of(self.layout.batch))
        try:
            with recorder:
                done = accumulation.run(parts, self.layout.count)
            self.draws.end()
        finally:
            recorder.stop()
            # After each run, as another checkpoint may follow, or nothing. The model stays: a diagnosis looks at it.
            self.checkpoint.restore_outside()
            self.outside.put_back()
        if done is None:
            return Gradients((None,) * len(parameters))
        return take_gradients(parameters)

    def _counts(self, part: Layout) -> bool:
        return any(weight > 0 for weight in self.workload.weights_of(part.batch, part.count).values())

    def _make_step(self, ranges: Iterator[tuple[int, int]]) -> Step:
        """The user's step, that begins as all others do, with the numbers that its samples draw."""
        step = self.workload.step

        def begin(model: Any, batch: Any) -> Any:
            if self.renews:
                self.checkpoint.restore()
            self.draws.begin(*next(ranges), self.layout.count)
            returned = step(model, batch)
            self.states_counts = self.states_counts or _states_counts(returned)
            return returned

        return begin


def _states_counts(returned: Any) -> bool:
    loss = returned[0] if isinstance(returned, tuple) and returned else returned
    terms = loss.values() if isinstance(loss, Mapping) else (loss,)
    return any(isinstance(term, Mean | Sum) for term in terms)


def _end(shortage: Shortage) -> NoReturn:
    raise DoesNotFit(shortage.reason)
