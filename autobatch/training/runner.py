"""Applies a plan, step after step. ``_run_once`` tells the story of one step.

1. Record everything that the step may change.
2. Cut the batch into micro-batches; run forward and backward of each.
3. If memory runs out, restore the record, choose a smaller size, and go back to 2 with all samples.
4. With several ranks: do what can fail on one of them alone, then agree that all make the step.
5. Make the gradient that of the whole batch, and of all ranks.
6. Prepare the update.
7. Commit: drop the record. Nothing is undone from here on.
8. Step the optimizer, once.

Invariants, asserted by the tests:

- The gradient is the whole batch's.
- A retried step equals, bit for bit, a step in its final micro-batches.
- A step that raises before the commit has changed nothing.
- The optimizer steps once or never.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from autobatch._wrappers import members_of, unwrap_members, unwrap_optimizer, unwrap_scheduler
from autobatch.batch.cut import CutFunction, cut_apart, cut_joined, number_rows
from autobatch.batch.lengths import ByLength
from autobatch.batch.samples import Layout
from autobatch.distributed.parallelism import begin_step, find_ranks, take_module
from autobatch.distributed.ranks import all_or_none
from autobatch.distributed.sharded import ClippedShardedStep, ShardedRanks, ShardedStep
from autobatch.distributed.shared_step import SharedStep
from autobatch.errors import AutobatchError, CannotRetry, InvalidArgument
from autobatch.events import Hook
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.run_recorder import RunRecorder
from autobatch.memory.device import Device
from autobatch.memory.devices import find_device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.plan import Plan
from autobatch.result import StepResult
from autobatch.step.loop_guard import refuse_sample_gradients
from autobatch.step.model_info import refuses_one_sample
from autobatch.step.workload import Step, Weigh
from autobatch.training.accumulation_state import AccumulationState, Shortage
from autobatch.training.batches import GivenBatches, read_division
from autobatch.training.binding import (
    check_plan,
    check_rank,
    describe_binding,
    make_accumulation,
    make_workload,
    refuse_unlike_bindings,
)
from autobatch.training.given_backward import Backward
from autobatch.training.misuse import SteppedObjects, StepSizes
from autobatch.training.step_events import StepEvents, check_hooks
from autobatch.training.step_memory import StepMemory
from autobatch.training.update import Update, check_options, explain_shortage
from autobatch.undo.interrupts import deferred_interrupts
from autobatch.undo.undo import Undo
from autobatch.undo.user_objects import check_objects


class StepRunner:
    """Runs one optimizer step at a time; ``autobatch.Runner`` gives it batches.

    Attributes:
        plan: Plan that the steps follow.
        steps: Number of committed steps (or accumulations).
    """

    _is_in_users_loop: ClassVar[bool] = True
    """Whether the user's own loop calls it; a framework's loop decides sizes and schedules for its user."""

    _calls_between: ClassVar[bool] = False
    """Whether the user's functions run between the sum of the gradients and the update, and may fail on one rank."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        step: Step | None,
        optimizer: Any,
        *,
        weigh: Weigh | None = None,
        cut: ByLength | CutFunction | None = None,
        device: torch.device | str | Device | None = None,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        scheduler: Any | None = None,
        hooks: Iterable[Hook] = (),
        keep: Sequence[Any] = (),
        backward: Backward | None = None,
    ) -> None:
        """Bind a plan to a model.

        Args:
            plan: From ``fit``, or loaded. One of another model, by the shapes of its parameters, or of another
                optimizer is used as it is, and warned of.
            model: The model to train, on its device.
            step: ``step(model, micro_batch) -> loss``, the mean over ``weigh(micro_batch)`` units; or ``(loss, aux)``.
                ``None``: as in ``fit``, the model's own loss.
            optimizer: Stepped once a step; ``None`` if only ``accumulate`` is used. Or a list of several that share no
                parameter: each is stepped, and nothing is undone once the first one steps. Lightning's wrapper is
                stepped itself, so that the trainer counts the step; of accelerate's the optimizer inside is, with its
                scaler.
            weigh: Counts the units of a mean: ``weigh(micro_batch) -> float``. Default: samples.
            cut: Chooses samples that run together, if equal numbers of them differ in cost. ``autobatch.by_length`` as
                in ``fit``, where the plan was made with it: batches are divided by length, and micro-batches are
                trimmed to their longest sample. Or ``cut(batch, largest)`` returns lists of sample indices, each sample
                in one of them, as a ``BatchSampler`` yields them. ``largest`` is the most samples that run together,
                the plan's or less after a shortage. A longer list is divided: nothing larger than the plan's size has
                been tried. It is called before each step, and must not draw random numbers.
            scaler: Scales each loss, and unscales, steps and updates once a step.
            max_grad_norm: Clip the norm of the gradients of all parameters that the optimizers hold, taken together,
                before the update.
            scheduler: Its ``step()`` is called after each step in which the optimizer stepped. Or a list of several,
                called after each step in which no optimizer was skipped for infinities.
            hooks: Called with every event.
            keep: Objects outside the model that the step changes, such as metrics: a step that is undone or retried
                puts them back. Each has ``take()`` and ``put(taken)``, or ``state_dict()`` and ``load_state_dict()``,
                or is a module, a tensor, a generator, or a dict or list of these.
            backward: Called with each micro-batch's loss, divided and scaled, in place of ``loss.backward()``: a
                framework's own, such as ``accelerator.backward``. It has to run one backward pass and not to divide the
                loss again. If it scales the loss, the framework's own ``step()`` has to unscale the gradients, and
                ``scaler=`` stays ``None``.
            device: The device's memory; default: where the model is.

        Raises:
            InvalidArgument: An argument cannot mean anything.
            RankFailed: Another rank failed, or the ranks made different calls.
            RankLost: Another rank is gone or did not answer.
        """
        self._ranks = find_ranks(model)
        with all_or_none(self._ranks, "Runner()") as gathered:
            check_plan(plan, weigh)
            check_rank(plan, *((0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)))
            model = take_module(model, self._ranks)
            inner, (optimizers, scaler) = unwrap_optimizer(optimizer), unwrap_members(optimizer, scaler)
            schedulers = [*map(unwrap_scheduler, members_of(scheduler))]
            check_options(scaler, max_grad_norm, schedulers, has_optimizer=inner is not None)
            self.plan, self.steps, self._max_grad_norm = plan, 0, max_grad_norm
            self._workload = make_workload(plan, model, step, weigh, inner)
            refuse_sample_gradients(model.named_parameters())
            self._device = find_device(self._workload.parameters(), type(model).__name__, device)
            self._is_sharded = isinstance(self._ranks, ShardedRanks)
            self._division = read_division(cut, plan, self._workload, is_sharded=self._is_sharded)
            norm = None if self._is_sharded else max_grad_norm  # a sharded step clips itself
            self._update = Update(optimizers, plan, scaler, norm, schedulers) if optimizers else None
            self._accumulation = make_accumulation(
                plan,
                self._workload,
                self._device,
                is_sharded=self._is_sharded,
                division=self._division,
                scaler=scaler,
                keep=check_objects(keep),
                backward=backward,
            )
            # Steps on a substitute for a device are not recorded, and those of all ranks are one run, the first's.
            described = self._device.describe()
            recorder = None if isinstance(device, Device) or plan.rank else RunRecorder(plan, Ledger.open(described))
            self._events = StepEvents(plan, check_hooks(hooks), recorder)
            self._events.report_plan(model, inner, described)
            self._sizes, self._batches = StepSizes(sum(plan.micro_batch_sizes)), GivenBatches(plan.batch_lists)
            self._stepped = SteppedObjects(optimizers, scaler, schedulers)
            self._memory = StepMemory(plan, self._workload, self._device, self._division, self._events)
            self._is_running, self._samples = False, 0
            if self._ranks is not None:
                self._ranks.bind(optimizers, scaler, is_weighed=weigh is not None)
                named = {"scaler": scaler, "schedulers": schedulers, "backward": backward}
                gathered.append(describe_binding(plan, self._workload, self._device, max_grad_norm, **named))
        refuse_unlike_bindings(gathered, self._ranks)

    @property
    def micro_batch_size(self) -> int:
        """The most samples in a micro-batch from now on: the plan's, or less where memory was short."""
        return self._memory.pace.size

    def _run(self, batches: Iterable[Any], *, update: bool, is_cut: bool = False) -> StepResult:
        """Run a step, count it, and report it."""
        if self._is_running:
            raise InvalidArgument("step() calls its own Runner; return the loss, the Runner does the rest")
        started, shared = time.perf_counter(), None
        try:
            self._is_running, shared = True, self._begin_shared(update=update)
            if shared is not None:
                shared.begin()
            layouts = self._describe([*batches], update=update, is_cut=is_cut)
            buckets = () if self._ranks is None else self._ranks.reduction.buckets()
            with self._memory.limit(self.steps, layouts, buckets):
                if isinstance(shared, ShardedStep):
                    shared.summing = self._memory.choose_summing()
                done = self._run_step(layouts, shared, update=update)
        except BaseException as error:
            if shared is not None:
                shared.fail(error)
            self._stepped.forget()
            self._events.report_failed(self.steps, error)
            raise
        finally:
            self._is_running = False
            if shared is not None:
                shared.close()
        self._stepped.note(is_ours=update and self._is_in_users_loop)
        if done is None:  # all weights are 0, and nothing has happened
            self._events.report_skip(self.steps, self._samples)
            loss = torch.full((), torch.nan, device=self._device.torch_device)
            return StepResult(loss, (), 0, 0, time.perf_counter() - started, skipped=True)
        return self._report(self.steps - 1, done, shared, started, update=update)

    def _run_step(
        self, layouts: Sequence[Layout], shared: SharedStep | None, *, update: bool
    ) -> AccumulationState | None:
        """Run a step. If the model refuses a micro-batch of one sample, run it again without such."""
        try:
            return self._run_once(layouts, shared, update=update)
        except Exception as error:
            if not self._needs_two_samples(error):
                raise
        return self._run_once(layouts, shared, update=update)  # only now has the traceback let go of tensors

    def _run_once(
        self, layouts: Sequence[Layout], shared: SharedStep | None, *, update: bool
    ) -> AccumulationState | None:
        """Run one step: all of it, or nothing happened. ``None``: no sample counts, so that a mean has no value."""
        accumulation, applied, handled = self._accumulation, self._update if update else None, sys.exc_info()[1]
        pace, summing = self._memory.pace, self._memory.summing
        undo = accumulation.record()  # before anything moves
        try:
            if undo.gradients.are_there:
                undo.gradients.set_aside()
            size = self._memory.begin(accumulation.smallest)
            progress = accumulation.begin(layouts, size, undo, shared)
            while (shortage := self._attempt(progress, undo, shared, applied)) is not None:
                # Only now, after the ``except`` block in attempt(), has the traceback let go of the step's tensors.
                if applied is not None:
                    applied.cancel()
                undo.restart()
                accumulation.cut_again(progress, self._memory.after_shortage(self.steps, shortage))
            accumulation.complete(progress, undo, shared)
            if progress.loss.value is not None:
                self._finish(undo, shared, applied)
                return progress
        except BaseException as error:
            if undo.is_released:  # the commit was made
                raise
            self._memory.pace, self._memory.summing = pace, summing  # a step that was undone does not count
            if isinstance(error, AutobatchError) or not is_oom(error, handled=handled):
                self._undo(undo, applied)
                raise
            reason = describe_error(error, handled=handled)
        else:
            self._undo(undo, applied)
            return None
        self._undo(undo, applied)
        self._device.reclaim()
        raise explain_shortage(self.steps, self.plan, reason, is_agreed=shared is not None and shared.is_agreed)

    def _undo(self, undo: Undo, applied: Update | None) -> None:
        with deferred_interrupts():
            try:
                if applied is not None:
                    applied.cancel()
            finally:
                self._accumulation.undo(undo)

    def _attempt(
        self, progress: AccumulationState, undo: Undo, shared: SharedStep | None, applied: Update | None
    ) -> Shortage | None:
        """Run all passes, and let all ranks agree on the step; return why it has to be run again, if it has to."""
        accumulation = self._accumulation
        shortage = accumulation.attempt(progress, undo)
        if shared is None:
            return shortage
        while shortage is None and not self._agree(progress, undo, shared, applied):
            # Another rank has gradients that this one lacked: now it has zeros, and makes state in the same order.
            # Or another rank has not held its last backward pass back.
            if applied is not None:
                applied.cancel()
            shortage = accumulation.run_held(progress, undo)
        if shortage is not None or progress.held is None:
            return shortage
        shortage = accumulation.run_held(progress, undo, shared.overlapped)
        if shortage is None:
            self._make_room(applied)
        return accumulation.confirm_sum(progress, undo, shared, self._memory.read_peaks(), shortage)

    def _agree(self, progress: AccumulationState, undo: Undo, shared: SharedStep, applied: Update | None) -> bool:
        """Let all ranks make the step, or none, after what can fail on one of them alone; see ``SharedStep.agree``."""
        self._accumulation.fill(undo)
        if progress.held is None:
            self._make_room(applied)
        return self._accumulation.agree(progress, undo, shared, self._memory.read_peaks())

    def _make_room(self, applied: Update | None) -> None:
        if applied is not None:
            summed = self._accumulation.summed()
            self._memory.check_update(summed)
            applied.make_state(summed)

    def _finish(self, undo: Undo, shared: SharedStep | None, applied: Update | None) -> None:
        """Commit: up to here all can be undone, from here on nothing is. Then step the optimizer, once."""
        gradients = undo.gradients if applied is None else None  # an update lets go of earlier gradients
        if shared is None:
            self._make_room(applied)
        if applied is not None:
            applied.prepare()
        if shared is not None:
            shared.settle()
        with deferred_interrupts():  # Ctrl-C finds a step that is undone, or one that is made and counted
            self._accumulation.commit(undo)
            if gradients is not None:
                gradients.settle()
            if applied is not None:
                self._make_update(applied, shared)
            self._count(shared)

    def _count(self, shared: SharedStep | None) -> None:
        self.steps += 1
        if shared is not None:
            shared.finish()

    def _make_update(self, update: Update, shared: SharedStep | None) -> None:
        """Step the optimizers; if memory runs out, take what they have made on another rank."""
        try:
            update.apply(self.steps)
        except CannotRetry as error:
            self._workload.drop_gradients()
            if shared is None or (giver := shared.take_update(error)) is None:
                raise
            update.note_skip()
            self._events.report_copied(self.steps, giver)
        finally:
            self._workload.drop_gradients()
        update.step_schedulers()

    def _report(
        self, step: int, done: AccumulationState, shared: SharedStep | None, started: float, *, update: bool
    ) -> StepResult:
        """Report a finished step, and choose the next one's size."""
        assert done.loss.value is not None  # noqa: S101 - narrows for mypy
        self._sizes.last = self._samples
        result = StepResult(
            loss=done.loss.value,
            micro_batch_sizes=done.micro_batch_sizes,
            retries=done.retries,
            peak_bytes=self._memory.peak_bytes,
            seconds=time.perf_counter() - started,
            aux=tuple(done.aux),
            ranks=() if shared is None else shared.ranks,
            gradient_norm=self._read_norm(shared) if update and self._max_grad_norm is not None else None,
            samples=() if self._division in (cut_apart, cut_joined) else number_rows(done.groups, done.micro_batches),
        )
        if update and done.had_gradients:
            self._events.report_earlier_gradients(step)
        self._events.report_finished(step, result, self._memory.held_bytes)
        self._memory.after_step(self.steps, done.micro_batches)
        return result

    def _needs_two_samples(self, error: BaseException) -> bool:
        """Whether the model refuses a micro-batch of one sample; a plan without trials does not know that."""
        if self._is_sharded or self._accumulation.smallest > 1 or not refuses_one_sample(error):
            return False
        self._accumulation.smallest = 2
        self._memory.pace = self._memory.make_pace(smallest=2)
        return True

    def _begin_shared(self, *, update: bool) -> SharedStep | None:
        if self._ranks is None:
            return None
        given = {"optimizer": self._workload.optimizer, "max_grad_norm": self._max_grad_norm} if update else {}
        scales = self._update is not None and self._update.scaler is not None
        # Unscaling, clipping, and what a framework calls there come after the sum, and may fail on one rank alone.
        is_confirmed = self._calls_between or (update and (scales or self._max_grad_norm is not None))
        call = "step" if update else "accumulate"
        return begin_step(self._ranks, f"{call} {self.steps}", is_confirmed=is_confirmed, **given)

    def _read_norm(self, shared: SharedStep | None) -> torch.Tensor | None:
        source = shared if isinstance(shared, ClippedShardedStep) else self._update
        return None if source is None else source.gradient_norm

    def _describe(self, batches: Sequence[Any], *, update: bool, is_cut: bool) -> Sequence[Layout]:
        """Describe the batches: lists as in the plan's example, later batches as earlier ones."""
        if not batches and self._ranks is None:
            raise InvalidArgument("step_over() was given no batches")
        layouts = self._batches.read(batches, leaves_out_empty=self._ranks is not None)
        self._samples = sum([layout.count for layout in layouts])
        if self._is_in_users_loop:
            if self._samples != self._sizes.planned and not is_cut and self._sizes.surprise(self._samples):
                self._events.report_size(self.steps, self._samples, can_run=self._update is not None)
            if update and (moved := self._stepped.find_moved()):
                self._events.report_moves(self.steps, moved)
        return layouts
