"""Which sizes of one workload run: trial after trial until the question is answered.

Covers the example batch, the order of the trials, and why nothing fits. Does not cover how a trial is run (``probe``),
which size is tried next (``planning.search``), nor what a plan is made of (``fitting``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autobatch.errors import DoesNotFit
from autobatch.events import Hook, TrialFinished, emit
from autobatch.memory.device import Device
from autobatch.planning.planner import Objective, choose_size, useful_sizes
from autobatch.planning.search import Question, next_size, next_smaller_size
from autobatch.prediction.expecting import expect_largest
from autobatch.probe import Probe
from autobatch.records import Trial
from autobatch.report.text import explain_refusal
from autobatch.request import Allowance
from autobatch.wording import format_bytes
from autobatch.workload.batch_norm import batch_norms_in_train_mode
from autobatch.workload.batches import Layout, count_bytes, tensors_of
from autobatch.workload.default_step import default_step, explain_default
from autobatch.workload.example import find_example
from autobatch.workload.fingerprint import fingerprint
from autobatch.workload.reading import ListReading
from autobatch.workload.step import Workload
from autobatch.workload.training_state import TrainingState

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
        batch_norms: Names of layers that normalise by their micro-batch, in the mode in which the user left them.
        warnings: What the user should know, a sentence each.
    """

    size: int
    example: Layout
    trials: tuple[Trial, ...]
    fingerprint: str
    batch_lists: dict[str, ListReading]
    state_bytes: int
    batch_norms: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass
class SizeSearch:
    """Tries sizes of one workload until the question is answered.

    Attributes:
        workload: What is run.
        memory: Where.
        allowance: How much of it there is.
        state: What is put back between trials.
        target: Samples a step should see.
        bound: The most samples to try.
        objective: What the best size is.
        in_float32: Whether narrow gradients are added up in float32.
        hooks: Called with each trial.
    """

    workload: Workload
    memory: Device
    allowance: Allowance
    state: TrainingState
    target: int
    bound: int
    objective: Objective
    in_float32: bool
    hooks: tuple[Hook, ...]

    def run(self, batch: Any | None) -> Found:
        """Try sizes on this batch, or on what the model tells of one.

        Raises:
            DoesNotFit: Not even one sample does.
            NeedsBatch: There is no batch and the model tells of none.
        """
        model = self.workload.model
        example = find_example(model, batch, self.target)
        warnings = [*self.allowance.warnings, *example.warnings]
        batch_norms = tuple(batch_norms_in_train_mode(model))
        if not model.training:
            warnings.append("the model was in eval mode: sizes were tried in train mode, which needs more memory")
            model.train()
        layout = self._hold_whole_batch(example.layout, warnings)
        # A weigh() that cannot count is told first.
        self.workload.weights_of(example.layout.batch, example.layout.count)
        question = Question(
            bound=self.bound,
            limit_bytes=self.allowance.limit_bytes,
            measures=self.memory.measures,
            smallest_probe=min(2 if batch_norms_in_train_mode(model) else 1, self.bound),
            candidates=useful_sizes(self.target, self.bound),
            expected=self._expect(example.layout),
        )
        probe = Probe(self.workload, layout, self.memory, self.allowance.limit_bytes, self.state, self.in_float32)
        trials = self._try_sizes(question, probe)
        size = choose_size(question, trials, self.objective)
        if size is None:
            raise DoesNotFit(self._refuse(trials, probe))
        if self.workload.step is default_step:
            warnings.append(explain_default(model, layout.grow(2)))
        warnings += _warn_of_aux(probe.aux_bytes, size, self.target)
        identity = fingerprint(self.workload, layout, self.memory.describe(), world_size=1)
        return Found(
            size,
            example.layout,
            tuple(trials),
            identity,
            dict(layout.lists),
            probe.state_bytes,
            batch_norms,
            tuple(warnings),
        )

    def _expect(self, layout: Layout) -> int:
        """On a card needless trials are dear, more so if they run out; on a CPU a trace takes longer than they."""
        if self.memory.describe().kind != "cuda" or not self.memory.measures:
            return 0
        return expect_largest(self.workload, layout, self.allowance.limit_bytes, useful_sizes(self.target, self.bound))

    def _try_sizes(self, question: Question, probe: Probe) -> list[Trial]:
        trials: list[Trial] = []
        policies = (next_size, next_smaller_size) if self.objective == "memory" else (next_size,)
        with torch.enable_grad():
            for policy in policies:
                while (size := policy(question, trials)) is not None:
                    trials.append(self._try_size(size, question, probe, trials))
                    emit(TrialFinished(trial=trials[-1], limit_bytes=question.limit_bytes), self.hooks)
        return trials

    def _try_size(self, size: int, question: Question, probe: Probe, trials: Sequence[Trial]) -> Trial:
        try:
            return probe.run(size)
        except ValueError as error:
            # Below the smallest probe BatchNorm may refuse; then what did not fit before is the answer, not this error.
            if size >= question.smallest_probe:
                raise
            raise DoesNotFit(self._refuse(trials, probe)) from error

    def _hold_whole_batch(self, layout: Layout, warnings: list[str]) -> Layout:
        """A batch that lives where the model lives stands there whole during a step: so it does in each trial."""
        if all(tensor.device != self.memory.torch_device for tensor in tensors_of(layout.batch)):
            return layout
        whole = count_bytes(layout.batch) * self.target // layout.count
        if self.allowance.limit_bytes and whole > self.allowance.limit_bytes // 2:
            warnings.append(
                f"the whole batch of {self.target} would take {format_bytes(whole)} of {self.memory.describe().name} "
                f"by itself, and was left out of the trials: hand it over in parts with runner.step_over()"
            )
            return layout
        return layout.grown(self.target)

    def _refuse(self, trials: Sequence[Trial], probe: Probe) -> str:
        smallest = min(trials, key=lambda trial: trial.micro_batch_size)
        reason = probe.reasons.get(smallest.micro_batch_size, f"it ended as {smallest.outcome!r}")
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
