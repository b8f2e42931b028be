"""The update: one optimizer step on a finished gradient.

Covers what comes before it and can be undone (room, optimizer state, unscaling, clipping), and the step itself, which
cannot: once it has begun, parameters may have moved. Does not cover the gradient (``accumulation``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autobatch.errors import CannotRetry
from autobatch.memory.oom import describe_error, is_oom
from autobatch.workload.optimizer_state import forget_state, make_state

__all__ = ["Update"]


@dataclass(frozen=True)
class Update:
    """What is done with a gradient, once a step.

    Attributes:
        optimizer: Stepped.
        check_room: Raises where there is no room for the optimizer's step.
        scaler: Unscales, steps and updates once.
        max_grad_norm: The whole gradient is clipped to this norm.
        scheduler: Stepped after the optimizer, if that stepped.
    """

    optimizer: Any
    check_room: Callable[[], None]
    scaler: torch.amp.GradScaler | None = None
    max_grad_norm: float | None = None
    scheduler: Any | None = None

    def prepare(self) -> None:
        """All that comes before the optimizer's own step; on any error it has not happened, but for ``.grad``.

        Raises:
            DoesNotFit: There is no room for the step.
        """
        entry = _read_entry(self.scaler, self.optimizer)
        made: list[torch.Tensor] = []
        try:
            self.check_room()
            made = make_state(self.optimizer)
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            if self.max_grad_norm is not None:
                # The optimizer's own parameters: unscale_() has divided these alone.
                parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
                nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        except BaseException:
            forget_state(self.optimizer, made)
            _write_entry(self.scaler, self.optimizer, entry)
            raise

    def apply(self, advice: str) -> None:
        """Step the optimizer, then scaler and scheduler.

        Args:
            advice: The end of the message where memory runs out.

        Raises:
            CannotRetry: Memory ended in it.
        """
        reason, handled = None, sys.exc_info()[1]
        try:
            self._step()
        except BaseException as error:
            # Whoever loads a checkpoint and goes on must not be told that unscale_() was called already.
            _write_entry(self.scaler, self.optimizer, None)
            if not isinstance(error, Exception) or not is_oom(error, handled=handled):
                raise
            reason = describe_error(error, handled=handled)
        if reason is not None:
            raise CannotRetry(
                f"memory ended inside the optimizer's step ({reason}): parameters may have moved, {advice}"
            )

    def _step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            return
        # Reading the scale waits for the device: only where somebody wants to know whether the optimizer stepped.
        scale = self.scaler.get_scale() if self.scheduler is not None else 0.0
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # It only falls when infinities made it skip the step.
        if self.scheduler is not None and self.scaler.get_scale() >= scale:
            self.scheduler.step()


def _read_entry(scaler: Any, optimizer: Any) -> dict[str, Any] | None:
    """What a scaler remembers of an optimizer between ``unscale_`` and ``update``."""
    entry = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer))
    return None if entry is None else dict(entry)


def _write_entry(scaler: Any, optimizer: Any, entry: dict[str, Any] | None) -> None:
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        return
    states.pop(id(optimizer), None)
    if entry is not None:
        states[id(optimizer)] = entry
