"""Lets Lightning make the update of a step: its hooks, unscaling and clipping, then its optimizer's step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from autobatch.distributed.shared_step import SharedStep
from autobatch.errors import CannotRetry
from autobatch.memory.oom import describe_error, is_oom
from autobatch.runner import Runner
from autobatch.training.update import explain_no_retry, forget_state, make_state
from autobatch.undo.undo import Undo


class LightningRunner(Runner):
    """A Runner whose update ``apply`` makes; it calls its argument right before the parameters move.

    Attributes:
        ended_early: Whether memory ran out in the last step's update, before the parameters moved.
    """

    _is_in_users_loop = False

    def __init__(self, apply: Callable[[Callable[[], None]], None], *arguments: Any, **named: Any) -> None:
        """Bind a plan to a module; the other arguments are Runner's."""
        self._apply = apply
        self.ended_early = False
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        super().__init__(*arguments, **named)
        self._has_reported_gradients = True  # Lightning has cleared them, or its user's ``optimizer_zero_grad`` has not

    def leave_gradients(self) -> None:
        """Let ``.grad`` hold the step's gradient until Lightning clears it, as its hooks expect."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []

    def _finish(self, undo: Undo, shared: SharedStep | None, *, update: bool) -> None:
        """Let Lightning make the update, and commit right before its parameters move."""
        self.ended_early = False
        self._memory.check_update()
        optimizer: Any = self._workload.optimizer
        handled, reason = sys.exc_info()[1], None
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        made = make_state(optimizer)

        def commit() -> None:
            if undo.is_released:
                return
            gradients = [(parameter, parameter.grad) for parameter in held if parameter.grad is not None]
            if shared is not None:
                shared.agree()
            self._accumulation.commit(undo)
            self._gradients = gradients

        try:
            self._apply(commit)
            commit()  # an ``optimizer_step`` of the user may leave the optimizer's step out
        except BaseException as error:
            is_short = isinstance(error, Exception) and is_oom(error, handled=handled)
            if not undo.is_released:
                self.ended_early = is_short
                forget_state(optimizer, made)
            if not undo.is_released or not is_short:
                raise
            reason = describe_error(error, handled=handled)
        finally:
            if undo.is_released:
                self._workload.drop_gradients()
        if reason is not None:
            raise CannotRetry(
                f"ran out of memory inside the optimizer's step ({reason}): parameters may have moved, "
                f"{explain_no_retry(self.steps, self.plan)}"
            )
