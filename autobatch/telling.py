"""What a runner tells of its steps: each thing in one event, and once what would be noise the second time.

Covers the events of training. Does not cover what they say (``events``) nor the numbers in them (``runner``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from autobatch.accumulation.progress import Shortage
from autobatch.batch.layout import Layout
from autobatch.errors import AutobatchError, CannotRetry, DoesNotFit, InvalidArgument
from autobatch.events import (
    BatchDiffers,
    GradientsFound,
    Hook,
    PlanDiffers,
    Retried,
    SizeChanged,
    StepFailed,
    StepFinished,
    StepSkipped,
    emit,
)
from autobatch.plan import Plan
from autobatch.planning.identity import differences
from autobatch.planning.pacing import Pace
from autobatch.result import StepResult
from autobatch.step.identity import identify_model
from autobatch.wording import show_value
from autobatch.wrappers import unwrap_model

__all__ = ["Telling", "check_hooks"]


def check_hooks(hooks: Any) -> tuple[Hook, ...]:
    """Each can be called, which is found out before the first step and not in each.

    Raises:
        InvalidArgument: One cannot, or they are no row of hooks at all.
    """
    found = (hooks,) if isinstance(hooks, str) or not isinstance(hooks, Iterable) else tuple(hooks)
    for hook in found:
        if not callable(hook) or isinstance(hook, type):
            raise InvalidArgument(
                f"hooks has {show_value(hook)}, which cannot be called: pass a list of hooks, each hook(event)"
            )
    return found


class Telling:
    """The events of one plan's steps, for the log and for the user's hooks."""

    def __init__(self, plan: Plan, hooks: Sequence[Hook]) -> None:
        """Nothing has been told yet; ``hooks`` are called with every event."""
        self._plan, self._hooks = plan, hooks
        self._planned = sum(plan.micro_batch_sizes)
        self._told_sizes = {self._planned}
        self._told_gradients = False
        self._inexact = "" if plan.verdict is None else "; ".join(plan.verdict.causes)

    def tell_plan(self, model: nn.Module, optimizer: Any | None) -> None:
        """A plan of another model or optimizer."""
        name = type(unwrap_model(model)).__name__
        differing = differences(self._plan, name, identify_model(model, optimizer))
        if differing:
            emit(PlanDiffers(plan_id=self._plan.id, differences=differing), self._hooks)

    def tell_size(self, step: int, layouts: Sequence[Layout]) -> None:
        """Another number of samples than planned, once each number."""
        samples = _count(layouts)
        if samples not in self._told_sizes:
            self._told_sizes.add(samples)
            emit(BatchDiffers(step=step, samples=samples, planned=self._planned), self._hooks)

    def tell_earlier_gradients(self, step: int, parameters: Sequence[torch.Tensor]) -> None:
        """Gradients that become part of the step, once."""
        if not self._told_gradients and any(parameter.grad is not None for parameter in parameters):
            self._told_gradients = True
            emit(GradientsFound(step=step), self._hooks)

    def tell_retry(self, step: int, shortage: Shortage, new_size: int, used_bytes: int) -> None:
        """Memory ended, and what comes next."""
        retried = Retried(
            step=step,
            failed_size=shortage.failed_size,
            new_size=new_size,
            samples_kept=shortage.samples_kept,
            samples_redone=shortage.samples_redone,
            used_bytes=used_bytes,
            budget_bytes=self._plan.budget_bytes,
            reason=shortage.reason,
            inexact=self._inexact,
        )
        emit(retried, self._hooks)

    def tell_pace(self, step: int, old_size: int, pace: Pace) -> None:
        """The size changed between two steps, if it did."""
        if pace.size == old_size:
            return
        inexact = self._inexact if pace.size < old_size else ""
        change = SizeChanged(step=step, old_size=old_size, new_size=pace.size, reason=str(pace.reason), inexact=inexact)
        emit(change, self._hooks)

    def tell_skip(self, step: int, layouts: Sequence[Layout]) -> None:
        """A step with nothing to take a mean over."""
        emit(StepSkipped(step=step, samples=_count(layouts)), self._hooks)

    def tell_failed(self, step: int, error: BaseException) -> None:
        """A step that ended in an error; the text of the user's own error stays his, and nothing here replaces it."""
        with suppress(Exception):
            self._tell_failed(step, error)

    def _tell_failed(self, step: int, error: BaseException) -> None:
        ours = isinstance(error, AutobatchError)
        reason = f"{type(error).__name__}: {error}".partition("\n")[0] if ours else type(error).__name__
        short = isinstance(error, (DoesNotFit, CannotRetry))
        emit(StepFailed(step=step, reason=reason, out_of_memory=short), self._hooks)

    def tell_finished(self, step: int, result: StepResult) -> None:
        """A step's numbers."""
        finished = StepFinished(
            step=step,
            micro_batch_sizes=result.micro_batch_sizes,
            retries=result.retries,
            peak_bytes=result.peak_bytes,
            seconds=result.seconds,
            budget_bytes=self._plan.budget_bytes,
        )
        emit(finished, self._hooks)


def _count(layouts: Sequence[Layout]) -> int:
    return sum(layout.count for layout in layouts)
