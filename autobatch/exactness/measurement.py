"""Measures the gradient of the same few samples, whole and in parts, each by the code that trains.

Covers runs that all begin with the same buffers and generators, and their comparison. Does not cover why two gradients
differ (``diagnosis``) nor what makes a step repeatable (``determinism``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from autobatch.batch.layout import Layout, tensors_of
from autobatch.batch.tree import as_leaf, map_tensors
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
from autobatch.exactness.partitions import Sizes, ranges_of
from autobatch.exactness.sample_numbers import SampleNumbers
from autobatch.memory.device import Device
from autobatch.records import ModuleError
from autobatch.step.losses import Stated, find_stated, states_counts
from autobatch.step.workload import Step, Workload
from autobatch.training.accumulation import Accumulation
from autobatch.undo.module_state import ModuleState
from autobatch.undo.undo import Undo
from autobatch.undo.written_memory import WrittenMemory

__all__ = ["Measurement"]

_Ranges = tuple[tuple[int, int], ...]

_FACTOR = 1.1
"""Not a power of two, so that every number of the backward pass is rounded differently."""


@dataclass(eq=False)
class Measurement:
    """Runs of one deterministic workload on the same samples; gradients of parts are reduced to a few numbers.

    Where memory ends all methods that run something raise DoesNotFit.

    Attributes:
        rewind_point: Buffers and generators at the start of each run.
        outside: What modules that the step can reach outside the model held, such as a teacher.
        diagnoses: Whether values of gradients are stored for ``values`` and ``alone``.
        renews: What is rewound before each part of a run too, not only before the run: nothing, what lies outside the
            model, or all of it.
        moves: Modules that are not rewound then.
        states_counts: Whether the step said itself what a loss was divided by.
        running: How many samples the step was called with last.
    """

    workload: Workload
    device: Device
    layout: Layout
    rewind_point: Undo
    outside: ModuleState
    random: SampleNumbers
    diagnoses: bool = False
    renews: Literal["", "outside", "all"] = ""
    moves: tuple[nn.Module, ...] = ()
    states_counts: bool = False
    running: int = field(default=0, init=False)
    _whole: Gradients | None = field(default=None, init=False)
    _scales: Scales | None = field(default=None, init=False)
    _loss: torch.Tensor | None = field(default=None, init=False)
    _whole_loss: torch.Tensor | None = field(default=None, init=False)
    _measured: dict[_Ranges, tuple[list[float], torch.Tensor]] = field(default_factory=dict, init=False)
    _stated: dict[tuple[int, int], Stated] = field(default_factory=dict, init=False)

    def whole(self) -> Gradients:
        """The gradient of all samples at once."""
        if self._whole is None:
            self._whole = self._run(((0, self.layout.count),))
            self._whole_loss = self._loss
        return self._whole

    def whole_loss(self) -> float:
        """The loss of all samples at once; 0 where they count for nothing."""
        self.whole()
        return float(self._whole_loss) if self._whole_loss is not None else 0.0

    def scales(self) -> Scales:
        """The scale on which each parameter is judged; without its noise until that was needed."""
        if self._scales is None:
            self._scales = Scales(norms(self.whole()))
        return self._scales

    def release(self) -> None:
        """Free the whole gradient; it is measured again when it is needed."""
        self._whole = None

    def forget(self) -> None:
        """Measure everything again."""
        self._whole, self._scales, self._measured = None, None, {}

    def anew(self) -> Measurement:
        """The same, measured again because something in the model or in its random numbers was changed."""
        return replace(self, rewind_point=Undo(self.workload.model, self.device.torch_device))

    def renewing(self, renews: Literal["outside", "all"], moves: tuple[nn.Module, ...] = ()) -> Measurement:
        """The same, with the state rewound before each part; the whole, which is one part, stays as measured."""
        other = replace(self, renews=renews, moves=moves)
        vars(other).update(_whole=self._whole, _scales=self._scales, _stated=self._stated)
        return other

    def differences(self, sizes: Sizes) -> list[float]:
        """How far this partition's gradient is from the whole one, parameter by parameter."""
        return self._measure(ranges_of(sizes))[0]

    def error(self, partitions: Sequence[Sizes], before: Sequence[float] = ()) -> float:
        """The relative error of the worst parameter in the worst partition, accumulated as training would.

        More than ``TOLERANCE`` only where it is more than the parameter's rounding noise, and what it had ``before``.
        """
        for sizes in partitions:
            self.differences(sizes)
        # Some again: a later partition may have made an earlier one void.
        return max(self._judge(self.differences(sizes), before) for sizes in partitions)

    def repeat_error(self) -> float:
        """The relative error of all samples at once, run again."""
        return self._judge(distances(self._run(((0, self.layout.count),)), self.whole()))

    def scaled_error(self) -> float:
        """The relative error of the gradient at twice the loss, halved; a power of two rounds nothing."""
        twice = self._run(((0, self.layout.count),), 2.0)
        for tensor in twice:
            if tensor is not None:
                tensor.div_(2.0)
        return self._judge(distances(twice, self.whole()))

    def values(self, sizes: Sizes) -> torch.Tensor:
        """Values of one partition's gradient, as ``sample_values`` picks them."""
        return self._measure(ranges_of(sizes))[1]

    def whole_values(self) -> torch.Tensor:
        """Values of the whole gradient."""
        return self._sample(self.whole())

    def whole_values_of(self, batch: Any) -> torch.Tensor:
        """Values of the whole gradient of another batch of as many samples, on the scales of this one."""
        other = replace(self, layout=Layout(batch, self.layout.count, self.layout.lists))
        return self._sample(other.whole())

    def whole_values_by(self, divisors: Sequence[float]) -> torch.Tensor:
        """Values of the whole gradient, each divided by its parameter's entry."""
        return sample_values(self.whole(), self.whole(), divisors)

    def composed(self, sizes: Sizes) -> torch.Tensor | None:
        """The parts' own gradients, each from the state at the beginning, added up with the counts that training uses.

        ``None`` where there is no one count: the step returns several terms, or ``weigh`` counts each otherwise.
        """
        ranges = [part for part in ranges_of(sizes) if self.alone(*part) is not None]
        stated = [self._stated.get(part, Stated("several", 0.0)) for part in ranges]
        if not ranges or any(one.kind == "several" for one in stated):
            return None
        divisor = math.fsum(one.over for one in stated) if stated[0].kind != "part" else 1.0
        parts = [self.alone(*part) for part in ranges]
        terms = [p * (one.over / divisor) for p, one in zip(parts, stated, strict=True) if p is not None and one.over]
        return torch.stack(terms).sum(0) if terms else None

    def alone(self, start: int, stop: int) -> torch.Tensor | None:
        """Values of one part's gradient, as if it were the whole batch; ``None`` where it counts for nothing."""
        ranges = ((start, stop),)
        is_run = ranges in self._measured or self._counts(self.part(start, stop))
        return self._measure(ranges)[1] if is_run else None

    def part(self, start: int, stop: int) -> Layout:
        """Samples ``start`` to ``stop`` as a batch."""
        # Leaves: a registered type's own ``take`` may compute them from tensors that require a gradient.
        batch = map_tensors(self.layout.take(start, stop), as_leaf)
        return Layout(batch, stop - start, self.layout.lists)

    def reference_norms(self, sizes: Sizes) -> list[float]:
        """The norm of each parameter's gradient, or its difference where that is larger; 0 where neither is finite."""
        pairs = zip(self.scales().sizes, self.differences(sizes), strict=True)
        return [max(filter(math.isfinite, pair), default=0.0) for pair in pairs]

    def find_modules(self, partitions: Sequence[Sizes]) -> tuple[ModuleError, ...]:
        """Modules with parameters that differ, and by how much in the worst partition, the worst first."""
        self.error(partitions)
        model, parameters = self.workload.model, self.workload.parameters()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        worst = dict[str, float]()
        for sizes in partitions:
            for index, error in self.scales().report(self.differences(sizes)).items():
                name = names.get(id(parameters[index]))
                if name is None:
                    module = "a parameter of the optimizer alone"
                else:
                    module = name.rpartition(".")[0] or type(model).__name__
                worst[module] = max(worst.get(module, 0.0), error)
        ordered = sorted(worst.items(), key=lambda found: -found[1])
        return tuple(ModuleError(module=module, relative_error=error) for module, error in ordered)

    def _measure(self, ranges: _Ranges) -> tuple[list[float], torch.Tensor]:
        """How far the gradient of these parts is from the whole one, and its values for a diagnosis."""
        while ranges not in self._measured:
            whole = self.whole()  # first: a part's random numbers are rows of the whole's
            found = self._run(ranges)
            if self.random.take_learned():
                self.forget()  # random numbers are used otherwise than the whole did
            else:
                values = self._sample(found) if self.diagnoses else torch.zeros(0)
                self._measured[ranges] = distances(found, whole), values
        return self._measured[ranges]

    def _judge(self, apart: list[float], before: Sequence[float] = ()) -> float:
        worst = max(replace(self.scales(), before=before).judge(apart), default=0.0)
        if worst <= TOLERANCE:
            return worst
        self._measure_noise()
        return max(replace(self.scales(), before=before).judge(apart))

    def _measure_noise(self) -> None:
        """Multiply the loss by a factor and divide the gradient by it: all that differs is rounding.

        Another order of the samples would do as well, but a step that couples samples may depend on their order, and
        that must not pass for noise.
        """
        scales = self.scales()
        if scales.noise:
            return
        found = self._run(((0, self.layout.count),), _FACTOR)
        for tensor in found:
            if tensor is not None:
                tensor.div_(_FACTOR)
        self._scales = replace(scales, noise=bound_noise(distances(found, self.whole()), scales.sizes))

    def _sample(self, found: Gradients) -> torch.Tensor:
        self._measure_noise()
        return sample_values(found, self.whole(), self.scales().divisors())

    def _run(self, ranges: _Ranges, factor: float = 1.0) -> Gradients:
        self.rewind_point.restore()
        parameters = self.workload.parameters()  # only now: what the last run has made is gone
        for parameter in parameters:
            parameter.grad = None
        parts = [self.part(start, stop) for start, stop in ranges]
        # What counts for nothing is not run.
        run = [range_ for range_, part in zip(ranges, parts, strict=True) if self._counts(part)]
        workload = self.workload.around(self._make_step(iter(run)), weigh=self.workload.weigh)
        scale = None if factor == 1 else lambda loss: loss * factor
        accumulation = Accumulation(workload, self.device, scale, records=False, owns_batches=True)
        recorder = self.rewind_point.watch(WrittenMemory(), tensors_of(self.layout.batch))
        try:
            with recorder:
                done = accumulation.run(parts, self.layout.count)
            self.random.end()
        finally:
            recorder.stop()
            # After each run, as another rewind point may follow, or none. The model stays: a diagnosis looks at it.
            self._restore_outside()
        self._loss = None if done is None else done.loss
        return [None] * len(parameters) if done is None else take_gradients(parameters)

    def _counts(self, part: Layout) -> bool:
        return any(weight > 0 for weight in self.workload.weights_of(part.batch, part.count).values())

    def _make_step(self, ranges: Iterator[tuple[int, int]]) -> Step:
        """The user's step, with the same state at its start and the random numbers of its samples."""
        step = self.workload.step

        def run(model: Any, batch: Any) -> Any:
            self._renew()
            start, stop = next(ranges)
            self.running = stop - start
            self.random.begin(start, stop, self.layout.count)
            returned = step(model, batch)
            self.states_counts = self.states_counts or states_counts(returned)
            if self.diagnoses:
                self._stated[start, stop] = self._read_count(returned, start, stop)
            return returned

        return run

    def _restore_outside(self) -> None:
        self.rewind_point.restore_outside()
        self.outside.restore()

    def _renew(self) -> None:
        if self.renews == "outside":
            self._restore_outside()
        elif self.renews == "all":
            moved = ModuleState(self.moves)
            tensors = [tensor for module in self.moves for tensor in moved.tensors_of(module)]
            values = [tensor.detach().clone() for tensor in tensors]
            self.rewind_point.restore()
            self._restore_outside()
            moved.restore()
            for tensor, value in zip(tensors, values, strict=True):
                tensor.data.copy_(value)

    def _read_count(self, returned: Any, start: int, stop: int) -> Stated:
        """What one part counts for: the step's own count, or that of ``weigh``, or its samples."""
        if self.workload.weigh is not None:
            weights = self.workload.weights_of(self.part(start, stop).batch, stop - start)
            counted = weights.get("")
        else:
            counted = float(stop - start)
        return find_stated(returned, counted)
