"""Runs a Trainer's optimizer steps in micro-batches: what stands in place of its ``training_step``.

Covers the first batch, on which the loss's rule, the plan and the Runner are made, and each batch after it. Does not
cover clipping, the update and all that follows, which are the Trainer's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from autobatch.distributed.data_parallel import module_of
from autobatch.distributed.ranks import all_or_none, find_ranks
from autobatch.errors import DoesNotFit, InexactSplit
from autobatch.fitting.fit import fit
from autobatch.fitting.options import Options
from autobatch.integrations.transformers.known_rules import KnownRules, choose_likeliest, entries_of
from autobatch.integrations.transformers.loss_rule import LossRule, count_samples
from autobatch.integrations.transformers.rule_search import OTHERWISE, cuts_for, find_rule, refutes
from autobatch.integrations.transformers.samples import collate_largest, take_samples
from autobatch.integrations.transformers.trainer_state import AutobatchState, TrainerAttributes
from autobatch.integrations.transformers.trainer_step import TrainerStep, modes_of_training
from autobatch.memory.device import Device
from autobatch.memory.devices import find_device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.plan import Plan
from autobatch.result import StepResult
from autobatch.runner import Runner
from autobatch.undo.random_state import RandomState
from autobatch.undo.undo import Undo
from autobatch.undo.user_objects import check_objects

__all__ = ["TrainingStep"]

_log = logging.getLogger("autobatch")
_T = TypeVar("_T")


class TrainerRunner(Runner):
    """A Runner whose batches and schedules are the Trainer's."""

    _is_in_users_loop = False


class TrainingStep:
    """Stands in place of a Trainer's ``training_step``; what ``attach`` returns.

    Attributes:
        plan: Made on the first batch of ``train()``; ``None`` before.
        runner: Runs the batches of the current ``train()``.
        rule: How batches are divided, and what the loss is a mean over; ``print(step.rule)`` says it in words.
        result: Of the last step.
    """

    def __init__(self, trainer: Any, collate: Callable[[Sequence[Any]], Any], options: Options) -> None:
        """Know the Trainer.

        Args:
            trainer: Whose ``training_step`` is still its own.
            collate: Its own collate function.
            options: The user's.
        """
        self.plan: Plan | None = None
        self.runner: Runner | None = None
        self.rule: LossRule | None = None
        self.result: StepResult | None = None
        self._trainer, self._collate, self._options = trainer, collate, options
        self._step = TrainerStep(trainer, trainer.training_step, ranks=trainer.args.world_size)
        self._bound_to: tuple[Any, Any] = (None, None)
        self._rules = KnownRules(type(trainer).__name__)

    def __call__(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Add the gradient of a whole batch to ``.grad``, as the Trainer's own does; returns the loss."""
        samples = take_samples(inputs)
        self._step.num_items, self._step.samples = num_items_in_batch, count_samples(inputs, samples)
        rule, runner = self._find(model, inputs, samples)
        batch = self._try_twice(lambda: rule.cut.batch_of(inputs, samples, runner.micro_batch_size))
        self._step.metrics.begin()
        self._step.logs.micro_batches.clear()
        self.result = runner.accumulate(batch)
        self._merge_metrics(model, self.result.micro_batch_sizes)
        self._step.logs.write(self.result.micro_batch_sizes)
        return self.result.loss.to(self._trainer.args.device)

    def _find(self, model: nn.Module, inputs: Any, samples: Any) -> tuple[LossRule, Runner]:
        """The rule and the Runner for this batch: those of the batch before, if there was one."""
        if self.runner is None or self._bound_to != (model, self._trainer.optimizer):
            return self._begin(model, inputs, samples)
        runner, rule = self.runner, self._rules.find(self._entries_of_all(model, inputs))
        if rule is None or self._is_put_in_question(model, rule, inputs, samples):
            with self._leaves_no_trace():
                rule = self._learn(model, inputs, samples, rule or self.rule)
        if not rule.is_like(self.rule):
            runner = self._bind_anew(model, rule, runner)
        self.rule = rule
        return rule, runner

    def _begin(self, model: nn.Module, inputs: Any, samples: Any) -> tuple[LossRule, Runner]:
        """Find the rule and the plan, or go on with those of the checkpoint that is resumed."""
        self._rules.begin()
        recalled = self._recall()
        rule = self._rules.find(self._entries_of_all(model, inputs))
        with self._leaves_no_trace():
            if rule is None or self._is_put_in_question(model, rule, inputs, samples):
                rule = self._learn(model, inputs, samples, rule or (self.rule if recalled else None))
            else:
                self._step.learn_logs(module_of(model), rule.cut, inputs, samples)
            plan, state = recalled or (self._fit(model, rule, inputs, samples), None)
        runner = self._bind(model, rule, plan)
        if state is not None:
            runner.load_state_dict(state)
        return rule, runner

    def _learn(self, model: nn.Module, inputs: Any, samples: Any, known: LossRule | None) -> LossRule:
        """The rule of this batch; with several ranks one that is exact on each of them.

        Args:
            model: Of which gradients are compared.
            inputs: The loader's batch.
            samples: What it was made of.
            known: The rule of the batches before.
        """
        cuts, options = cuts_for(self._trainer, self._collate), self._options
        name = type(self._trainer).__name__
        with self._all_or_none(model, "attach(), the loss") as gathered:
            device, check = options.device, options.fit["check"]
            with modes_of_training(module_of(model)):
                own = find_rule(
                    self._step, cuts, module_of(model), inputs, samples, device=device, check=check, known=known
                )
            self._step.learn_logs(module_of(model), own.cut, inputs, samples)
            gathered.append((own.cut.name, own.reading, own.open, own.is_tried, own.is_exact, own.is_guess))
        by_name = {cut.name: cut for cut in cuts}
        found = [
            LossRule(by_name[cut], reading, self._step, tuple(others), *flags)
            for cut, reading, others, *flags in gathered
        ]
        rule = self._rules.add(found)
        if rule is None:
            self._refuse_differences(name, found)
            rule = self._rules.insist(choose_likeliest(found))
        _log.info("%s: %s", name, rule)
        return rule

    def _refuse_differences(self, name: str, found: Sequence[LossRule]) -> None:
        """Raise or warn where the batches of several ranks have to be divided each in its own way."""
        ways = "; ".join(f"rank {rank}: {rule}" for rank, rule in enumerate(found))
        refusal = InexactSplit(
            f"{name}: no way was found to split this loss exactly: the ranks' batches have different losses ({ways}); "
            f"check='warn' trains anyway"
        )
        if self._options.fit["check"] == "raise":
            raise refusal
        if self._options.fit["check"] == "warn":
            _log.warning("%s", f"{refusal}".removesuffix(OTHERWISE))

    def _entries_of_all(self, model: nn.Module, inputs: Any) -> Sequence[Any]:
        """What tells the kind of each rank's batch."""
        with self._all_or_none(model, "attach(), the kind of the batch") as gathered:
            gathered.append(entries_of(inputs))
        return gathered

    def _fit(self, model: nn.Module, rule: LossRule, inputs: Any, samples: Any) -> Plan:
        """A plan that the dataset's largest samples fit."""
        arguments = self._trainer.args
        largest = collate_largest(self._trainer.callback_handler.train_dataloader)
        if largest is not None:
            its_samples = take_samples(largest)
            if rule.cut.can_divide(largest, its_samples):
                inputs, samples = largest, its_samples
        return fit(
            model,
            arguments.per_device_train_batch_size * arguments.world_size,
            batch=rule.cut.batch_of(inputs, samples),
            step=rule.run,
            optimizer=self._trainer.optimizer,
            weigh=rule.weigh,
            device=self._options.device,
            **{**self._options.fit, "check": None},  # the rule was compared
        )

    def _bind(self, model: nn.Module, rule: LossRule, plan: Plan) -> Runner:
        trainer, options = self._trainer, self._options
        self.rule, self.plan, self._bound_to = rule, plan, (model, trainer.optimizer)
        self.runner = TrainerRunner(
            plan,
            model,
            step=rule.run,
            optimizer=trainer.optimizer,
            weigh=rule.weigh,
            device=options.device,
            scaler=trainer.accelerator.scaler,
            hooks=options.hooks,
            keep=[TrainerAttributes(trainer), self._step.metrics.tokens, self._step.logs, *options.keep],
        )
        return self.runner

    def _bind_anew(self, model: nn.Module, rule: LossRule, runner: Runner) -> Runner:
        """With another rule, and the size that this Runner has come to."""
        state = runner.state_dict()
        bound = self._bind(model, rule, runner.plan)
        bound.load_state_dict(state)
        return bound

    def budget(self) -> int | None:
        """Bytes that this process may have, where a plan says it."""
        return None if self.plan is None else self.plan.budget_bytes

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint has of it; ``None`` before the first step."""
        if self.rule is None or self.plan is None or self.runner is None:
            return None
        saved = self._rules.state(self.rule)
        return {**saved, "plan": self.plan.model_dump_json(), "runner": self.runner.state_dict()}

    def _recall(self) -> tuple[Plan, Any] | None:
        """Plan and Runner's state of a checkpoint, where they serve here; its rule is known from now on.

        With several ranks each has its own, and one rank's is saved.
        """
        AutobatchState.attach_to(self._trainer, self.state)
        saved = AutobatchState.saved_in(self._trainer.state)
        arguments = self._trainer.args
        if saved is None or self._trainer.state.global_step == 0 or arguments.world_size > 1:
            return None
        plan = Plan.model_validate_json(saved["plan"])
        if plan.target_batch != arguments.per_device_train_batch_size or plan.device != self.device().describe():
            return None
        cuts = cuts_for(self._trainer, self._collate)
        self.rule = self._rules.load(saved, cuts, self._step)
        return None if self.rule is None else (plan, saved["runner"])

    def _merge_metrics(self, model: nn.Module, samples: Sequence[int]) -> None:
        metrics = self._step.metrics

        def exchange(own: Any) -> list[Any]:
            with self._all_or_none(model, "attach(), the metrics") as gathered:
                gathered.append(own)
            return gathered

        metrics.merge(samples, exchange if self._step.ranks > 1 else None)

    def _is_put_in_question(self, model: nn.Module, rule: LossRule, inputs: Any, samples: Any) -> bool:
        """Whether the rule has to be found again: by what this batch shows, or as batches 2, 4, 8, ... are compared."""
        is_compared = self._rules.is_compared(rule)
        if rule.is_certain and not is_compared:
            return False
        with self._all_or_none(model, "attach(), the labels") as gathered:
            is_open = not rule.is_certain and self._try_twice(lambda: self._may_tell_more(rule, inputs, samples))
            gathered.append(is_open or (is_compared and self._is_refuted(model, rule, inputs, samples)))
        return any(gathered)

    def _may_tell_more(self, rule: LossRule, inputs: Any, samples: Any) -> bool:
        is_asked = rule.is_guess and count_samples(inputs, samples) > 1 and self._rules.is_asked_again()
        return is_asked or rule.is_put_in_question(inputs)

    def _is_refuted(self, model: nn.Module, rule: LossRule, inputs: Any, samples: Any) -> bool:
        try:
            with self._leaves_no_trace(), modes_of_training(module_of(model)):
                return refutes(rule, module_of(model), inputs, samples, self._options.device)
        except Exception as error:
            if not is_oom(error):
                raise
            return False  # the step itself may fit: it is then asked of a later batch

    def _all_or_none(self, model: nn.Module, call: str) -> AbstractContextManager[list[Any]]:
        """Block of all ranks; at its end the list holds what each has appended. One rank exchanges nothing."""
        if self._trainer.args.world_size == 1:
            return nullcontext([])
        return all_or_none(find_ranks(model), call)

    @contextmanager
    def _leaves_no_trace(self) -> Iterator[None]:
        """A block after which all that steps and collate functions may draw and count is as before."""
        attributes, random = TrainerAttributes(self._trainer), RandomState(self.device().torch_device)
        taken = attributes.take()
        objects = check_objects([*self._options.keep])
        before = Undo(None, torch.device("cpu"), keep=objects)
        try:
            yield
        finally:
            before.restore()
            attributes.put(taken)
            random.restore()

    def device(self) -> Device:
        """The memory of the device that the model is on."""
        model = self._trainer.model
        return find_device([*model.parameters()], type(model).__name__, self._options.device)

    def _try_twice(self, action: Callable[[], _T]) -> _T:
        """Do what takes little memory; where it ends, once more after caches are given back."""
        reason = ""
        for _ in range(2):
            try:
                return action()
            except Exception as error:
                if not is_oom(error):
                    raise
                reason = describe_error(error)
            self.device().reclaim()  # only now, after the ``except`` block, are the failed frames gone
        raise DoesNotFit(f"ran out of memory while dividing the batch ({reason}); the step was undone")
