"""Defines the records of one accumulation: how far it has come, and why memory ran out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from autobatch.batch.cut import Group
from autobatch.batch.samples import MicroBatch
from autobatch.distributed.shared_step import SharedStep
from autobatch.records import Phase
from autobatch.training.misuse import BatchWatch
from autobatch.training.weights import StepLoss


@dataclass(frozen=True)
class Shortage:
    """A micro-batch that ran out of memory."""

    failed_size: int  # samples in it; 0: this rank did not run out of memory, but all run the step again
    reason: str  # the error's first line
    least_size: int = 1  # the smallest size into which the samples can be divided for this model
    ended_in: Phase = "forward"
    # The least ``largest`` that cuts batches into such a micro-batch: ``failed_size``, but for samples by length.
    failed_scale: int = 0
    has_held_sums: bool = False  # gradients were held to be summed once: then the same sizes are run again


class HeldPass(NamedTuple):
    """The backward pass of the last micro-batch, in which all ranks will sum their gradients."""

    part: torch.Tensor  # of the loss, with its graph
    samples: Any  # held until the pass has ended, as in any other


@dataclass
class AccumulationState:
    """The micro-batches of one accumulation, and what has come of them."""

    groups: Sequence[Group]  # samples that may run together, from which micro-batches are cut
    micro_batches: Sequence[MicroBatch]
    loss: StepLoss
    watch: BatchWatch
    had_gradients: bool = False  # from before the step: they are added to its own
    shared: SharedStep | None = None
    held: HeldPass | None = None
    may_hold: bool = False  # whether its last backward pass could be held
    aux: list[Any] = field(default_factory=list)  # what the step returned beside the loss, of each finished micro-batch
    stated: list[Any] = field(default_factory=list)  # counts that the step stated, if they are compared
    retries: int = 0
    phase: Phase = "forward"  # of the running micro-batch
    running: str = ""  # function of the user that runs now, named for a note on its error

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        return tuple([micro_batch.size for micro_batch in self.micro_batches])

    @property
    def running_size(self) -> int:
        """Number of samples that run together now: in the loss of ``WholeBatch`` all of them."""
        return sum(self.micro_batch_sizes) if self.phase == "loss" else self._running.size

    @property
    def _running(self) -> MicroBatch:
        return self.micro_batches[min(len(self.aux), len(self.micro_batches) - 1)]  # the last one's pass may be held

    @property
    def counted_per_sample(self) -> float:
        """Divisor of this step's losses, for each sample; 0 if the total was known before."""
        return self.loss.counted / max(1, sum(self.micro_batch_sizes))

    def describe(self) -> dict[str, int]:
        """Return what other ranks show of this one."""
        sizes = self.micro_batch_sizes
        return {"samples": sum(sizes), "micro_batch_size": max(sizes, default=0), "retries": self.retries}

    def fail(self) -> MicroBatch:
        """Count nothing as done; returns the micro-batch that ran out of memory."""
        failed = self._running
        self.retries += 1
        self.restart()
        return failed

    def restart(self) -> None:
        self.aux, self.stated, self.held = [], [], None
        self.loss.restart()

    def begin_again(self, micro_batches: Sequence[MicroBatch]) -> None:
        self.micro_batches = micro_batches
        self.loss.count_again(micro_batches)
