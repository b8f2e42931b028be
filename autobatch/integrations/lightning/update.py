"""Lets Lightning make the update of a step.

What Lightning does before the parameters move (hooks, unscaling, clipping) is undone if memory runs out in it. The
optimizer's step after it is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autobatch.distributed.shared_step import SharedStep
from autobatch.errors import CannotRetry
from autobatch.memory.oom import describe_error, is_oom
from autobatch.runner import Runner
from autobatch.training.update import Update, explain_no_retry, forget_state, make_state
from autobatch.undo.undo import Undo

__all__ = ["Apply", "LightningRunner", "LightningUpdate"]

Apply = Callable[[Callable[[], None]], None]
"""Makes Lightning's update; calls the function that it is given when the parameters are about to move."""


@dataclass
class LightningUpdate(Update):
    """The update of a Runner whose optimizer Lightning steps.

    Attributes:
        lightning: Lightning's update.
        ended_early: Whether memory ended in the last one before the parameters moved.
    """

    lightning: Apply | None = None
    ended_early: bool = False

    def run(self, begin: Callable[[], None], step: int) -> None:
        """Make the optimizer's state, then let Lightning do the rest.

        Args:
            begin: Called right before the parameters move. An error before it leaves all as it was but ``.grad``.
            step: Number of the step.

        Raises:
            DoesNotFit: The step does not fit.
            CannotRetry: Memory ended in it.
        """
        begun, reason, handled = False, None, sys.exc_info()[1]
        made: list[torch.Tensor] = []
        gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.ended_early = False

        def begin_once() -> None:
            nonlocal begun
            if not begun:
                gradients.extend(self.gradients_now())
                begin()
                begun = True

        try:
            made = make_state(self._inner)
            assert self.lightning is not None  # noqa: S101 - narrows for mypy
            self.lightning(begin_once)
            begin_once()  # an ``optimizer_step`` of the user's own may leave a step out
        except BaseException as error:
            if not begun:
                forget_state(self._inner, made)
            is_short = isinstance(error, Exception) and is_oom(error, handled=handled)
            self.ended_early = is_short and not begun
            if not begun or not is_short:
                raise
            reason = describe_error(error, handled=handled)
        finally:
            self.gradients = gradients
        if reason is not None:
            raise CannotRetry(
                f"ran out of memory inside the optimizer's step ({reason}): parameters may have moved, "
                f"{explain_no_retry(step, self.plan)}"
            )

    def leave_gradients(self) -> None:
        """Let ``.grad`` hold the step's gradient until Lightning clears it, as its hooks expect."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        self.gradients = []

    def gradients_now(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters of the optimizer that have a gradient, with it."""
        parameters = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        return [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]


class LightningRunner(Runner):
    """A Runner whose update is Lightning's.

    Attributes:
        update: How it is made.
    """

    _is_in_users_loop = False

    def __init__(self, apply: Apply, *arguments: Any, **named: Any) -> None:
        """Bind a plan to a module; the other arguments are Runner's."""
        self._apply = apply
        super().__init__(*arguments, **named)
        self._has_looked = False

    def ignore_zero_gradients(self) -> None:
        """Report no gradients from before where Lightning's ``zero_grad``, which has just run, has left zeros.

        A module's ``optimizer_zero_grad`` may set them to zero in place of ``None``. They stay as they are: a parameter
        without a gradient would be left out of the update. One that clears nothing has to be reported, so their values
        are looked at, once: to read them the device has to finish its work.
        """
        gradients = [] if self._has_looked else [gradient for _, gradient in self.update.gradients_now()]
        if gradients:
            self._has_looked = True
            self._has_reported_gradients = not any(bool(gradient.any()) for gradient in gradients)

    def _make_update(
        self, optimizers: Sequence[Any], scaler: Any, max_grad_norm: float | None, schedulers: Sequence[Any]
    ) -> Update:
        made = super()._make_update(optimizers, scaler, max_grad_norm, schedulers)
        self.update = LightningUpdate(made.optimizers, made.plan, lightning=self._apply)
        return self.update

    def _finish(self, undo: Undo, shared: SharedStep | None, *, update: bool) -> None:
        """Let Lightning make the update; the commit is where its parameters are about to move."""
        self._memory.check_update()

        def commit() -> None:
            if shared is not None:
                shared.agree()
            self._accumulation.commit(undo)

        try:
            self.update.run(commit, self.steps)
        finally:
            if undo.is_released:
                self._accumulation.workload.drop_gradients()
