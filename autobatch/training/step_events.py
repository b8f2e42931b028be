"""Emits the events of training to the log, the user's hooks and the ledger."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from autobatch._formatting import show_value
from autobatch._wrappers import unwrap_model
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
    SteppedTwice,
    StepSkipped,
    UpdateCopied,
    emit,
)
from autobatch.ledger.run_recorder import RunRecorder
from autobatch.plan import Plan
from autobatch.planning.pacing import Pace
from autobatch.records import DeviceInfo
from autobatch.result import StepResult
from autobatch.step.model_info import identify_model, model_differences
from autobatch.training.accumulation_state import Shortage

_SAME_MEMORY = 0.03
"""By how much of its memory a card may differ from the one of a prediction, which knows cards by other names."""

logger = logging.getLogger("autobatch")


def check_hooks(hooks: Any) -> tuple[Hook, ...]:
    """The hooks as a tuple; what cannot be called is refused before the first step."""
    found = (hooks,) if isinstance(hooks, str) or not isinstance(hooks, Iterable) else tuple(hooks)
    for hook in found:
        if not callable(hook) or isinstance(hook, type):
            raise InvalidArgument(
                f"hooks has {show_value(hook)}, which cannot be called: pass a list of hooks, each hook(event)"
            )
    return found


class StepEvents:
    """The events of one plan's steps, for the log and for the user's hooks.

    Attributes:
        has_reported_gradients: Whether gradients from before a step are not reported any more.
    """

    def __init__(self, plan: Plan, hooks: Sequence[Hook], recorder: RunRecorder | None = None) -> None:
        self._plan, self._recorder, self._of_user = plan, recorder, hooks
        self._hooks = hooks if recorder is None else (*hooks, recorder)
        self._planned, self.has_reported_gradients = sum(plan.micro_batch_sizes), False
        self._of: dict[str, int] = {"rank": plan.rank, "world_size": plan.world_size}
        self._inexact = "" if plan.verdict is None else "; ".join(plan.verdict.causes)

    def report_plan(self, model: nn.Module, optimizer: Any | None, device: DeviceInfo) -> None:
        name = type(unwrap_model(model)).__name__
        identity = identify_model(model, optimizer)
        differing = (
            *model_differences(self._plan.model, self._plan.identity, name, identity),
            *device_differences(self._plan, device),
        )
        if differing:
            emit(PlanDiffers(plan_id=self._plan.id, differences=differing, **self._of), self._hooks)

    def report_size(self, step: int, samples: int, *, can_run: bool) -> None:
        sizes = {"samples": samples, "planned": self._planned, "target_batch": self._plan.target_batch}
        emit(BatchDiffers(step=step, can_run=can_run, **sizes, **self._of), self._hooks)

    def report_moves(self, step: int, moved: Mapping[str, str]) -> None:
        """Warn of what the user's loop steps, by class, with the calls to remove."""
        emit(SteppedTwice(step=step, names=tuple(moved), calls=tuple(moved.values()), **self._of), self._hooks)

    def report_earlier_gradients(self, step: int) -> None:
        """Report earlier gradients that became part of the step, once."""
        if not self.has_reported_gradients:
            self.has_reported_gradients = True
            emit(GradientsFound(step=step, **self._of), self._hooks)

    def report_retry(
        self, step: int, shortage: Shortage, new_size: int, used_bytes: int, *, recomputed: int = 0
    ) -> None:
        retried = Retried(
            step=step,
            failed_size=shortage.failed_size,
            new_size=new_size,
            used_bytes=used_bytes,
            budget_bytes=self._plan.budget_bytes,
            reason=shortage.reason,
            sums_in_each=shortage.has_held_sums,
            recomputed=recomputed,
            inexact=self._inexact,
            **self._of,
        )
        emit(retried, self._hooks)

    def report_copied(self, step: int, giver: int) -> None:
        """Report an update that was copied from another rank."""
        emit(UpdateCopied(step=step, giver=giver, **self._of), self._hooks)

    def report_pace(self, step: int, old_size: int, pace: Pace) -> None:
        inexact = self._inexact if pace.size < old_size else ""
        change = SizeChanged(
            step=step, old_size=old_size, new_size=pace.size, reason=str(pace.reason), inexact=inexact, **self._of
        )
        emit(change, self._hooks)

    def report_skip(self, step: int, samples: int) -> None:
        emit(StepSkipped(step=step, samples=samples, **self._of), self._hooks)

    def report_failed(self, step: int, error: BaseException) -> None:
        """Report a step that raised; of the user's own errors only the type, and no error here replaces that one."""
        with suppress(Exception):
            self._emit_failed(step, error)

    def _emit_failed(self, step: int, error: BaseException) -> None:
        ours = isinstance(error, AutobatchError)
        reason = f"{type(error).__name__}: {error}".partition("\n")[0] if ours else type(error).__name__
        short = isinstance(error, (DoesNotFit, CannotRetry))
        emit(StepFailed(step=step, reason=reason, out_of_memory=short, **self._of), self._hooks)

    def report_finished(self, step: int, result: StepResult, held_bytes: int) -> None:
        """Report a step's numbers."""
        totals: dict[str, Any] = {"retries": result.retries, "seconds": result.seconds}
        totals |= {"peak_bytes": result.peak_bytes, "held_bytes": held_bytes}
        if self._recorder is not None:
            try:
                self._recorder.count_step(step, result.micro_batch_sizes, result.ranks, **totals)
            except Exception:  # the step is committed, and must not fail
                logger.exception("the run could not be recorded")
                self._recorder = None
        if self._of_user or logger.isEnabledFor(logging.DEBUG):
            finished = StepFinished(
                step=step,
                micro_batch_sizes=result.micro_batch_sizes,
                budget_bytes=self._plan.budget_bytes,
                ranks=result.ranks,
                loss=result.loss,
                gradient_norm=result.gradient_norm,
                **totals,
                **self._of,
            )
            emit(finished, self._of_user)


def device_differences(plan: Plan, device: DeviceInfo) -> Iterator[str]:
    """One sentence where the plan is of another device than the one that runs it."""
    planned = plan.device
    is_near = abs(planned.total_bytes - device.total_bytes) <= _SAME_MEMORY * device.total_bytes
    is_same_card = planned.name == device.name or (plan.predicted and is_near)
    if planned.kind != device.kind or not is_same_card:
        yield f"it was {'predicted for' if plan.predicted else 'made on'} {planned.name}, and this is {device.name}"
