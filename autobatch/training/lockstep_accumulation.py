"""Accumulates the gradient of a model whose parameters are sharded: every rank runs as many micro-batches, in lockstep.

Covers how many that is, ranks that have fewer samples, and going on together after memory has ended on one rank. Does
not cover a single pass (``distributed.lockstep``), nor what is the same on one rank (``accumulation``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autobatch.batch.layout import Layout, describe, map_tensors
from autobatch.batch.tree import tensors_of
from autobatch.distributed.interrupts import deferred_interrupts
from autobatch.distributed.lockstep import Lockstep, OtherRankShort
from autobatch.distributed.sharded_step import ShardedStep
from autobatch.distributed.sharding import gathered_tensors
from autobatch.distributed.shared_step import SharedStep
from autobatch.errors import AutobatchError, DoesNotFit, InvalidBatch, InvalidStep
from autobatch.memory.oom import describe_error, is_oom
from autobatch.state.gradients import GradientsAside, GradientStamps
from autobatch.step.workload import Workload
from autobatch.training.accumulation import Accumulation, UpdateFunction
from autobatch.training.accumulation_state import AccumulationState
from autobatch.training.loss_denominators import DividedLoss
from autobatch.training.micro_batches import MicroBatch, find_least_size, join
from autobatch.training.transaction import Transaction

__all__ = ["LockstepAccumulation"]


@dataclass
class LockstepAccumulation(Accumulation):
    """Accumulates the gradients of one workload whose parameters are sharded, batch after batch.

    A forward pass that is dropped keeps the micro-batches before it; a backward pass that is dropped does not, since
    some sharded gradients have its part by then.
    """

    _shared: ShardedStep | None = None
    _spare: Layout | None = None
    _is_short: bool = False
    _ended_in: str = ""
    _zeros: Sequence[torch.Tensor] = ()
    _states_none: bool = False  # whether the step returns its loss alone, so that no micro-batch counts for nothing

    def __post_init__(self) -> None:
        """End the forward pass where the user's step returns."""
        super().__post_init__()
        self.leaves_are_known = True  # a graph ends at unsharded parameters, which are in neither model nor optimizer
        self._inner: Workload = self.workload
        self.workload = self._inner.around(self._run_forward, weigh=self._inner.weigh)

    @property
    def _lockstep(self) -> Lockstep:
        assert self._shared is not None  # noqa: S101 - narrows for mypy
        return self._shared.lockstep

    def run(
        self,
        batches: Sequence[Layout],
        largest: int,
        update: UpdateFunction | None = None,
        shared: SharedStep | None = None,
    ) -> AccumulationState | None:
        """Accumulate as ``Accumulation.run`` does, in lockstep with the other ranks."""
        assert isinstance(shared, ShardedStep)  # noqa: S101 - narrows for mypy
        self._shared = shared
        try:
            if self._spare is None and batches:
                self._spare = self.try_twice("copying a sample", _copy_samples, batches[0], self.smallest)
            return super().run(batches, largest, update, shared)
        finally:
            self._shared = None

    def _run_forward(self, _: nn.Module, samples: Any) -> Any:
        if self._states_none:
            returned = self._inner.call_step(samples)
        else:
            with _collect_zeros(self._inner.model) as self._zeros:
                returned = self._inner.call_step(samples)
            self._states_none = type(returned) is torch.Tensor
        self._lockstep.start("backward")
        return returned

    def _run_micro_batches(self, progress: AccumulationState, transaction: Transaction) -> str | None:
        """Run those of this rank, and passes that count for nothing where another rank has more."""
        try:
            spares = self._agree_on_number(progress) - _count(progress)
            reason = super()._run_micro_batches(progress, transaction)
            if reason is None and spares > 0:
                reason = self._run_spares(spares, transaction)
            if reason is None:
                self._lockstep.finish()
                return None
            self._is_short = True
        except OtherRankShort as error:
            reason, self._is_short = str(error), False
        except BaseException as error:
            self._lockstep.abandon(error)
            raise
        # Only now, after the ``except`` block, are the frames of the failed pass gone.
        self._ended_in = self._lockstep.drop(reason if self._is_short else None)
        return reason

    def _open(
        self, shared: SharedStep, progress: AccumulationState, batches: Sequence[Layout], aside: GradientsAside
    ) -> None:
        super()._open(shared, progress, batches, aside)
        progress.denominators = progress.denominators.with_common_unit()

    def _agree_on_number(self, progress: AccumulationState) -> int:
        """How many micro-batches every rank runs; this one's samples are divided among so many where that is more."""
        assert self._shared is not None  # noqa: S101 - narrows for mypy
        own = _count(progress)
        with deferred_interrupts():
            number = self._shared.agree_on(own)
            if number:  # from here on the others are in it
                self._lockstep.start("forward")
        if 0 < own < number:
            ranges = join(progress.todo)
            samples = sum(stop - start for _, start, stop in ranges)
            smaller = self._cut(ranges, max(self.smallest, -(-samples // number)))
            if sum(micro_batch.counts for micro_batch in smaller) <= number:
                progress.retry_with(smaller)
        return number

    def _run_micro_batch(
        self, micro_batch: MicroBatch, progress: AccumulationState, stamps: GradientStamps
    ) -> tuple[DividedLoss | None, Any]:
        self._lockstep.start("forward")
        divided, aux = super()._run_micro_batch(micro_batch, progress, stamps)
        if divided is None:  # the step has counted nothing, but the other ranks run their backward pass
            _run_backward(self._zeros)
        self._zeros = []
        if self._sums.hooks:
            self._sums.take_in(stamps.parameters)  # torch calls no hook of a sharded parameter
        return divided, aux

    def _find_apart(self) -> Sequence[torch.Tensor]:
        return gathered_tensors(self.workload.model)

    def _run_spares(self, number: int, transaction: Transaction) -> str | None:
        """Run passes whose gradient is 0; returns why memory ended."""
        handled = sys.exc_info()[1]
        if self._spare is None:
            raise InvalidBatch(
                "this rank has no samples, and had none before: parameters are sharded, so each rank has to run the "
                "model; give it at least one sample in its first step"
            )
        try:
            with self.workload.guard(transaction.parameters):
                for _ in range(number):
                    self._run_spare(self._spare, transaction)
        except Exception as error:
            if isinstance(error, AutobatchError) or not is_oom(error, handled=handled):
                raise
            return describe_error(error, handled=handled)
        return None

    def _run_spare(self, spare: Layout, transaction: Transaction) -> None:
        self._lockstep.start("forward")
        here = self._state.begin_micro_batch(transaction.start)
        (micro_batch,) = self._cut([(spare, 0, spare.count)], None)
        with _collect_zeros(self.workload.model) as zeros:
            self.workload.call_step(self._move(micro_batch))
        _run_backward(zeros)
        here.restore()

    def _recover(self, progress: AccumulationState, transaction: Transaction, reason: str) -> None:
        """Go back with all other ranks, and cut this one's samples smaller where its own memory has ended."""
        assert self._shared is not None  # noqa: S101 - narrows for mypy
        ran_spare = self._is_short and not _count(progress)
        if progress.todo:
            progress.fail()
        divides = not self._is_short or (
            not ran_spare and find_least_size(join(progress.todo), self.smallest) < progress.failed_size
        )
        can_keep = self._ended_in == "forward" and divides and transaction.can_keep(progress)
        keeps = self._shared.agree_to_keep(can_keep=can_keep)
        transaction.rewind(progress, reason, can_divide_rest=keeps)
        self.device.reclaim()
        if ran_spare:
            raise DoesNotFit(
                f"memory ended in a micro-batch of {self.smallest} that counts for nothing, which this rank runs as "
                f"others have more ({reason}); everything is as before the step"
            )
        if self._is_short:
            self._divide_anew(progress, reason)


def _count(progress: AccumulationState) -> int:
    """Micro-batches that will be run: one in which nothing counts is not."""
    return sum(micro_batch.counts for micro_batch in progress.todo)


def _run_backward(zeros: Sequence[torch.Tensor]) -> None:
    """A backward pass whose gradients are 0."""
    if not zeros:
        raise InvalidStep(
            "step() did not call the model, or it returned no tensor with a graph; parameters are sharded, so each "
            "micro-batch has to run a backward pass: return the loss of what the model has returned"
        )
    sum(zeros[1:], start=zeros[0]).backward()


def _copy_samples(layout: Layout, count: int) -> Layout:
    """The first samples of a batch, for a step in which this rank has none."""
    samples = layout.take(0, min(count, layout.count))
    return describe(map_tensors(samples, lambda tensor: tensor.detach().clone()), like=layout)


@contextmanager
def _collect_zeros(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """For what the model returns inside the block: 0, with its graph.

    Not made of the loss: one whose labels are all ignored is nan, and so is its gradient times 0. What a sum keeps for
    its backward pass is a shape.
    """
    zeros: list[torch.Tensor] = []

    def collect(_: nn.Module, __: Any, output: Any) -> None:
        zeros.extend(tensor.sum() * 0 for tensor in tensors_of(output) if tensor.requires_grad)

    handle = model.register_forward_hook(collect)
    try:
        yield zeros
    finally:
        handle.remove()
