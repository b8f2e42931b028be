"""Compares one optimizer step after a whole batch with one after its parts, both on the same gradient.

DP-SGD reads the gradients of single samples, K-FAC reads statistics that hooks gather in each pass: split, they read
something else, though ``.grad`` is exact. So ``.grad`` is replaced by the same numbers in both runs, and nothing but
what the optimizer reads beside it can make the parameters differ.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from autobatch.batch.layout import Layout, map_tensors
from autobatch.batch.tree import as_leaf
from autobatch.errors import DoesNotFit
from autobatch.exactness.determinism import deterministic, widen
from autobatch.exactness.partitions import Sizes, ranges_of
from autobatch.exactness.sample_numbers import SampleNumbers
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import Verdict
from autobatch.step.model_info import name_optimizer
from autobatch.step.workload import Step, Workload
from autobatch.training.accumulation import Accumulation
from autobatch.training.accumulation_state import Shortage
from autobatch.undo.training_state import TrainingState

__all__ = ["check_update"]

_log = logging.getLogger("autobatch")

_TOLERANCE = 1e-3
"""Relative to the update of a parameter. An optimizer that reads ``.grad`` alone makes the same update bit for bit."""

_ROUNDINGS = 8
"""A parameter that differs by this many roundings of its own values does not differ."""

_REPEATS = 3.0
"""The parts are blamed where they differ this many times more than the whole does when it runs again."""

_VALUES = 4096
"""How many values of each parameter are compared: they are held in host memory."""

_RATE = 1e-3
"""The learning rate of the compared step where a warmup begins at 0: nothing would move."""

_DIVIDES_ITSELF = "; opacus divides a batch itself: BatchMemoryManager(max_physical_batch_size=...), without autobatch"


def check_update(verdict: Verdict, workload: Workload, layout: Layout, device: Device, state: TrainingState) -> Verdict:
    """The verdict of a split whose gradient is exact; inexact where the optimizer makes another update of it.

    Two optimizer steps are run, each from the state that was recorded, and a third one where they differ.

    Args:
        verdict: Exact.
        workload: Model, step and optimizer.
        layout: Samples, of which as many are taken as the verdict compared.
        device: Device of the runs, inside the limit that holds for the comparison.
        state: The state at the start of ``fit``, which rewinds and restores everything.
    """
    if workload.optimizer is None:
        return verdict
    # One sample and the others: where DP-SGD clips all samples of two halves, it hides that their shares scale them.
    sizes, handled = min(verdict.partitions, key=lambda sizes: (sizes[0], len(sizes))), sys.exc_info()[1]
    run = _Run(workload, layout.spread(verdict.samples), device, state)
    try:
        error, reads_samples = run.compare(sizes)
    except Exception as raised:  # noqa: BLE001 - trials have stepped it: the comparison fails, not the user's step
        reason = describe_error(raised, handled=handled)
        if not is_oom(raised, handled=handled) and not isinstance(raised, DoesNotFit):
            _log.info("the optimizer's update was not compared: %s", reason)
        error, reads_samples = 0.0, False
    state.reset_optimizer()  # only now, after the ``except`` block, are the failed run's frames gone
    state.rewind()
    device.reclaim()
    if error <= _TOLERANCE:
        return verdict
    what = "grad_sample, the gradients of single samples" if reads_samples else "such as what hooks gather in each pass"
    cause = (
        f"the update differs though the gradient does not: the optimizer ({name_optimizer(workload.optimizer)}) reads "
        f"more than .grad ({what}), which is another for each micro-batch: use an optimizer that reads .grad alone, or "
        f"a target_batch that fits at once{_DIVIDES_ITSELF if reads_samples else ''}"
    )
    return verdict.model_copy(
        update={"exact": False, "relative_error": error, "causes": (cause,), "partitions": (sizes,)}
    )


@dataclass
class _Run:
    """Runs of one optimizer step on the same samples, each from the same state."""

    workload: Workload
    layout: Layout
    device: Device
    state: TrainingState
    _random: SampleNumbers = field(default_factory=SampleNumbers)
    _scales: list[float] = field(default_factory=list)
    _before: list[torch.Tensor] = field(default_factory=list)
    _reads_samples: bool = False

    def compare(self, sizes: Sizes) -> tuple[float, bool]:
        """Returns the error of the worst parameter's update, and whether there were gradients of single samples."""
        whole, parts = self._values_after((self.layout.count,)), self._values_after(sizes)
        if self._random.take_learned():  # random numbers are used otherwise than the whole did
            whole, parts = self._values_after((self.layout.count,)), self._values_after(sizes)
        error = max(map(_relate, parts, whole, self._before), default=0.0)
        if error > _TOLERANCE:
            again = self._values_after((self.layout.count,))
            if _distance(parts, whole) <= _REPEATS * _distance(again, whole):
                _log.info("the optimizer's update was not compared: it is another each time")
                return 0.0, False
        return error, self._reads_samples

    @torch.enable_grad()
    def _values_after(self, sizes: Sizes) -> list[torch.Tensor]:
        """Values of each parameter after one step on the samples in these parts."""
        self.state.reset_optimizer()
        self.state.rewind()
        self.device.reclaim()
        workload, parameters = self.workload, self.workload.parameters()
        # Inside it too the optimizer draws the same numbers, whatever the passes drew.
        with deterministic(workload.model, parameters, random=self._random):
            self._before = _values_of(parameters)
            self._accumulate(sizes)
            parameters = workload.parameters()  # a forward pass may have made some
            self._reads_samples |= any(getattr(one, "grad_sample", None) is not None for one in parameters)
            self._make_gradients_equal(parameters)
            for group in workload.optimizer.param_groups:  # type: ignore[union-attr]
                if isinstance(group.get("lr"), float | int | torch.Tensor) and not group["lr"]:
                    group["lr"] = group["lr"] + _RATE
            workload.optimizer.step()  # type: ignore[union-attr]
            values = _values_of(parameters)
            for parameter in parameters:  # before the block ends: there its dtype may be another than the parameter's
                parameter.grad = None
        return values

    def _accumulate(self, sizes: Sizes) -> None:
        parts = [self._part(start, stop) for start, stop in ranges_of(sizes)]
        run = [range_ for range_, part in zip(ranges_of(sizes), parts, strict=True) if self._counts(part)]
        workload = self.workload.around(self._make_step(iter(run)), weigh=self.workload.weigh)
        accumulation = Accumulation(workload, self.device, records=False, owns_batches=True)
        accumulation.run(parts, self.layout.count)
        self._random.end()

    def _make_step(self, ranges: Iterator[tuple[int, int]]) -> Step:
        def run(model: Any, batch: Any) -> Any:
            self._random.begin(*next(ranges), self.layout.count)
            return self.workload.step(model, batch)

        return run

    def _part(self, start: int, stop: int) -> Layout:
        batch = map_tensors(map_tensors(self.layout.take(start, stop), as_leaf), widen)
        return Layout(batch, stop - start, self.layout.lists)

    def _counts(self, part: Layout) -> bool:
        return any(weight > 0 for weight in self.workload.weights_of(part.batch, part.count).values())

    @torch.no_grad()
    def _make_gradients_equal(self, parameters: Sequence[torch.Tensor]) -> None:
        """Write the same numbers into ``.grad`` in every run: as large as the first run's, made of the parameter.

        The gradients of whole and parts differ by rounding, which Adam makes large where a gradient is nearly 0.
        """
        gradients = [parameter.grad for parameter in parameters]
        if not self._scales:
            self._scales = [0.0 if gradient is None else _root_mean_square(gradient) for gradient in gradients]
        for parameter, gradient, scale in zip(parameters, gradients, self._scales, strict=True):
            if gradient is None:
                continue
            if gradient.layout is torch.strided:
                gradient.copy_(parameter).mul_(scale).add_(scale)
            else:
                indices = gradient.coalesce().indices()
                rows = parameter[tuple(indices)] * scale + scale
                parameter.grad = torch.sparse_coo_tensor(indices, rows, gradient.shape).coalesce()


def _root_mean_square(gradient: torch.Tensor) -> float:
    values = gradient if gradient.layout is torch.strided else gradient.coalesce().values()
    norm = float(torch.linalg.vector_norm(values)) / math.sqrt(max(1, values.numel()))
    return norm if math.isfinite(norm) else 1.0


@torch.no_grad()
def _values_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Some values of each parameter, in host memory."""
    found = []
    for parameter in parameters:
        values = (torch.view_as_real(parameter) if parameter.is_complex() else parameter).reshape(-1)
        stride = -(-values.numel() // _VALUES) or 1
        found.append(values[::stride].to("cpu", copy=True))
    return found


def _relate(found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> float:
    """The error of a parameter's update, relative to its length; 0 where that is rounding."""
    rounding = torch.finfo(found.dtype).eps if found.dtype.is_floating_point else 0.0
    apart, most = (found.double() - expected.double()).abs(), before.double().abs()
    apart[apart <= _ROUNDINGS * rounding * torch.maximum(most, expected.double().abs())] = 0.0
    moved = max(float((expected.double() - before.double()).norm()), float((found.double() - before.double()).norm()))
    error = float(apart.norm()) / moved if moved else 0.0
    return error if math.isfinite(error) else 0.0


def _distance(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    pairs = zip(first, second, strict=True)
    return math.hypot(*(float((one.double() - other.double()).norm()) for one, other in pairs))


def _end(shortage: Shortage) -> NoReturn:
    raise DoesNotFit(shortage.reason)
