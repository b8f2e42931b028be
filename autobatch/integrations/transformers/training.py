"""Runs a Trainer's optimizer steps in micro-batches, in place of its ``training_step``.

1. The first batch shows how the loss is read (``loss_rule``). Then ``fit`` finds the size, and a Runner is bound.
2. Each batch runs through ``Runner.accumulate``. The Trainer clips, updates and logs as usual.
3. Batches 1, 2, 4, 8 and so on of each kind are compared with their parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from autobatch.distributed.data_parallel import module_of
from autobatch.distributed.parallelism import find_ranks
from autobatch.distributed.ranks import all_or_none
from autobatch.errors import DoesNotFit
from autobatch.fitting.fit import fit
from autobatch.fitting.options import Options
from autobatch.integrations.transformers.cuts import (
    Collate,
    Rows,
    collate_largest,
    count_samples,
    cuts_for,
    take_samples,
)
from autobatch.integrations.transformers.loss_rule import SAMPLES, KnownRules, LossRule, find_rule, refuse
from autobatch.integrations.transformers.trainer_step import TrainerAttributes, TrainerStep
from autobatch.memory.device import Device
from autobatch.memory.devices import find_device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.plan import Plan
from autobatch.result import StepResult
from autobatch.runner import Runner
from autobatch.step.whole_batch import RankBatch, WholeBatch
from autobatch.undo.undo import Undo

_log = logging.getLogger("autobatch")
_T = TypeVar("_T")


class TrainerRunner(Runner):
    """A Runner whose batches and schedules are the Trainer's."""

    _is_in_users_loop = False


class TrainingStep:
    """Takes the place of a Trainer's ``training_step``; ``attach`` returns it.

    Attributes:
        plan: Made on the first batch of ``train()``; ``None`` before.
        runner: Runs the batches of the current ``train()``.
        rule: How batches are divided, and how the loss is read; ``print(step.rule)`` shows it in words.
        result: Result of the last step.
    """

    def __init__(self, trainer: Any, collate: Collate, options: Options) -> None:
        """Bind a Trainer whose ``training_step`` is still its own."""
        self.plan: Plan | None = None
        self.runner: Runner | None = None
        self.rule: LossRule | None = None
        self.result: StepResult | None = None
        self._trainer, self._collate, self._options = trainer, collate, options
        self._step = TrainerStep(trainer, options.weigh)
        self._rules = KnownRules[LossRule](type(trainer).__name__)
        self._bound_to: tuple[Any, Any] = (None, None)

    def __call__(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Add the gradient of a whole batch to ``.grad``, as the Trainer's own step does; return the loss."""
        samples = take_samples(inputs)
        step = self._step
        step.num_items, step.samples = num_items_in_batch, count_samples(inputs, samples)
        if self.runner is None or self._bound_to != (model, self._trainer.optimizer):
            runner = self._begin(model, inputs, samples)
        else:
            runner, self.rule = self.runner, self._find_rule(model, inputs, samples)
        rule = cast("LossRule", self.rule)
        batch = self.try_twice(lambda: rule.cut.batch_of(inputs, samples, runner.micro_batch_size))
        step.metrics.begin()
        step.logs.micro_batches.clear()
        self.result = runner.accumulate(batch)
        sizes = self.result.micro_batch_sizes

        def exchange(own: Any) -> Sequence[Any]:
            with self._all_or_none(model, "attach(), the metrics") as gathered:
                gathered.append(own)
            return gathered

        step.metrics.merge(sizes, None if step.ranks == 1 else exchange)
        step.logs.write(sizes)
        return self.result.loss.to(self._trainer.args.device)

    def _begin(self, model: nn.Module, inputs: Any, samples: Any) -> Runner:
        """Read the loss and make a plan, or take that of the checkpoint that is resumed; bind a Runner."""
        self._rules.clear()
        saved = self._recall()
        self.rule = None if saved is None else LossRule(Rows(), saved["reading"], self._step, is_guess=True)
        self.rule = self._find_rule(model, inputs, samples)
        if saved is None:
            with self._leaves_no_trace():
                self.plan = self._fit(model, self.rule, inputs, samples)
        else:
            self.plan = Plan.model_validate_json(saved["plan"])
        runner = self._bind(model, self.plan)
        if saved is not None:
            runner.load_state_dict(saved["runner"])
        return runner

    def _bind(self, model: nn.Module, plan: Plan) -> Runner:
        trainer, options = self._trainer, self._options
        self._bound_to = model, trainer.optimizer
        self.runner = TrainerRunner(
            plan,
            model,
            optimizer=trainer.optimizer,
            **self._choose_step(),
            device=options.device,
            scaler=trainer.accelerator.scaler,
            hooks=options.hooks,
            keep=[TrainerAttributes(trainer), self._step.metrics.weights, self._step.logs, *options.keep],
        )
        return self.runner

    def _fit(self, model: nn.Module, rule: LossRule, inputs: Any, samples: Any) -> Plan:
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
            optimizer=self._trainer.optimizer,
            device=self._options.device,
            **self._choose_step(),
            **{**self._options.fit, "check": None},  # the rule was compared
        )

    # The Runner is bound once, and the rule may differ with the kind of batch.

    def _choose_step(self) -> dict[str, Any]:
        if self._step.whole is None:
            return {"step": self._run, "weigh": self._count}
        return {"step": self._step.whole.kind(self._represent, self._compare)}

    def _represent(self, model: nn.Module, micro_batch: Any) -> Any:
        step = cast("WholeBatch", cast("LossRule", self.rule).as_step())
        return step.represent(model, micro_batch)

    def _compare(self, embeddings: Any, batch: Any) -> Any:
        step = cast("WholeBatch", cast("LossRule", self.rule).as_step())
        return step.loss(embeddings, batch.read_own() if isinstance(batch, RankBatch) else batch)

    def _run(self, model: nn.Module, micro_batch: Any) -> Any:
        return cast("LossRule", self.rule).run(model, micro_batch)

    def _count(self, micro_batch: Any) -> Any:
        return cast("LossRule", self.rule).count(micro_batch)

    # ------------------------------------------------------------------------------------------ the rule of a batch

    def _find_rule(self, model: nn.Module, inputs: Any, samples: Any) -> LossRule:
        """Return the rule for this batch; on several ranks, one reading for the batches of all."""
        with self._all_or_none(model, "attach(), the loss") as gathered:
            own = self._find_own(module_of(model), inputs, samples)
            gathered.append((own.reading, own.is_guess, str(own)))
        decided = {reading for reading, is_guess, _ in gathered if not is_guess} or {one for one, _, _ in gathered}
        if len(decided) == 1:
            return replace(own, reading=decided.pop())
        ways = "; ".join(f"rank {rank}: {rule}" for rank, (_, _, rule) in enumerate(gathered))
        likeliest = replace(own, reading=SAMPLES, is_exact=False)
        refuse(
            self._options.fit["check"],
            f"{type(self._trainer).__name__}: no way was found to split this loss exactly: the ranks' batches have "
            f"different losses ({ways})",
            likeliest,
        )
        return likeliest

    def _find_own(self, model: nn.Module, inputs: Any, samples: Any) -> LossRule:
        """Return the rule for this rank's batch: that of its kind, which is found or compared again if it is due."""
        kind, known = self.try_twice(lambda: self._rules.find(inputs, self._step.samples))
        if known is not None and not (self._rules.is_due(kind) and (known.is_exact or known.is_guess)):
            return known
        options, is_exact = self._options, known is not None and known.is_exact
        try:
            with self._leaves_no_trace():
                cuts = cuts_for(self._trainer, self._collate, inputs, samples)
                names = [cut.name for cut in cuts]
                if known is not None and is_exact and known.cut.name in names:
                    cuts = cuts[names.index(known.cut.name) :]
                rule = find_rule(
                    self._step,
                    cuts,
                    model,
                    inputs,
                    samples,
                    device=options.device,
                    check=options.fit["check"],
                    known=known if is_exact else None,
                    last=self.rule,
                )
        except Exception as error:
            if known is None or not is_oom(error):
                raise
            return known  # the step itself may fit
        if str(rule) != str(known):
            _log.info("%s: %s", type(self._trainer).__name__, rule)
        if not (is_exact and rule.is_guess):  # this batch had nothing to compare: what is known stays
            self._rules.add(kind, rule)
            return rule
        return known or rule

    @contextmanager
    def _leaves_no_trace(self) -> Iterator[None]:
        """Undo at the block's end what steps and collate functions drew and counted in it."""
        keep = [TrainerAttributes(self._trainer), *self._options.keep]
        before = Undo(None, self.device().torch_device, keep=keep)
        try:
            yield
        finally:
            before.restore()

    def _all_or_none(self, model: nn.Module, call: str) -> AbstractContextManager[list[Any]]:
        """Block of all ranks; at its end, the list holds what each has appended."""
        return nullcontext([]) if self._step.ranks == 1 else all_or_none(find_ranks(model), call)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint saves; ``None`` before the first step."""
        if self.rule is None or self.plan is None or self.runner is None:
            return None
        return {"reading": self.rule.reading, "plan": self.plan.model_dump_json(), "runner": self.runner.state_dict()}

    def _recall(self) -> dict[str, Any] | None:
        """Return what the checkpoint has saved, if its plan serves here; each of several ranks makes its own."""
        AutobatchState.attach_to(self._trainer, self.state)
        saved = AutobatchState.saved_in(self._trainer.state)
        arguments = self._trainer.args
        if saved is None or self._trainer.state.global_step == 0 or arguments.world_size > 1:
            return None
        plan = Plan.model_validate_json(saved["plan"])
        is_like = plan.target_batch == arguments.per_device_train_batch_size
        return saved if is_like and plan.device == self.device().describe() else None

    # ------------------------------------------------------------------------------------------------------ memory

    def device(self) -> Device:
        model = self._trainer.model
        return find_device([*model.parameters()], type(model).__name__, self._options.device)

    def try_twice(self, action: Callable[[], _T]) -> _T:
        """Do what takes little memory; if memory runs out, free caches and try once more."""
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


class AutobatchState(TrainerCallback, ExportableState):  # type: ignore[misc] # transformers is not typed
    """Saves plan and size with each checkpoint; the Trainer writes it to ``trainer_state.json``."""

    def __init__(self, read: Callable[[], dict[str, Any] | None] | None = None) -> None:
        self.read = read
        self.saved: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"saved": self.read() if self.read is not None else self.saved}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add an entry to the state of a checkpoint that was made without autobatch: the Trainer adds none."""
        if isinstance(state.stateful_callbacks, dict):
            state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    @classmethod
    def attach_to(cls, trainer: Any, read: Callable[[], dict[str, Any] | None]) -> None:
        """Let the Trainer's callbacks of this class read what is saved: a resumed Trainer may have made its own."""
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, cls):
                callback.read = read

    @classmethod
    def saved_in(cls, state: Any) -> dict[str, Any] | None:
        """Return what a loaded checkpoint has; ``None`` if it was made without autobatch, or before its first step."""
        entries = state.stateful_callbacks if isinstance(state.stateful_callbacks, dict) else {}
        entry = entries.get(cls.__name__)
        latest = entry[-1] if isinstance(entry, list) and entry else entry
        saved: dict[str, Any] | None = latest["attributes"]["saved"] if isinstance(latest, dict) else None
        return saved
