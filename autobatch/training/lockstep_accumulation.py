"""Accumulates the gradient of a model with sharded parameters: every rank runs as many micro-batches, in lockstep."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autobatch._user_errors import contextmanager
from autobatch.batch.cut import Group
from autobatch.batch.samples import Layout, MicroBatch, describe
from autobatch.batch.tree import map_tensors, tensors_of
from autobatch.distributed.sharded.lockstep import DIFFERS, ONE_SAMPLE, Lockstep, PassDiffers, PassDropped
from autobatch.distributed.sharded.model import gathered_tensors, sharded_modules, unsharded_parameters
from autobatch.distributed.sharded.step import ShardedStep
from autobatch.distributed.shared_step import SharedStep
from autobatch.errors import AutobatchError, InvalidArgument
from autobatch.memory.oom import describe_error, is_oom, try_twice
from autobatch.step.losses import losses_of
from autobatch.step.model_info import refuses_one_sample
from autobatch.step.workload import Workload
from autobatch.training.accumulation import Accumulation
from autobatch.training.accumulation_state import AccumulationState, Shortage
from autobatch.training.given_backward import Backward
from autobatch.undo.interrupts import deferred_interrupts
from autobatch.undo.undo import Undo

_SPARE = 2
"""Samples kept for passes that add nothing: two, as a model may refuse one."""


@dataclass
class LockstepAccumulation(Accumulation):
    """Accumulates the gradients of one workload with sharded parameters, batch after batch.

    Ranks run equally many micro-batches; one with fewer runs passes whose gradient is 0. After a dropped pass all ranks
    restore the beginning of the step and run all their samples again.
    """

    _shared: ShardedStep | None = None
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
        self._given_backward, self.backward = self.backward, self._call_backward
        self.stand_ins = partial(unsharded_parameters, self.workload.model)
        self._inner: Workload = self.workload
        self.workload = self._inner.around(self._run_forward, weigh=self._inner.weigh)

    @property
    def _lockstep(self) -> Lockstep:
        assert self._shared is not None  # noqa: S101 - narrows for mypy
        return self._shared.lockstep

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
        self._lockstep.start("backward")
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
                self._lockstep.finish()
                return None
            reason = shortage.reason
        except PassDropped as error:
            reason = str(error)
        except BaseException as error:
            reason = str(error)
            if isinstance(error, PassDiffers):
                again = DIFFERS
            elif self.smallest == 1 and refuses_one_sample(error) and self._lockstep.running is not None:
                again = ONE_SAMPLE
            else:
                self._lockstep.abandon(error)
                raise
        finally:
            self._forget_graph()
        # Only here, after the ``except`` block, has the traceback let go of the failed pass's tensors.
        self._lockstep.drop(short=None if shortage is None else reason, again=again)
        self._is_short = shortage is not None
        if shortage is not None:
            return shortage
        self.leaves_are_known = False  # the next attempt finds the trained tensors again
        undo.refuse_lost(reason)
        if progress.micro_batches and "short" in self._lockstep.causes:
            progress.fail()
        else:
            progress.restart()
        return Shortage(failed_size=0, reason=reason)

    def _forget_graph(self) -> None:
        self._outputs, self._losses = (), {}

    def _open(self, shared: SharedStep, progress: AccumulationState, batches: Sequence[Layout], undo: Undo) -> None:
        super()._open(shared, progress, batches, undo)
        progress.loss.use_common_unit()

    def _agree_on_number(self, progress: AccumulationState) -> int:
        """Agree on the number of micro-batches of every rank; divide this rank's samples among more if needed."""
        assert self._shared is not None  # noqa: S101 - narrows for mypy
        own = _count(progress)
        with deferred_interrupts():
            number = self._shared.agree_on_number(own)
            if number:  # from the exchange on, the other ranks are in the pass
                self._lockstep.start("forward")
        if 0 < own < number:
            samples = sum(micro_batch.size for micro_batch in progress.micro_batches)
            smaller = self._cut(progress.groups, max(self.smallest, -(-samples // number)))
            if sum(micro_batch.counts for micro_batch in smaller) <= number:
                progress.begin_again(smaller)
        return number

    def _run_micro_batch(self, micro_batch: MicroBatch, progress: AccumulationState) -> Any:
        self._lockstep.start("forward")
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
        self._lockstep.start("forward")
        here = self._record()
        (micro_batch,) = self._cut([Group(spare, range(self.smallest))], self.smallest)
        self._call_step(self._take(micro_batch))
        run_zero_backward(self._find_counted(progress))
        self._forget_graph()
        here.restore()

    def cut_again(self, progress: AccumulationState, largest: int) -> None:
        """Cut smaller micro-batches after a shortage on this rank; else the same, or larger ones for the model."""
        if ONE_SAMPLE in self._lockstep.causes:
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


# A micro-batch that counts for nothing on this rank runs a backward pass with zeros. They flow from the model's
# outputs, not from the loss: a loss whose labels are all ignored is nan, and nan times 0 is nan.


class ModelOutput(NamedTuple):
    """A tensor with a graph that a model has returned, as a place in the graph: its memory is not held.

    Attributes:
        edge: The place.
        scalar: Its value where it has no dimension: a loss that the model has computed itself.
    """

    edge: GradientEdge
    scalar: torch.Tensor | None


@contextmanager
def collect_outputs(model: nn.Module) -> Iterator[list[ModelOutput]]:
    """Collect what a sharded model, or a module of it that is called alone, returns inside the block."""
    outputs: list[ModelOutput] = []
    running: list[nn.Module] = []

    def enter(module: nn.Module, _: Any) -> None:
        running.append(module)

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        del running[-1:]
        if not running:
            outputs.extend(_describe(tensor) for tensor in tensors_of(output) if tensor.requires_grad)

    handles = []
    for module in sharded_modules(model):
        if module is model or module._compiled_call_impl is None:  # noqa: SLF001 - a hook would compile it again
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def edges_of(losses: Mapping[str, torch.Tensor]) -> dict[str, GradientEdge]:
    return {name: get_gradient_edge(loss) for name, loss in losses.items() if loss.requires_grad}


def find_reached(losses: Iterable[GradientEdge], outputs: Sequence[ModelOutput]) -> list[ModelOutput]:
    """Through which outputs a backward pass of these losses goes.

    Takes as long as a forward pass where not all are.
    """
    wanted = {(output.edge.node, output.edge.output_nr): output for output in outputs}
    found: dict[int, ModelOutput] = {}
    waiting: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in losses]
    seen = set()
    while waiting and len(found) < len(wanted):
        place = waiting.pop()
        if place in wanted:
            found[id(wanted[place])] = wanted[place]
        if place[0] is not None and place[0] not in seen:
            seen.add(place[0])
            waiting += place[0].next_functions
    return [output for output in outputs if id(output) in found]


def run_zero_backward(reached: Sequence[ModelOutput], loss: torch.Tensor | None = None) -> None:
    """A backward pass with zeros from these outputs, and with the gradient of a loss beside them.

    If the model has computed a loss from another output, only that output gets zeros.
    """
    outputs = _leave_out_losses(reached)
    if not outputs and loss is None:
        raise InvalidArgument(
            "the step did not call the model, or it returned no tensor with a graph; parameters are sharded, so each "
            "micro-batch has to run a backward pass: return the loss of what the model has returned"
        )
    if not all(output.scalar is None or bool(output.scalar.isfinite()) for output in outputs):
        raise InvalidArgument(
            "the model returns only its loss, and the loss is nan or infinite in a micro-batch that counts for nothing "
            "on this rank, while others run theirs: let the model return its outputs, too"
        )
    roots = [output.edge for output in outputs]
    zeros = [_make_zeros(edge) for edge in roots]
    if loss is None:
        torch.autograd.backward(roots, zeros)
    else:
        torch.autograd.backward([get_gradient_edge(loss), *roots], [torch.ones_like(loss), *zeros])


def _describe(tensor: torch.Tensor) -> ModelOutput:
    return ModelOutput(get_gradient_edge(tensor), None if tensor.ndim else tensor.detach())


def _leave_out_losses(reached: Sequence[ModelOutput]) -> list[ModelOutput]:
    others = [output for output in reached if output.scalar is None]
    return [
        output for output in reached if output.scalar is None or not (others and find_reached([output.edge], others))
    ]


def _make_zeros(edge: GradientEdge) -> torch.Tensor:
    """A gradient of 0 for it, of one element's memory."""
    made: Any = edge.node
    metadata = made._input_metadata[edge.output_nr]  # noqa: SLF001 - as torch.autograd.backward reads it
    return torch.zeros((), dtype=metadata.dtype, device=metadata.device).expand(tuple(metadata.shape))
