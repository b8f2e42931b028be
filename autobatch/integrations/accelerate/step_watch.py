"""Measures the first two optimizer steps of a function from outside, and ends the function after them.

Covers the steps of the first ``torch.optim.Optimizer`` that steps, whoever calls it: the function, accelerate's
wrapper, a gradient scaler. Does not cover optimizers that are no torch optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autobatch.integrations.accelerate.outside_state import OutsideState
from autobatch.memory.device import Device
from autobatch.records import MemoryUsage, Trial

__all__ = ["EnoughMeasured", "StepWatch"]

_STEPS = 2
"""The first makes the optimizer's state; from the second on memory is that of training."""


class EnoughMeasured(BaseException):
    """Ends a function whose steps are measured. No ``Exception``, so that nobody's ``except Exception`` stops it."""


class StepWatch:
    """Watches one call of a function.

    Attributes:
        trial: What was measured: of the last step that was watched; ``None`` before the first one.
        is_answer: Whether the size of this call is the one that was looked for, so that it goes on to its end.
        is_stopped: Whether the call was ended.
    """

    def __init__(self, size: int, device: Device, outside: OutsideState, find_answer: Callable[[Trial], bool]) -> None:
        """Register nothing yet.

        Args:
            size: The batch size of this call.
            device: Whose memory is measured.
            outside: What is there before the call, such as the data.
            find_answer: Whether a trial's size is the one that is looked for.
        """
        self.trial: Trial | None = None
        self.is_answer = self.is_stopped = False
        self._size, self._device, self._outside, self._find_answer = size, device, outside, find_answer
        self._optimizer: Any = None
        self._steps, self._backward, self._retries = 0, MemoryUsage(), 0

    def __enter__(self) -> StepWatch:
        """Begin to watch the optimizers of this process."""
        self._device.reset_peak()
        self._retries = self._device.usage().alloc_retries
        before, after = self._before_step, self._after_step
        self._hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        return self

    def __exit__(self, *error: object) -> None:
        """End watching."""
        for hook in self._hooks:
            hook.remove()
        self._optimizer = None

    def judge(self) -> None:
        """Decide after a call that came to its end with fewer than two steps."""
        if self.trial is not None and not self.is_stopped:
            self.is_answer = self.is_answer or self._find_answer(self.trial)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._optimizer = optimizer if self._optimizer is None else self._optimizer
        if optimizer is self._optimizer and not self.is_answer:
            self._backward = self._device.usage()
            self._device.reset_peak()

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is not self._optimizer or self.is_answer:
            return
        if not self.is_stopped:
            self._steps += 1
            self.trial = self._summarise(self.trial)
            self._device.reset_peak()
            if self._steps < _STEPS:
                return
            self.is_answer = self._find_answer(self.trial)
        if not self.is_answer:  # in each later step again, where a bare ``except`` has stopped it
            self.is_stopped = True
            raise EnoughMeasured

    def _summarise(self, first: Trial | None) -> Trial:
        """The peaks of this step, and of the first one, since the last batch of a loader may be a smaller one."""
        backward, update = self._backward, self._device.usage()
        allocated = max(backward.peak_allocated, first.backward_allocated or 0 if first else 0)
        reserved = max(backward.peak_reserved, first.backward_reserved or 0 if first else 0)
        return Trial(
            micro_batch_size=self._size,
            outcome="thrash" if update.alloc_retries > self._retries else "fits",
            peak_allocated=max(allocated, update.peak_allocated),
            peak_reserved=max(reserved, update.peak_reserved),
            optimizer_peak=update.peak_allocated,
            alloc_retries=max(update.alloc_retries - self._retries, 0),
            backward_allocated=allocated,
            backward_reserved=reserved,
            resident_bytes=min(self._resident_bytes(), allocated),
        )

    def _resident_bytes(self) -> int:
        """Bytes of parameters, state and what was there before: no more than at any size, so none is overestimated.

        Data that counted as growth would make each line to a larger size too steep, and the sizes too close.
        """
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        entries = [entry for entry in self._optimizer.state.values() if isinstance(entry, dict)]
        held = [
            value
            for value in (*parameters, *(one for entry in entries for one in entry.values()))
            if isinstance(value, torch.Tensor)
        ]
        return self._outside.bytes_with(held, self._device.torch_device.type)
