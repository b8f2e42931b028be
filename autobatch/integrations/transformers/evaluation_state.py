"""Records what a pass of an evaluation may change, and puts it back where the pass is undone.

Covers the Trainer's attributes (``trainer_state``), random numbers, what the model holds, and the objects that the user
has named. Does not cover parameters: no evaluation changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from autobatch.integrations.transformers.trainer_state import Attributes, TrainerAttributes
from autobatch.memory.device import Device
from autobatch.state.rewind_point import RewindPoint, StepState

__all__ = ["EvaluationState"]


class EvaluationState:
    """What passes of one Trainer's evaluations may change.

    Args:
        trainer: Whose attributes are recorded.
        device: Whose random numbers are.
        keep: Objects of the user that a pass changes.
    """

    def __init__(self, trainer: Any, device: Callable[[], Device], keep: Sequence[Any]) -> None:
        self._attributes, self._device, self._keep = TrainerAttributes(trainer), device, keep
        self._of: tuple[nn.Module, StepState] | None = None
        self._begun: tuple[Attributes, RewindPoint] | None = None

    def begin(self, model: nn.Module) -> RewindPoint:
        """Record all of it before a pass, in the place of what was recorded before another."""
        self.end()
        point = self._state_of(model).begin()
        self._begun = self._attributes.take(), point
        return point

    @contextmanager
    def undone(self, model: nn.Module) -> Iterator[None]:
        """A block after which all of it is as before, and all memory that is written into in it, whoever holds it."""
        try:
            with self.begin(model).record(()):
                yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Make it what it was; nothing is done where memory ended before all of it was recorded."""
        if self._begun is None:
            return
        taken, point = self._begun
        with ExitStack() as parts:  # what one of them raises leaves the other not out
            parts.callback(point.restore)  # last: it puts random numbers back
            parts.callback(self._attributes.put, taken)
        self.end()

    def end(self) -> None:
        """Drop the record: the pass was the evaluation's own."""
        if self._begun is not None:
            self._begun[1].release()
        self._begun = None

    def _state_of(self, model: nn.Module) -> StepState:
        """One for all passes of a model: what has not changed is not recorded anew."""
        if self._of is None or self._of[0] is not model:
            self._of = model, StepState(model, self._device().torch_device, self._keep, records=False)
        return self._of[1]
