"""Trials: one micro-batch size run for real, under the conditions of training.

Covers one measured attempt: gradients resident, optimizer state resident, two micro-batches accumulated by the code
that trains (``accumulation``), then the optimizer's own step. Does not cover which sizes are tried
(``planning.search``) nor the restoration after the last trial (``workload.training_state``, held by ``fitting``).

The optimizer's step is a real one on the user's own tensors, put back from a copy in host memory. A shadow of the
parameters would need as many bytes again on the device, which moves the very limit that is measured; a fake trace does
not know custom optimizers. The copy costs host memory only (a file where that is short), and the peak is the true one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn

from autobatch.batch.layout import Layout, count_bytes, map_tensors, tensors_of
from autobatch.errors import DoesNotFit
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import MemoryUsage, Phase, Trial
from autobatch.state.optimizer_state import count_state, is_making_state, make_state
from autobatch.state.rewind_point import StepState
from autobatch.state.training_state import TrainingState
from autobatch.step.model_info import is_compiled
from autobatch.step.workload import Workload
from autobatch.torch_internals.storages import bytes_of
from autobatch.training.accumulation_state import Accumulated, Shortage
from autobatch.training.transaction import Accumulation

__all__ = ["Probe"]

_WARM_SIZE = 2
"""Samples of the first step, whose batch is a copy: at a trial's own size that would need more than training does."""


_LITTLE = 0.001
"""Of what a step adds: if less of that outlives the step, such as a loss in an attribute, no trial is run for it."""


@dataclass
class _Readings:
    """What one trial has measured so far."""

    resident: int = 0
    held: int = 0
    state: int = 0
    retries_before: int = 0
    seconds: float = 0.0
    backward: MemoryUsage = field(default_factory=MemoryUsage)
    optimizer: MemoryUsage = field(default_factory=MemoryUsage)


@dataclass
class Probe:
    """Runs trials of one workload on one device.

    Attributes:
        workload: What is tried.
        example: The batch from which every size is made, by repeating its samples.
        device: Where.
        limit_bytes: Enforced during each trial.
        state: Puts values and generators back after each trial.
        in_float32: As in ``Accumulation``.
        target: Samples in a step, of which a trial runs two micro-batches; 0: no more than those.
        aux_bytes: The most that a step has put beside the loss of one micro-batch.
        state_bytes: What the optimizer's state took in the last trial.
        reasons: For each size that ran out of memory, the error's first line.
    """

    workload: Workload
    example: Layout
    device: Device
    limit_bytes: int
    state: TrainingState
    in_float32: bool = True
    target: int = 0
    reasons: dict[int, str] = field(default_factory=dict)
    aux_bytes: int = 0
    state_bytes: int = 0
    _warm: bool = False
    _phase: Phase = "forward"
    _passes_left: int = 0
    _ended_in_pass: bool = False
    _holds_activations: bool = False

    def __post_init__(self) -> None:
        """Begin to learn what the steps change: in the first one, so that no trial's time has that in it."""
        model, device = self.workload.model, self.device.torch_device
        self._is_compiled = is_compiled(model, self.workload.step)
        self._learnt = StepState(model, device, records=not self._is_compiled)

    def run(self, size: int) -> Trial:
        """Try one size. Only an out-of-memory error becomes an outcome; all others come out unchanged.

        Args:
            size: Samples in each of the two micro-batches.

        Returns:
            What was measured, up to the point where memory ended if it did.
        """
        self.device.watch(self.workload.resident_tensors())
        usage = self.device.usage()
        readings, reason = _Readings(resident=usage.allocated, retries_before=usage.alloc_retries), None
        if not self._warm:
            readings.state = self._resumed_state_bytes(usage)
            reason = self._run_first_step(min(size, _WARM_SIZE), readings)
        if reason is None:
            reason = self._measure_as_in_training(size, readings)
        if reason is not None:
            self.reasons[size] = reason
        phase = None if reason is None else self._judge_phase(readings)
        return _summarise(size, readings, self.device.usage().alloc_retries, phase)

    def _measure_as_in_training(self, size: int, readings: _Readings) -> str | None:
        """The trial; once more where it is the first one to show that activations outlive their step."""
        was_known = self._holds_activations
        reason = self._attempt(self._measure, size, readings)
        if self._holds_activations and not was_known:
            return self._attempt(self._measure, size, readings)
        return reason

    def _run_first_step(self, size: int, readings: _Readings) -> str | None:
        """The step before the first trial; returns None, or why memory ended in it.

        What it writes into, outside the model too, is copied before that. A compiled model, or step, runs as it was
        written meanwhile, so it has a second such step, which compiles it.
        """
        reason = self._attempt(self._warm_up, size, readings, records=True)
        if reason is None and self._is_compiled:
            reason = self._attempt(self._warm_up, size, readings)
        self._warm = reason is None
        self._learnt.records = self._learnt.records and not self._warm
        if not self._warm:
            self.state.reset_optimizer()
            self.device.reclaim()
        return reason

    def _resumed_state_bytes(self, usage: MemoryUsage) -> int:
        """What an earlier run's state takes of the device: not what lies elsewhere, or is only a formula's."""
        others = sum(bytes_of(tensor) for tensor in (*self.workload.parameters(), *self.workload.model.buffers()))
        return min(self.workload.state_bytes(), max(usage.allocated - others, 0))

    def _judge_phase(self, readings: _Readings) -> Phase:
        """Where memory ended; a backward pass has to make all gradients, however few samples it has."""
        gradients = sum(bytes_of(p) for p in self.workload.parameters() if p.requires_grad)
        is_hopeless = 0 < self.limit_bytes < readings.resident + gradients
        fits_before = readings.resident < self.limit_bytes
        return "gradients" if self._phase == "backward" and is_hopeless and fits_before else self._phase

    def find_smallest(self) -> int:
        """The fewest samples that the model can run: 1, or 2 where one sample alone raises an error.

        Only the forward pass is run. Whether two samples run is not asked here: each trial does, and what is wrong
        with the step itself is raised there, about the samples that were asked for.
        """
        handled = sys.exc_info()[1]
        try:
            self._attempt(self._run_one_sample, 1, _Readings(), records=True)
        except Exception as error:
            if is_oom(error, handled=handled):
                raise
        else:
            return 1
        # After the ``except`` block, whose error holds the tensors of the failed pass.
        self.state.rewind()
        self.device.reclaim()
        return 2

    def _run_one_sample(self, size: int, _: _Readings) -> None:
        batch = self._make_batch(size)
        self.workload.run(map_tensors(batch.batch, self._copy))

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.device.move_tensor(tensor.detach().clone()).requires_grad_(tensor.requires_grad)

    def _attempt(
        self, action: Callable[[int, _Readings], None], size: int, readings: _Readings, *, records: bool = False
    ) -> str | None:
        """Run one part of a trial from the user's own state; returns None, or why memory ended.

        Args:
            action: The part, called with ``size`` and ``readings``.
            size: Samples.
            readings: Where it puts what it measures.
            records: Whether to find what the step writes into outside the model; takes time, so not where it counts.
        """
        # Outside the limit: putting values back must not count, nor may a copy of them.
        self.state.rewind()
        if not self.workload.model.training:  # what was put back; a model in train mode may have layers that are not
            self.workload.model.train()
        reason, handled = None, sys.exc_info()[1]
        try:
            with self.device.limit(self.limit_bytes), self.state.record() if records else nullcontext():
                action(size, readings)
        except DoesNotFit as ended:
            reason = str(ended)
        except Exception as error:
            if not is_oom(error, handled=handled):
                raise
            reason = describe_error(error, handled=handled)
        # After the ``except`` block the frames of a failed attempt no longer hold its tensors.
        self.state.rewind()
        self.device.reclaim()
        return reason

    def _warm_up(self, size: int, readings: _Readings) -> None:
        """The first step makes the optimizer's state and loads kernels: neither belongs to the steps that follow."""
        batch = self._make_batch(size)
        # A copy: a step that writes into its batch is found here, before it has written into the user's.
        batch = replace(batch, batch=map_tensors(batch.batch, _copy_as_leaf))
        with self._read(readings, "backward"):
            self._accumulate([batch], size)
            self._make_state()
            self._step_optimizer()

    def _measure(self, size: int, readings: _Readings) -> None:
        batch = self._make_batch(size)
        before = self.device.usage()
        # As the device sees it: the formula of a fake one knows nothing of the optimizer's real tensors.
        seen = before.allocated - readings.resident
        made = min(self.workload.state_bytes() - readings.state, seen)
        self.state_bytes = max(self.state_bytes, readings.state + max(made, 0))
        readings.resident, readings.retries_before = before.allocated, before.alloc_retries
        if self._holds_activations:
            with self._read(readings, "backward"):
                self._run_step_before(batch, size)
            begun = self.device.usage().allocated
            readings.resident = min(before.allocated, begun)  # an earlier trial's may have been there before it
            readings.held = begun - readings.resident
        started = time.perf_counter()
        with self._read(readings, "backward"):
            accumulated = self._accumulate([batch, batch], size)
        with self._read(readings, "optimizer"):
            self._step_optimizer()
        del accumulated  # its loss stands beside the optimizer's step, as it does in training
        readings.seconds = time.perf_counter() - started
        self._drop_gradients()
        left, grown = self.device.usage().allocated - before.allocated, readings.backward.peak_allocated
        self._holds_activations = self._holds_activations or left > _LITTLE * (grown - before.allocated)

    def _run_step_before(self, batch: Layout, size: int) -> None:
        """A micro-batch of the step before, of which activations are still there in the one that is measured."""
        self._learnt.moves_modules = True  # as a Runner learns in its first step: it holds those of each micro-batch
        self._accumulate([batch], size)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self.workload.parameters():
            parameter.grad = None

    def _make_batch(self, size: int) -> Layout:
        batch = self.example.grown(size)
        self.device.watch(tensors_of(batch.batch))
        return batch

    @contextmanager
    def _read(self, readings: _Readings, phase: str) -> Iterator[None]:
        self.device.reset_peak()
        try:
            yield
            self.device.synchronize()
        finally:
            setattr(readings, phase, self.device.usage())

    def _accumulate(self, batches: list[Layout], size: int) -> Accumulated:
        # Weighed by samples: a piece of the example whose labels are all ignored must run in a trial all the same.
        workload = replace(self.workload, step=self._run_step, weigh=None)
        accumulation = Accumulation(
            workload,
            self.device,
            shrink=self._end_trial,
            in_float32=self.in_float32,
            leaves_are_known=self._warm,
            known_state=self._learnt,
            stands_for=-(-self.target // size) if self.target > size else 0,
        )
        self._phase, self._passes_left, self._ended_in_pass = "forward", len(batches), False
        try:
            accumulated = accumulation.run(batches, size)
        except Exception:
            if self._passes_left == 0 and not self._ended_in_pass:
                self._phase = "gradients"  # after the last pass they are rounded, or added to earlier ones
            raise
        assert accumulated is not None  # noqa: S101 - all samples count here
        self.aux_bytes = max(self.aux_bytes, *(count_bytes(aux) for aux in accumulated.aux))
        return accumulated

    def _run_step(self, model: nn.Module, samples: Any) -> tuple[torch.Tensor, Any]:
        self._phase = "forward"
        output = self.workload.run(samples)
        self._phase, self._passes_left = "backward", self._passes_left - 1
        first, *others = [term.loss for term in output.terms]
        return sum(others, start=first), output.aux

    def _make_state(self) -> None:
        if self.workload.optimizer is None:
            return
        self._phase = "optimizer state"
        make_state(self.workload.optimizer)  # as ``update`` does before a first step

    def _step_optimizer(self) -> None:
        optimizer = self.workload.optimizer
        if optimizer is None:
            return
        before = count_state(optimizer)
        self._phase = "update"
        try:
            optimizer.step()
        except Exception:
            if is_making_state(optimizer, before):
                self._phase = "optimizer state"
            raise

    def _end_trial(self, shortage: Shortage) -> NoReturn:
        self._ended_in_pass = True
        raise DoesNotFit(shortage.reason)


def _copy_as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _summarise(size: int, readings: _Readings, alloc_retries: int, phase: Phase | None) -> Trial:
    backward, optimizer = readings.backward, readings.optimizer
    retries = max(alloc_retries - readings.retries_before, 0)  # somebody may have reset the allocator's statistics
    return Trial(
        micro_batch_size=size,
        outcome="oom" if phase is not None else "thrash" if retries > 0 else "fits",
        peak_allocated=max(backward.peak_allocated, optimizer.peak_allocated),
        peak_reserved=max(backward.peak_reserved, optimizer.peak_reserved),
        optimizer_peak=optimizer.peak_allocated,
        alloc_retries=retries,
        seconds=readings.seconds,
        backward_allocated=backward.peak_allocated,
        backward_reserved=backward.peak_reserved,
        resident_bytes=readings.resident,
        held_bytes=readings.held,
        ended_in=phase,
    )
