"""Searches the best micro-batch size by trials.

Covers the example batch, the order of the trials, and why nothing fits. Does not cover how a trial is run (``probe``),
which size is tried next (``planning.next_trial``), nor what a plan is made of (``fit``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autobatch._formatting import format_bytes
from autobatch.batch.example import check_values, find_example
from autobatch.batch.layout import Layout, count_bytes, tensors_of
from autobatch.batch.lengths import Lengths
from autobatch.batch.samples_by_length import SamplesByLength
from autobatch.distributed.shared_trials import SharedTrials
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.events import Hook, PlanRecalled, PlanRefused, StageBegan, TrialFinished, emit
from autobatch.fitting.fingerprint import fingerprint
from autobatch.fitting.length_search import search_lengths
from autobatch.fitting.probe import Probe
from autobatch.memory.device import Device
from autobatch.memory.devices import Allowance
from autobatch.planning.curve import MemoryCurve, fit_curve
from autobatch.planning.evidence import Question
from autobatch.planning.next_trial import choose_size, next_size, next_smaller_size
from autobatch.planning.plan_record import PlanRecord
from autobatch.planning.planner import balance, least_size, useful_sizes
from autobatch.planning.reuse import Wanted, choose_remembered, why_not_confirmed
from autobatch.prediction.prior import Expectation, FirstStep, expect_largest
from autobatch.records import Saving, SizeAtLength, Trial
from autobatch.report.advice import explain_refusal
from autobatch.step.batch_norm import (
    batch_norms_in_train_mode,
    explain_smallest,
    may_refuse_one_sample,
    refuses_one_sample,
)
from autobatch.step.default_step import default_step, explain_default
from autobatch.step.workload import Workload
from autobatch.undo.training_state import TrainingState

__all__ = ["SizeSearch"]


@dataclass
class SizeSearch:
    """A search over the sizes of one workload: what is run, where, within what, the request, the results."""

    workload: Workload
    memory: Device
    allowance: Allowance
    state: TrainingState
    wanted: Wanted
    hooks: tuple[Hook, ...]
    recall: Callable[[str], Sequence[PlanRecord]]  # plans of a fingerprint from earlier runs, the newest first
    rank: int = 0
    world_size: int = 1
    shared: SharedTrials = field(default_factory=lambda: SharedTrials(None))
    lengths: Lengths | None = None  # how long samples are; None: all alike
    example: Layout = field(init=False)  # the samples of the trials, as they were given or found
    compared: Layout = field(init=False)  # those of the check: these, and of a dataset its smallest one
    fingerprint: str = ""
    trials: list[Trial] = field(default_factory=list)  # of the longest samples, where they differ
    shorter_trials: list[Trial] = field(default_factory=list)
    samples: SamplesByLength | None = None  # of the example, by length
    sizes: tuple[SizeAtLength, ...] = ()  # how many samples of up to each length run together
    confirmed: PlanRecord | None = None  # by one trial; None where sizes were searched
    size: int = 0  # of the micro-batches; it has run
    state_bytes: int = 0  # what the optimizer's state took
    trained: int = 0  # numbers that the optimizer moved
    smallest: int = 1  # the fewest samples that the model can run
    savings: tuple[Saving, ...] = ()  # what the step does already to save memory
    batch_norms: Sequence[str] = ()  # layers that normalise by their micro-batch, in the mode that the user left
    warnings: list[str] = field(default_factory=list)
    _probe: Probe = field(init=False)
    _whole: Layout | None = None  # the batch beside the trials' samples, which are copies where they have lengths

    @property
    def _of(self) -> dict[str, int]:
        """Whose search it is, in its events."""
        return {"rank": self.rank, "world_size": self.world_size}

    @property
    def peak_bytes(self) -> int:
        """The most that a trial of the chosen size held."""
        return max(trial.peak_reserved for trial in self.trials if trial.micro_batch_size == self.size)

    @property
    def curve(self) -> MemoryCurve | None:
        """The memory curve through the trials, or that of the confirmed plan."""
        return self.confirmed.curve if self.confirmed else fit_curve(self.trials)

    @property
    def failing_size(self) -> int:
        """The smallest size that did not fit when sizes were searched for; 0 where each did."""
        if self.confirmed:
            return self.confirmed.failing_size
        return min((trial.micro_batch_size for trial in self.trials if trial.outcome != "fits"), default=0)

    @property
    def most_at_once(self) -> int:
        """How many samples of the target should fit in one micro-batch, tried or not; at least the chosen size."""
        curve = self.curve if self.wanted.limit_bytes else None
        if curve is None:
            return self.size
        failing = self.failing_size or self.wanted.target_batch + 1
        return max(self.size, min(curve.largest(self.wanted.limit_bytes), failing - 1, self.wanted.target_batch))

    def run(self, batch: Any | None) -> None:
        """Try sizes on this batch, or on one that the model describes; raises as ``fit`` says. ``finish`` follows."""
        model, target = self.workload.model, self.wanted.target_batch
        layout = self._prepare(batch)
        with torch.enable_grad():
            is_doubtful = target > 1 and may_refuse_one_sample(model)
            self.smallest = self._probe.find_smallest() if is_doubtful else 1
            self._confirm()
            if self.confirmed is None:
                self._search()
            # With a size of 2 an odd target has a micro-batch of one sample, which has not run.
            if not is_doubtful and min(balance(target, self.size)) < self.size == 2:
                self.smallest = self._probe.find_smallest()
                if self.smallest > 1:
                    self._search()
                    self.confirmed = self.confirmed if self.size == 2 else None
            if self.samples is not None:
                self.sizes = self.confirmed.lengths if self.confirmed else self._search_lengths(self.samples)
        if self.workload.step is default_step:
            self.warnings.append(explain_default(model, layout.grow(2)))

    def tell(self, stage: str) -> None:
        """Say what begins, to whoever waits for it."""
        emit(StageBegan(stage=stage, **self._of), self.hooks)

    @property
    def rate(self) -> float:
        """Samples a second at the chosen size; 0 where no trial of it was timed."""
        return max(trial.samples_per_second for trial in self.trials if trial.micro_batch_size == self.size)

    def finish(self, target: int) -> None:
        """Take so many samples a step, and release what the trials needed.

        Where sizes were searched for another number, the size into which these are cut has run afterwards.

        Raises:
            DoesNotFit: It is smaller than one that fits, and does not fit.
        """
        if target != self.wanted.target_batch:
            self._settle(target)
        micro_batches, aux_bytes = -(-target // self.size), self._probe.aux_bytes
        if micro_batches > 2 and aux_bytes:
            self.warnings.append(
                f"the step returns {format_bytes(aux_bytes)} beside each loss, which is held until the step ends: "
                f"{micro_batches} x that, of which the trials held two"
            )
        self.state_bytes, self.trained = self._probe.state_bytes, self._probe.trained
        self.savings = tuple(sorted(self._probe.savings))
        self._whole = None
        del self._probe  # holds a whole batch, which the check must not find on the device

    def _settle(self, target: int) -> None:
        self.wanted = self.wanted.model_copy(update={"target_batch": target})
        # Of the largest share, which was tried with the others: they try no other one. Lengths are divided greedily.
        if self.shared.are_shared or self.sizes:
            return
        self.size = max(balance(target, self.size, min(self.smallest, target)))
        if self.size not in {trial.micro_batch_size for trial in self.trials}:
            with torch.enable_grad():
                self._add(self._try_size(self.size))
            if self.trials[-1].outcome != "fits":
                raise DoesNotFit(self._refuse(""))

    def _prepare(self, batch: Any | None) -> Layout:
        """Find the example batch and put the model into train mode; returns the samples that a trial repeats."""
        model, target = self.workload.model, self.wanted.target_batch
        found = find_example(model, batch, target, self.lengths, has_own_step=self.workload.step is not default_step)
        self.example, self.compared = found.layout, found.with_smallest or found.layout
        check_values(self.example.batch)
        self.warnings += [*self.allowance.warnings, *found.warnings]
        self.batch_norms = batch_norms_in_train_mode(model)
        if not model.training:
            self.warnings.append("the model was in eval mode: sizes were tried in train mode, which needs more memory")
            model.train()
        layout = self._hold_whole_batch()
        if self.lengths is not None:
            layout = self._read_lengths(self.lengths, layout)
        self.workload.weights_of(self.example.batch, self.example.count)
        options = self.allowance.limit_bytes, self.state, self.wanted.accumulate_in_float32, target
        self._probe = Probe(self.workload, layout, self.memory, *options, shared=self.shared)
        lengths = (self.lengths.of, self.samples.padding) if self.lengths and self.samples else None
        self.fingerprint = fingerprint(self.workload, layout, self.memory.describe(), self.world_size, lengths)
        return layout

    def _read_lengths(self, lengths: Lengths, whole: Layout) -> Layout:
        """The longest samples of the example; the ``whole`` batch stays beside them, as in training."""
        self.samples, self._whole = SamplesByLength.read(self.example, lengths), whole
        self.memory.watch(tensors_of(whole.batch))
        return self.samples.at(self.samples.longest)[0]

    def _search_lengths(self, samples: SamplesByLength) -> tuple[SizeAtLength, ...]:
        """Try shorter samples, one number of them at each length."""
        if self.smallest > 1:
            raise InvalidArgument(
                f"lengths= divides a batch into parts of any size, and {explain_smallest(self.workload.model)}: plan "
                f"without lengths="
            )

        def try_size(length: int, size: int) -> Trial:
            self._probe.example, length = samples.at(length)
            return self._add(self._probe.run(size), length)

        longest = SizeAtLength(length=samples.longest, micro_batch_size=self.size, peak_bytes=self.peak_bytes)
        limit = self.allowance.limit_bytes if self.wanted.objective == "throughput" else self.peak_bytes
        curve = self.curve if self.memory.measures else None
        return search_lengths(try_size, longest, curve, limit, self.wanted.max_micro_batch)

    def _confirm(self) -> None:
        """Confirm an earlier plan by a trial of its size, if the ledger has one."""
        least = least_size(self.wanted.target_batch, self.smallest)
        plans = [plan for plan in self.recall(self.fingerprint) if plan.micro_batch_size >= least]
        plan, reason, refused = choose_remembered(plans, self.wanted)
        if plan is not None:
            emit(PlanRecalled(plan_id=plan.id, micro_batch_size=plan.micro_batch_size, **self._of), self.hooks)
            self._add(self._probe.run(plan.micro_batch_size))
            reason, refused = why_not_confirmed(plan, self.trials[-1], self.allowance.limit_bytes), plan.id
        if reason:
            emit(PlanRefused(plan_id=refused, reason=reason, **self._of), self.hooks)
        elif plan is not None:
            self.confirmed, self.size = plan, plan.micro_batch_size

    def _search(self) -> None:
        """Find the size, with as many more trials as it takes."""
        sizes = self._find_candidates(self.smallest)
        expected = Expectation()
        # A trace has no other ranks from which sharded parameters could be gathered.
        if self.memory.measures and self.memory.describe().kind == "cuda" and not self.shared.are_shared:
            # There trials, and failing ones most, cost more than a trace; not so on a CPU.
            self.tell("predicting which sizes fit")
            first = FirstStep(self.memory.usage().allocated, self._probe.measure_forward() if sizes[-1] > 1 else None)
            expected = expect_largest(self.workload, self.example, self.allowance.limit_bytes, sizes, first)
        question = Question(
            bound=self.wanted.max_micro_batch,
            limit_bytes=self.allowance.limit_bytes,
            measures=self.memory.measures,
            smallest_probe=min(self.smallest, sizes[0]),
            candidates=sizes,
            expected=expected.largest,
            expects_no_more=not expected.knows_no_larger,
            forecast=expected.forecast,
        )
        for policy in (next_size, next_smaller_size) if self.wanted.objective == "memory" else (next_size,):
            while (size := policy(question, self.trials)) is not None:
                self._add(self._try_size(size))
        chosen = choose_size(question, self.trials, self.wanted.objective)
        if chosen is None:
            raise DoesNotFit(self._refuse(explain_smallest(self.workload.model) if self.smallest > 1 else ""))
        self.size = chosen

    def _find_candidates(self, smallest: int) -> tuple[int, ...]:
        """The useful sizes that leave no micro-batch that the model cannot run."""
        target, bound = self.wanted.target_batch, self.wanted.max_micro_batch
        least = least_size(target, smallest)
        if bound < least:
            raise DoesNotFit(
                f"max_micro_batch={bound} leaves a micro-batch of one sample of target_batch={target}, and "
                f"{explain_smallest(self.workload.model)}: pass max_micro_batch={least} or more"
            )
        # Of samples of mixed lengths each micro-batch has as many as ran at its own: any number is worth trying.
        sizes = useful_sizes(target, bound) if self.lengths is None else range(1, bound + 1)
        return tuple(size for size in sizes if size >= least)

    def _add(self, trial: Trial, shorter: int | None = None) -> Trial:
        """Note and report a trial of the longest samples, or of those of a ``shorter`` length."""
        length = shorter or (self.samples.longest if self.samples else None)
        trial = trial.model_copy(update={"length": length})
        (self.shorter_trials if shorter else self.trials).append(trial)
        emit(TrialFinished(trial=trial, limit_bytes=self.allowance.limit_bytes, **self._of), self.hooks)
        return trial

    def _try_size(self, size: int) -> Trial:
        try:
            return self._probe.run(size)
        except ValueError as error:
            if size > 1 or self.wanted.target_batch == 1 or not refuses_one_sample(error):
                raise
            self._find_candidates(smallest=2)  # what did not fit before is the answer, not this error
            raise DoesNotFit(self._refuse(explain_smallest(self.workload.model))) from error

    def _hold_whole_batch(self) -> Layout:
        """The batch of the trials: the whole one if batches are on the model's device, where a step holds it whole."""
        layout = self.example
        if all(tensor.device != self.memory.torch_device for tensor in tensors_of(layout.batch)):
            return layout
        target = self.wanted.target_batch
        whole = count_bytes(layout.batch) * target // layout.count
        if self.allowance.limit_bytes and whole > self.allowance.limit_bytes // 2:
            self.warnings.append(
                f"the whole batch of {target} would take {format_bytes(whole)} of {self.memory.describe().name} "
                f"by itself, and was left out of the trials: hand it over in parts with runner.step_over()"
            )
            return layout
        return layout.grown(target)

    def _refuse(self, why_no_smaller: str) -> str:
        smallest = min(self.trials, key=lambda trial: trial.micro_batch_size)
        reason = self._probe.errors.get(smallest.micro_batch_size, f"it ended as {smallest.outcome!r}")
        reason, allowance = f"{reason}; {why_no_smaller}" if why_no_smaller else reason, self.allowance
        limits, device = (allowance.limit_bytes, allowance.budget_bytes), self.memory.describe()
        return explain_refusal(smallest, reason, *limits, device, savings=self._probe.savings)
