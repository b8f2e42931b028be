"""Tries one micro-batch size: runs it for real and measures it, under the conditions of training.

Covers one measured attempt: gradients resident, optimizer state resident, two micro-batches accumulated, then the
optimizer's own step. Does not cover the step itself (``trial_step``), which sizes are tried (``planning.next_trial``),
nor the restoration after the last trial (``state.training_state``, held by ``fitting``).

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

import torch

from autobatch.batch.layout import Layout, map_tensors, tensors_of
from autobatch.errors import DoesNotFit
from autobatch.fitting.trial_step import TrialStep
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import MemoryUsage, Phase, Trial
from autobatch.state.training_state import TrainingState
from autobatch.step.workload import Workload
from autobatch.torch_internals.storages import bytes_of

__all__ = ["Probe"]

_WARM_SIZE = 2
"""Samples of the first step, whose batch is a copy: at a trial's own size that would need more than training does."""

_LITTLE = 0.001
"""The part of a step's memory that may outlive the step, such as a loss in an attribute, without another trial."""


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

    def summarise(self, size: int, alloc_retries: int, ended_in: Phase | None) -> Trial:
        retries = max(alloc_retries - self.retries_before, 0)  # the step may reset the allocator's statistics
        return Trial(
            micro_batch_size=size,
            outcome="oom" if ended_in is not None else "thrash" if retries > 0 else "fits",
            peak_allocated=max(self.backward.peak_allocated, self.optimizer.peak_allocated),
            peak_reserved=max(self.backward.peak_reserved, self.optimizer.peak_reserved),
            optimizer_peak=self.optimizer.peak_allocated,
            alloc_retries=retries,
            seconds=self.seconds,
            backward_allocated=self.backward.peak_allocated,
            backward_reserved=self.backward.peak_reserved,
            resident_bytes=self.resident,
            held_bytes=self.held,
            ended_in=ended_in,
        )


@dataclass
class Probe:
    """Runs trials of one workload on one device.

    Attributes:
        workload: What is tried.
        example: The batch from which every size is made, by repeating its samples.
        device: Where.
        limit_bytes: Enforced during each trial.
        state: Puts values and generators back after each trial.
        in_float32, target: As for ``TrialStep``.
        state_bytes: The most that the optimizer's state has taken.
        errors: For each size that ran out of memory, the error's first line.
    """

    workload: Workload
    example: Layout
    device: Device
    limit_bytes: int
    state: TrainingState
    in_float32: bool = True
    target: int = 0
    errors: dict[int, str] = field(default_factory=dict)
    state_bytes: int = 0
    step: TrialStep = field(init=False)
    _now: _Readings = field(default_factory=_Readings)
    _warm: bool = False
    _holds_activations: bool = False

    def __post_init__(self) -> None:
        """Rewind the state, so that the first attempt begins as the later ones do."""
        self.step = TrialStep(self.workload, self.device, in_float32=self.in_float32, target=self.target)
        self.state.rewind()

    def run(self, size: int) -> Trial:
        """Try one size. Only an out-of-memory error becomes an outcome; all others pass through.

        Args:
            size: Samples in each of the two micro-batches.

        Returns:
            What was measured, up to the point where memory ended if it did.
        """
        self.device.watch(self.workload.resident_tensors())
        usage = self.device.usage()
        self._now, reason = _Readings(resident=usage.allocated, retries_before=usage.alloc_retries), None
        if not self._warm:
            self._now.state = self._resumed_state_bytes(usage)
            reason = self._run_first_step(min(size, _WARM_SIZE))
        if reason is None:
            was_known = self._holds_activations
            reason = self._attempt(self._measure, size)
            if self._holds_activations and not was_known:  # once more, now that they are known to outlive their step
                reason = self._attempt(self._measure, size)
        phase = None
        if reason is not None:
            self.errors[size], phase = reason, self._judge_phase()
        return self._now.summarise(size, self.device.usage().alloc_retries, phase)

    def _run_first_step(self, size: int) -> str | None:
        """Run the step before the first trial, which records writes; returns why memory ended."""
        reason = self._attempt(self._warm_up, size, records=True)
        if reason is None and self.step.is_compiled:  # recorded, it ran eagerly: now it is compiled
            reason = self._attempt(self._warm_up, size)
        if reason is not None:
            self.state.reset_optimizer()
            self.device.reclaim()
        else:
            self._warm, self.step.learnt.records = True, False
        return reason

    def _resumed_state_bytes(self, usage: MemoryUsage) -> int:
        """Bytes of the device that the state of a resumed run takes; state on another device is not counted."""
        others = sum(bytes_of(tensor) for tensor in (*self.workload.parameters(), *self.workload.model.buffers()))
        return min(self.workload.state_bytes(), max(usage.allocated - others, 0))

    def _judge_phase(self) -> Phase:
        """The phase in which memory ended; of a backward pass that cannot hold all gradients, ``gradients``."""
        gradients = sum(bytes_of(p) for p in self.workload.parameters() if p.requires_grad)
        resident, phase = self._now.resident, self.step.phase
        is_hopeless = 0 < self.limit_bytes < resident + gradients
        return "gradients" if phase == "backward" and is_hopeless and resident < self.limit_bytes else phase

    def find_smallest(self) -> int:
        """The fewest samples whose forward pass runs: 1, or 2 where one alone raises an error (trials run two)."""
        handled = sys.exc_info()[1]
        try:
            self._attempt(lambda size: self.workload.run(self._copy_batch(size).batch), 1, records=True)
        except Exception as error:
            if is_oom(error, handled=handled):
                raise
        else:
            return 1
        # After the ``except`` block, whose error holds the tensors of the failed pass.
        self.state.rewind()
        self.device.reclaim()
        return 2

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.device.move_tensor(tensor.detach().clone()).requires_grad_(tensor.requires_grad)

    def _attempt(self, action: Callable[[int], object], size: int, *, records: bool = False) -> str | None:
        """Run one part of a trial from the user's own state; returns why memory ended.

        With ``records`` copy what the step writes into outside the model, which takes time: not in measured steps.
        """
        if not self.workload.model.training:  # restored so; of a model in train mode single layers may be in eval mode
            self.workload.model.train()
        reason, handled = None, sys.exc_info()[1]
        try:
            with self.device.limit(self.limit_bytes), self.state.record() if records else nullcontext():
                action(size)
        except DoesNotFit as ended:
            reason = str(ended)
        except Exception as error:
            if not is_oom(error, handled=handled):
                raise
            reason = describe_error(error, handled=handled)
        # After the ``except`` block, whose error holds the attempt's tensors; outside the limit, as copies count.
        self.state.rewind()
        self.device.reclaim()
        return reason

    def _warm_up(self, size: int) -> None:
        """Run a first step, which makes the optimizer's state and loads kernels: later steps do neither."""
        batch = self._copy_batch(size)
        with self._read("backward"):
            self.step.accumulate([batch], size)
            self.step.make_state()
            self.step.update()

    def _measure(self, size: int) -> None:
        batch, now = self._make_batch(size), self._now
        before = self.device.usage()
        # As the device counts: a substitute for a device does not count the optimizer's real tensors.
        made = min(self.workload.state_bytes() - now.state, before.allocated - now.resident)
        self.state_bytes = max(self.state_bytes, now.state + max(made, 0))
        now.resident, now.retries_before = before.allocated, before.alloc_retries
        if self._holds_activations:
            self._run_step_before(batch, size)
            begun = self.device.usage().allocated
            now.resident = min(before.allocated, begun)  # before it there may have been an earlier trial's
            now.held = begun - now.resident
        started = time.perf_counter()
        with self._read("backward"):
            accumulated = self.step.accumulate([batch, batch], size)
        with self._read("optimizer"):
            self.step.update()
        del accumulated  # not before: in training its loss is held during the optimizer's step, too
        now.seconds = time.perf_counter() - started
        self.step.drop_gradients()
        left, grown = self.device.usage().allocated - before.allocated, now.backward.peak_allocated
        self._holds_activations = self._holds_activations or left > _LITTLE * (grown - before.allocated)

    def _run_step_before(self, batch: Layout, size: int) -> None:
        """Run a micro-batch of the step before, whose activations are still held in the measured step."""
        # As a Runner learns in its first step; from then on it holds those of each micro-batch.
        self.step.learnt.moves_modules = True
        with self._read("backward"):
            self.step.accumulate([batch], size)
            self.step.drop_gradients()

    def _copy_batch(self, size: int) -> Layout:
        """A copy, so that a step that writes into its batch does not change the user's."""
        batch = self._make_batch(size)
        return replace(batch, batch=map_tensors(batch.batch, self._copy))

    def _make_batch(self, size: int) -> Layout:
        batch = self.example.grown(size)
        self.device.watch(tensors_of(batch.batch))
        return batch

    @contextmanager
    def _read(self, part: str) -> Iterator[None]:
        self.device.reset_peak()
        try:
            yield
            self.device.synchronize()
        finally:
            setattr(self._now, part, self.device.usage())
