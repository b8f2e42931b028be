"""Applies a plan, step after step. ``_run_step`` tells the story of one step.

1. Record everything that the step may change.
2. Cut the batch into micro-batches; run forward and backward of each.
3. If memory runs out, restore the record, choose a smaller size, and go back to 2 with all samples.
4. Make the gradient that of the whole batch, and of all ranks.
5. Prepare the update: the last part that can fail.
6. Commit: drop the record. Nothing is undone from here on.
7. Step the optimizer, once.

Invariants, asserted by the tests: the gradient is the whole batch's; a retried step equals, bit for bit, a step in its
final micro-batches; a step that raises before the commit has changed nothing; the optimizer steps once or never.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch
from torch import nn

from autobatch._arguments import as_sequence, check_switch
from autobatch._user_errors import contextmanager
from autobatch._wrappers import is_accumulating, unwrap_members, unwrap_optimizer, unwrap_scheduler
from autobatch.batch.cut import CutFunction, cut_apart, cut_joined, number_rows
from autobatch.batch.layout import Layout
from autobatch.batch.lengths import ByLength
from autobatch.distributed.ranks import (
    all_or_none,
    find_ranks,
    take_module,
)
from autobatch.distributed.sharded.step import ShardedStep, begin_step
from autobatch.distributed.shared_step import SharedStep
from autobatch.errors import AutobatchError, DoesNotFit, InvalidArgument
from autobatch.events import Hook
from autobatch.events.rank_step import RankStep
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.run_recorder import RunRecorder
from autobatch.memory.cpu import CpuDevice
from autobatch.memory.device import Device
from autobatch.memory.devices import find_device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.plan import Plan
from autobatch.planning.pacing import Pace
from autobatch.result import StepResult
from autobatch.step.batch_norm import refuses_one_sample
from autobatch.step.default_step import default_step
from autobatch.step.gradient_hooks import refuse_sample_gradients
from autobatch.step.workload import Step, Weigh, Workload
from autobatch.training.accumulation_state import AccumulationState, Shortage
from autobatch.training.binding import describe_binding, make_accumulation, make_pace, refuse_unlike_bindings
from autobatch.training.free_memory import FreeMemory
from autobatch.training.given_backward import Backward
from autobatch.training.given_batches import GivenBatches, read_division, several
from autobatch.training.loader_steps import (
    Pass,
    Progress,
    check_loader,
    count_samples,
    read_together,
    refuse_unlike,
    set_epoch,
)
from autobatch.training.loop_watch import SteppedObjects, StepSizes
from autobatch.training.optimizer_step import Update, check_options
from autobatch.training.runner_state import RunnerState, read_state
from autobatch.training.step_errors import (
    check_plan,
    check_rank,
    explain_shortage,
)
from autobatch.training.step_events import StepEvents, check_hooks
from autobatch.undo.interrupts import deferred_interrupts
from autobatch.undo.undo import Undo
from autobatch.undo.user_objects import check_objects

_NO_OPTIMIZER = "this Runner has no optimizer; use accumulate(batch) and do the update yourself"

_ACCUMULATED_TWICE = (
    "accumulate() inside accelerator.accumulate(), where optimizer.step() does nothing for this batch: the gradient of "
    "the next one would be added, and nothing would divide the sum; leave accelerator.accumulate() out and pass the "
    "whole batch, or set gradient_accumulation_steps=1"
)

_INSIDE_ITSELF = "step() calls its own Runner; return the loss, the Runner does the rest"

_NO_COPY = (
    "a Runner cannot be copied or pickled, as it is bound to one model and one optimizer: make one of runner.plan, and "
    "give it runner.state_dict()"
)

_FIRST_STEPS = 2
"""Number of steps, from the start or from a loaded state, in which a CPU's default budget is enforced.

The optimizer makes its state in the first and has it in the second."""


class StepRunner:
    """Runs optimizer steps in the plan's micro-batches; ``autobatch.Runner`` is this with ``fit``.

    Attributes:
        steps: How many steps (or accumulations) have been committed.
    """

    _is_in_users_loop: ClassVar[bool] = True
    """Whether the user's own loop calls it; a framework's loop decides sizes and schedules for its user."""

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
            weigh: What a mean is over: ``weigh(micro_batch) -> float``. Default: samples.
            cut: Which samples run together, where equal numbers of them are unlike in cost. ``autobatch.by_length`` as
                in ``fit``, where the plan was made with it: batches are divided by length, and micro-batches are
                trimmed to their longest sample. Or ``cut(batch, largest)`` returns lists of sample indices, each sample
                in one of them, as a ``BatchSampler`` yields them. ``largest`` is the most samples that run together,
                the plan's or less after a shortage; a longer list is divided, since nothing larger than the plan's size
                has been tried. It is called before each step, and must not draw random numbers.
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
                loss again; a framework's scaler in it is its own ``step()``'s to take out, and then ``scaler=`` stays
                ``None``.
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
            schedulers = [*map(unwrap_scheduler, as_sequence(scheduler))]
            check_options(scaler, max_grad_norm, schedulers, has_optimizer=inner is not None)
            self.plan, self.steps, self._begun_at, self._max_grad_norm = plan, 0, 0, max_grad_norm
            self._workload = Workload(model, step or default_step, weigh, inner, "autobatch.Runner")
            refuse_sample_gradients(model.named_parameters())
            self._device = find_device(self._workload.parameters(), type(model).__name__, device)
            self._free_memory = FreeMemory(plan, self._workload, self._device)
            self._is_sharded = self._ranks is not None and self._ranks.lockstep is not None
            self._division = read_division(cut, plan, self._workload, is_sharded=self._is_sharded)
            self._update = self._make_update(optimizers, scaler, max_grad_norm, schedulers) if optimizers else None
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
            self._pace = self._set_pace(plan.smallest_micro_batch)
            # Steps on a substitute for a device are not recorded, and those of all ranks are one run, the first's.
            recorder = None if isinstance(device, Device) or plan.rank else RunRecorder(plan, Ledger.open())
            self._events = StepEvents(plan, check_hooks(hooks), recorder)
            self._events.report_plan(model, inner, self._device.describe())
            self._sizes, self._batches = StepSizes(sum(plan.micro_batch_sizes)), GivenBatches(plan.batch_lists)
            self._progress, self._stepped = Progress(), SteppedObjects(optimizers, scaler, schedulers)
            self._peak_bytes, self._has_reported_gradients, self._is_running, self._samples = 0, False, False, 0
            self._has_thrashed = False
            if self._ranks is not None:
                gathered.append(
                    describe_binding(
                        plan,
                        self._workload,
                        self._device,
                        max_grad_norm,
                        scaler=scaler,
                        schedulers=schedulers,
                        backward=backward,
                    )
                )
        refuse_unlike_bindings(gathered, self._ranks)

    def _make_update(
        self, optimizers: Sequence[Any], scaler: Any, max_grad_norm: float | None, schedulers: Sequence[Any]
    ) -> Update:
        norm = None if self._is_sharded else max_grad_norm
        return Update(optimizers, self.plan, scaler=scaler, max_grad_norm=norm, schedulers=schedulers)

    @property
    def micro_batch_size(self) -> int:
        """The most samples in a micro-batch from now on: the plan's, or less where memory was short."""
        return self._pace.size

    @property
    def passes(self) -> int:
        """Number of passes over a loader that ``run`` has finished."""
        return self._progress.passes

    def run(self, loader: Iterable[Any], *, epochs: int | None = None, drop_last: bool = False) -> Iterator[StepResult]:
        """Run one optimizer step for every target's worth of samples, whatever sizes the loader's batches have.

        Batches are joined and cut so that each step has exactly this rank's share of the target; what is left of a
        batch begins the next step. At the loader's end the last, smaller step runs, with the mean over its own samples.
        A step runs when its result is asked for.

        ``state_dict()`` between two steps says how far the pass has come. After ``load_state_dict()`` the first call of
        ``run`` reads the samples that were used, without running them, restores the random generators to the states
        that you had set, and continues. A batch that was used in part is read again: a dataset that draws random
        numbers as it is read may give its other samples new ones. Let the loader give the same order again: by
        ``set_epoch`` and a seed, or a generator that you seed for each pass. A ``ShareSampler`` that was resumed with
        its own state begins there itself; load no state into other loaders that resume themselves. Every other call
        begins a new pass, also after a ``break`` or an error.

        With several ranks each passes its own loader, for as many passes. A rank whose loader has ended takes part in
        the others' last steps without samples. Leave the loop at the same step on every rank.

        Args:
            loader: A DataLoader, a list of batches, or another iterable of batches.
            epochs: Number of passes. Before each, ``set_epoch(epoch)`` is called of what has it: the loader, its
                sampler, its batch_sampler, its dataset. After ``load_state_dict()`` finished passes count. ``None``:
                one pass, and ``set_epoch`` is yours to call.
            drop_last: Leave out a last step that is smaller than the target.

        Yields:
            The result of each step, as ``step`` returns it.

        Raises:
            InvalidArgument: ``loader`` is a single batch or a dataset, yields samples, or has fewer samples than the
                state says were used; samples of a batch cannot be counted or divided; or another call of ``run`` has
                begun since.
            DoesNotFit: As ``step``.
            CannotRetry: As ``step``.
            RankFailed: Another rank's loader or step has raised an error.
        """
        if self._update is None:
            raise InvalidArgument(_NO_OPTIMIZER)
        check_loader(loader, epochs)
        check_switch("drop_last", drop_last)
        return self._run_passes(loader, epochs, drop_last=drop_last)

    def _run_passes(self, loader: Iterable[Any], epochs: int | None, *, drop_last: bool) -> Iterator[StepResult]:
        share, progress = sum(self.plan.micro_batch_sizes), self._progress
        for epoch in progress.begin(epochs):
            call = progress.calls
            if epoch is not None:
                set_epoch(loader, epoch)
            reading = Pass(loader, progress, share, self._describe_loaded, self._device.torch_device)
            while (batches := self._read_step(reading, drop_last=drop_last)) is not None:
                result, used = self._run(batches, update=True, is_cut=True), count_samples(batches)
                progress.samples += used
                del batches  # while the user has the result, nothing of the step is held
                yield result
                progress.check_call(call)

    def _describe_loaded(self, batch: Any) -> Layout:
        return refuse_unlike(self._batches.describe(batch), self.plan.batch_dims)

    def _read_step(self, reading: Pass, *, drop_last: bool) -> list[Layout] | None:
        """This rank's samples of the next step of ``run``; ``None`` where the pass ends, on all ranks at once."""
        if self._ranks is None:
            layouts = reading.take()
            samples = count_samples(layouts)
        else:
            layouts, samples = read_together(self._ranks, self.steps, reading)
        return None if not samples or (drop_last and samples < self.plan.target_batch) else layouts

    def step(self, batch: Any) -> StepResult:
        """Run one optimizer step on a whole batch.

        Earlier gradients become part of it, as with ``backward``: call ``zero_grad()`` before if they should not.

        Args:
            batch: This rank's share of the target batch, on any device; only micro-batches go to the model's device.
                With several ranks one may have no samples: ``None``, or tensors without rows.

        Returns:
            The loss, the committed sizes and the numbers of this step. Gradients are ``None`` afterwards.

        Raises:
            DoesNotFit: Memory ended at one sample, or at the fewest that the model can run; everything is as before. Or
                the batch cannot be cut into micro-batches of at most the plan's ``max_micro_batch`` that the model can
                run; nothing was run.
            InvalidArgument: Its samples cannot be counted; nothing was run.
            CannotRetry: Memory ended inside the optimizer's step; parameters may have moved.
        """
        if self._update is None:
            raise InvalidArgument(_NO_OPTIMIZER)
        return self._run([batch], update=True)

    def step_over(self, batches: Iterable[Any]) -> StepResult:
        """Run one optimizer step on smaller batches that make up the target together.

        The step is that of one batch with all their samples: neighbours whose samples one tensor can hold are divided
        together, so that small batches fill micro-batches of the plan's size. Others are divided each by itself: those
        of unlike shape or dtype, with numbers in them, of registered types, and all with ``cut=`` or sharded
        parameters.

        Args:
            batches: All are read before the first one is run: the mean's denominator is the total, and a restart needs
                them. Samples of several batches are copied together, one micro-batch at a time.

        Returns:
            As ``step``.

        Raises:
            DoesNotFit: As ``step``.
            CannotRetry: As ``step``.
        """
        if self._update is None:
            raise InvalidArgument(_NO_OPTIMIZER)
        return self._run(several(batches), update=True)

    def accumulate(self, batch: Any) -> StepResult:
        """Run a step without the update: the batch's gradient is added to ``.grad``.

        With a ``scaler`` the gradients stay scaled, as after ``scaler.scale(loss).backward()``.

        Args:
            batch: This rank's share of the target batch.

        Returns:
            As ``step``.

        Raises:
            DoesNotFit: Memory ended at one sample; everything is as before.
            InvalidArgument: accelerate is accumulating: its optimizer's ``step()`` would do nothing now, and gradients
                of several batches would add up that nothing divides.
        """
        if is_accumulating():
            raise InvalidArgument(_ACCUMULATED_TWICE)
        return self._run([batch], update=False)

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the next steps' sizes and how far ``run`` is, in plain numbers, texts, lists and dicts.

        With it, a resumed run is bit for bit the one that was not interrupted, also after a shortage has made the size
        smaller (sizes decide how gradients are rounded), as far as the same memory is free. Parameters, optimizers,
        schedulers, scalers, generators and what ``keep=`` names are yours to save. On several ranks each has its own.
        """
        return RunnerState.of(
            self.plan,
            self._pace,
            steps=self.steps,
            passes=self._progress.passes,
            pass_samples=self._progress.samples,
            batch_lists=self._batches.lists,
            counted_per_sample=self._accumulation.counted_per_sample,
        ).model_dump(mode="json")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where ``state_dict`` was, between two steps.

        Args:
            state: From a Runner of the same plan, as by ``Plan.load``; also after ``json`` or ``torch.save``.

        Raises:
            InvalidArgument: It is no such state, or another plan's; nothing has changed.
        """
        found = read_state(state, self.plan)
        pace = found.resume(self._set_pace(found.smallest_micro_batch))
        self._accumulation.smallest = found.smallest_micro_batch
        self._accumulation.counted_per_sample = found.counted_per_sample
        self._batches.lists = found.batch_lists
        self.steps = self._begun_at = found.steps
        self._progress.resume(found.passes, found.pass_samples)
        if found.steps:
            self._sizes.last = self._sizes.planned  # the next step may be the last of an epoch
        self._stepped.forget()
        self._change_pace(pace, self.steps)

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: a copy would go on with parts of this one.

        Raises:
            InvalidArgument: Always.
        """
        raise InvalidArgument(_NO_COPY)

    def _run(self, batches: Iterable[Any], *, update: bool, is_cut: bool = False) -> StepResult:
        """Run a step, count it, and report it."""
        if self._is_running:
            raise InvalidArgument(_INSIDE_ITSELF)
        started, shared = time.perf_counter(), None
        try:
            self._is_running, shared = True, self._begin_shared(update=update)
            if shared is not None:
                shared.begin()
            layouts = self._describe([*batches], update=update, is_cut=is_cut)
            with self._limit_memory(layouts):
                done = self._run_allowed(layouts, shared, update=update)
            ranks = () if shared is None else self._end(shared, done)
            step, self.steps = self.steps, self.steps + (done is not None)
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
        if done is None:
            return self._skip(layouts, started)
        return self._report(step, done, shared, ranks, started, update=update)

    def _run_allowed(
        self, layouts: Sequence[Layout], shared: SharedStep | None, *, update: bool
    ) -> AccumulationState | None:
        """Run a step; if the model refuses a micro-batch of one sample, run it again without such."""
        try:
            return self._run_step(layouts, shared, update=update)
        except Exception as error:
            if not self._needs_two_samples(error):
                raise
        return self._run_step(layouts, shared, update=update)  # only now has the traceback let go of tensors

    def _run_step(
        self, layouts: Sequence[Layout], shared: SharedStep | None, *, update: bool
    ) -> AccumulationState | None:
        """Run one step: all of it, or nothing happened.

        Returns:
            The loss and the sizes; ``None`` where no sample counts for anything, so that a mean has no value.
        """
        accumulation, pace, handled = self._accumulation, self._pace, sys.exc_info()[1]
        undo = accumulation.record()  # before anything moves
        try:
            undo.gradients.set_aside()
            progress = accumulation.begin(layouts, self._begin_pace(layouts), undo, shared)
            while (shortage := accumulation.attempt(progress, undo)) is not None:
                # Only now, after the ``except`` block in attempt(), has the traceback let go of the step's tensors.
                undo.restart()
                self._device.reclaim()
                accumulation.cut_again(progress, self._choose_size(shortage))
            if progress.loss is not None or shared is not None:
                accumulation.complete(progress, undo, shared)
            if progress.loss is not None:
                self._finish(undo, shared, update=update)
                return progress
            reason = ""
        except BaseException as error:
            if undo.is_released:  # the update had begun
                raise
            self._pace = pace  # a step that was undone does not count
            if isinstance(error, AutobatchError) or not is_oom(error, handled=handled):
                accumulation.undo(undo)
                raise
            reason = describe_error(error, handled=handled)
        accumulation.undo(undo)
        if not reason:
            return None
        self._device.reclaim()
        raise DoesNotFit(
            f"ran out of memory after the last backward pass, before the update ({reason}); the step was undone: free "
            f"memory or give fit() more headroom="
        )

    def _finish(self, undo: Undo, shared: SharedStep | None, *, update: bool) -> None:
        """Commit: up to here all can be undone, from here on nothing is. Then step the optimizer, once."""
        applied = self._update if update else None
        try:
            if applied is not None:
                self._free_memory.check_update()
                applied.prepare()  # optimizer state, unscaling, clipping: the last that can fail on one rank alone
            if shared is not None:
                shared.agree_on_update()
        except BaseException:
            if applied is not None:
                applied.cancel()
            raise
        if applied is None:
            with deferred_interrupts():
                undo.gradients.settle()
                self._accumulation.commit(undo)
            return
        try:
            self._accumulation.commit(undo)
            applied.apply(self.steps)
        finally:
            if undo.is_released:
                self._accumulation.drop_gradients()

    def _report(
        self,
        step: int,
        done: AccumulationState,
        shared: SharedStep | None,
        ranks: tuple[RankStep, ...],
        started: float,
        *,
        update: bool,
    ) -> StepResult:
        """Report a finished step, and choose the next one's size."""
        assert done.loss is not None  # noqa: S101 - narrows for mypy
        self._sizes.last = self._samples
        result = StepResult(
            loss=done.loss,
            micro_batch_sizes=done.micro_batch_sizes,
            retries=done.retries,
            peak_bytes=self._peak_bytes,
            seconds=time.perf_counter() - started,
            aux=tuple(done.aux),
            ranks=ranks,
            gradient_norm=self._read_norm(shared) if update and self._max_grad_norm is not None else None,
            samples=() if self._division in (cut_apart, cut_joined) else number_rows(done.groups, done.done),
        )
        if update and done.had_gradients and not self._has_reported_gradients:
            self._has_reported_gradients = True
            self._events.report_earlier_gradients(step)
        self._events.report_finished(step, result)
        largest = max((micro_batch.scale for micro_batch in done.done), default=0)
        pace = self._pace.after_step(largest, thrashed=self._has_thrashed)
        if pace is not self._pace:
            self._change_pace(pace, self.steps)
        return result

    def _needs_two_samples(self, error: BaseException) -> bool:
        """Whether the model refuses a micro-batch of one sample; a plan without trials does not know that."""
        if self._is_sharded or self._accumulation.smallest > 1 or not refuses_one_sample(error):
            return False
        self._accumulation.smallest = 2
        self._pace = self._set_pace(smallest=2)
        return True

    def _begin_pace(self, layouts: Sequence[Layout]) -> int:
        """The size with which a step begins."""
        smallest = self._accumulation.smallest
        if smallest > self._pace.smallest:  # of sharded parameters all ranks learn it inside a step
            self._pace = replace(self._pace, smallest=smallest)
        return self._pace.size

    def _begin_shared(self, *, update: bool) -> SharedStep | None:
        if self._ranks is None:
            return None
        if not update:
            return begin_step(self._ranks, self.steps, "accumulate", None, None)
        return begin_step(self._ranks, self.steps, "step", self._workload.optimizer, self._max_grad_norm)

    def _end(self, shared: SharedStep, done: AccumulationState | None) -> tuple[RankStep, ...]:
        sizes, retries = (done.micro_batch_sizes, done.retries) if done else ((), 0)
        return shared.end(micro_batch_size=max(sizes, default=0), retries=retries, peak_bytes=self._peak_bytes)

    def _read_norm(self, shared: SharedStep | None) -> torch.Tensor | None:
        source = shared if isinstance(shared, ShardedStep) else self._update
        return None if source is None else source.gradient_norm

    @contextmanager
    def _limit_memory(self, layouts: Sequence[Layout]) -> Iterator[None]:
        """Enforce the budget and measure the peak; on a CPU, where that takes time, not in every step."""
        self._has_thrashed = False
        if not self._begin_counting():
            yield
            return
        self._device.watch(self._workload.resident_tensors())
        if self._ranks is not None:
            self._device.watch(self._ranks.reduction.buckets())
        for layout in layouts:
            self._device.watch(layout.tensors())
        with self._device.limit(self.plan.budget_bytes):
            self._change_pace(self._look_ahead(), self.steps)
            self._device.reset_peak()
            before = self._device.usage()
            yield
            usage = self._device.usage()
        self._peak_bytes, self._has_thrashed = usage.peak_allocated, usage.alloc_retries > before.alloc_retries

    def _set_pace(self, smallest: int) -> Pace:
        return make_pace(self.plan, self._workload, self._division, smallest)

    def _look_ahead(self) -> Pace:
        """The pace for this step: smaller only if too little is free even after all caches are given back."""
        pace = self._read_pace()
        if pace.size >= self._pace.size:
            return pace
        self._device.reclaim()
        return self._read_pace()

    def _read_pace(self) -> Pace:
        return self._pace.before_step(*self._free_memory.read())

    def _describe(self, batches: Sequence[Any], *, update: bool, is_cut: bool) -> Sequence[Layout]:
        """Describe the batches: lists as in the plan's example, later batches as earlier ones."""
        if not batches and self._ranks is None:
            raise InvalidArgument("step_over() was given no batches")
        layouts = self._batches.read(batches, leaves_out_empty=self._ranks is not None)
        self._samples = count_samples(layouts)
        if self._is_in_users_loop:
            if self._samples != self._sizes.planned and not is_cut and self._sizes.surprise(self._samples):
                self._events.report_size(self.steps, self._samples, can_run=self._update is not None)
            if update and (moved := self._stepped.find_moved()):
                self._events.report_moves(self.steps, moved)
        return layouts

    def _begin_counting(self) -> bool:
        """Return whether the coming step runs inside the budget. On a CPU that takes time at every operator.

        A step outside of it reads no free memory, so it takes the size that the last steps allow.
        """
        is_first = self.steps - self._begun_at < _FIRST_STEPS
        is_counted = is_first or self.plan.budget_passed or not isinstance(self._device, CpuDevice)
        if not is_counted:
            self._change_pace(self._pace.before_step(None, None), self.steps)
        self._free_memory.is_counted = is_counted
        return is_counted

    def _skip(self, layouts: Sequence[Layout], started: float) -> StepResult:
        """The result of a step whose weights are all 0: nothing has happened."""
        self._events.report_skip(self.steps, sum(layout.count for layout in layouts))
        loss = torch.full((), torch.nan, device=self._device.torch_device)
        return StepResult(loss, (), 0, 0, time.perf_counter() - started, skipped=True)

    def _change_pace(self, pace: Pace, step: int) -> None:
        if pace.size > self._pace.size:
            self._device.reclaim()  # cached segments of the smaller sizes would stay beside those of this one
        if pace.size != self._pace.size:
            self._events.report_pace(step, self._pace.size, pace)
        self._pace = pace

    def _choose_size(self, shortage: Shortage) -> int:
        """The size of the next attempt.

        Raises:
            DoesNotFit: The micro-batch that ran out of memory cannot be smaller.
        """
        if not shortage.failed_size:  # another rank ran out of memory
            return self._pace.size
        least = max(shortage.least_size, self._pace.smallest)
        if shortage.failed_size <= least:
            used = self._device.usage().allocated
            raise DoesNotFit(explain_shortage(self.steps, shortage, used, self.plan, self._workload.model))
        _, limit_bytes = self._free_memory.read()
        self._pace = self._pace.after_shortage(shortage.failed_scale, limit_bytes, least)
        self._events.report_retry(self.steps, shortage, self.micro_batch_size, self._device.usage().allocated)
        return self.micro_batch_size
