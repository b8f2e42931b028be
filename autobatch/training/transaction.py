"""Undoes a training step that fails before its update has begun.

It restores gradients, modules, generators and everything else that a step changes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from autobatch.errors import CannotRetry
from autobatch.step.workload import Workload
from autobatch.training.accumulation_state import AccumulationState
from autobatch.undo.gradients import Float32Sums, GradientsAside, GradientStamps
from autobatch.undo.undo import RewindPoint, StepState

__all__ = ["Transaction"]

_LOG = logging.getLogger("autobatch")


class Transaction:
    """A block at whose end everything that a step changes is as before, unless the update has begun.

    Attributes:
        start: The state before the step.
        stamps: The gradients before the running micro-batch.
        aside: The gradients before the step.
    """

    def __init__(
        self,
        state: StepState,
        start: RewindPoint,
        workload: Workload,
        parameters: Sequence[torch.Tensor],
        sums: Float32Sums,
    ) -> None:
        """Note the gradients; nothing is moved yet."""
        self._state, self._workload, self._sums = state, workload, sums
        self.parameters, self._has_ended, self._is_left = parameters, False, False
        self.start = start
        self.stamps = GradientStamps(parameters, sums)
        self.aside = GradientsAside(self.stamps)

    def __enter__(self) -> Transaction:
        """Begin with the state that was noted."""
        return self

    def set_aside(self) -> None:
        """Move gradients from before the step out of ``.grad``."""
        self.aside.take()
        self.stamps.renew()

    def find_made_parameters(self) -> bool:
        """Whether forward passes have made parameters since the step began; their gradients are stamped from now on."""
        if self.start.modules.holds_same_parameters():
            return False
        self.stamps.renew(self._workload.parameters())
        return True

    def end_micro_batches(self) -> None:
        """Note what the micro-batches have shown, and release the stamps of gradients."""
        self._state.makes_sparse |= self.stamps.any_sparse
        self.stamps.release()
        if self.start.modules.headers.any_written():
            self._state.learn(self.start)
        if self._state.is_recording:
            self._state.stop_recording()

    def begin_update(self) -> None:
        """Restore nothing from here on; at the end every gradient is ``None``."""
        made_some = not self.start.modules.holds_same_parameters()  # a forward pass may have made parameters
        self.aside.spend(self._workload.parameters() if made_some else self.parameters)
        self.start.release()  # the trials' optimizer steps had no such copy beside them, nor earlier activations
        self._has_ended = True

    def __exit__(self, *error: object) -> None:
        """Restore everything, or clear the gradients of an update; done a second time, do nothing."""
        if self._is_left:
            return
        try:
            if self._state.is_recording:
                self._state.stop_recording()
            if not self.aside.is_final:
                self._undo()
        finally:
            self.aside.end()
            if self._sums.hooks:
                self._sums.end()
            self._is_left = True
            if not self._has_ended:
                self.start.release()  # last: it only frees memory, and an interrupt may come in the middle of it

    def _undo(self) -> None:
        """Restore everything; a tensor that cannot be is logged, since the error raised may be the user's own."""
        lost = self._state.learn(self.start)
        self.start.restore()
        if lost:
            _LOG.warning(
                "the step was undone but for a tensor of shape %s, into which step() had never written before, so it "
                "was not copied",
                tuple(lost[0].shape),
            )

    def rewind(self, progress: AccumulationState, reason: str) -> None:
        """Restore the beginning of the step.

        Args:
            progress: Begins again with all samples.
            reason: The failure's first line.

        Raises:
            CannotRetry: The step has written into memory that was not copied.
        """
        lost = self._state.learn(self.start)
        if lost:
            raise CannotRetry(
                f"memory ended ({reason}) after step() had written into a tensor of shape {tuple(lost[0].shape)} that "
                f"it had never written into before and that was not copied: this tensor stays as it is, all else is as "
                f"before the step; load your last checkpoint"
            )
        self.start.restore()
        self.stamps.clear(self.parameters)
        progress.begin_anew()
