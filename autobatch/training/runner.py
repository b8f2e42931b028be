"""``Runner``: applies a plan, step after step.

Covers one optimizer step on a batch of any size: accumulation, the retry's next size, the update, and what is told
about it. The exactness lives in ``accumulation``, the sizes over time in ``planning.pacing``. Does not cover several
ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from autobatch._arguments import check_choice
from autobatch._formatting import format_bytes, name_type
from autobatch._wrappers import unwrap_for_training, unwrap_optimizer, unwrap_scheduler
from autobatch.batch.layout import Layout, describe, is_one_batch
from autobatch.distributed import refuse_many_ranks
from autobatch.errors import DoesNotFit, InvalidArgument, InvalidBatch
from autobatch.events import Hook
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.run_recorder import RunRecorder
from autobatch.memory.device import Device
from autobatch.memory.devices import find_device
from autobatch.plan import Plan
from autobatch.planning.pacing import Pace
from autobatch.planning.planner import least_size
from autobatch.planning.retry_size import CLEAN_STEPS, compiled_ladder, eager_ladder
from autobatch.report.advice import PHASES
from autobatch.result import StepResult
from autobatch.state.user_objects import check_objects
from autobatch.step.batch_norm import explain_smallest, refuses_one_sample
from autobatch.step.default_step import default_step
from autobatch.step.model_info import is_compiled
from autobatch.step.workload import Step, Weigh, Workload
from autobatch.training.accumulation import Accumulation
from autobatch.training.accumulation_state import AccumulationState, Shortage
from autobatch.training.counted_steps import CountedSteps
from autobatch.training.free_memory import FreeMemory
from autobatch.training.step_events import StepEvents, check_hooks
from autobatch.training.update import Update, check_options

__all__ = ["Runner"]

_NO_OPTIMIZER = "this Runner has no optimizer; use accumulate(batch) and do the update yourself"

_ALWAYS_COUNTED = 2
"""Steps measured in any case: in the first the optimizer makes its state, from the second on it is there."""


class Runner:
    """Runs optimizer steps in the plan's micro-batches, exactly, and goes on with less when memory ends.

    Attributes:
        steps: How many steps (or accumulations) have been committed.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        step: Step | None,
        optimizer: Any,
        *,
        weigh: Weigh | None = None,
        device: torch.device | str | Device | None = None,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        scheduler: Any | None = None,
        hooks: Iterable[Hook] = (),
        keep: Sequence[Any] = (),
        enforce: Literal["auto", "always"] = "auto",
    ) -> None:
        """Bind a plan to a model.

        Args:
            plan: From ``fit``, or loaded. One of another model, by the shapes of its parameters, or of another
                optimizer is used as it is, and warned of.
            model: The model to train, on its device.
            step: ``step(model, micro_batch) -> loss``, the mean over ``weigh(micro_batch)`` units; or ``(loss, aux)``.
                ``None``: as in ``fit``, the model's own loss.
            optimizer: Stepped once a step; ``None`` if only ``accumulate`` is used. Lightning's wrapper is stepped
                itself, so that the trainer counts the step; of accelerate's the optimizer inside is, with its scaler.
            weigh: What a mean is over: ``weigh(micro_batch) -> float``. Default: samples.
            scaler: Scales each loss, and unscales, steps and updates once a step.
            max_grad_norm: Clip the whole gradient's norm to this before the update.
            scheduler: Its ``step()`` is called after each step in which the optimizer stepped.
            hooks: Called with every event.
            keep: Objects outside the model that the step changes, such as metrics: a step that is undone or retried
                puts them back. Each has ``take()`` and ``put(taken)``, or ``state_dict()`` and ``load_state_dict()``,
                or is a module, a tensor, a generator, or a dict or list of these.
            device: The device's memory; default: where the model is.
            enforce: On a CPU, where a budget is enforced by counting what each operator returns: ``"always"`` counts
                every step. ``"auto"`` does not count steps that cannot come near the budget, nor, near it, steps like
                those that were counted and took no more than is free; one in 31 of these is counted in any case. A step
                that takes more than those of its sizes did may then pass the budget without an error; the next counted
                one meets it and is retried with less. On CUDA torch's allocator enforces the budget in each step,
                whatever this says.

        Raises:
            InvalidArgument: An argument cannot mean anything.
        """
        refuse_many_ranks()
        _check_plan(plan, weigh)
        optimizer, scaler = unwrap_for_training(optimizer, scaler)
        scheduler = unwrap_scheduler(scheduler)
        check_options(scaler, max_grad_norm, scheduler)
        hooks = check_hooks(hooks)
        check_choice("enforce", enforce, ("auto", "always"))
        self.plan = plan
        self.steps = 0
        self._workload = Workload(model, step or default_step, weigh, unwrap_optimizer(optimizer))
        self._device = find_device(self._workload.parameters(), type(model).__name__, device)
        scale = None if scaler is None else scaler.scale
        if scaler is not None and scaler.is_enabled():
            # Its two tensors are made on first use: memory that ended between them would leave a broken scaler.
            scaler.scale(torch.zeros((), device=self._device.torch_device))
        self._free_memory = FreeMemory(plan, self._workload, self._device)
        self._accumulation = Accumulation(
            self._workload,
            self._device,
            self._shrink,
            scale,
            in_float32=plan.accumulate_in_float32,
            smallest=plan.smallest_micro_batch,
            keep=check_objects(keep),
        )
        self._update = (
            None
            if optimizer is None
            else Update(
                optimizer, self._free_memory.check_update, self._explain_no_retry, scaler, max_grad_norm, scheduler
            )
        )
        self._pace = _set_pace(plan, self._workload, plan.smallest_micro_batch)
        self._layout = Layout(None, 0, plan.batch_lists)
        self._sizes_seen = {sum(plan.micro_batch_sizes)}
        # What runs on a stand-in for a device is not worth keeping.
        recorder = None if isinstance(device, Device) else RunRecorder(plan, Ledger.open())
        self._events = StepEvents(plan, hooks, recorder)
        self._events.report_plan(model, optimizer)
        self._has_reported_gradients = False
        self._counted_steps, self._enforce = CountedSteps(self._workload, self._device, plan.budget_bytes), enforce
        self._largest_elements = 0.0
        self._peak_bytes = 0

    @property
    def micro_batch_size(self) -> int:
        """The most samples in a micro-batch from now on: the plan's, or less where memory was short."""
        return self._pace.size

    def step(self, batch: Any) -> StepResult:
        """One optimizer step on a whole batch.

        Gradients that were there before are part of it, as they would be after ``backward``: begin with none.

        Args:
            batch: This rank's share of the target batch, on any device; only micro-batches go to the model's device.

        Returns:
            The loss, the committed sizes and the numbers of this step. Gradients are ``None`` afterwards.

        Raises:
            DoesNotFit: Memory ended at one sample, or at the fewest that the model can run; everything is as before. Or
                the batch cannot be cut into micro-batches of at most the plan's ``max_micro_batch`` that the model can
                run; nothing was run.
            InvalidBatch: Its samples cannot be counted; nothing was run.
            CannotRetry: Memory ended inside the optimizer's step; parameters may have moved.
        """
        if self._update is None:
            raise InvalidArgument(_NO_OPTIMIZER)
        return self._run([batch], update=True)

    def step_over(self, batches: Iterable[Any]) -> StepResult:
        """One optimizer step on smaller batches that make up the target together.

        Args:
            batches: All are taken before the first one is run: the mean's denominator is the total, and a restart needs
                them.

        Returns:
            As ``step``.

        Raises:
            DoesNotFit: As ``step``.
            CannotRetry: As ``step``.
        """
        if self._update is None:
            raise InvalidArgument(_NO_OPTIMIZER)
        if is_one_batch(batches):
            raise InvalidArgument(
                "step_over() takes several batches, such as a list of them; for one batch call step()"
            )
        return self._run(list(batches), update=True)

    def accumulate(self, batch: Any) -> StepResult:
        """The same without the update: ``.grad`` becomes the batch's gradient, added to what was there.

        With a ``scaler`` the gradients stay scaled, as after ``scaler.scale(loss).backward()``.

        Args:
            batch: This rank's share of the target batch.

        Returns:
            As ``step``.

        Raises:
            DoesNotFit: Memory ended at one sample; everything is as before.
        """
        return self._run([batch], update=False)

    def _run(self, batches: Sequence[Any], *, update: bool) -> StepResult:
        started, thrashed = time.perf_counter(), False
        try:
            layouts = self._describe(batches)
            self._free_memory.is_counted = self._is_counted(layouts, update=update)
            if self._free_memory.is_counted:
                accumulated, thrashed = self._accumulate_counted(layouts, update=update)
            else:
                accumulated = self._accumulate(layouts, update=update)
        except BaseException as error:
            self._events.report_failed(self.steps, error)
            raise
        if accumulated is None or accumulated.loss is None:
            return self._skip(layouts, started)
        result = StepResult(
            loss=accumulated.loss,
            micro_batch_sizes=accumulated.micro_batch_sizes,
            retries=accumulated.retries,
            peak_bytes=self._peak_bytes,
            seconds=time.perf_counter() - started,
            aux=tuple(accumulated.aux),
        )
        if update and self._accumulation.had_gradients and not self._has_reported_gradients:
            self._has_reported_gradients = True
            self._events.report_earlier_gradients(self.steps)
        # Counted before anything is reported: an interrupt there must not make it a failed step.
        step, self.steps = self.steps, self.steps + 1
        self._events.report_finished(step, result)
        self._change_pace(self._pace.after_step(max(result.micro_batch_sizes), thrashed=thrashed), self.steps)
        return result

    def _accumulate_counted(self, layouts: Sequence[Layout], *, update: bool) -> tuple[AccumulationState | None, bool]:
        """The step inside the budget, and whether the allocator had to give memory back in it."""
        self._device.watch(self._workload.resident_tensors())
        for layout in layouts:
            self._device.watch(layout.tensors())
        with self._device.limit(self.plan.budget_bytes):
            self._change_pace(self._look_ahead(), self.steps)
            before = self._counted_steps.begin(layouts, self._pace.size, update=update)
            accumulated = self._accumulate(layouts, update=update)
            usage = self._counted_steps.end(is_skipped=accumulated is None or accumulated.loss is None)
        self._peak_bytes = usage.peak_allocated
        return accumulated, usage.alloc_retries > before.alloc_retries

    def _accumulate(self, layouts: Sequence[Layout], *, update: bool) -> AccumulationState | None:
        pace_before, apply = self._pace, self._update.run if update and self._update is not None else None
        if self._accumulation.smallest > 1:
            self._refuse_larger_micro_batches(layouts)
        try:
            return self._accumulation.run(layouts, pace_before.size, apply)
        except BaseException as error:
            self._pace = pace_before  # a step that did not happen has taught nothing
            if self._accumulation.smallest > 1 or not refuses_one_sample(error):
                raise
        # A plan that no trial stands behind does not know it. Everything is as before the step: it can be run anew.
        self._accumulation.smallest = 2
        self._pace = _set_pace(self.plan, self._workload, smallest=2)
        return self._accumulate(layouts, update=update)

    def _look_ahead(self) -> Pace:
        """The size for this step: less only if less is free even when all that is unused is given back."""
        pace = self._read_pace()
        if pace.size >= self._pace.size:
            return pace
        self._device.reclaim()
        return self._read_pace()

    def _read_pace(self) -> Pace:
        return self._pace.before_step(self._free_memory.limit(), self._free_memory.target())

    def _describe(self, batches: Sequence[Any]) -> list[Layout]:
        """Read the batches' lists as the plan's example was read, and later ones as earlier ones."""
        if not batches:
            raise InvalidBatch("step_over() was given no batches")
        layouts, samples = [], 0
        for batch in batches:
            layout = describe(batch, like=self._layout)
            if layout.spec is None or layout.spec is not self._layout.spec:
                self._layout = layout.without_batch()
            layouts.append(layout)
            samples += layout.count
        if samples not in self._sizes_seen:
            self._sizes_seen.add(samples)
            self._events.report_size(self.steps, samples)
        return layouts

    def _is_counted(self, layouts: Sequence[Layout], *, update: bool) -> bool:
        """Whether to count: near the budget what is not known, the first two steps, and samples larger than before."""
        is_new = self.steps < _ALWAYS_COUNTED
        for layout in layouts:
            elements = layout.elements / layout.count
            if elements > self._largest_elements:
                is_new, self._largest_elements = True, elements
        device = self._device
        if (is_new or self._enforce == "always") and device.measures:
            return True
        if not device.needs_limit(self.plan.peak_bytes, self.plan.budget_bytes):
            if self._pace.goal != self._pace.size:
                self._change_pace(self._pace.before_step(None, None), self.steps)
            return False
        if not self._counted_steps.cover(layouts, self._pace.size, update=update):
            return True
        return self._pace.size < self._pace.goal and self._read_pace() is not self._pace

    def _skip(self, layouts: Sequence[Layout], started: float) -> StepResult:
        """A step that has nothing to take a mean over has not happened, and says so."""
        self._events.report_skip(self.steps, sum(layout.count for layout in layouts))
        loss = torch.full((), torch.nan, device=self._device.torch_device)
        return StepResult(loss, (), 0, 0, time.perf_counter() - started, skipped=True)

    def _refuse_larger_micro_batches(self, batches: Sequence[Layout]) -> None:
        """``max_micro_batch`` is the user's word: nothing is run where a batch could only be divided beyond it."""
        most, smallest = self.plan.max_micro_batch, self._accumulation.smallest
        for layout in batches:
            least = least_size(layout.count, smallest)
            if most is not None and least > most and most < self.plan.target_batch:  # else the bound is fit's own
                why = explain_smallest(self._workload.model)
                raise DoesNotFit(
                    f"a batch of {layout.count} samples in micro-batches of at most {most} (the plan's "
                    f"max_micro_batch) leaves one of a single sample, and {why}: pass an even number of samples, or "
                    f"plan with fit(max_micro_batch={least}) or more"
                )

    def _change_pace(self, pace: Pace, step: int) -> None:
        if pace.size != self._pace.size:
            self._events.report_pace(step, self._pace.size, pace)
        self._pace = pace

    def _shrink(self, shortage: Shortage) -> int:
        self._counted_steps.add_shortage()
        least = max(shortage.least_size, self._pace.smallest)
        if shortage.failed_size <= least:
            raise DoesNotFit(self._explain_shortage(shortage))
        self._pace = self._pace.after_shortage(shortage.failed_size, self._free_memory.target(), least)
        self._events.report_retry(self.steps, shortage, self.micro_batch_size, self._device.usage().allocated)
        return self.micro_batch_size

    def _explain_no_retry(self) -> str:
        return (
            f"so step {self.steps} was not retried; load your last checkpoint and give fit() the optimizer and more "
            f"headroom= than {format_bytes(self.plan.headroom_bytes)}"
        )

    def _explain_shortage(self, shortage: Shortage) -> str:
        used, size = self._device.usage().allocated, shortage.failed_size
        samples = "one sample" if size == 1 else f"{size} samples, the fewest it can have"
        reason = shortage.reason if size == 1 else f"{shortage.reason}; {explain_smallest(self._workload.model)}"
        return (
            f"step {self.steps} ran out of memory {PHASES[shortage.ended_in]} at a micro-batch of {samples}; "
            f"{format_bytes(used)} of a budget of {format_bytes(self.plan.budget_bytes)} were held before it; "
            f"{reason}; everything is as before the step: free memory or give fit() a larger budget="
        )


def _set_pace(plan: Plan, workload: Workload, smallest: int) -> Pace:
    size = plan.micro_batch_size
    if is_compiled(workload.model, workload.step):
        return Pace(compiled_ladder(size), size, plan.curve, smallest, patience=CLEAN_STEPS)
    return Pace(eager_ladder(sum(plan.micro_batch_sizes), size), size, plan.curve, smallest)


def _check_plan(plan: Any, weigh: Any) -> None:
    if not isinstance(plan, Plan):
        raise InvalidArgument(f"plan is {name_type(plan)}: pass what fit() returned, or Plan.load(path)")
    if plan.weighed and weigh is None:
        raise InvalidArgument("the plan was made with weigh=, and this Runner has none: pass the same weigh= to both")
