"""Accumulates the gradient of a model with sharded parameters: every rank runs as many micro-batches, in lockstep."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from autobatch.batch.cut import Group
from autobatch.batch.samples import Layout, MicroBatch, describe
from autobatch.batch.tree import map_tensors
from autobatch.distributed.sharded import (
    DIFFERS,
    ONE_SAMPLE,
    ModelOutput,
    PassDiffers,
    PassDropped,
    Passes,
    ShardedStep,
    collect_outputs,
    edges_of,
    find_reached,
    gathered_tensors,
    is_tried,
    keeping_parameters,
    run_zero_backward,
    unsharded_parameters,
)
from autobatch.distributed.shared_step import SharedStep
from autobatch.errors import AutobatchError, InvalidArgument
from autobatch.memory.oom import describe_error, is_oom, try_twice
from autobatch.records import IN_EACH
from autobatch.step.losses import losses_of
from autobatch.step.model_info import refuses_one_sample
from autobatch.step.workload import Workload
from autobatch.training.accumulation_state import AccumulationState, Shortage
from autobatch.training.given_backward import Backward
from autobatch.training.rank_accumulation import RankAccumulation
from autobatch.undo.interrupts import deferred_interrupts
from autobatch.undo.undo import Undo

_SPARE = 2
"""Samples kept for passes that add nothing: two, as a model may refuse one."""


@dataclass
class LockstepAccumulation(RankAccumulation):
    """Accumulates the gradients of one workload with sharded parameters, batch after batch.

    Ranks run equally many micro-batches; one with fewer runs passes whose gradient is 0. After a dropped pass all ranks
    restore the beginning of the step and run all their samples again.
    """

    _shared: ShardedStep | None = None
    _own_totals: tuple[Mapping[str, float], int] = field(default_factory=lambda: ({}, 0))
    _spare: Layout | None = None
    _is_short: bool = False
    _outputs: Sequence[ModelOutput] = ()
    _losses: Mapping[str, GradientEdge] = field(default_factory=dict)
    _runs_spare: bool = False
    _now: tuple[MicroBatch, AccumulationState] | None = None
    _given_backward: Backward | None = None
    _states_none: bool = False  # whether the step returns one loss, which counts in every micro-batch

    def __post_init__(self) -> None:
        """End the forward pass where the user's step returns."""
        super().__post_init__()
        self.records = self.records and is_tried()  # what torch writes into cannot be told from what the step does
        self._given_backward, self.backward = self.backward, self._call_backward
        self.stand_ins = partial(unsharded_parameters, self.workload.model)
        self._inner: Workload = self.workload
        self.workload = self._inner.around(self._run_forward, weigh=self._inner.weigh)

    @property
    def _passes(self) -> Passes:
        assert self._shared is not None  # noqa: S101 - narrows for mypy
        return self._shared.passes

    def record(self) -> Undo:
        """Record as ``Accumulation`` does; gathered parameters cannot be told from others in an untried release."""
        undo = super().record()
        self.leaves_are_known = self.leaves_are_known or not is_tried()
        return undo

    def begin(
        self, batches: Sequence[Layout], largest: int, undo: Undo, shared: SharedStep | None = None
    ) -> AccumulationState:
        """Begin as ``Accumulation`` does, and keep a few samples for passes that add nothing."""
        assert isinstance(shared, ShardedStep)  # noqa: S101 - narrows for mypy
        self._shared = shared
        if self._spare is None and batches:
            count = max(_SPARE, self.smallest)
            self._spare = try_twice(self.device.reclaim, "copying a sample", _copy_samples, batches[0], count)
        return super().begin(batches, largest, undo, shared)

    def _end(self, undo: Undo) -> None:
        super()._end(undo)
        self._shared = None

    def _call_inner(self, samples: Any) -> Any:
        return self._inner.call_step(samples) if self._is_watched else self._inner.step(self._inner.model, samples)

    def _run_forward(self, _: nn.Module, samples: Any) -> Any:
        if self._states_none and not self._runs_spare:
            returned = self._call_inner(samples)
        else:
            with collect_outputs(self._inner.model) as outputs:
                returned = self._call_inner(samples)
            loss = returned[0] if isinstance(returned, tuple) and returned else returned
            self._outputs, self._losses = outputs, edges_of(losses_of(loss))
            self._states_none = isinstance(loss, torch.Tensor)
        self._passes.start("backward")
        return returned

    def attempt(self, progress: AccumulationState, undo: Undo) -> Shortage | None:
        """Run this rank's micro-batches, and passes that add nothing if another rank has more of them."""
        shortage, again = None, None
        try:
            spares = self._agree_on_number(progress) - _count(progress)
            shortage = super().attempt(progress, undo)
            if shortage is None and spares > 0:
                shortage = self._run_spares(spares, progress, undo)
            if shortage is None:
                self._passes.finish()
                return None
            reason = shortage.reason
        except PassDropped as error:
            reason = str(error)
        except BaseException as error:
            reason = str(error)
            if isinstance(error, PassDiffers):
                again = DIFFERS
            elif self.smallest == 1 and refuses_one_sample(error) and self._passes.running is not None:
                again = ONE_SAMPLE
            elif (lost := self._passes.abandon(error)) is not None:
                raise lost from error
            else:
                raise
        finally:
            self._forget_graph()
        # Only here, after the ``except`` block, has the traceback let go of the failed pass's tensors.
        self._passes.drop(short=None if shortage is None else reason, again=again)
        if shortage is None:
            return self._follow(progress, undo, reason)
        self._is_short = self._passes.summing == IN_EACH
        return shortage if self._is_short else self._give_back_sums(shortage)

    def _follow(self, progress: AccumulationState, undo: Undo, reason: str) -> Shortage:
        """Begin again because another rank does, or because the pass differs."""
        self._is_short, self.leaves_are_known = False, False  # the next attempt finds the trained tensors again
        undo.refuse_lost(reason)
        if progress.micro_batches and "short" in self._passes.causes:
            progress.fail()
        else:
            progress.restart()
        return Shortage(failed_size=0, reason=reason)

    def _give_back_sums(self, shortage: Shortage) -> Shortage:
        """Run the same micro-batches again, and hold no gradients between them: that may be enough."""
        assert self._shared is not None  # noqa: S101 - narrows for mypy
        self._shared.summing = IN_EACH
        return replace(shortage, has_held_sums=True)

    def _forget_graph(self) -> None:
        self._outputs, self._losses = (), {}

    def _open(self, _: SharedStep, progress: AccumulationState) -> None:
        """Keep this rank's totals: the ranks exchange them with their numbers of micro-batches."""
        self._own_totals = progress.loss.weights, progress.loss.samples

    def _agree_on_number(self, progress: AccumulationState) -> int:
        """Agree on totals and the number of micro-batches; divide this rank's samples among more if needed."""
        assert self._shared is not None  # noqa: S101 - narrows for mypy
        own = _count(progress)
        with deferred_interrupts():
            number, totals = self._shared.agree_on_number(own, *self._own_totals)
            progress.loss.share(*totals)
            progress.loss.use_common_unit()
            if number:  # from the exchange on, the other ranks are in the pass
                self._passes.start("forward")
        if 0 < own < number:
            samples = sum(micro_batch.size for micro_batch in progress.micro_batches)
            smaller = self._cut(progress.groups, max(self.smallest, -(-samples // number)))
            if sum(micro_batch.counts for micro_batch in smaller) <= number:
                progress.begin_again(smaller)
        return number

    def _run_micro_batch(self, micro_batch: MicroBatch, progress: AccumulationState) -> Any:
        self._passes.start("forward")
        self._now = micro_batch, progress
        aux = super()._run_micro_batch(micro_batch, progress)
        self._now = None
        self._forget_graph()
        if self._sums.hooks:
            self._sums.add_gradients(self._parameters)  # torch calls no hook of a sharded parameter
        return aux

    def _run_backward(self, part: torch.Tensor | None) -> None:
        if part is not None:
            super()._run_backward(part)
        else:  # no sample counts here, but the other ranks run their backward pass
            assert self._now is not None  # noqa: S101 - narrows for mypy
            run_zero_backward(self._find_counted(self._now[1]))

    def _call_backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass, with zeros for terms that have no weight here: they may have some on other ranks."""
        assert self._now is not None  # noqa: S101 - narrows for mypy
        micro_batch, progress = self._now
        absent = {name for name, weight in micro_batch.weights.items() if not weight}
        zeros = self._find_counted(progress, absent) if absent else []
        if self._given_backward is None:
            run_zero_backward(zeros, loss)
        elif not zeros:
            self._given_backward(loss)
        else:
            named = ", ".join(sorted(absent))
            raise InvalidArgument(
                f"backward= cannot be used with sharded parameters if a term ({named}) counts for nothing on one "
                f"rank: leave backward= out"
            )

    def _find_counted(self, progress: AccumulationState, names: Container[str] | None = None) -> list[ModelOutput]:
        """Find the model's outputs in the losses of these names, as far as they count on any rank."""
        totals = progress.loss.weights
        counted = [
            edge for name, edge in self._losses.items() if totals.get(name, 1) and (names is None or name in names)
        ]
        return find_reached(counted, self._outputs)

    def _find_uncopied(self) -> Sequence[torch.Tensor]:
        return [*super()._find_uncopied(), *gathered_tensors(self.workload.model)]

    def _run_spares(self, number: int, progress: AccumulationState, undo: Undo) -> Shortage | None:
        """Run passes whose gradient is 0; return the shortage if memory ran out."""
        handled = sys.exc_info()[1]
        if self._spare is None:
            raise InvalidArgument(
                "this rank has had no samples yet, but with sharded parameters each rank has to run the model: give it "
                "at least one sample in its first step"
            )
        self._runs_spare = True
        try:
            with self._watch(undo, progress) if self._is_watched else nullcontext():
                for _ in range(number):
                    self._run_spare(self._spare, progress)
        except Exception as error:
            if isinstance(error, AutobatchError) or not is_oom(error, handled=handled):
                raise
            reason = describe_error(error, handled=handled)
        else:
            return None
        finally:
            self._runs_spare = False
        undo.refuse_lost(reason)
        progress.restart()
        return Shortage(failed_size=self.smallest, reason=reason, least_size=self.smallest)

    def _run_spare(self, spare: Layout, progress: AccumulationState) -> None:
        self._passes.start("forward")
        here = self._record()
        (micro_batch,) = self._cut([Group(spare, range(self.smallest))], self.smallest)
        self._call_step(self._take(micro_batch))
        run_zero_backward(self._find_counted(progress))
        self._forget_graph()
        with keeping_parameters(self.workload.model):
            here.restore()

    def cut_again(self, progress: AccumulationState, largest: int) -> None:
        """Cut smaller micro-batches after a shortage on this rank; else the same, or larger ones for the model."""
        if ONE_SAMPLE in self._passes.causes:
            self.smallest = 2
        if self._is_short:
            super().cut_again(progress, largest)
        elif progress.micro_batches:
            sizes = progress.micro_batch_sizes
            is_too_small = min(sizes) < self.smallest
            progress.begin_again(self._cut(progress.groups, max(sizes)) if is_too_small else progress.micro_batches)


def _count(progress: AccumulationState) -> int:
    """Return the number of micro-batches that run: those in which something counts."""
    return sum(micro_batch.counts for micro_batch in progress.micro_batches)


def _copy_samples(layout: Layout, count: int) -> Layout:
    """Copy the first samples of a batch, repeated if it has fewer, for steps in which this rank has none."""
    samples = map_tensors(layout.grown(count).batch, lambda tensor: tensor.detach().clone())
    return describe(samples, layout.lists, count)
