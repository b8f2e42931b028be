"""Measures the gradient of the same few samples, whole and in parts, each by the code that trains.

1. All runs begin with the same buffers, attributes and generators. The first run also records other memory that the
   step writes into; later runs are recorded only if the first one wrote anything.
2. Only distances from the whole gradient are kept, so that two gradients are in memory at a time.
3. A distance is first judged on the scale of each parameter's gradient. If it is large, rounding noise is measured too.
4. For a diagnosis, values of each part's gradient are kept: they show how parts would have to be added up.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, chain, cycle, pairwise
from typing import Any, Literal

import torch
from torch import nn

from autobatch._user_errors import contextmanager
from autobatch.batch.cut import Group
from autobatch.batch.samples import Layout
from autobatch.batch.tree import as_leaf, map_tensors, tensors_of
from autobatch.errors import DoesNotFit
from autobatch.exactness.gradients import TOLERANCE, Gradients, Scales, distances, norms, sample_values, take_gradients
from autobatch.exactness.sample_numbers import SampleNumbers
from autobatch.memory.device import Device
from autobatch.records import ModuleError
from autobatch.step.losses import Mean, read_terms
from autobatch.step.whole_batch import WholeBatch
from autobatch.step.workload import Workload, split_output
from autobatch.training.whole_batch import accumulation_for
from autobatch.undo.module_state import ModuleState
from autobatch.undo.undo import Undo

_log = logging.getLogger("autobatch")

_FACTOR = 1.1  # not a power of two, so that every number of the backward pass is rounded differently
# Part of its norm by which each parameter moves at most; part of the loss by which all change it, as on a line.
_MOVED = 0.3
_MOVED_WITHOUT_LOSS = 0.01  # part of its norm by which each parameter moves if the loss is 0
Sizes = tuple[int, ...]  # a partition into neighbours: the number of samples of each part
Parts = tuple[Sequence[int], ...]  # a partition: the samples of each part
Side = Literal["", "against", "along"]  # how parameters have moved: not at all, against their gradient, or along it


def ranges_of(sizes: Sizes) -> tuple[range, ...]:
    """Return the samples of each part of neighbours."""
    return tuple(range(start, stop) for start, stop in pairwise([0, *accumulate(sizes)]))


class Measurement:
    """Runs of one workload on the same samples; all that run something raise DoesNotFit if memory runs out.

    Attributes:
        random: The random numbers; ``None`` if the step draws as in training.
        keeps_values: Whether values of gradients are kept for ``values`` and ``alone``.
        writes: Whether runs write into memory that has to be put back; ``None`` before the first run.
        start: Buffers, attributes and generators at the start of each run.
        renews: State that is rewound before each part of a run: none, that outside the model, or all of it.
        states_counts: Whether the step states what a loss was divided by.
        running: Number of samples with which the step was called last.
    """

    def __init__(
        self,
        workload: Workload,
        device: Device,
        layout: Layout,
        random: SampleNumbers | None,
        *,
        writes: bool | None = None,
    ) -> None:
        self.workload, self.device, self.layout, self.random, self.writes = workload, device, layout, random, writes
        self.keeps_values, self.states_counts, self.running = False, False, 0
        self.renews: Literal["", "outside", "all"] = ""
        self._loss = self._whole_loss = 0.0
        self._to_watch = 2  # runs in which the step may not do the loop's work: the whole, and then parts
        self._begin()

    def _begin(self) -> None:
        """Take the present state as that of each run's start."""
        outside = [module for module in self.workload.outside() if isinstance(module, nn.Module)]
        self._outside = ModuleState([part for module in outside for part in module.modules()])
        self.start = Undo(self.workload.model, self.device.torch_device)
        self.forget()

    def forget(self) -> None:
        """Measure everything again."""
        self._whole: Gradients | None = None
        self._scales: Scales | None = None
        self._measured: dict[str, tuple[list[float], torch.Tensor]] = {}

    def release(self) -> None:
        """Free the whole gradient; it is measured again when it is needed."""
        self._whole = None

    def again(self) -> Measurement:
        """Return a measurement from the present state, after a change to the model."""
        other = copy.copy(self)
        other.renews = ""
        other._begin()  # noqa: SLF001 - of its own class, as below
        return other

    def on(self, layout: Layout) -> Measurement:
        """Return a measurement of other samples, from the same start."""
        other = copy.copy(self)
        other.layout = layout
        other.forget()
        return other

    def renewing(self, renews: Literal["outside", "all"]) -> Measurement:
        """Return the same with the state rewound before each part; the whole, which is one part, stays as measured."""
        other = copy.copy(self)
        other.renews, other._measured = renews, {}  # noqa: SLF001 - of its own class
        return other

    def uncounted(self) -> Measurement:
        """Return the same with samples as counts of means, so that parts without a count run too; the whole stays."""
        other, step = copy.copy(self), self.workload.step

        def run(model: Any, batch: Any) -> Any:
            losses, aux = split_output(step(model, batch))
            named = losses if isinstance(losses, Mapping) else {"": losses}
            return {name: one.loss if isinstance(one, Mean) else one for name, one in named.items()}, aux

        other.workload, other._measured = self.workload.around(run, weigh=None), {}  # noqa: SLF001 - of its own class
        return other

    # --------------------------------------------------------------------------------- how far parts are from the whole

    def whole(self) -> Gradients:
        """Return the gradient of all samples at once."""
        if self._whole is None:
            self._whole = self._run()
            self._whole_loss = self._loss
        return self._whole

    def scales(self) -> Scales:
        """Return the scale on which each parameter is judged, without its noise until that was needed."""
        if self._scales is None:
            self._scales = Scales(norms(self.whole()))
        return self._scales

    def norm(self) -> float:
        """Return the norm of the whole gradient."""
        return math.hypot(*self.scales().sizes)

    def error(self, partitions: Sequence[Parts]) -> float:
        """Return the relative error of the worst parameter in the worst partition, accumulated as training would.

        It is more than ``TOLERANCE`` only if it is more than the parameter's rounding noise.
        """
        for parts in partitions:
            self._measure(parts)
        # Some again: a later partition may have made an earlier one void.
        return max(self._judge(self._measure(parts)[0]) for parts in partitions)

    def repeat_error(self) -> float:
        """Return the relative error of all samples at once, run again."""
        return self._judge(distances(self._run(), self.whole()))

    def doubled_error(self) -> float:
        """Return the relative error of the gradient at twice the loss, halved; a power of two rounds nothing."""
        return self._judge(self._apart_at(2.0))

    def find_modules(self, partitions: Sequence[Parts]) -> tuple[ModuleError, ...]:
        """Return the modules with parameters that differ, and their error in the worst partition, the worst first."""
        self.error(partitions)
        model, parameters = self.workload.model, self.workload.parameters()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        worst = dict[str, float]()
        for parts in partitions:
            for index, error in self.scales().report(self._measure(parts)[0]).items():
                name = names.get(id(parameters[index]), "a parameter of the optimizer alone.")
                module = name.rpartition(".")[0] or type(model).__name__
                worst[module] = max(worst.get(module, 0.0), error)
        ordered = sorted(worst.items(), key=lambda found: -found[1])
        return tuple(ModuleError(module=module, relative_error=error) for module, error in ordered)

    # ------------------------------------------------------------------------------------------- with moved parameters

    def error_after_moves(self, rows: Parts, columns: Parts) -> tuple[float, Side]:
        """Return the error after parameters have moved, and the last side; if a copy does not fit, they stay.

        A term that compares samples may be 0 with the values that parameters have. One side alone may not show it, as a
        mean may be kept from below 0.
        """
        try:
            with self.moved() as mirror:
                error = self._error_here(rows)
                if error > TOLERANCE:
                    return error, "against"
                mirror()
                return max(error, self._error_here(columns)), "along"
        except DoesNotFit as shortage:
            _log.info("the check was not repeated with moved parameters: %s", shortage)
        self.device.reclaim()  # only now, after the ``except`` block, are the failed attempt's frames gone
        self.forget()
        return self.error([rows, columns]), ""

    def _error_here(self, parts: Parts) -> float:
        """Return the error with the present values of parameters; infinite without a gradient to compare."""
        self.forget()
        here = self.again() if self.writes else self  # runs would put back parameters that a step writes into
        return here.error([parts]) if 0 < here.norm() < math.inf else math.inf

    @contextmanager
    def moved(self) -> Iterator[Callable[[], None]]:
        """Move each parameter against its gradient, and along it once the function is called; at the end put it back.

        A policy begins equal to its reference, and a new adapter, a gate or a last layer begins at 0. Then part of a
        loss, or of its gradient, is 0, and a comparison shows nothing about it. This takes a copy of the parameters.
        """
        gradients, sizes, loss = self.whole(), self.scales().sizes, abs(self._whole_loss)
        found = zip(self.workload.parameters(), gradients, sizes, strict=True)
        moving = [(p, gradient, size, _length_of(p)) for p, gradient, size in found if gradient is not None and size]
        slope = math.fsum(size * length for _, _, size, length in moving)
        part = min(_MOVED, _MOVED * loss / slope) if 0 < loss < math.inf else _MOVED_WITHOUT_LOSS
        del gradients, found
        saved = [(parameter, parameter.data.clone()) for parameter, *_ in moving]

        def mirror() -> None:
            for parameter, values in saved:
                parameter.data.neg_().add_(values, alpha=2)

        try:
            while moving:  # nothing holds a gradient afterwards
                _move(*moving.pop(), part)
            self.release()
            yield mirror
        finally:
            for parameter, values in saved:
                parameter.data.copy_(values)
            saved.clear()  # the caller still holds ``mirror``, and with it the copies

    # --------------------------------------------------------------------------------------------- for the diagnosis

    def values(self, parts: Parts) -> torch.Tensor:
        """Return values of one partition's gradient, as ``sample_values`` picks them."""
        return self._measure(parts)[1]

    def whole_values(self) -> torch.Tensor:
        """Return values of the whole gradient."""
        return self.sample(self.whole())

    def sample(self, found: Gradients) -> torch.Tensor:
        """Return values of a gradient, on the scales of the whole one."""
        self._measure_noise()
        return sample_values(found, self.whole(), self.scales().divisors())

    def alone(self, rows: Sequence[int]) -> torch.Tensor | None:
        """Return values of one part's gradient, as if it were the whole batch; ``None`` if it counts for nothing."""
        is_run = str((rows,)) in self._measured or self._counts_any(self.part(rows))
        return self.values((rows,)) if is_run else None

    # ----------------------------------------------------------------------------------------------------- the runs

    def part(self, rows: Sequence[int]) -> Layout:
        """Return these samples as a batch."""
        # Leaves: a registered type's own ``take`` may compute them from tensors that require a gradient.
        return Layout(map_tensors(self.layout.take(rows), as_leaf), len(rows), self.layout.lists)

    def accumulate(self, parts: Parts, factor: float = 1.0) -> Sequence[nn.Parameter]:
        """Accumulate the gradient of these parts into ``.grad``, from the state at the start; return the parameters."""
        self.start.restore()
        parameters = self.workload.parameters()  # only now: those that the last run has made are gone
        self.workload.drop_gradients()
        layouts = [self.part(rows) for rows in parts]
        run = cycle([rows for rows, part in zip(parts, layouts, strict=True) if self._counts_any(part)])
        user = self.workload.step
        called, lose = (user.represent, user.loss) if isinstance(user, WholeBatch) else (user, user)

        def step(model: Any, batch: Any) -> Any:
            """Run the user's step with the random numbers of its samples."""
            if self.renews == "all":
                self.start.restore()
            if self.renews:
                self._restore_outside()
            rows = next(run)
            self.running = len(rows)
            self._draw_for(rows)
            returned = called(model, batch)
            if self.keeps_values and called is user:
                self.states_counts = any(term.count is not None for term in read_terms(split_output(returned)[0]))
            return returned

        def loss(representations: Any, batch: Any) -> Any:
            """Run the loss of ``WholeBatch`` with the random numbers of all samples."""
            self._draw_for(sorted(chain(*parts)))
            return lose(representations, batch)

        split = WholeBatch(step, loss) if isinstance(user, WholeBatch) else step
        workload = self.workload.around(split, weigh=self.workload.weigh)
        accumulation = accumulation_for(workload)(
            workload,
            self.device,
            None if factor == 1 else lambda loss: loss * factor,
            records=False,
            watched=self._to_watch,
            owns_batches=True,
        )
        if isinstance(user, WholeBatch):  # its loss is over one batch, of which the parts are rows
            layouts = [self.part(range(self.layout.count))]
            rows = [part if isinstance(part, range) else [*part] for part in parts]
            accumulation.division = lambda batches, _: [Group(batches[0], part) for part in rows]
        try:
            with nullcontext() if self.writes is False else self.start.watch(tensors_of(self.layout.batch)):
                done = accumulation.run(layouts, self.layout.count)
            self.writes, self._to_watch = bool(self.start.memory), max(self._to_watch - 1, 0)
        finally:
            self._restore_outside()  # no run may follow; the model stays: a diagnosis looks at it
        if self.random is not None:
            self.random.end()
        self._loss = 0.0 if done is None or done.loss.value is None else float(done.loss.value)
        return parameters

    def _draw_for(self, rows: Sequence[int]) -> None:
        if self.random is not None:
            self.random.begin(rows, self.layout.count)

    def _restore_outside(self) -> None:
        self.start.restore_outside()
        self._outside.restore()

    def _counts_any(self, part: Layout) -> bool:
        return any(weight > 0 for weight in self.workload.weights_of(part.batch, part.count).values())

    def _run(self, parts: Parts | None = None, factor: float = 1.0) -> Gradients:
        return take_gradients(self.accumulate(parts or (range(self.layout.count),), factor))

    def _measure(self, parts: Parts) -> tuple[list[float], torch.Tensor]:
        """Return how far the gradient of these parts is from the whole one, by parameter, and its values if kept."""
        key = str(parts)
        while key not in self._measured:
            whole = self.whole()  # first: a part's random numbers are rows of the whole's
            found = self._run(parts)
            if self.random is not None and self.random.take_learned():
                self.forget()  # random numbers are used otherwise than the whole did
            else:
                values = self.sample(found) if self.keeps_values else torch.zeros(0)
                self._measured[key] = distances(found, whole), values
        return self._measured[key]

    def _judge(self, apart: list[float]) -> float:
        worst = max(self.scales().judge(apart), default=0.0)
        if worst > TOLERANCE:
            self._measure_noise()
            worst = max(self.scales().judge(apart))
        return worst

    def _measure_noise(self) -> None:
        """Multiply the loss by a factor and divide the gradient by it: all that differs is rounding.

        Another order of the samples would do too, but a step that couples samples may depend on their order.
        """
        scales = self.scales()
        if scales.noise:
            return
        # One rounding of a gradient in float64, as one run may show less; 0 in float32, where it would hide. It is that
        # of the largest gradient, or of one that would change the loss if all of its parts are rounding.
        least = 0.0
        if all(one is None or one.dtype == torch.float64 for one in self.whole()):
            length = math.hypot(*map(_length_of, self.workload.parameters())) or 1.0
            least = torch.finfo(torch.float64).eps * max(self.norm(), abs(self._whole_loss) / length)
        self._scales = scales.with_noise(self._apart_at(_FACTOR), least)

    def _apart_at(self, factor: float) -> list[float]:
        """Return how far the gradient at a multiple of the loss, divided by it, is from the whole."""
        found = self._run(factor=factor)
        return distances([None if one is None else one.div_(factor) for one in found], self.whole())


def _move(parameter: torch.Tensor, gradient: torch.Tensor, size: float, length: float, part: float) -> None:
    along = torch.view_as_complex(gradient) if parameter.is_complex() else gradient
    parameter.data.add_(along, alpha=-part * length / size)


def _length_of(parameter: torch.Tensor) -> float:
    """Return the norm of a parameter, or what it would be if the parameter is all zeros."""
    norm = float(torch.linalg.vector_norm(parameter.detach()))
    return norm or math.sqrt(parameter.numel() / (parameter.shape[-1] if parameter.ndim > 1 else 1))
