"""Accumulates the gradient of a whole batch over micro-batches: all of it, or nothing happened.

A trial measures this code and a training step runs it. If a micro-batch runs out of memory, everything is restored to
the beginning of the step and all samples run again, in smaller micro-batches.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeVar

import torch

from autobatch._user_errors import contextmanager
from autobatch.batch.layout import Layout
from autobatch.batch.trimming import SortedLayout
from autobatch.distributed.shared_step import SharedStep
from autobatch.errors import AutobatchError, DoesNotFit, InvalidArgument
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.step.gradient_hooks import HOOKS_OF, find_hooks
from autobatch.step.losses import add_counts, counts_of
from autobatch.step.model_info import is_compiled
from autobatch.step.workload import Workload, split_output
from autobatch.torch_internals.backward import begin_in_engine, can_begin_in_engine
from autobatch.training.accumulation_state import AccumulationState, Shortage
from autobatch.training.batch_mutation import WatchedBatch, refuse_write
from autobatch.training.given_backward import Backward
from autobatch.training.loss_denominators import Denominators, DividedLoss
from autobatch.training.micro_batches import MicroBatch, check_additive, cut, find_least_size, join, refuse_graphs
from autobatch.training.stated_counts import StatedCounts, check_counts, find_doubtful, read_stated
from autobatch.training.transaction import Transaction
from autobatch.undo.gradients import Float32Sums, GradientsAside, GradientStamps
from autobatch.undo.module_state import ModuleState
from autobatch.undo.sparse_gradients import coalesce_gradients, widen_gradients
from autobatch.undo.undo import StepState

__all__ = ["Accumulation", "UpdateFunction"]

UpdateFunction = Callable[[Callable[[], None]], None]
"""Makes the update: prepares, calls the function that it was given, then begins what cannot be undone."""

_LOG = logging.getLogger("autobatch")
_T = TypeVar("_T")
_PARAMS, _VERSION = itemgetter("params"), attrgetter("_version")
_UNDISTURBED = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - a subclass would be asked in Python
_COUNT, _HOME, _PAIR_SIZE = attrgetter("count"), attrgetter("home"), attrgetter("spec.pair_size")
_COPYING = "copying what the step changes, such as buffers"


@dataclass
class Accumulation:
    """Accumulates the gradients of one workload on one device, batch after batch.

    Attributes:
        workload: Model, step, weights, optimizer.
        device: Where micro-batches go.
        shrink: Called after each shortage; returns the new largest micro-batch, smaller than the failed one, or raises.
        scale: Applied to each micro-batch's loss before its backward pass: a ``GradScaler``'s ``scale``.
        in_float32: Whether gradients in bfloat16 and float16 of several micro-batches are added up in float32.
        smallest: The fewest samples that the model can run; no batch is cut into smaller micro-batches.
        leaves_are_known: Whether a graph was searched for parameters outside model and optimizer already.
        stand_ins: What stands for parameters of the model in a graph: those of ``fully_shard`` are gathered.
        known_state: What its steps are known to change; default: nothing yet.
        state: The same, learnt as steps run.
        stands_for: Micro-batches of the step of which a trial runs the first two: sparse gradients get the rows that
            all of them may have. 0: all are run.
        keep: Objects of the user that the step changes; see ``undo.user_objects``.
        had_gradients: Whether gradients from before the last batch have become part of its gradient.
        owns_batches: Whether the batches are copies that the user does not see.
        backward: Called with each micro-batch's loss, scaled, in place of ``loss.backward()``.
        is_training: Whether these are a Runner's steps, between which the user may change anything. Then hooks on
            gradients of parameters that were registered between two steps are refused (those that the step itself
            registers are judged by a comparison, ``exactness``), and graphs are searched again now and then.
        counted_per_sample: What the last step's losses were divided by, for each sample, if it stated its count; else
            0. The next step's unit is chosen by it, and with it how a narrow loss rounds.
    """

    workload: Workload
    device: Device
    shrink: Callable[[Shortage], int]
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None
    in_float32: bool = True
    smallest: int = 1
    leaves_are_known: bool = False
    stand_ins: Callable[[], Sequence[torch.Tensor]] = tuple
    known_state: StepState | None = None
    stands_for: int = 0
    keep: Sequence[Any] = ()
    had_gradients: bool = False
    owns_batches: bool = False
    backward: Backward | None = None
    is_training: bool = False
    counted_per_sample: float = 0.0
    _hooks: frozenset[int] = frozenset()
    _is_additive: bool = False
    _sums: Float32Sums = field(default_factory=Float32Sums)
    _parameters: Sequence[torch.Tensor] = ()
    _seen_modules: ModuleState | None = None
    _seen_held: Sequence[torch.Tensor] = ()
    _begins_in_engine: bool = False
    _stated: StatedCounts = field(default_factory=StatedCounts)

    def __post_init__(self) -> None:
        """Find out what steps change, where ``known_state`` does not say it."""
        self._home = self.device.torch_device
        compiled = is_compiled(self.workload.model, self.workload.step)
        self.state = self.known_state or StepState(
            self.workload.model, self.device.torch_device, self.keep, records=not compiled
        )

    def run(
        self,
        batches: Sequence[Layout],
        largest: int,
        update: UpdateFunction | None = None,
        shared: SharedStep | None = None,
    ) -> AccumulationState | None:
        """Accumulate the gradient of the mean over all samples of ``batches`` into ``.grad``.

        Args:
            batches: One batch or several that belong together, described; each is divided by itself.
            largest: The most samples a micro-batch may have.
            update: Called last, when ``.grad`` holds the sum, with a function that it must call right before it begins
                what cannot be undone. An error before that call undoes everything; after it nothing is restored, and
                ``.grad`` is ``None`` at the end. Without ``update`` the gradients are the result, in the tensors that
                held earlier ones.
            shared: The step of this rank beside the others, where there are several.

        Returns:
            The loss and the committed sizes. Earlier gradients are added, as ``backward`` would.
            ``None`` where all weights are 0, so that a mean has no value: then nothing has happened.

        Raises:
            InvalidArgument: A parameter has got a gradient hook; ``weigh`` does not count, trimming changes a sample's
                length, or a batch carries a graph; the step wrote into its batch or into gradients, trains what is in
                neither model nor optimizer, or returned no valid loss or count, or counts that do not add up.
            DoesNotFit: A copy of the model's buffers does not fit, or ``weigh`` or ``lengths``, or what follows the
                last backward pass. Errors of ``shrink`` and ``update`` pass through.
        """
        start = self.try_twice(_COPYING, self.state.begin)
        parameters = self._find_parameters(start.modules)
        transaction = Transaction(self.state, start, self.workload, parameters, self._sums)
        try:
            with transaction:
                self.had_gradients = transaction.aside.are_there
                if self.had_gradients:
                    transaction.set_aside()
                progress = self._begin(batches, largest)
                if shared is not None:
                    self._open(shared, progress, batches, transaction.aside)
                while (reason := self._run_micro_batches(progress, transaction)) is not None:
                    # Only now, after the ``except`` block, are the frames of the failed attempt gone.
                    self._recover(progress, transaction, reason)
                transaction.end_micro_batches()
                is_empty = progress.loss is None and shared is None
                reason = None if is_empty else self._complete(progress, transaction, update, shared)
        except BaseException:
            transaction.__exit__()  # nothing is left to do, unless an interrupt came as the block ended
            raise
        finally:
            if self.is_training:
                with _UNDISTURBED():  # written out: a function of ours would be one more call in every step
                    if any(map(any, map(HOOKS_OF, parameters))):
                        self._hooks = find_hooks(parameters)
        if reason is None:
            return None if progress.loss is None else progress
        self.device.reclaim()
        raise DoesNotFit(
            f"memory ended after the last backward pass, before the update ({reason}); everything is as before the "
            f"step: free memory or give fit() more headroom="
        )

    def _find_parameters(self, modules: ModuleState) -> Sequence[torch.Tensor]:
        """The workload's parameters, listed again where modules or the optimizer hold other ones.

        Raises:
            InvalidArgument: One has got a gradient hook since the last step.
        """
        groups = self.workload.optimizer.param_groups if self.workload.optimizer is not None else ()
        held = [*chain.from_iterable(map(_PARAMS, groups))]
        is_same = len(held) == len(self._seen_held) and all(map(is_, held, self._seen_held))
        if modules is not self._seen_modules or not is_same:
            self._parameters = self.workload.parameters()
            self._seen_modules, self._seen_held = modules, held
        if self.is_training:
            with _UNDISTURBED():
                if any(map(any, map(HOOKS_OF, self._parameters))):
                    self.workload.check_hooks(self._hooks)
        return self._parameters

    def _run_micro_batches(self, progress: AccumulationState, transaction: Transaction) -> str | None:
        """Run the micro-batches that are not finished; returns why memory ended, with no reference to the error."""
        state, stamps, todo = self.state, transaction.stamps, progress.todo
        if not todo:  # a rank without samples
            return None
        handled = sys.exc_info()[1]  # the caller may be handling an OOM of its own, which is in every error's context
        is_watched = state.is_looked_over or self.device.micro_batch(todo[0].size) is not None
        if self.in_float32 and len(todo) > 1:
            self._sums.begin(stamps.parameters)
        try:
            with self.workload.guard(transaction.parameters):
                while todo:
                    if not todo[0].counts:  # 0 x nan is nan: one whose labels are all ignored must not be run
                        progress.finish(None, None)
                        continue
                    # No variable stays: nothing of a micro-batch is held but what the user put beside its loss.
                    if is_watched:
                        with self.device.micro_batch(todo[0].size) or nullcontext():
                            with self._watch(todo[0], transaction):
                                ran = self._run_micro_batch(todo[0], progress, stamps)
                            progress.finish(*ran)  # not watched: it writes into the sum of the losses
                            del ran
                    else:
                        progress.finish(*self._run_micro_batch(todo[0], progress, stamps))
                    stamps.renew()
                    if len(progress.done) == 1 and transaction.find_made_parameters() and self.in_float32 and todo:
                        self._sums.begin(stamps.parameters)
        except Exception as error:
            if isinstance(error, AutobatchError) or not is_oom(error, handled=handled):
                progress.note_where(error, self.workload.called_by)
                raise
            if [*map(_VERSION, progress.batch)] != progress.versions and not state.is_looked_over:
                refuse_write(stays=not self.owns_batches)
            return describe_error(error, handled=handled)
        return None

    def _recover(self, progress: AccumulationState, transaction: Transaction, reason: str) -> None:
        """Go back to the beginning of the step, and cut all samples smaller."""
        progress.fail()
        self.leaves_are_known = False  # what the step trains by now, the next attempt would train twice
        transaction.rewind(progress, reason)
        self.device.reclaim()
        self._divide_anew(progress, reason)

    def _run_micro_batch(
        self, micro_batch: MicroBatch, progress: AccumulationState, stamps: GradientStamps
    ) -> tuple[DividedLoss | None, Any]:
        """Add one micro-batch's gradient to ``.grad``; returns its part of the loss, and what is beside it."""
        progress.phase = "forward"
        samples = tuple(micro_batch.leaves) if progress.is_ready else self._move(micro_batch)
        progress.running = self.workload.named
        returned = self.workload.call_step(samples)
        progress.running = ""
        losses, aux = (returned, None) if type(returned) is torch.Tensor else split_output(returned)
        if not stamps.unchanged():
            stamps.refuse_change()
        divided = progress.denominators.divide(micro_batch, losses, progress.unit)
        progress.stated += read_stated(micro_batch, losses) if self._stated.is_due else ()
        if divided is not None:
            loss, factor = divided[:2]
            if not self.leaves_are_known:
                self.workload.check_leaves(loss, self.stand_ins())
                self.leaves_are_known = True  # going through the graph takes as long as a forward pass
            progress.phase, progress.running = "backward", "the backward pass of your loss"
            if self._begins_in_engine and type(loss) is torch.Tensor:
                # Not loss * factor: its gradient begins with the same number, and two operators less are run.
                begin_in_engine(loss, torch.full_like(loss, factor))
            else:
                loss = loss * factor if self.scale is None else self.scale(loss * factor)
                if self.backward is None:
                    loss.backward()
                else:
                    self.backward(loss)
            progress.running = ""
        if self.state.may_be_sparse or stamps.any_sparse:
            self._join_sparse_rows(progress, stamps)
        if [*map(_VERSION, progress.batch)] != progress.versions and not self.state.is_looked_over:
            refuse_write(stays=not self.owns_batches)
        return divided, aux

    @contextmanager
    def _watch(self, micro_batch: MicroBatch, transaction: Transaction) -> Iterator[None]:
        """In steps that are looked over: find what the micro-batch writes into."""
        watch: AbstractContextManager[object] = nullcontext()
        record: AbstractContextManager[object] = nullcontext()
        if self.state.is_looked_over:
            samples = micro_batch.layout.views(micro_batch.start, micro_batch.stop)
            watch = watched = WatchedBatch(samples, copies_arrays=True, is_copy=self.owns_batches)
            if self.state.is_recording:
                apart = [*transaction.stamps.tensors(), *micro_batch.layout.tensors(), *self._find_apart()]
                record = self.state.record(transaction.start, apart, watched.save)
        with watch, record:
            yield

    def _check_counts(self, progress: AccumulationState, *, is_shared: bool) -> None:
        """Refuse counts of the step's own that do not add up; a step of one micro-batch adds up none."""
        doubtful, wrong = find_doubtful(progress.stated, progress.done), ""
        if is_shared:
            self._stated.warn_of_zero_loss(doubtful)
        if is_shared or not doubtful or len(progress.done) == 1:
            return
        start = self.try_twice(_COPYING, self.state.mark)
        recorder = start.record(progress.batch)
        try:
            with torch.no_grad(), recorder:
                wrong = check_counts(doubtful, self.smallest, self._count_again)
        except Exception:  # noqa: BLE001 - these samples have run: what ends here is the comparison, not the step
            _LOG.debug("the counts that step() states could not be compared", exc_info=True)
            self._stated.warn_of_zero_loss(doubtful)
        finally:
            recorder.stop()
            start.restore()
            torch.clear_autocast_cache()  # casts that were made without a graph
        if wrong:
            raise InvalidArgument(wrong)

    def _count_again(self, samples: tuple[Layout, int, int], largest: int) -> Mapping[str, float]:
        """The sum of what the step states for these samples in micro-batches of at most so many."""
        pieces = self._cut([samples], largest)
        returned = (self.workload.call_step(self._move(piece)) for piece in pieces)
        return add_counts(counts_of(split_output(one)[0]) for one in returned)

    def _find_apart(self) -> Sequence[torch.Tensor]:
        """Memory that steps write into and that is never put back."""
        return ()

    def _move(self, micro_batch: MicroBatch) -> Any:
        """The samples of a micro-batch on the device, in containers of their own."""
        return micro_batch.layout.micro_batch(
            micro_batch.start, micro_batch.stop, micro_batch.leaves, self.device.move_tensor, self._home
        )

    def _join_sparse_rows(self, progress: AccumulationState, stamps: GradientStamps) -> None:
        """Join equal rows: torch appends those of each micro-batch to the earlier ones."""
        if self.stands_for and not progress.done:
            widen_gradients(stamps.parameters, self.stands_for)
            self._sums.widen(self.stands_for)
        if stamps.any_sparse or not progress.done or len(progress.todo) == 1:
            coalesce_gradients(stamps.parameters)

    def _complete(
        self,
        progress: AccumulationState,
        transaction: Transaction,
        update: UpdateFunction | None,
        shared: SharedStep | None,
    ) -> str | None:
        """Make ``.grad`` the whole gradient, then update; returns why memory ended before the update."""
        aside, handled = transaction.aside, sys.exc_info()[1]
        if self._stated.is_due:
            self._check_counts(progress, is_shared=shared is not None)
        begin = aside.settle if update is None else transaction.begin_update
        try:
            if shared is not None:
                if not self._combine(shared, progress):
                    return None
                begin = partial(shared.begin_update, begin)
            elif progress.unit is not None:
                self._correct(progress.correct())
            if self._sums.writes:
                self._sums.write()
            if aside.are_there:
                aside.add()
            if update is None:
                begin()
            else:
                update(begin)
        except Exception as error:
            if aside.is_final or isinstance(error, AutobatchError) or not is_oom(error, handled=handled):
                raise
            return describe_error(error, handled=handled)
        self.counted_per_sample = progress.counted_per_sample if progress.counted else 0.0
        return None

    def _open(
        self, shared: SharedStep, progress: AccumulationState, batches: Sequence[Layout], aside: GradientsAside
    ) -> None:
        """Divide by the totals of all ranks from here on."""
        own = progress.denominators
        if not own.are_exact:  # a sum that does not depend on how this rank's samples are cut, or cut anew
            own = Denominators.of(self._cut([(layout, 0, layout.count) for layout in batches], None), weighed=True)
        shared.open(own.weights, own.samples, aside.gradients())
        progress.share(shared.weights, shared.samples)

    def _combine(self, shared: SharedStep, progress: AccumulationState) -> bool:
        """Make loss and ``.grad`` those of all ranks; False where no sample of any counts."""
        parameters = self.workload.parameters()  # a forward pass may have made some
        sums = self._sums.take()
        progress.loss = shared.combine(parameters, sums, progress.loss, counted=progress.counted, unit=progress.unit)
        progress.unit = None
        return progress.loss is not None

    def _correct(self, factor: float) -> None:
        """Multiply the gradients once the true total is known; float32 sums before they are rounded."""
        if factor != 1:
            self._sums.multiply(factor)
            for parameter in self.workload.parameters():  # a forward pass may have made some
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def try_twice(self, purpose: str, action: Callable[..., _T], *arguments: Any) -> _T:
        """Do what takes little memory; where memory ends, try again after all caches are given back."""
        handled = sys.exc_info()[1]
        for _ in range(2):
            try:
                return action(*arguments)
            except Exception as error:
                if not is_oom(error, handled=handled):
                    raise
                reason = describe_error(error, handled=handled)
            self.device.reclaim()
        raise DoesNotFit(f"memory ended while {purpose} ({reason}); everything is as before the step")

    def _begin(self, batches: Sequence[Layout], largest: int) -> AccumulationState:
        tensors = [*chain.from_iterable(map(Layout.tensors, batches))]
        self._begins_in_engine = self.scale is None and self.backward is None and can_begin_in_engine()
        if self.is_training:
            self._stated.begin()
        if self.is_training and self.state.is_looked_over:
            self.leaves_are_known = False  # a step may begin later to train another network
        is_home = {*map(_HOME, batches)} == {self._home}  # which no tensor with a graph has
        if not is_home:
            refuse_graphs(tensors)
        ranges = [*zip(batches, repeat(0), map(_COUNT, batches), strict=False)]
        weighed = self.workload.weigh is not None
        micro_batches = self._cut(ranges, largest)
        if weighed and (self._stated.is_due or not self._is_additive):
            check_additive(self._cut(ranges, None), micro_batches)
            self._is_additive = True  # now and then: where it keeps counts from 0, only some batches show that
        is_ready = is_home and all(map(_PAIR_SIZE, batches))
        progress = AccumulationState(micro_batches, tensors, weighed=weighed, is_ready=is_ready)
        if self.counted_per_sample:
            progress.expect(self.counted_per_sample, is_scaled=self.scale is not None)
        return progress

    def _cut(self, ranges: Sequence[tuple[Layout, int, int]], largest: int | None) -> list[MicroBatch]:
        if self.workload.weigh is not None:
            purpose = "counting with weigh()"
        elif ranges and type(ranges[0][0]) is SortedLayout:  # then all are
            purpose = "reading lengths with lengths()"
        else:
            return cut(self.workload, ranges, largest, self.smallest)
        return self.try_twice(purpose, cut, self.workload, ranges, largest, self.smallest)

    def _divide_anew(self, progress: AccumulationState, reason: str) -> None:
        """Cut all samples into smaller micro-batches."""
        todo = progress.todo
        ranges = join(todo)
        shortage = Shortage(
            failed_size=progress.failed_size,
            reason=reason,
            least_size=find_least_size(ranges, self.smallest),
            ended_in=progress.phase,
            failed_scale=progress.failed_scale,
        )
        smaller = self._cut(ranges, self.shrink(shortage))
        check_additive(todo, smaller)
        progress.retry_with(smaller)
