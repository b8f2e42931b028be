"""Which sizes of one workload run: trial after trial until the question is answered.

Covers the example batch, the order of the trials, and why nothing fits. Does not cover how a trial is run (``probe``),
which size is tried next (``planning.search``), nor what a plan is made of (``fitting``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autobatch._formatting import format_bytes
from autobatch.batch.example import check_values, find_example
from autobatch.batch.layout import Layout, count_bytes, tensors_of
from autobatch.batch.list_rules import ListReading
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.events import Hook, PlanRecalled, PlanRefused, TrialFinished, emit
from autobatch.fitting.fingerprint import fingerprint
from autobatch.fitting.probe import Probe
from autobatch.memory.allowance import Allowance
from autobatch.memory.device import Device
from autobatch.planning.curve import MemoryCurve, fit_curve
from autobatch.planning.evidence import Question
from autobatch.planning.plan_record import PlanRecord
from autobatch.planning.planner import balance, choose_size, least_size, useful_sizes
from autobatch.planning.reuse import Wanted, find_remembered, why_not_confirmed
from autobatch.planning.search import next_size, next_smaller_size
from autobatch.prediction.prior import Expectation, expect_largest
from autobatch.records import Trial
from autobatch.report.advice import explain_refusal
from autobatch.state.training_state import TrainingState
from autobatch.step.batch_norm import (
    batch_norms_in_train_mode,
    explain_smallest,
    may_refuse_one_sample,
    refuses_one_sample,
)
from autobatch.step.default_step import default_step, explain_default
from autobatch.step.workload import Workload

__all__ = ["Found", "SizeSearch"]


@dataclass(frozen=True)
class Found:
    """What the trials answered, and what else the plan has to say.

    Attributes:
        size: The chosen micro-batch size; it has run.
        example: The samples of the trials, as they were given or found.
        trials: Every attempt, in order.
        fingerprint: Identifies what was measured.
        batch_lists: How the lists of the example were read, by path.
        state_bytes: What the optimizer's state took.
        smallest: The fewest samples that the model can run.
        batch_norms: Names of layers that normalise by their micro-batch, in the mode in which the user left them.
        warnings: What the user should know, a sentence each.
        confirmed: The remembered plan that the one trial confirmed; ``None`` where sizes were searched for.
    """

    size: int
    example: Layout
    trials: tuple[Trial, ...]
    fingerprint: str
    batch_lists: dict[str, ListReading]
    state_bytes: int
    smallest: int
    batch_norms: tuple[str, ...]
    warnings: tuple[str, ...]
    confirmed: PlanRecord | None = None

    @property
    def peak_bytes(self) -> int:
        """The most that a trial of the chosen size held."""
        return max(trial.peak_reserved for trial in self.trials if trial.micro_batch_size == self.size)

    @property
    def curve(self) -> MemoryCurve | None:
        """Through what was measured; one trial is no curve, but it has just confirmed one."""
        return self.confirmed.curve if self.confirmed else fit_curve(self.trials)

    @property
    def failing_size(self) -> int:
        """The smallest size that did not fit when sizes were searched for; 0 where each did."""
        if self.confirmed:
            return self.confirmed.failing_size
        return min((trial.micro_batch_size for trial in self.trials if trial.outcome != "fits"), default=0)

    def most_at_once(self, wanted: Wanted) -> int:
        """How many samples of the target should fit in one micro-batch, tried or not; at least the chosen size."""
        curve = self.curve if wanted.limit_bytes else None
        if curve is None:
            return self.size
        failing = self.failing_size or wanted.target_batch + 1
        return max(self.size, min(curve.largest(wanted.limit_bytes), failing - 1, wanted.target_batch))


@dataclass
class SizeSearch:
    """Tries sizes of one workload until the question is answered.

    Attributes:
        workload: What is run.
        memory: Where.
        allowance: How much of it there is.
        state: What is put back between trials.
        wanted: What is asked for.
        hooks: Called with each trial.
        recall: Plans of a fingerprint from earlier runs, the newest first.
    """

    workload: Workload
    memory: Device
    allowance: Allowance
    state: TrainingState
    wanted: Wanted
    hooks: tuple[Hook, ...]
    recall: Callable[[str], Sequence[PlanRecord]]

    def run(self, batch: Any | None) -> Found:
        """Try sizes on this batch, or on what the model tells of one.

        Raises:
            DoesNotFit: Not even one sample does.
            InvalidArgument: No division of the target into micro-batches of at most ``max_micro_batch`` samples is one
                that the model can run.
            NeedsBatch: There is no batch and the model tells of none.
        """
        model, target = self.workload.model, self.wanted.target_batch
        example = find_example(model, batch, target)
        check_values(example.layout.batch)
        warnings = [*self.allowance.warnings, *example.warnings]
        batch_norms = tuple(batch_norms_in_train_mode(model))
        if not model.training:
            warnings.append("the model was in eval mode: sizes were tried in train mode, which needs more memory")
            model.train()
        layout = self._hold_whole_batch(example.layout, warnings)
        # A weigh() that cannot count is told first.
        self.workload.weights_of(example.layout.batch, example.layout.count)
        probe = Probe(
            self.workload,
            layout,
            self.memory,
            self.allowance.limit_bytes,
            self.state,
            self.wanted.accumulate_in_float32,
            target,
        )
        identity = fingerprint(self.workload, layout, self.memory.describe(), world_size=1)
        with torch.enable_grad():
            is_doubtful = target > 1 and may_refuse_one_sample(model)
            smallest = probe.find_smallest() if is_doubtful else 1
            trials, confirmed = self._recall(identity, probe, smallest)
            size = confirmed.micro_batch_size if confirmed else self._search(example.layout, probe, trials, smallest)
            if not is_doubtful and min(balance(target, size)) < size == 2:  # a piece of one that no trial has run
                smallest = probe.find_smallest()
                size = self._search(example.layout, probe, trials, smallest) if smallest > 1 else size
                confirmed = confirmed if size == 2 else None
        if self.workload.step is default_step:
            warnings.append(explain_default(model, layout.grow(2)))
        warnings += _warn_of_aux(probe.aux_bytes, size, target)
        return Found(
            size,
            example.layout,
            tuple(trials),
            identity,
            dict(layout.lists),
            probe.state_bytes,
            smallest,
            batch_norms,
            tuple(warnings),
            confirmed,
        )

    def _recall(self, identity: str, probe: Probe, smallest: int) -> tuple[list[Trial], PlanRecord | None]:
        """The trial of a remembered plan's size, if there is such a plan, and the plan if that trial confirms it."""
        least = least_size(self.wanted.target_batch, smallest)
        plans = [plan for plan in self.recall(identity) if plan.micro_batch_size >= least]
        plan, reason, refused = find_remembered(plans, self.wanted)
        if plan is None:
            if reason:
                emit(PlanRefused(plan_id=refused, reason=reason), self.hooks)
            return [], None
        emit(PlanRecalled(plan_id=plan.id, micro_batch_size=plan.micro_batch_size), self.hooks)
        trial = self._told(probe.run(plan.micro_batch_size))
        changed = why_not_confirmed(plan, trial, self.allowance.limit_bytes)
        if changed:
            emit(PlanRefused(plan_id=plan.id, reason=changed), self.hooks)
        return [trial], None if changed else plan

    def _search(self, example: Layout, probe: Probe, trials: list[Trial], smallest: int) -> int:
        """The answer, after as many more trials as it takes; they are added to those there are."""
        sizes = self._find_candidates(smallest)
        expected = self._expect(example, sizes)
        question = Question(
            bound=self.wanted.max_micro_batch,
            limit_bytes=self.allowance.limit_bytes,
            measures=self.memory.measures,
            smallest_probe=min(smallest, sizes[0]),
            candidates=sizes,
            expected=expected.largest,
            expects_no_more=not expected.knows_no_larger,
        )
        policies = (next_size, next_smaller_size) if self.wanted.objective == "memory" else (next_size,)
        for policy in policies:
            while (size := policy(question, trials)) is not None:
                trials.append(self._told(self._try_size(size, probe, trials)))
        chosen = choose_size(question, trials, self.wanted.objective)
        if chosen is None:
            reason = explain_smallest(self.workload.model) if smallest > 1 else ""
            raise DoesNotFit(self._refuse(trials, probe, reason))
        return chosen

    def _find_candidates(self, smallest: int) -> tuple[int, ...]:
        """The useful sizes that leave no piece which the model cannot run.

        Raises:
            InvalidArgument: None of them is within ``max_micro_batch``.
        """
        target, bound = self.wanted.target_batch, self.wanted.max_micro_batch
        least = least_size(target, smallest)
        if bound < least:
            raise InvalidArgument(
                f"max_micro_batch={bound} leaves a micro-batch of one sample of target_batch={target}, and "
                f"{explain_smallest(self.workload.model)}: pass max_micro_batch={least} or more"
            )
        return tuple(size for size in useful_sizes(target, bound) if size >= least)

    def _expect(self, example: Layout, sizes: Sequence[int]) -> Expectation:
        """On a card needless trials are dear, more so if they run out; on a CPU a trace takes longer than they."""
        if self.memory.describe().kind != "cuda" or not self.memory.measures:
            return Expectation()
        return expect_largest(self.workload, example, self.allowance.limit_bytes, sizes)

    def _told(self, trial: Trial) -> Trial:
        emit(TrialFinished(trial=trial, limit_bytes=self.allowance.limit_bytes), self.hooks)
        return trial

    def _try_size(self, size: int, probe: Probe, trials: Sequence[Trial]) -> Trial:
        try:
            return probe.run(size)
        except ValueError as error:
            if size > 1 or self.wanted.target_batch == 1 or not refuses_one_sample(error):
                raise
            self._find_candidates(smallest=2)
            # What did not fit before is the answer, not this error.
            raise DoesNotFit(self._refuse(trials, probe, explain_smallest(self.workload.model))) from error

    def _hold_whole_batch(self, layout: Layout, warnings: list[str]) -> Layout:
        """A batch that lives where the model lives stands there whole during a step: so it does in each trial."""
        if all(tensor.device != self.memory.torch_device for tensor in tensors_of(layout.batch)):
            return layout
        target = self.wanted.target_batch
        whole = count_bytes(layout.batch) * target // layout.count
        if self.allowance.limit_bytes and whole > self.allowance.limit_bytes // 2:
            warnings.append(
                f"the whole batch of {target} would take {format_bytes(whole)} of {self.memory.describe().name} "
                f"by itself, and was left out of the trials: hand it over in parts with runner.step_over()"
            )
            return layout
        return layout.grown(target)

    def _refuse(self, trials: Sequence[Trial], probe: Probe, why_no_smaller: str) -> str:
        smallest = min(trials, key=lambda trial: trial.micro_batch_size)
        reason = probe.reasons.get(smallest.micro_batch_size, f"it ended as {smallest.outcome!r}")
        reason = f"{reason}; {why_no_smaller}" if why_no_smaller else reason
        allowance = self.allowance
        return explain_refusal(smallest, reason, allowance.limit_bytes, allowance.budget_bytes, self.memory.describe())


def _warn_of_aux(aux_bytes: int, size: int, target: int) -> list[str]:
    """Trials hold what stands beside the loss of two micro-batches, a step that of all."""
    micro_batches = -(-target // size)
    if micro_batches <= 2 or not aux_bytes:
        return []
    return [
        (
            f"the step returns {format_bytes(aux_bytes)} beside each loss, which is kept until the step ends: "
            f"{micro_batches} x that, of which the trials held two"
        )
    ]
