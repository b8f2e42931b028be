"""Trials: one micro-batch size run for real, under the conditions of training.

Covers one measured attempt: gradients resident, optimizer state resident, two micro-batches accumulated by the code
    that
trains (``accumulation``), then the optimizer's own step. Does not cover which sizes are tried (``planning.search``) nor
the restoration after the last trial (``workload.training_state``, held by ``fitting``).

The optimizer's step is a real one on the user's own tensors, put back from a copy in host memory. A shadow of the
parameters would need as many bytes again on the device, which moves the very limit that is measured; a fake trace does
not know custom optimizers. The copy costs host memory only (a file where that is short), and the peak is the true one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from autobatch.accumulation import Accumulation, Shortage
from autobatch.errors import DoesNotFit
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import MemoryUsage, Trial
from autobatch.workload.batches import Layout, tensors_of
from autobatch.workload.step import Workload
from autobatch.workload.training_state import TrainingState

__all__ = ["Probe"]


@dataclass
class _Readings:
    """What one trial has measured so far."""

    resident: int = 0
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
        reasons: For each size that ran out of memory, the error's first line.
    """

    workload: Workload
    example: Layout
    device: Device
    limit_bytes: int
    state: TrainingState
    reasons: dict[int, str] = field(default_factory=dict)
    _warm: bool = False

    def run(self, size: int) -> Trial:
        """Try one size. Only an out-of-memory error becomes an outcome; all others come out unchanged.

        Args:
            size: Samples in each of the two micro-batches.

        Returns:
            What was measured, up to the point where memory ended if it did.
        """
        self.state.rewind()
        self.device.watch(self.workload.resident_tensors())
        readings = _Readings()
        reason = self._attempt(size, readings)
        # Here, outside the ``except`` block, the frames of a failed attempt no longer hold its tensors.
        self.state.rewind()
        self.device.reclaim()
        if reason is not None:
            self.reasons[size] = reason
        return _summarise(size, readings, self.device.usage().alloc_retries, reason)

    def _attempt(self, size: int, readings: _Readings) -> str | None:
        """Returns None, or why memory ended."""
        try:
            with self.device.limit(self.limit_bytes):
                self._measure(size, readings)
        except DoesNotFit as ended:
            return str(ended)
        except Exception as error:
            if not is_oom(error):
                raise
            return describe_error(error)
        return None

    def _measure(self, size: int, readings: _Readings) -> None:
        batch = self.example.grow(size)
        self.device.watch(tensors_of(batch))
        if not self._warm:
            # The first step makes the optimizer's state and loads kernels: neither belongs to the steps that follow.
            with self._read(readings, "backward"):
                self._accumulate([batch], size)
                self._step_optimizer()
            self.state.rewind()
            self._warm = True
        before = self.device.usage()
        readings.resident, readings.retries_before = before.allocated, before.alloc_retries
        started = time.perf_counter()
        with self._read(readings, "backward"):
            self._accumulate([batch, batch], size)
        with self._read(readings, "optimizer"):
            self._step_optimizer()
        readings.seconds = time.perf_counter() - started

    @contextmanager
    def _read(self, readings: _Readings, phase: str) -> Iterator[None]:
        self.device.reset_peak()
        try:
            yield
            self.device.synchronize()
        finally:
            setattr(readings, phase, self.device.usage())

    def _accumulate(self, batches: list[Any], size: int) -> None:
        Accumulation(self.workload, self.device, shrink=_end_trial).run(batches, size)

    def _step_optimizer(self) -> None:
        if self.workload.optimizer is not None:
            self.workload.optimizer.step()


def _end_trial(shortage: Shortage) -> NoReturn:
    raise DoesNotFit(shortage.reason)


def _summarise(size: int, readings: _Readings, alloc_retries: int, reason: str | None) -> Trial:
    backward, optimizer = readings.backward, readings.optimizer
    retries = alloc_retries - readings.retries_before
    return Trial(
        micro_batch_size=size,
        outcome="oom" if reason is not None else "thrash" if retries > 0 else "fits",
        peak_allocated=max(backward.peak_allocated, optimizer.peak_allocated),
        peak_reserved=max(backward.peak_reserved, optimizer.peak_reserved),
        optimizer_peak=optimizer.peak_allocated,
        alloc_retries=retries,
        seconds=readings.seconds,
        backward_allocated=backward.peak_allocated,
        backward_reserved=backward.peak_reserved,
        resident_bytes=readings.resident,
    )
