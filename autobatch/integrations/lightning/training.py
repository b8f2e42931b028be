"""Runs the batches of Lightning's automatic optimization in micro-batches: what stands in place of its ``run``.

Covers the first batch, on which the plan and the Runner are made, and each batch after it up to the end of its update.
Does not cover what Lightning does between batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch

from autobatch.batch.samples import describe
from autobatch.distributed.ranks import all_or_none, find_ranks
from autobatch.errors import AutobatchError, DoesNotFit, InexactSplit, InvalidArgument
from autobatch.exactness.verification import verify
from autobatch.fitting.fit import fit
from autobatch.fitting.options import Options
from autobatch.integrations.attributes import replaced
from autobatch.integrations.lightning.framework import closure_classes
from autobatch.integrations.lightning.later_check import LaterCheck, are_alike
from autobatch.integrations.lightning.log_rules import LOSS, KnownNames, agreed_rules, find_rules
from autobatch.integrations.lightning.logs import Key, LogCall, ResultsKeeper, Rule, combine, merge_calls
from autobatch.integrations.lightning.metrics import StepMetrics, UnknownMetric
from autobatch.integrations.lightning.module_step import ModuleStep, StepOutputs, hook_name
from autobatch.integrations.lightning.outputs import join_outputs
from autobatch.integrations.lightning.refusals import refuse_accumulation, refuse_target
from autobatch.integrations.lightning.update import LightningRunner
from autobatch.memory.devices import find_device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.plan import Plan
from autobatch.records import Verdict
from autobatch.result import StepResult
from autobatch.step.workload import Weigh
from autobatch.undo.undo import Undo
from autobatch.undo.user_objects import check_objects

__all__ = ["Optimization"]

_log = logging.getLogger("autobatch")


class _NewNames(Exception):
    """The step has logged names whose rules are not known."""


class Optimization:
    """Stands in place of ``run`` of a Trainer's automatic optimization.

    Attributes:
        plan: Made on the first batch; ``None`` before.
        runner: Runs the batches.
        result: Of the last step.
        saved: From a checkpoint that is resumed, until the first batch.
    """

    def __init__(self, trainer: Any, module: Any, options: Options) -> None:
        """Take the place of ``run``."""
        self.plan: Plan | None = None
        self.runner: LightningRunner | None = None
        self.result: StepResult | None = None
        self.saved: Mapping[str, Any] | None = None
        self._trainer, self._module, self._options = trainer, module, options
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._run_whole = type(self._loop).run.__get__(self._loop)
        self._step = ModuleStep(trainer, module, self._loop, options.weigh)
        self._metrics = StepMetrics()
        self._rules: dict[Key, Rule] = {}
        # Of several ranks one may log what the others do not: they cannot search together.
        self._names = KnownNames(type(module).__name__, may_search=trainer.world_size == 1)
        self._later = LaterCheck(self._compare)
        self._is_searched = False
        self._batch_index = 0
        self._closed: Any = None
        self._postponed: Sequence[LogCall] = ()
        self._loop.run = self

    def release(self) -> None:
        """Give the place back."""
        vars(self._loop).pop("run", None)

    def __call__(self, optimizer: Any, batch_index: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run one batch and its update; returns what ``on_train_batch_end`` gets."""
        if self._loop._skip_backward:  # noqa: SLF001 - set by StochasticWeightAveraging for batches without an update
            found: dict[str, Any] = self._run_whole(optimizer, batch_index, arguments)
            return found
        refuse_accumulation(self._trainer, self._module)
        self._step.arguments, self._batch_index = arguments, batch_index
        self._closed, self._postponed, self._step.refusal = None, (), ""
        try:
            runner = self._check_and_go_on(arguments["batch"]) or self._begin(optimizer, arguments["batch"])
            self._loop._make_zero_grad_fn(batch_index, optimizer)()  # noqa: SLF001 - Lightning's own, with its hooks
            runner.ignore_zero_gradients()
            self.result = self._run_step(runner, arguments["batch"])
        except AutobatchError:
            if not self._step.refusal:
                raise
        else:
            runner.update.leave_gradients()
            self._step.outputs.clear()
            self._is_searched = False
            self._log_postponed()
            return {} if self._closed is None else self._closed.asdict()
        return self._skip(optimizer)  # only now, after the ``except`` block, are the failed frames gone

    def _check_and_go_on(self, batch: Any) -> LightningRunner | None:
        """Return the Runner, ``None`` on the first batch; where that one could not be checked, ask a later one.

        Raises:
            InexactSplit: Splitting is not exact, and ``check="raise"``.
        """
        verdict = None if self.runner is None else self._later.ask(batch)
        if verdict is not None and not verdict.exact and self.plan is not None and self.plan.accumulation_steps > 1:
            if self._options.fit["check"] == "raise":
                raise InexactSplit(str(verdict))
            _log.warning("%s", verdict)
        return self.runner

    def _compare(self, batch: Any) -> Verdict:
        options = self._options
        with self._keeping():
            return verify(self._trainer.strategy.model, batch, self._step.run, options.weigh, device=options.device)

    def _skip(self, optimizer: Any) -> dict[str, Any]:
        """Skip a batch as Lightning does where ``training_step`` returns ``None`` for the whole of it.

        Raises:
            InvalidArgument: It returns a loss for the whole, or the whole does not fit.
        """
        refusal = self._step.refusal
        self._step.outputs.clear()

        def refuse(*_: Any) -> NoReturn:
            raise InvalidArgument(refusal)

        try:
            with ExitStack() as stack:
                stack.enter_context(replaced(self._loop, "_make_backward_fn", lambda _: refuse))
                if self.runner is not None:  # gradients are cleared, with the hooks
                    stack.enter_context(replaced(self._loop, "_make_zero_grad_fn", lambda *_: None))
                skipped: dict[str, Any] = self._run_whole(optimizer, self._batch_index, self._step.arguments)
                return skipped
        except Exception as error:
            if not is_oom(error):
                raise
        raise InvalidArgument(f"{refusal}; the whole batch would show it, but does not fit in memory")

    def _run_step(self, runner: LightningRunner, batch: Any) -> StepResult:
        """One step; begun again where a metric or a name was unknown, and once where memory ended before the update."""
        was_short = False
        while True:
            try:
                return self._attempt(runner, batch)
            except UnknownMetric:
                continue
            except _NewNames:
                self._note(find_rules(self._step, batch, self._kept(), self._names.new))
                continue
            except Exception as error:
                if was_short or not self._may_run_again(runner, error):
                    raise
                _log.warning("%s; running the step again", describe_error(error))
            was_short = True
            self._device().reclaim()  # only now, after the ``except`` block, are the failed frames gone

    def _may_run_again(self, runner: LightningRunner, error: Exception) -> bool:
        """Whether memory ended where a smaller micro-batch is of no use, and all is as before the step."""
        if isinstance(error, DoesNotFit):  # the other ranks know of it, and will not run it again
            return runner.update.ended_early and self._trainer.world_size == 1
        return not isinstance(error, AutobatchError) and is_oom(error)

    def _attempt(self, runner: LightningRunner, batch: Any) -> StepResult:
        self._step.outputs.clear()
        try:
            self._metrics.begin()
            return runner.step(batch)
        except BaseException:
            self._metrics.undo()
            raise

    def _update(self, begin: Callable[[], None]) -> None:
        """Log what the whole batch would have logged, then let Lightning step its optimizer."""
        closure_class, _ = closure_classes(self._loop)
        with hook_name(self._module, "training_step"), self._trainer.precision_plugin.train_step_context():
            self._close()
        closure = closure_class(step_fn=lambda: self._closed)
        plugin = self._trainer.precision_plugin
        after_closure = plugin._after_closure  # noqa: SLF001 - the last that Lightning does before parameters move

        def clip_and_begin(*arguments: Any) -> None:
            after_closure(*arguments)
            begin()

        with (
            hook_name(self._module, None),
            replaced(plugin, "_after_closure", clip_and_begin),
            self._scaler_as_before(),
        ):
            self._loop._optimizer_step(self._batch_index, closure)  # noqa: SLF001 - Lightning's own
        closure.consume_result()  # raises where ``optimizer_step`` did not run it

    def _close(self) -> None:
        """Put together what the micro-batches have left: loss, outputs, metrics, and what is logged."""
        outputs, (_, result_class) = self._step.outputs, closure_classes(self._loop)
        weights = [output.weight for output in outputs]
        losses = [output.loss for output in outputs]
        sizes = [output.size for output in outputs]
        beside = join_outputs([output.beside for output in outputs], sizes, weights, self._rules)
        loss = combine("sum" if self._step.is_summed else "mean", losses, weights) if losses else None
        self._closed = result_class(loss, extra=beside)
        logged = [(output.weight, output.logged) for output in outputs]
        if self._names.learn(logged, is_searched=self._is_searched):
            raise _NewNames
        calls = merge_calls(logged, self._rules)
        if self._metrics.learn(calls):
            raise UnknownMetric
        self._metrics.end()
        # Reduced over the ranks: all of them are there only when the step is done.
        self._postponed = [call for call in calls if self._trainer.world_size > 1 and call.options.get("sync_dist")]
        self._log_calls([call for call in calls if call not in self._postponed])

    def _log_calls(self, calls: Sequence[LogCall]) -> None:
        for call in calls:
            self._module.log(call.name, call.value, **call.options)

    def _log_postponed(self) -> None:
        with hook_name(self._module, "training_step"), self._trainer.precision_plugin.train_step_context():
            self._log_calls(self._postponed)

    @contextmanager
    def _scaler_as_before(self) -> Iterator[None]:
        """Where this raises, the scaler forgets that gradients were unscaled: the step may be run again."""
        try:
            yield
        except BaseException:
            getattr(getattr(self._trainer.precision_plugin, "scaler", None), "_per_optimizer_states", {}).clear()
            raise

    def _begin(self, optimizer: Any, batch: Any) -> LightningRunner:
        """Find the plan, or go on with that of the checkpoint that is resumed."""
        samples, ranks = describe(batch).count, self._trainer.world_size
        target = self._options.target or ranks * (
            getattr(self._trainer.train_dataloader, "batch_size", None) or samples
        )
        refuse_target(target, samples, ranks, self._trainer.train_dataloader)
        saved = self._recall(target)
        self._note(self._find_rules(batch))
        # With ``weigh=`` the user says what the loss is a mean over.
        is_summed = self._options.weigh is None and LOSS in self._rules and self._rules[LOSS].way == "sum"
        self._step.is_summed = is_summed if saved is None else saved["is_summed"]
        plan = self._fit(optimizer, target, batch) if saved is None else Plan.model_validate_json(saved["plan"])
        if saved is None:
            self._warn_of_loss(plan)
        runner = self._bind(optimizer, plan)
        if saved is not None:
            runner.load_state_dict(saved["runner"])
        return runner

    def _warn_of_loss(self, plan: Plan) -> None:
        """Warn where neither the loss nor its gradient has shown what the loss is."""
        is_known = LOSS in self._rules or self._options.weigh is not None or plan.accumulation_steps == 1
        if is_known or (plan.verdict is not None and not plan.verdict.unchecked):
            return
        _log.warning(
            "the loss of %s.training_step is taken as a mean over samples: a comparison of a few samples with their "
            "parts did not show whether it is a mean or a sum; if it is a sum, divide it by the number of samples",
            type(self._module).__name__,
        )

    def _find_rules(self, batch: Any) -> dict[Key, Rule]:
        """How numbers are put together: with several ranks, where those agree that have a rule."""
        rules = find_rules(self._step, batch, self._kept())
        with self._all_or_none() as of_ranks:
            of_ranks.append(sorted([*key, [*rule.ways], rule.adds_up] for key, rule in rules.items()))
        return agreed_rules(of_ranks)

    def _note(self, rules: Mapping[Key, Rule]) -> None:
        """Keep what was found on the batch that is run."""
        self._rules.update({key: rule.narrowed(self._rules.get(key)) for key, rule in rules.items()})
        self._names.note(self._rules)
        self._is_searched = True

    def _all_or_none(self) -> AbstractContextManager[list[Any]]:
        """Block of all ranks; at its end the list holds what each has appended."""
        if self._trainer.world_size == 1:
            return nullcontext([])
        return all_or_none(find_ranks(self._trainer.strategy.model), "Autobatch(), what is logged")

    def _fit(self, optimizer: Any, target: int, batch: Any) -> Plan:
        options = self._options
        # Several ranks would have to ask together.
        is_open = options.fit["check"] is not None and self._trainer.world_size == 1 and are_alike(batch)
        self._later = LaterCheck(self._compare, is_open)
        with self._keeping():
            return fit(
                self._trainer.strategy.model,
                target,
                batch=batch,
                step=self._step.run,
                optimizer=optimizer,
                weigh=self._weigh(),
                device=options.device,
                **{**options.fit, **({"check": None} if is_open else {})},
            )

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Put back what a step changes outside the module."""
        kept = Undo(None, torch.device("cpu"), keep=check_objects(self._kept()))
        try:
            yield
        finally:
            kept.restore()

    def _bind(self, optimizer: Any, plan: Plan) -> LightningRunner:
        options = self._options
        self.plan = plan
        self.runner = LightningRunner(
            self._update,
            plan,
            self._trainer.strategy.model,
            self._step.run,
            optimizer,
            weigh=self._weigh(),
            device=options.device,
            hooks=options.hooks,
            keep=self._kept(),
            backward=self._step.backward_with(optimizer),
        )
        return self.runner

    def _weigh(self) -> Weigh | None:
        """What a mean is over. Ranks have to know the total of a sum's shares before they divide by it."""
        is_shared = self._step.is_summed and self._trainer.world_size > 1
        return self._step.share_of if is_shared else self._options.weigh

    def _kept(self) -> list[Any]:
        """What a step changes outside the module."""
        return [StepOutputs(self._step), ResultsKeeper(self._trainer), self._loop.optim_progress, *self._options.keep]

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of it; nothing before the first step, but what an earlier one had."""
        if self.plan is None or self.runner is None:
            return dict(self.saved or {})
        plan, runner = self.plan.model_dump_json(), self.runner.state_dict()
        return {"plan": plan, "runner": runner, "is_summed": self._step.is_summed}

    def _recall(self, target: int) -> Mapping[str, Any] | None:
        """What a checkpoint has, where it serves here. With several ranks each has its own, and one rank's is saved."""
        if not self.saved or self._trainer.world_size > 1:
            return None
        plan = Plan.model_validate_json(self.saved["plan"])
        is_same = plan.target_batch == target and plan.device == self._device().describe()
        return self.saved if is_same else None

    def _device(self) -> Any:
        return find_device([*self._module.parameters()], type(self._module).__name__, self._options.device)
