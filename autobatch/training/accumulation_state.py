"""Counts how far an accumulation has come: which micro-batches are done, and the running sum of the loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autobatch._user_errors import note_where
from autobatch.batch.cut import Group, MicroBatch
from autobatch.errors import AutobatchError, InvalidArgument
from autobatch.records import Phase
from autobatch.training.loss_denominators import Denominators, DividedLoss
from autobatch.training.misuse import BatchWatch

_STATED_FOR_SOME = "step() states a count (Mean, Sum) for one micro-batch and none for another: always state it"


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


class AccumulationState:
    """Finished and unfinished micro-batches of one accumulation; at the end ``loss`` is the mean over all samples.

    Attributes:
        watch: Whether the step writes into the batches.
        todo: Micro-batches to be run.
        done: Micro-batches that have run.
        denominators: Divisors of the step's losses.
        stated: Counts that the step states for each micro-batch, if they are compared (``stated_counts``).
        aux: Values that the step returned beside each finished micro-batch's loss.
        loss: The running sum of the divided losses.
        counted: The sum of the counts of losses that were divided by ``unit``.
        unit: Divisor of losses until the total is known; ``None`` if the total was known before.
        retries: Number of attempts that ran out of memory.
        had_gradients: Whether gradients from before the step are added to its own.
        groups: Samples that may run together, from which micro-batches are cut.
        phase: The pass of the running micro-batch.
        running: Function of the user that runs now, named for a note on its error; empty: none.
    """

    loss: torch.Tensor | None = None
    counted: float = 0.0
    unit: float | None = None
    retries: int = 0
    had_gradients: bool = False
    watch: BatchWatch
    phase: Phase = "forward"
    running: str = ""

    def __init__(
        self, groups: Sequence[Group], micro_batches: list[MicroBatch], watch: BatchWatch, *, weighed: bool
    ) -> None:
        """Begin.

        Args:
            groups: Samples from which the micro-batches were cut.
            micro_batches: To be run.
            watch: Finds writes into the batches.
            weighed: Whether ``weigh`` gave the weights.
        """
        self.groups, self.todo, self._weighed = groups, deque(micro_batches), weighed
        self.done: list[MicroBatch] = []
        self.aux: list[Any] = []
        self.stated: list[Any] = []
        self.watch = watch
        self.denominators = Denominators.of(micro_batches, weighed=weighed)
        self._is_shared, self._per_sample, self._is_scaled, self._has_stated_none = False, 0.0, False, False

    def expect(self, per_sample: float, *, is_scaled: bool) -> None:
        """Use the divisor of the last step's losses, for each sample."""
        self._per_sample, self._is_scaled = per_sample, is_scaled
        expected = per_sample * self.denominators.samples
        self.denominators = replace(self.denominators, expected=expected, is_scaled=is_scaled)

    def note_where(self, error: Exception, called_by: str) -> None:
        """Name the user's function that runs now in a note on its error; errors of autobatch name it already."""
        if self.running and not isinstance(error, AutobatchError):
            note_where(error, self.running, called_by, self.todo[0].size)

    @property
    def counted_per_sample(self) -> float:
        """Divisor of this step's losses, for each sample; 0 if the total was known before."""
        return self.counted / max(1, sum(self.micro_batch_sizes))

    def share(self, weights: Mapping[str, float], samples: int) -> None:
        """Divide by the totals of all ranks, however often this rank's samples are cut again."""
        self.denominators, self._is_shared = replace(self.denominators, weights=weights, samples=samples), True
        if self._per_sample:
            self.expect(self._per_sample, is_scaled=self._is_scaled)

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Samples of each finished micro-batch."""
        return tuple(micro_batch.size for micro_batch in self.done)

    def finish(self, divided: DividedLoss | None, aux: Any) -> None:
        """Count the first unfinished micro-batch as done.

        Raises:
            InvalidArgument: The step counts for one micro-batch and not for another.
        """
        if divided is None:
            self._has_stated_none |= self.todo[0].counts
        else:
            loss, factor, count, unit = divided
            if self.loss is None:
                self.loss, self.unit = loss.detach() * factor, unit
            elif unit is not self.unit and (unit is None or self.unit is None):
                raise InvalidArgument(_STATED_FOR_SOME)
            elif self.loss.dtype is loss.dtype:
                # A running sum in place: only the first micro-batch allocates one number for it.
                self.loss.add_(loss.detach(), alpha=factor)
            else:
                self.loss = self.loss + loss.detach() * factor
            self.counted += count
        if self._has_stated_none and self.loss is not None and self.unit is None:
            raise InvalidArgument(_STATED_FOR_SOME)  # the others' mean would be over these samples too
        # Last: if memory ends in the addition, the micro-batch is not done and is run again.
        self.done.append(self.todo.popleft())
        self.aux.append(aux)

    def fail(self) -> MicroBatch:
        """Count nothing as done; returns the micro-batch that ran out of memory."""
        failed = self.todo[0]
        self.retries += 1
        self.restart()
        return failed

    def restart(self) -> None:
        """Count nothing as done."""
        self.todo.extendleft(reversed(self.done))
        self.done, self.aux = [], []
        self.loss, self.counted, self.unit = None, 0.0, None
        self._has_stated_none = False

    def begin_again(self, micro_batches: list[MicroBatch]) -> None:
        """Run these micro-batches instead, and sum the denominators again.

        Sums of other parts may be rounded otherwise, and the step has to equal one that used these micro-batches from
        the start.
        """
        self.todo = deque(micro_batches)
        if not self._is_shared:
            self.denominators = Denominators.of(micro_batches, weighed=self._weighed)
            if self._per_sample:
                self.expect(self._per_sample, is_scaled=self._is_scaled)

    def correct(self) -> float:
        """Divide the loss by the true total if that was not known before; returns the gradients' factor."""
        factor = 1.0 if self.unit is None else self.unit / self.counted
        if factor != 1 and self.loss is not None:
            self.loss = self.loss * factor
        return factor
