"""Takes the place of ``run`` in Lightning's automatic optimization, which runs a batch and its update."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from autobatch.batch.samples import describe
from autobatch.distributed.shared_step import SharedStep
from autobatch.errors import AutobatchError, CannotRetry, DoesNotFit, InexactSplit, InvalidArgument
from autobatch.exactness.comparison import samples_differ
from autobatch.exactness.verification import verify_in_training
from autobatch.fitting.fit import fit
from autobatch.fitting.options import Options
from autobatch.integrations.attributes import advise, replaced
from autobatch.integrations.lightning.logs import (
    LogCall,
    ResultsKeeper,
    StepMetrics,
    UnknownMetric,
    combine,
    join_outputs,
    merge_calls,
)
from autobatch.integrations.lightning.module_step import ModuleStep, hook_name
from autobatch.memory.devices import find_device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.plan import Plan
from autobatch.result import StepResult
from autobatch.runner import Runner
from autobatch.step.workload import Workload
from autobatch.training.update import Update, explain_no_retry
from autobatch.undo.undo import Undo

_log = logging.getLogger("autobatch")

_VERIFIED_AGAIN = (2, 4, 8)
"""Batches that are compared with their parts after the first: its samples may not show what later ones do."""

_ADVICE = {
    "autobatch.PerStep": " (in Lightning: multiply the term by the count of your autobatch.Sum)",
    "a dict of losses": " (Lightning takes one loss: use autobatch.Runner in manual optimization)",
}


class Optimization:
    """Runs each batch of a Trainer as one step of a Runner."""

    def __init__(self, trainer: Any, module: Any, options: Options) -> None:
        self.plan: Plan | None = None
        self.runner: LightningRunner | None = None
        self.result: StepResult | None = None
        self.saved: Mapping[str, Any] | None = None  # of the checkpoint that is resumed
        self._trainer, self._module, self._options = trainer, module, options
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._run_whole = type(self._loop).run.__get__(self._loop)
        self._step = ModuleStep(trainer, module, self._loop, options.weigh)
        self._kept = [self._step, ResultsKeeper(trainer), self._loop.optim_progress, *options.keep]
        self._metrics = StepMetrics()
        self._batches = self._batch_index = 0
        self._closed: Any = None
        self._postponed: list[LogCall] = []
        self._loop.run = self

    def release(self) -> None:
        vars(self._loop).pop("run", None)

    def __call__(self, optimizer: Any, batch_index: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run one batch and its update; return what ``on_train_batch_end`` gets."""
        loop, batch = self._loop, arguments["batch"]
        if loop._skip_backward:  # noqa: SLF001 - set by StochasticWeightAveraging for batches without an update
            found: dict[str, Any] = self._run_whole(optimizer, batch_index, arguments)
            return found
        refuse_accumulation(self._trainer, self._module)
        self._step.arguments, self._step.refusal, self._batch_index = arguments, "", batch_index
        self._step.batch_sizes.begin()
        self._closed = None
        loop._make_zero_grad_fn(batch_index, optimizer)()  # noqa: SLF001 - Lightning's own, with its hooks
        try:
            runner = self.runner or self._begin(optimizer, batch)
            self._verify_again(runner, batch)
            self._step.refusal = ""
            self.result = self._run_step(runner, batch)
        except AutobatchError as error:
            if not self._step.refusal and isinstance(error, InexactSplit):
                raise InexactSplit(advise(error, _ADVICE)) from None
            if not self._step.refusal:
                raise
        else:
            runner.leave_gradients()
            self._step.outputs.clear()
            with self._logging():
                for call in self._postponed:
                    self._module.log(call.name, call.value, **call.options)
            return {} if self._closed is None else self._closed.asdict()
        return self._skip(optimizer)  # only now, after the ``except`` block, are the failed frames gone

    def _begin(self, optimizer: Any, batch: Any) -> LightningRunner:
        """Find the plan, or take that of the checkpoint that is resumed; bind it."""
        trainer, options, samples = self._trainer, self._options, describe(batch).count
        loader, ranks = trainer.train_dataloader, trainer.world_size
        target = options.target or ranks * (getattr(loader, "batch_size", None) or samples)
        refuse_target(target, samples, ranks, loader)
        plan = self._recall(target)
        is_resumed = plan is not None
        plan = plan or self._fit(optimizer, target, batch)
        runner = LightningRunner(
            self._update,
            plan,
            trainer.strategy.model,
            self._step.run,
            optimizer,
            weigh=options.weigh,
            device=options.device,
            hooks=options.hooks,
            keep=self._kept,
            backward=self._step.backward_with(optimizer),
        )
        if is_resumed and self.saved:
            runner.load_state_dict(self.saved["runner"])
            self._step.batch_sizes.is_whole.update(self.saved.get("batch_sizes", {}))
        self.plan, self.runner = plan, runner
        return runner

    def _fit(self, optimizer: Any, target: int, batch: Any) -> Plan:
        options, layout = self._options, describe(batch)
        # Samples that are all alike show nothing: a later batch is compared. Several ranks could not do so alone.
        is_open = self._trainer.world_size == 1 and not samples_differ(layout.spread(min(layout.count, 16)))
        with self._keeping():
            return fit(
                self._trainer.strategy.model,
                target,
                batch=batch,
                step=self._step.run,
                optimizer=optimizer,
                weigh=options.weigh,
                device=options.device,
                **{**options.fit, **({"check": None} if is_open else {})},
            )

    def _verify_again(self, runner: LightningRunner, batch: Any) -> None:
        """Compare some later batches with their parts; with several ranks only the first batch is."""
        self._batches += 1
        options, model, ranks = self._options, self._trainer.strategy.model, self._trainer.world_size
        is_due = self._batches in _VERIFIED_AGAIN and runner.plan.accumulation_steps > 1 and ranks == 1
        if options.fit["check"] is None or not is_due:
            return
        plan = runner.plan
        try:
            with self._keeping():
                verdict = verify_in_training(
                    Workload(model, self._step.run, options.weigh),
                    batch,
                    device=self._device(),
                    budget_bytes=plan.budget_bytes,
                    most=plan.micro_batch_size,
                )
        except Exception as error:  # noqa: BLE001 - the step itself shows it if it cannot run
            _log.info("batch %d was not compared with its parts: %s", self._batches, describe_error(error))
            return
        finally:
            self._step.refusal = ""
        if verdict.exact or verdict.unchecked:
            return
        if options.fit["check"] == "raise":
            raise InexactSplit(str(verdict))
        _log.warning("%s", advise(verdict, _ADVICE))

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        kept = Undo(None, torch.device("cpu"), keep=self._kept)
        try:
            yield
        finally:
            kept.restore()

    def _run_step(self, runner: LightningRunner, batch: Any) -> StepResult:
        was_short = False
        while True:
            self._step.outputs.clear()
            self._postponed = []
            try:
                runner.ended_early = False
                self._metrics.begin()
                return runner.step(batch)
            except BaseException as error:
                self._metrics.undo()
                # A step that has failed at one sample is hopeless. The other ranks know that this one does not fit, and
                # do not run the step again.
                is_short = isinstance(error, DoesNotFit) and runner.ended_early and self._trainer.world_size == 1
                is_short = is_short or (not isinstance(error, AutobatchError) and is_oom(error))
                if not isinstance(error, UnknownMetric) and (was_short or not is_short):
                    raise
                if is_short:
                    _log.warning("%s; running the step again", describe_error(error))
            was_short = was_short or is_short
            self._device().reclaim()  # only now, after the ``except`` block, are the failed frames gone

    def _update(self, begin: Callable[[], None]) -> None:
        """Log what the whole batch would have logged, then let Lightning step its optimizer."""
        loop, plugin = self._loop, self._trainer.precision_plugin
        with self._logging():
            self._close()
        closure = sys.modules[loop.output_result_cls.__module__].Closure(step_fn=lambda: self._closed)
        after_closure = plugin._after_closure  # noqa: SLF001 - the last that Lightning does before parameters move

        def clip_and_begin(*arguments: Any) -> None:
            after_closure(*arguments)
            begin()

        try:
            with hook_name(self._module, None), replaced(plugin, "_after_closure", clip_and_begin):
                loop._optimizer_step(self._batch_index, closure)  # noqa: SLF001 - Lightning's own
        except BaseException:
            # The scaler forgets that gradients were unscaled: the step may be run again.
            getattr(getattr(plugin, "scaler", None), "_per_optimizer_states", {}).clear()
            raise
        closure.consume_result()  # raises where ``optimizer_step`` did not run it

    def _close(self) -> None:
        """Combine what the micro-batches have left: loss, outputs, metrics, and what is logged."""
        outputs = self._step.outputs
        sizes, weights = [output.size for output in outputs], [output.weight for output in outputs]
        loss = combine("mean", [output.loss for output in outputs], weights) if outputs else None
        beside = join_outputs([output.beside for output in outputs], sizes, weights)
        self._closed = self._loop.output_result_cls(loss, extra=beside)
        logged = [(output.size, output.weight, output.logged) for output in outputs]
        wholes = {sum(sizes), getattr(self._trainer.train_dataloader, "batch_size", None)}
        calls = merge_calls(logged, wholes, self._step.batch_sizes)
        if self._metrics.learn(calls):
            raise UnknownMetric
        self._metrics.end()
        for call in calls:
            if self._trainer.world_size > 1 and call.options.get("sync_dist"):
                self._postponed.append(call)  # the other ranks, for which Lightning waits, may run the step again
            else:
                self._module.log(call.name, call.value, **call.options)

    @contextmanager
    def _logging(self) -> Iterator[None]:
        with hook_name(self._module, "training_step"), self._trainer.precision_plugin.train_step_context():
            yield

    def _skip(self, optimizer: Any) -> dict[str, Any]:
        """Skip a batch as Lightning does if ``training_step`` returns ``None`` for the whole of it; else refuse it."""
        refusal, loop = self._step.refusal, self._loop
        self._step.outputs.clear()

        def refuse(*_: Any) -> NoReturn:
            raise InvalidArgument(refusal)

        try:
            # Gradients are cleared already, with the hooks.
            with (
                replaced(loop, "_make_backward_fn", lambda _: refuse),
                replaced(loop, "_make_zero_grad_fn", lambda *_: None),
            ):
                skipped: dict[str, Any] = self._run_whole(optimizer, self._batch_index, self._step.arguments)
                return skipped
        except Exception as error:
            if not is_oom(error):
                raise
        raise InvalidArgument(f"{refusal}; the whole batch would show it, but does not fit in memory")

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds; before the first step, what an earlier one held."""
        if self.plan is None or self.runner is None:
            return dict(self.saved or {})
        batch_sizes = dict(self._step.batch_sizes.is_whole)
        return {"plan": self.plan.model_dump_json(), "runner": self.runner.state_dict(), "batch_sizes": batch_sizes}

    def _recall(self, target: int) -> Plan | None:
        """Return the checkpoint's plan if it serves here. It has the plan of one rank only."""
        if not self.saved or self._trainer.world_size > 1:
            return None
        plan = Plan.model_validate_json(self.saved["plan"])
        is_same = plan.target_batch == target and plan.device == self._device().describe()
        return plan if is_same else None

    def _device(self) -> Any:
        return find_device([*self._module.parameters()], type(self._module).__name__, self._options.device)


class LightningRunner(Runner):
    """A Runner whose update ``apply`` makes; it calls its argument right before the parameters move."""

    _is_in_users_loop = False
    _calls_between = True  # Lightning's hooks before the optimizer's step

    def __init__(self, apply: Callable[[Callable[[], None]], None], *arguments: Any, **named: Any) -> None:
        """Bind a plan to a module; the other arguments are Runner's."""
        self._apply = apply
        self.ended_early = False  # whether memory ran out in the last step's update, before the parameters moved
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        super().__init__(*arguments, **named)
        # Lightning has cleared them, or its user's ``optimizer_zero_grad`` has not.
        self._events.has_reported_gradients = True

    def leave_gradients(self) -> None:
        """Let ``.grad`` hold the step's gradient until Lightning clears it, as its hooks expect."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []

    def _finish(self, undo: Undo, shared: SharedStep | None, applied: Update | None) -> None:
        """Let Lightning make the update, and commit right before its parameters move."""
        self.ended_early = False
        optimizer: Any = self._workload.optimizer
        handled, reason = sys.exc_info()[1], None
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if shared is None:
            self._make_room(applied)

        def commit() -> None:
            if undo.is_released:
                return
            gradients = [(parameter, parameter.grad) for parameter in held if parameter.grad is not None]
            if shared is not None:
                shared.settle()
            self._accumulation.commit(undo)
            self._gradients = gradients
            if applied is not None:
                applied.keep()

        try:
            self._apply(commit)
            commit()  # an ``optimizer_step`` of the user may leave the optimizer's step out
        except BaseException as error:
            is_short = isinstance(error, Exception) and is_oom(error, handled=handled)
            self.ended_early = is_short and not undo.is_released
            if not undo.is_released or not is_short:
                raise
            reason = describe_error(error, handled=handled)
        finally:
            if undo.is_released:
                self._workload.drop_gradients()
        if reason is not None:
            raise CannotRetry(
                f"ran out of memory inside the optimizer's step ({reason}): parameters may have moved, "
                f"{explain_no_retry(self.steps, self.plan)}"
            )
        self._count(shared)


def refuse_accumulation(trainer: Any, module: Any) -> None:
    """Raise InvalidArgument if Lightning adds up batches: it would divide each by their number."""
    if trainer.accumulate_grad_batches != 1:
        raise InvalidArgument(
            f"{type(module).__name__}: accumulate_grad_batches={trainer.accumulate_grad_batches} counts each batch the "
            f"same, whatever its size; give the DataLoader the whole batch, and leave accumulate_grad_batches out"
        )


def refuse_target(target: int, samples: int, ranks: int, loader: Any) -> None:
    """Raise InvalidArgument where the loader's batches are not this rank's share of the target."""
    share, rest = divmod(target, ranks)
    if rest:
        raise InvalidArgument(
            f"target_batch={target} over {ranks} ranks: the loader gives each rank equally many samples; pass a "
            f"multiple of {ranks}"
        )
    size = getattr(loader, "batch_size", None) or samples
    if size != share:
        where = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise InvalidArgument(
            f"target_batch={target}, and the loader gives {size} samples at once{where}: give the DataLoader "
            f"batch_size={share}, which autobatch divides, or leave target_batch out"
        )
