"""Runs a Trainer's optimizer steps in micro-batches: what stands in place of its ``training_step``.

Covers the first batch, on which the loss's rule, the plan and the Runner are made, and each batch after it. Does not
cover clipping, the update and all that follows, which are the Trainer's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autobatch.distributed.ranks import all_or_none, find_ranks
from autobatch.errors import DoesNotFit
from autobatch.events import Hook
from autobatch.fitting.fit import fit
from autobatch.integrations.transformers.loss_rule import (
    READINGS,
    LossRule,
    cuts_for,
    find_rule,
)
from autobatch.integrations.transformers.samples import collate_largest, take_samples
from autobatch.integrations.transformers.trainer_state import AutobatchState, TrainerAttributes
from autobatch.integrations.transformers.trainer_step import TrainerStep
from autobatch.memory.device import Device
from autobatch.memory.devices import find_device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.plan import Plan
from autobatch.result import StepResult
from autobatch.runner import Runner
from autobatch.state.random_state import RandomState
from autobatch.state.rewind_point import StepState
from autobatch.state.user_objects import check_objects

__all__ = ["Options", "TrainingStep"]

_log = logging.getLogger("autobatch")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Options:
    """What the user gave to ``attach``.

    Attributes:
        fit: Arguments of ``fit``, by name.
        check: What to do where no exact split is found.
        device: The device's memory; ``None``: where the model is.
        hooks: Called with the Runner's events.
        keep: Objects of the user that the step changes.
        timeout: How many seconds a rank waits for the others.
    """

    fit: Mapping[str, Any]
    check: Literal["warn", "raise"] | None
    device: Any
    hooks: Sequence[Hook]
    keep: Sequence[Any]
    timeout: float | None


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

    def __call__(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Add the gradient of a whole batch to ``.grad``, as the Trainer's own does; returns the loss."""
        samples = take_samples(inputs)
        self._step.num_items = num_items_in_batch
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
        rule, runner = self.rule, self.runner
        if rule is None or runner is None or self._bound_to != (model, self._trainer.optimizer):
            return self._begin(model, inputs, samples)
        if not rule.open or not self._is_put_in_question(model, rule, inputs):
            return rule, runner
        with self._leaves_no_trace():
            rule = self._learn(model, inputs, samples)
        return rule, self._bind(model, rule, runner.plan)

    def _begin(self, model: nn.Module, inputs: Any, samples: Any) -> tuple[LossRule, Runner]:
        """Find the rule and the plan, or go on with those of the checkpoint that is resumed."""
        recalled = self._recall()
        if recalled is None:
            with self._leaves_no_trace():
                rule = self._learn(model, inputs, samples)
                plan = self._fit(model, rule, inputs, samples)
            return rule, self._bind(model, rule, plan)
        rule, plan, state = recalled
        with self._leaves_no_trace():
            self._learn_logs(model, rule, inputs, samples)
        runner = self._bind(model, rule, plan)
        runner.load_state_dict(state)
        return rule, runner

    def _learn(self, model: nn.Module, inputs: Any, samples: Any) -> LossRule:
        """The rule of this batch; with several ranks the one that is exact on each of them."""
        cuts, options = cuts_for(self._trainer, self._collate), self._options
        with self._all_or_none(model, "attach(), the loss") as said:
            device, check = options.device, options.check
            found = find_rule(self._step, cuts, _unwrap(model), inputs, samples, device=device, check=check)
            self._learn_logs(model, found, inputs, samples)
            said.append((cuts.index(found.cut), READINGS.index(found.reading), found.open))
        # A rule that is exact on one rank only was tried before the one that another rank has found.
        cut, reading, _ = max(said)
        refuted = {one for one in READINGS if any(one not in (READINGS[its], *others) for _, its, others in said)}
        others = tuple(one for one in READINGS if one not in refuted and one != READINGS[reading])
        rule = LossRule(cuts[cut], READINGS[reading], self._step, others)
        _log.info("autobatch: %s: %s", type(self._trainer).__name__, rule)
        return rule

    def _learn_logs(self, model: nn.Module, rule: LossRule, inputs: Any, samples: Any) -> None:
        if self._options.check is not None:
            self._step.learn_logs(_unwrap(model), rule.cut, inputs, samples)

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
            check=None,
            timeout=self._options.timeout,
            **self._options.fit,
        )

    def _bind(self, model: nn.Module, rule: LossRule, plan: Plan) -> Runner:
        trainer, options = self._trainer, self._options
        self.rule, self.plan, self._bound_to = rule, plan, (model, trainer.optimizer)
        self.runner = Runner(
            plan,
            model,
            step=rule.run,
            optimizer=trainer.optimizer,
            weigh=rule.weigh,
            device=options.device,
            scaler=trainer.accelerator.scaler,
            hooks=options.hooks,
            keep=[TrainerAttributes(trainer), self._step.metrics.tokens, self._step.logs, *options.keep],
            timeout=options.timeout,
        )
        return self.runner

    def budget(self) -> int | None:
        """Bytes that this process may have, where a plan says it."""
        return None if self.plan is None else self.plan.budget_bytes

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint has of it; ``None`` before the first step."""
        if self.rule is None or self.plan is None or self.runner is None:
            return None
        saved = {"cut": self.rule.cut.name, "reading": self.rule.reading, "open": self.rule.open}
        return {**saved, "plan": self.plan.model_dump_json(), "runner": self.runner.state_dict()}

    def _recall(self) -> tuple[LossRule, Plan, Any] | None:
        """Rule, plan and the Runner's state of a checkpoint that is resumed, where they serve here.

        With several ranks each has its own, and one rank's is saved.
        """
        AutobatchState.attach_to(self._trainer, self.state)
        saved = AutobatchState.saved_in(self._trainer.state)
        arguments = self._trainer.args
        if saved is None or self._trainer.state.global_step == 0 or arguments.world_size > 1:
            return None
        plan = Plan.model_validate_json(saved["plan"])
        cuts = {cut.name: cut for cut in cuts_for(self._trainer, self._collate)}
        is_same = plan.target_batch == arguments.per_device_train_batch_size and saved["cut"] in cuts
        if not is_same or plan.device != self.device().describe():
            return None
        rule = LossRule(cuts[saved["cut"]], saved["reading"], self._step, tuple(saved["open"]))
        return rule, plan, saved["runner"]

    def _merge_metrics(self, model: nn.Module, samples: Sequence[int]) -> None:
        metrics = self._step.metrics

        def exchange(own: Any) -> list[Any]:
            with self._all_or_none(model, "attach(), the metrics") as said:
                said.append(own)
            return said

        metrics.merge(samples, exchange if self._step.ranks > 1 else None)

    def _is_put_in_question(self, model: nn.Module, rule: LossRule, inputs: Any) -> bool:
        with self._all_or_none(model, "attach(), the labels") as said:
            said.append(self._try_twice(lambda: rule.is_put_in_question(inputs)))
        return any(said)

    def _all_or_none(self, model: nn.Module, call: str) -> AbstractContextManager[list[Any]]:
        """A block of all ranks, at whose end each knows what the others have said; nothing is heard of one rank."""
        if self._trainer.args.world_size == 1:
            return nullcontext([])
        return all_or_none(find_ranks(model, self._options.timeout), call)

    @contextmanager
    def _leaves_no_trace(self) -> Iterator[None]:
        """A block after which all that steps and collate functions may draw and count is as before."""
        attributes, random = TrainerAttributes(self._trainer), RandomState(self.device().torch_device)
        taken = attributes.take()
        kept = StepState(nn.Module(), torch.device("cpu"), check_objects([*self._options.keep]), records=False).begin()
        try:
            yield
        finally:
            kept.restore()
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
        raise DoesNotFit(f"memory ended while the batch was divided ({reason}); everything is as before the step")


def _unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
