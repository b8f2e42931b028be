"""Accumulates the gradient of a whole batch over micro-batches.

1. ``record`` notes everything that the step may change.
2. ``begin`` cuts the batches into micro-batches, and counts what their losses are divided by.
3. ``attempt`` runs each micro-batch: forward, divide the loss, backward. It returns why memory ran out, if it did.
4. After a shortage the caller restores the record and calls ``cut_again``; then ``attempt`` runs all samples again.
5. ``complete`` makes ``.grad`` the gradient of the whole batch, earlier gradients included.

Training (``runner``) goes through these itself, and several ranks agree before 5 (``rank_accumulation``). Trials and
comparisons call ``run``, which does not retry.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from autobatch._user_errors import contextmanager, note_where
from autobatch.batch.cut import Division, Group, cut_apart
from autobatch.batch.samples import Layout, MicroBatch
from autobatch.distributed.shared_step import SharedStep
from autobatch.errors import AutobatchError, DoesNotFit, InvalidArgument
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom, try_twice
from autobatch.step.loop_guard import find_hooks
from autobatch.step.model_info import is_compiled
from autobatch.step.totals import refuse_totals
from autobatch.step.workload import Workload, split_output
from autobatch.strategies.checkpointing import explain_recomputed
from autobatch.training.accumulation_state import AccumulationState, Shortage
from autobatch.training.batches import cut_weighed, find_least_size, refuse_larger_micro_batches
from autobatch.training.given_backward import Backward
from autobatch.training.misuse import BatchWatch, GradientWatch
from autobatch.training.stated_counts import StatedCounts, check_counts, find_doubtful, read_stated
from autobatch.training.weights import StepLoss, check_additive
from autobatch.undo.gradients import Float32Sums, join_sparse_rows
from autobatch.undo.interrupts import deferred_interrupts
from autobatch.undo.undo import Undo
from autobatch.undo.written_memory import WrittenMemory

_LOG = logging.getLogger("autobatch")

_COPYING = "copying what the step changes, such as buffers"

_WATCHED_STEPS = 2
"""Steps in which a step function is watched: what it writes into, and whether it does the training loop's work."""


@dataclass
class Accumulation:
    """Accumulates the gradients of one workload on one device, batch after batch."""

    workload: Workload
    device: Device
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None  # of each loss: a ``GradScaler``'s ``scale``
    in_float32: bool = True  # whether gradients in bfloat16 and float16 are added up in float32
    smallest: int = 1  # fewest samples that the model can run
    leaves_are_known: bool = False  # whether a graph was searched for parameters outside model and optimizer
    stand_ins: Callable[[], Sequence[torch.Tensor]] = tuple  # extra parameters: the gathered ones of ``fully_shard``
    # Micro-batches of the step that a trial imitates: sparse gradients get the rows of all, and only two are run.
    stands_for: int = 0
    share: int = 0  # samples of a planned step on this rank
    target: int = 0  # and on all
    keep: Sequence[Any] = ()
    owns_batches: bool = False  # whether the batches are copies that the user does not see
    division: Division = cut_apart
    max_micro_batch: int | None = None
    backward: Backward | None = None
    is_training: bool = False  # whether these are a Runner's steps, between which the user may change anything
    # Divisor of the last step's losses, for each sample; 0 if the step stated no count. The next step's unit is chosen
    # by it, and with it how a narrow loss rounds.
    counted_per_sample: float = 0.0
    written: WrittenMemory = field(default_factory=WrittenMemory)  # memory that steps are known to write into
    records: bool = True  # whether writes are recorded: not of compiled models, which would run eagerly meanwhile
    watched: int = _WATCHED_STEPS  # number of coming steps that are watched
    _hooks: frozenset[int] = frozenset()
    _next_handle: int = 0
    _counted: float = 0.0
    _is_additive: bool = False
    _sums: Float32Sums = field(default_factory=Float32Sums)
    _stated: StatedCounts = field(default_factory=StatedCounts)
    _has_sparse: bool = False
    _is_watched: bool = False
    _parameters: Sequence[torch.Tensor] = ()

    def __post_init__(self) -> None:
        self.records = self.records and not is_compiled(self.workload.model, self.workload.step)

    def run(self, batches: Sequence[Layout], largest: int) -> AccumulationState | None:
        """Accumulate once, without a retry, as trials and comparisons do; ``None`` if all weights are 0."""
        undo = self.record()
        try:
            undo.gradients.set_aside()
            progress = self.begin(batches, largest, undo)
            if (shortage := self.attempt(progress, undo)) is not None:
                raise DoesNotFit(shortage.reason)  # noqa: TRY301 - undone below, as any error
            self.complete(progress, undo)
        except BaseException:
            self.undo(undo)
            raise
        if progress.loss.value is None:
            self.undo(undo)
            return None
        gradients = undo.gradients
        self.commit(undo)
        gradients.settle()
        return progress

    def record(self) -> Undo:
        self._is_watched, self.watched = self.watched > 0, max(self.watched - 1, 0)
        self.leaves_are_known = self.leaves_are_known and not (self._is_watched and self.is_training)
        undo = try_twice(self.device.reclaim, _COPYING, self._record, self.workload.held_by_optimizer())
        self._parameters = undo.gradients.parameters
        if self.is_training:
            if not (found := find_hooks(self._parameters)) <= self._hooks:
                self.workload.check_hooks(self._hooks)
            self._hooks, self._next_handle = found, RemovableHandle.next_id
        return undo

    def _record(self, held: Sequence[torch.Tensor] | None = None) -> Undo:
        return Undo(self.workload.model, self.device.torch_device, keep=self.keep, written=self.written, held=held)

    def begin(
        self, batches: Sequence[Layout], largest: int, undo: Undo, shared: SharedStep | None = None
    ) -> AccumulationState:
        """Cut the batches into micro-batches, and count what the losses are divided by."""
        if self.is_training:
            self._stated.begin()
        tensors = [tensor for layout in batches for tensor in layout.tensors()]
        watch = BatchWatch(tensors, [one.batch for one in batches] if self._is_watched else ())
        groups = try_twice(self.device.reclaim, "dividing the batch with cut=", self.division, batches, largest)
        if self.smallest > 1 and self.max_micro_batch is not None:
            refuse_larger_micro_batches(groups, self.max_micro_batch, self.smallest, self.workload.model)
        weighed = self.workload.weigh is not None
        micro_batches = self._cut(groups, largest)
        if weighed and (self._stated.is_due or not self._is_additive):
            check_additive(self._cut_wholes(batches), micro_batches)
            self._is_additive = True
        is_scaled, per_sample = self.scale is not None, self.counted_per_sample
        loss = StepLoss(micro_batches, weighed=weighed, counted_per_sample=per_sample, is_scaled=is_scaled)
        had_gradients = undo.gradients.are_there
        progress = AccumulationState(groups, micro_batches, loss, watch, had_gradients=had_gradients, shared=shared)
        if shared is not None:
            if not loss.are_exact:  # a sum that does not depend on how this rank's samples are cut
                loss.count_again(self._cut_wholes(batches))
            self._open(shared, progress)
        return progress

    def attempt(self, progress: AccumulationState, undo: Undo) -> Shortage | None:
        """Run all micro-batches; each adds its part of the gradient to ``.grad``.

        Return why memory ran out, if it did. No reference to the error stays: its traceback holds the step's tensors.
        """
        if not progress.micro_batches:  # a rank without samples
            return None
        self._sums.clear()  # of an attempt that failed, here or on another rank
        if self.in_float32 and len(progress.micro_batches) > 1:
            self._sums.begin(self._parameters)
        block = self._watch(undo, progress) if self._is_watched else nullcontext()
        return self._find_shortage(self._run_micro_batches, progress, undo, block)

    def _find_shortage(
        self,
        run: Callable[[AccumulationState], None],
        progress: AccumulationState,
        undo: Undo,
        block: AbstractContextManager[None],
    ) -> Shortage | None:
        handled = sys.exc_info()[1]  # the caller may be handling an OOM of its own, which is in every error's context
        try:
            with block:
                run(progress)
        except Exception as error:
            self.watched = max(self.watched, 1)
            if isinstance(error, AutobatchError) or not is_oom(error, handled=handled):
                self._note_where(error, progress)
                raise
            reason = describe_error(error, handled=handled)
        else:
            return None
        return self._note_shortage(progress, undo, reason)

    def _run_micro_batches(self, progress: AccumulationState) -> None:
        for micro_batch in progress.micro_batches:
            if not micro_batch.counts:  # 0 x nan is nan: one whose labels are all ignored must not be run
                progress.aux.append(None)
                continue
            # No variable stays: nothing of a micro-batch is held but what the user put beside its loss.
            if (marked := self.device.micro_batch(micro_batch.size)) is None:
                progress.aux.append(self._run_micro_batch(micro_batch, progress))
                continue
            with marked:
                progress.aux.append(self._run_micro_batch(micro_batch, progress))

    def _note_where(self, error: Exception, progress: AccumulationState) -> None:
        """Name the user's function that runs now in a note on its error; errors of autobatch name it already."""
        if progress.running and not isinstance(error, AutobatchError):
            note_where(error, progress.running, self.workload.called_by, progress.running_size)

    def _note_shortage(self, progress: AccumulationState, undo: Undo, reason: str) -> Shortage:
        self.leaves_are_known = False  # the next attempt looks at its graph again
        self._sums.clear()  # memory is full
        progress.watch.refuse_writes(undo.memory, stays=not self.owns_batches)
        undo.refuse_lost(f"{reason}{explain_recomputed(self.workload)}")
        is_hopeless = progress.phase == "loss" and progress.retries > 0  # it takes as much in any micro-batches
        failed = progress.fail()
        return Shortage(
            failed_size=failed.size,
            reason=reason,
            least_size=failed.size if is_hopeless else find_least_size(progress.groups, self.smallest),
            ended_in=progress.phase,
            failed_scale=failed.scale,
        )

    @contextmanager
    def _watch(self, undo: Undo, progress: AccumulationState) -> Iterator[None]:
        """Record what is written into, and refuse a step that writes into its batch."""
        recorder = undo.watch(self._find_uncopied()) if self.records else nullcontext()
        with recorder:
            yield
        progress.watch.refuse_writes(undo.memory, stays=not self.owns_batches)

    def _run_micro_batch(self, micro_batch: MicroBatch, progress: AccumulationState) -> Any:
        """Add one micro-batch's part to ``.grad`` and to the loss; returns what the step put beside its loss."""
        progress.phase, progress.running = "forward", self.workload.named
        gradients = GradientWatch(self._parameters, self._sums) if self._is_watched else None
        samples = self._take(micro_batch)  # held until the backward pass has ended, as predictions count them
        returned = self._call_step(samples)
        progress.running = ""
        losses, aux = (returned, None) if type(returned) is torch.Tensor else split_output(returned)
        if gradients is not None:
            gradients.refuse_change()
        part = progress.loss.divide(micro_batch, losses)
        progress.stated += read_stated(micro_batch, losses) if self._stated.is_due else ()
        if part is not None and not self.leaves_are_known:
            refuse_totals(losses)
            self.workload.check_leaves(part, self.stand_ins())
            self.leaves_are_known = True  # going through the graph takes as long as a forward pass
        self._end_micro_batch(part, samples, progress)
        return aux

    def _end_micro_batch(self, part: torch.Tensor | None, samples: Any, progress: AccumulationState) -> None:
        """Run the backward pass; the samples are held until then."""
        progress.phase, progress.running = "backward", "the backward pass of your loss"
        self._run_backward(part)
        progress.running = ""
        self._join_sparse_rows(progress)

    def _join_sparse_rows(self, progress: AccumulationState) -> None:
        if self._is_watched or self._has_sparse or not self.is_training:
            widen_to = self.stands_for if not progress.aux else 0
            self._has_sparse = join_sparse_rows(self._parameters, self._sums, widen_to)

    def _take(self, micro_batch: MicroBatch) -> Any:
        """The samples of a micro-batch on the device, in containers of their own."""
        return micro_batch.take(self.device.move_tensor, self.device.torch_device)

    def _call_step(self, samples: Any) -> Any:
        workload = self.workload
        return workload.call_step(samples) if self._is_watched else workload.step(workload.model, samples)

    def _run_backward(self, part: torch.Tensor | None) -> None:
        if part is None:  # the step states a count of 0
            return
        loss = part if self.scale is None else self.scale(part)
        loss.backward() if self.backward is None else self.backward(loss)

    def _find_uncopied(self) -> Sequence[torch.Tensor]:
        """Memory that steps write into and that is never put back."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return [*gradients, *self._sums.by_parameter.values()]

    def cut_again(self, progress: AccumulationState, largest: int) -> None:
        """Cut all samples again, into micro-batches of at most ``largest``, and begin again."""
        smaller = self._cut(progress.groups, largest)
        check_additive(progress.micro_batches, smaller)
        progress.begin_again(smaller)

    def complete(self, progress: AccumulationState, undo: Undo, shared: SharedStep | None = None) -> None:
        """Make ``.grad`` the gradient of the whole batch, and of all ranks, with earlier gradients added."""
        if shared is not None:
            progress.loss.value = shared.sum(self.workload.parameters(), self._sums.by_parameter)
        else:
            if self._stated.is_due:
                self._check_counts(progress, is_shared=False)
            if progress.loss.unit is not None:
                self._correct(progress.loss.correct())
        if self._sums.by_parameter:
            self._sums.write()
        if progress.had_gradients:
            undo.gradients.add()
        self._counted = progress.counted_per_sample if progress.loss.counted else 0.0

    def summed(self) -> Collection[torch.Tensor]:
        """Return the parameters whose gradients are still sums in float32, which take their memory."""
        return self._sums.by_parameter.keys()

    def undo(self, undo: Undo) -> None:
        """Restore the record of a step that failed."""
        lost = list[torch.Tensor]()
        with deferred_interrupts():
            try:
                lost = undo.find_lost()
                undo.restore()
            finally:  # the user's own objects may raise: no hook of ours stays on a parameter
                self._end(undo)
        if lost:
            shape = tuple(lost[0].shape)
            _LOG.warning("the step was undone, but not a tensor of shape %s: the step first wrote into it here", shape)

    def commit(self, undo: Undo) -> None:
        """Drop the record: nothing is undone from here on."""
        undo.find_lost()  # so that the next record copies it
        self.counted_per_sample = self._counted
        self._end(undo)

    def _end(self, undo: Undo) -> None:
        self._sums.end()
        undo.release()  # one assignment commits: an interrupt comes before it, and the step is undone, or after it
        if self.is_training and RemovableHandle.next_id != self._next_handle:  # the step has registered hooks
            self._hooks = find_hooks(self._parameters)

    def _check_counts(self, progress: AccumulationState, *, is_shared: bool) -> None:
        """Refuse counts of the step's own that do not add up; a step of one micro-batch adds up none."""
        doubtful, wrong = find_doubtful(progress.stated), ""
        if is_shared:
            self._stated.warn_of_zero_loss(doubtful)  # the other ranks wait: nothing is run again
        if is_shared or not doubtful or len(progress.micro_batches) == 1:
            return
        here = try_twice(self.device.reclaim, _COPYING, self._record)

        def ask(micro_batch: MicroBatch) -> Any:
            return split_output(self.workload.call_step(self._take(micro_batch)))[0]

        try:
            with torch.no_grad(), here.watch(progress.watch.tensors):
                wrong = check_counts(doubtful, self.smallest, ask)
        except Exception:  # noqa: BLE001 - these samples have run: what fails here is the comparison, not the step
            _LOG.debug("the counts that the step states could not be compared", exc_info=True)
            self._stated.warn_of_zero_loss(doubtful)
        finally:
            here.restore()
            torch.clear_autocast_cache()  # casts that were made without a graph
        if wrong:
            raise InvalidArgument(wrong)

    def _open(self, shared: SharedStep, progress: AccumulationState) -> None:
        """Divide by what all ranks' total is expected to be; by their totals if terms have their own denominators."""
        own = progress.loss
        totals = shared.find_totals(own.weights, own.samples)
        if totals is None:
            own.expect(self.share, self.target)
        else:
            own.share(*totals)

    def _correct(self, factor: float) -> None:
        """Multiply the gradients once the true total is known; float32 sums before they are rounded."""
        if factor != 1:
            self._sums.multiply(factor)
            for parameter in self.workload.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _cut(self, groups: Sequence[Group], largest: int) -> list[MicroBatch]:
        return try_twice(
            self.device.reclaim,
            "counting with weigh() or length_of()",
            cut_weighed,
            self.workload,
            groups,
            largest,
            self.smallest,
        )

    def _cut_wholes(self, batches: Sequence[Layout]) -> list[MicroBatch]:
        return self._cut(cut_apart(batches), max((batch.count for batch in batches), default=1))
