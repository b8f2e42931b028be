"""An accumulation that retries by a policy of the test's, in place of a Runner with its plan and pace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autobatch.errors import DoesNotFit
from autobatch.training.accumulation import Accumulation
from autobatch.training.accumulation_state import Shortage


def halve(shortage: Shortage) -> int:
    """The simplest policy: half, until one sample is left."""
    if shortage.failed_size == 1:
        raise DoesNotFit(shortage.reason)
    return shortage.failed_size // 2


@dataclass
class Retrying(Accumulation):
    """Runs as a Runner does, without its update."""

    shrink: Callable[[Shortage], int] = halve

    def run(self, batches, largest, prepare=lambda: None):
        """The loss and the sizes; ``prepare`` is called where a Runner prepares its update."""
        undo = self.record()
        try:
            undo.gradients.set_aside()
            progress = self.begin(batches, largest, undo)
            while (shortage := self.attempt(progress, undo)) is not None:
                undo.restart()
                self.device.reclaim()
                self.cut_again(progress, self.shrink(shortage))
            if progress.loss.value is not None:
                self.complete(progress, undo, None)
                prepare()
                undo.gradients.settle()
        except BaseException:
            self.undo(undo)
            raise
        if progress.loss.value is None:
            self.undo(undo)
            return None
        self.commit(undo)
        return progress


def retrying(workload, device, shrink=halve, **options):
    """A ``Retrying`` with its policy third."""
    return Retrying(workload, device, shrink=shrink, **options)
