"""Tries one micro-batch size: runs it for real and measures it, under the conditions of training.

Covers one measured attempt: gradients resident, optimizer state resident, two micro-batches accumulated, then the
optimizer's own step. Does not cover the step itself (``trial_step``), which sizes are tried (``planning.search``), nor
the restoration after the last trial (``state.training_state``, held by ``fitting``).

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

    def summarise(self, size: int, alloc_retries: int, ended_in: Phase | None) -> Trial:
        retries = max(alloc_retries - self.retries_before, 0)  # somebody may have reset the allocator's statistics
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
    state_bytes: int = 0
    step: TrialStep = field(init=False)
    _now: _Readings = field(default_factory=_Readings)
    _warm: bool = False
    _holds_activations: bool = False

    def __post_init__(self) -> None:
        """Put the state as each attempt leaves it, so that each begins with it."""
        self.step = TrialStep(self.workload, self.device, in_float32=self.in_float32, target=self.target)
        self.state.rewind()

    def run(self, size: int) -> Trial:
        """Try one size. Only an out-of-memory error becomes an outcome; all others come out unchanged.

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
            self.reasons[size], phase = reason, self._judge_phase()
        return self._now.summarise(size, self.device.usage().alloc_retries, phase)

    def _run_first_step(self, size: int) -> str | None:
        """The step before the first trial, which finds what is written into; returns None, or why memory ended."""
        reason = self._attempt(self._warm_up, size, records=True)
        if reason is None and self.step.is_compiled:  # it ran as it was written, for the record: now it is compiled
            reason = self._attempt(self._warm_up, size)
        if reason is not None:
            self.state.reset_optimizer()
            self.device.reclaim()
        else:
            self._warm, self.step.learnt.records = True, False
        return reason

    def _resumed_state_bytes(self, usage: MemoryUsage) -> int:
        """What an earlier run's state takes of the device: not what lies elsewhere, or is only a formula's."""
        others = sum(bytes_of(tensor) for tensor in (*self.workload.parameters(), *self.workload.model.buffers()))
        return min(self.workload.state_bytes(), max(usage.allocated - others, 0))

    def _judge_phase(self) -> Phase:
        """Where memory ended; a backward pass has to make all gradients, however few samples it has."""
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
        """Run one part of a trial from the user's own state; returns None, or why memory ended.

        With ``records`` copy what the step writes into outside the model; that takes time, so not where it counts.
        """
        if not self.workload.model.training:  # what was put back; a model in train mode may have layers that are not
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
        """The first step makes the optimizer's state and loads kernels: neither belongs to the steps that follow."""
        batch = self._copy_batch(size)
        with self._read("backward"):
            self.step.accumulate([batch], size)
            self.step.make_state()
            self.step.update()

    def _measure(self, size: int) -> None:
        batch, now = self._make_batch(size), self._now
        before = self.device.usage()
        # As the device sees it: the formula of a fake one knows nothing of the optimizer's real tensors.
        made = min(self.workload.state_bytes() - now.state, before.allocated - now.resident)
        self.state_bytes = max(self.state_bytes, now.state + max(made, 0))
        now.resident, now.retries_before = before.allocated, before.alloc_retries
        if self._holds_activations:
            self._run_step_before(batch, size)
            begun = self.device.usage().allocated
            now.resident = min(before.allocated, begun)  # an earlier trial's may have been there before it
            now.held = begun - now.resident
        started = time.perf_counter()
        with self._read("backward"):
            accumulated = self.step.accumulate([batch, batch], size)
        with self._read("optimizer"):
            self.step.update()
        del accumulated  # its loss stands beside the optimizer's step, as it does in training
        now.seconds = time.perf_counter() - started
        self.step.drop_gradients()
        left, grown = self.device.usage().allocated - before.allocated, now.backward.peak_allocated
        self._holds_activations = self._holds_activations or left > _LITTLE * (grown - before.allocated)

    def _run_step_before(self, batch: Layout, size: int) -> None:
        """A micro-batch of the step before, of which activations are still there in the one that is measured."""
        self.step.learnt.moves_modules = (
            True  # as a Runner learns in its first step, which holds those of each micro-batch
        )
        with self._read("backward"):
            self.step.accumulate([batch], size)
            self.step.drop_gradients()

    def _copy_batch(self, size: int) -> Layout:
        """A step that writes into its batch is found before it has written into the user's."""
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
