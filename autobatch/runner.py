"""Defines the public ``Runner``: it fits, reads loaders, and gives batches to ``training.runner``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import torch
from torch import nn

from autobatch._arguments import check_switch
from autobatch._wrappers import is_accumulating
from autobatch.batch.samples import Layout
from autobatch.distributed.parallelism import find_ranks
from autobatch.distributed.ranks import all_or_none
from autobatch.errors import InvalidArgument
from autobatch.fitting.fit import ForRun, fit
from autobatch.fitting.options import (
    FitAndRunOptions,
    FitOptions,
    RunnerOptions,
    names_of,
    refuse_unknown,
    select,
)
from autobatch.result import StepResult
from autobatch.step.workload import Step
from autobatch.training.batches import several
from autobatch.training.loader_steps import (
    Pass,
    Progress,
    check_loader,
    count_samples,
    read_together,
    refuse_unlike,
    set_epoch,
)
from autobatch.training.runner import StepRunner
from autobatch.training.runner_state import RunnerState, read_state
from autobatch.undo.undo import Undo
from autobatch.undo.user_objects import check_objects

if TYPE_CHECKING:
    from typing_extensions import Unpack


_LOG = logging.getLogger("autobatch")
_NO_OPTIMIZER = "this Runner has no optimizer; use accumulate(batch) and do the update yourself"

_ACCUMULATED_TWICE = (
    "accumulate() inside accelerator.accumulate(), where optimizer.step() does nothing for this batch: the gradient of "
    "the next one would be added, and nothing would divide the sum; leave accelerator.accumulate() out and pass the "
    "whole batch, or set gradient_accumulation_steps=1"
)

_NO_COPY = (
    "a Runner cannot be copied or pickled, as it is bound to one model and one optimizer: make one of runner.plan, and "
    "give it runner.state_dict()"
)


_CALL = inspect.signature(StepRunner)


def _explain_call(error: str) -> str:
    """Explain a call with wrong arguments; Python would name the base class."""
    if error == "missing a required argument: 'optimizer'":
        return "Runner(plan, model, step) has no optimizer: pass it, or optimizer=None if you call only accumulate()"
    return f"Runner(): {error}; its arguments are {', '.join(_CALL.parameters)}"


class Runner(StepRunner):
    """Runs optimizer steps in the plan's micro-batches, exactly, and retries with less when memory runs out.

    Attributes:
        plan: Plan that the steps follow.
        steps: Number of committed steps (or accumulations).
    """

    if not TYPE_CHECKING:  # a type checker reads the arguments from the base class

        @wraps(StepRunner.__init__, assigned=("__doc__", "__annotations__"))
        def __init__(self, *arguments: Any, **options: Any) -> None:
            try:
                _CALL.bind(*arguments, **options)
            except TypeError as error:
                raise InvalidArgument(_explain_call(str(error))) from None
            super().__init__(*arguments, **options)

    @classmethod
    def fit(
        cls,
        model: nn.Module,
        target_batch: int,
        *,
        batch: Any | None = None,
        step: Step | None = None,
        optimizer: Any | None = None,
        **options: Unpack[FitAndRunOptions],
    ) -> Runner:
        """Fit a plan and bind it in one call: ``autobatch.fit`` and then ``autobatch.Runner``.

        Example:
            >>> runner = autobatch.Runner.fit(model, 256, batch=loader, step=step, optimizer=sgd)  # doctest: +SKIP
            >>> for result in runner.run(loader):  # doctest: +SKIP
            ...     print(result.loss)

        Args:
            model: As in both.
            target_batch: As in ``fit``.
            batch: An example batch, or a Dataset or DataLoader. The loader may have any batch size: ``run`` joins and
                cuts its batches.
            step: As in both.
            optimizer: As in both.
            **options: Those of ``fit``: ``budget``, ``headroom``, ``max_micro_batch``, ``objective``,
                ``accumulate_in_float32``, ``check``, ``reuse``, ``progress``, ``strategies``, ``share``. Those of
                ``Runner``: ``scaler``, ``max_grad_norm``, ``scheduler``, ``hooks``, ``keep``, ``backward``. And those
                of both: ``weigh``, ``cut``, ``device``.

        Returns:
            A Runner whose ``plan`` is new.

        Raises:
            NeedsBatch: As ``fit``, and so are ``DoesNotFit`` and ``InexactSplit``.
            InvalidArgument: An argument is unknown or cannot be used.
        """
        refuse_unknown("Runner.fit()", options, ["batch", "step", "optimizer", *names_of(FitAndRunOptions)])
        with all_or_none(find_ranks(model), "Runner.fit()"):
            # Trials run the step too, which changes these objects.
            objects = Undo(None, torch.device("cpu"), keep=check_objects(options.get("keep", ())))
            try:
                plan = fit(
                    model,
                    target_batch,
                    batch=ForRun(batch),
                    step=step,
                    optimizer=optimizer,
                    **select(options, FitOptions),
                )
            finally:
                objects.restore()
        return cls(plan, model, step, optimizer, **select(options, RunnerOptions))

    @cached_property
    def _progress(self) -> Progress:
        return Progress()

    @property
    def passes(self) -> int:
        """Number of passes over a loader that ``run`` has finished."""
        return self._progress.passes

    def run(self, loader: Iterable[Any], *, epochs: int | None = None, drop_last: bool = False) -> Iterator[StepResult]:
        """Run one optimizer step for every target's worth of samples, whatever sizes the loader's batches have.

        Batches are joined and cut so that each step has exactly this rank's share of the target; the rest of a batch
        begins the next step. At the loader's end a smaller step runs, with the mean over its own samples. A step runs
        when its result is asked for.

        ``state_dict()`` between two steps has the place in the pass. After ``load_state_dict()`` the first call of
        ``run`` skips the used samples, restores the random generators to the states that you had set, and continues. A
        batch that was used in part is read again. The loader must give the same order again: by ``set_epoch`` and a
        seed, or a generator that you seed for each pass. Load no state into a loader that resumes itself, except a
        ``ShareSampler``. Every other call begins a new pass, also after a ``break`` or an error.

        With several ranks each passes its own loader, for as many passes. A rank whose loader has ended takes part in
        the others' last steps without samples. Leave the loop at the same step on every rank.

        Args:
            loader: A DataLoader, a list of batches, or another iterable of batches.
            epochs: Number of passes. ``set_epoch(epoch)`` is called before each, if the loader, its samplers or its
                dataset have it. After ``load_state_dict()`` finished passes count. ``None``: one pass without
                ``set_epoch``.
            drop_last: Leave out a last step that is smaller than the target.

        Yields:
            The result of each step, as ``step`` returns it.

        Raises:
            InvalidArgument: ``loader`` is a single batch or a dataset, or it yields samples. Its batches cannot be
                divided. It ends before the place of the loaded state. Or another call of ``run`` has begun.
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
        share, progress, has_warned = sum(self.plan.micro_batch_sizes), self._progress, False
        for epoch in progress.begin(epochs):
            call = progress.calls
            if epoch is not None:
                set_epoch(loader, epoch)
            reading, result = Pass(loader, progress, share, self._describe_loaded, self._device.torch_device), None
            while (batches := self._read_step(reading, drop_last=drop_last)) is not None:
                result, used = self._run(batches, update=True, is_cut=True), count_samples(batches)
                progress.samples += used
                del batches  # while the user has the result, nothing of the step is held
                yield result
                progress.check_call(call)
            if result is None and not progress.samples and not has_warned:
                has_warned = True
                _LOG.warning("run() made no step in a pass: the loader gave %s", reading.describe())

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
            DoesNotFit: Memory ran out at one sample, or at the fewest that the model can run; the step was undone. Or
                the batch cannot be cut into micro-batches of at most the plan's ``max_micro_batch`` that the model can
                run; nothing was run.
            InvalidArgument: Its samples cannot be counted; nothing was run.
            CannotRetry: Memory ran out inside the optimizer's step; parameters may have moved.
        """
        if self._update is None:
            raise InvalidArgument(_NO_OPTIMIZER)
        return self._run([batch], update=True)

    def step_over(self, batches: Iterable[Any]) -> StepResult:
        """Run one optimizer step on smaller batches that make up the target together.

        The step is that of one batch with all their samples. Neighbours of the same structure are joined, so that small
        batches fill micro-batches of the plan's size. Others are divided separately: those of other shapes or dtypes,
        with numbers in them, of registered types, and all with ``cut=`` or sharded parameters.

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
            DoesNotFit: Memory ran out at one sample; the step was undone.
            InvalidArgument: accelerate is accumulating: its optimizer's ``step()`` would do nothing now, and gradients
                of several batches would add up that nothing divides.
        """
        if is_accumulating():
            raise InvalidArgument(_ACCUMULATED_TWICE)
        return self._run([batch], update=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes of the next steps and the place of ``run``, in plain numbers, texts, lists and dicts.

        A resumed run is then bit for bit the uninterrupted one, if the same memory is free: sizes decide how gradients
        are rounded. Save parameters, optimizers, schedulers, scalers, generators and objects in ``keep=`` yourself.
        Each rank has its own state.
        """
        return RunnerState.of(
            self.plan,
            self._memory.pace,
            steps=self.steps,
            passes=self._progress.passes,
            pass_samples=self._progress.samples,
            batch_lists=self._batches.lists,
            counted_per_sample=self._accumulation.counted_per_sample,
            recomputes_more=self._memory.recomputes_more,
            summing_wait=self._memory.summing.wait,
            summing_left=self._memory.summing.left,
        ).model_dump(mode="json")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, between two steps.

        Args:
            state: From a Runner of the same plan, as by ``Plan.load``; also after ``json`` or ``torch.save``.

        Raises:
            InvalidArgument: It is not such a state, or it is another plan's; nothing has changed.
        """
        found = read_state(state, self.plan)
        pace = found.resume(self._memory.make_pace(found.smallest_micro_batch))
        self._accumulation.smallest = found.smallest_micro_batch
        self._accumulation.counted_per_sample = found.counted_per_sample
        self._memory.summing = replace(self._memory.summing, wait=found.summing_wait, left=found.summing_left)
        if found.recomputes_more:
            self._memory.recompute_more()
        self._batches.lists = found.batch_lists
        self.steps = self._memory.first_step = found.steps
        self._progress.resume(found.passes, found.pass_samples)
        if found.steps:
            self._sizes.last = self._sizes.planned  # the next step may be the last of an epoch
        self._stepped.forget()
        self._memory.change(pace, self.steps)

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: a copy would share parts with this one.

        Raises:
            InvalidArgument: Always.
        """
        raise InvalidArgument(_NO_COPY)
