"""Runs the optimizer step of a trial as training does, and tracks the phase in which memory ends.

Covers accumulation by the code that trains, making the optimizer's state, and the optimizer's own step. Does not cover
what is measured around them, nor the restoration afterwards (``probe``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from autobatch.batch.layout import Layout, count_bytes
from autobatch.errors import DoesNotFit
from autobatch.memory.device import Device
from autobatch.records import Phase
from autobatch.state.optimizer_state import count_state, is_making_state, make_state
from autobatch.state.rewind_point import StepState
from autobatch.step.model_info import is_compiled
from autobatch.step.workload import Workload
from autobatch.training.accumulation import Accumulation
from autobatch.training.accumulation_state import AccumulationState, Shortage

__all__ = ["TrialStep"]


class TrialStep:
    """The parts of a trial's step, each to be called inside the limit.

    Attributes:
        phase: The phase of the step, or the one in which memory ended.
        aux_bytes: The most that a step has returned beside the loss of one micro-batch.
        learnt: What the steps are known to change.
        is_compiled: Whether model or step is compiled; then nothing is recorded, since that would run it eagerly.
    """

    def __init__(self, workload: Workload, device: Device, *, in_float32: bool, target: int) -> None:
        """Prepare; what the steps change is learnt in the first one, before any trial is timed.

        Args:
            workload: What is run.
            device: Where it is run.
            in_float32: As in ``Accumulation``.
            target: Samples in a step, of which a trial runs two micro-batches; 0: no more than those.
        """
        self.phase: Phase = "forward"
        self.aux_bytes = 0
        self.is_compiled = is_compiled(workload.model, workload.step)
        self.learnt = StepState(workload.model, device.torch_device, records=not self.is_compiled)
        self._workload, self._device = workload, device
        self._in_float32, self._target = in_float32, target
        self._leaves_are_known = False
        self._passes_left = 0
        self._ended_in_pass = False

    def accumulate(self, batches: Sequence[Layout], size: int) -> AccumulationState:
        """Accumulate the gradient of these micro-batches of ``size`` samples.

        Raises:
            DoesNotFit: Memory ended.
        """
        accumulation = Accumulation(
            # By samples: a trial has to run a micro-batch of the example even if its labels are all ignored.
            self._workload.around(self._run, weigh=None),
            self._device,
            shrink=self._end,
            in_float32=self._in_float32,
            leaves_are_known=self._leaves_are_known,
            known_state=self.learnt,
            stands_for=-(-self._target // size) if self._target > size else 0,
        )
        self.phase, self._passes_left, self._ended_in_pass = "forward", len(batches), False
        try:
            accumulated = accumulation.run(batches, size)
        except Exception:
            if self._passes_left == 0 and not self._ended_in_pass:
                self.phase = "gradients"  # after the last pass they are rounded, or added to earlier ones
            raise
        assert accumulated is not None  # noqa: S101 - all samples count here
        self._leaves_are_known = True
        self.aux_bytes = max(self.aux_bytes, *(count_bytes(aux) for aux in accumulated.aux))
        return accumulated

    def make_state(self) -> None:
        """Make the optimizer's state, as ``update`` does before a first step."""
        if self._workload.optimizer is not None:
            self.phase = "optimizer state"
            make_state(self._workload.optimizer)

    def update(self) -> None:
        """Step the optimizer."""
        optimizer = self._workload.optimizer
        if optimizer is None:
            return
        before = count_state(optimizer)
        self.phase = "update"
        try:
            optimizer.step()
        except Exception:
            if is_making_state(optimizer, before):
                self.phase = "optimizer state"
            raise

    def drop_gradients(self) -> None:
        """Set every ``.grad`` to ``None``, as at the end of a step."""
        for parameter in self._workload.parameters():
            parameter.grad = None

    def _run(self, _: nn.Module, samples: Any) -> tuple[torch.Tensor, Any]:
        self.phase = "forward"
        output = self._workload.run(samples)
        self.phase, self._passes_left = "backward", self._passes_left - 1
        first, *others = [term.loss for term in output.terms]
        return sum(others, start=first), output.aux

    def _end(self, shortage: Shortage) -> NoReturn:
        self._ended_in_pass = True
        raise DoesNotFit(shortage.reason)
