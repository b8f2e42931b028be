"""Defines the records of one accumulation: how far it has come, and why memory ran out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autobatch.batch.cut import Group, MicroBatch
from autobatch.records import Phase
from autobatch.training.misuse import BatchWatch
from autobatch.training.weights import StepLoss


@dataclass(frozen=True)
class Shortage:
    """A micro-batch that ran out of memory.

    Attributes:
        failed_size: Samples in the micro-batch that failed.
        failed_scale: The least ``largest`` with which batches are cut into such a micro-batch: ``failed_size``, but for
            samples in order of their lengths.
        reason: The error's first line.
        least_size: The smallest size into which the samples can be divided such that the model can run each
            micro-batch.
        ended_in: Pass that ran out of memory.
    """

    failed_size: int
    reason: str
    least_size: int = 1
    ended_in: Phase = "forward"
    failed_scale: int = 0


@dataclass
class AccumulationState:
    """The micro-batches of one accumulation, and what has come of them.

    Attributes:
        groups: Samples that may run together, from which micro-batches are cut.
        micro_batches: All micro-batches of the step.
        loss: The step's loss.
        watch: Whether the step writes into the batches.
        had_gradients: Whether gradients from before the step are added to its own.
        aux: Values that the step returned beside each finished micro-batch's loss.
        stated: Counts that the step states for each micro-batch, if they are compared (``stated_counts``).
        retries: Number of attempts that ran out of memory.
        phase: Pass of the running micro-batch.
        running: Function of the user that runs now, named for a note on its error; empty: none.
    """

    groups: Sequence[Group]
    micro_batches: Sequence[MicroBatch]
    loss: StepLoss
    watch: BatchWatch
    had_gradients: bool = False
    aux: list[Any] = field(default_factory=list)
    stated: list[Any] = field(default_factory=list)
    retries: int = 0
    phase: Phase = "forward"
    running: str = ""

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch."""
        return tuple(micro_batch.size for micro_batch in self.micro_batches)

    @property
    def counted_per_sample(self) -> float:
        """Divisor of this step's losses, for each sample; 0 if the total was known before."""
        return self.loss.counted / max(1, sum(self.micro_batch_sizes))

    def fail(self) -> MicroBatch:
        """Count nothing as done; returns the micro-batch that ran out of memory."""
        failed = self.micro_batches[min(len(self.aux), len(self.micro_batches) - 1)]
        self.retries += 1
        self.restart()
        return failed

    def restart(self) -> None:
        """Count nothing as done."""
        self.aux, self.stated = [], []
        self.loss.restart()

    def begin_again(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run these micro-batches instead."""
        self.micro_batches = micro_batches
        self.loss.count_again(micro_batches)
