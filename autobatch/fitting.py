"""``fit``: from a model and a target batch to a plan, leaving no trace.

Covers the way from arguments to a plan: example batch, budget, trials, choice, warnings. Does not cover how a trial is
    run
(``probe``), which sizes are tried (``planning.search``), nor what a plan is applied with (``runner``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from autobatch.distributed import refuse_many_ranks
from autobatch.errors import DoesNotFit, InexactSplit
from autobatch.events import Event, Hook, PlanMade, TrialFinished, emit
from autobatch.memory.container import read_host_memory
from autobatch.memory.device import Device
from autobatch.plan import Plan
from autobatch.planning.curve import fit_curve, ran
from autobatch.planning.planner import Objective, balance, choose_size, useful_sizes
from autobatch.planning.search import Question, next_size, next_smaller_size
from autobatch.probe import Probe
from autobatch.records import Trial
from autobatch.report.text import explain_refusal
from autobatch.request import Allowance, check_choice, check_count, find_allowance, find_device
from autobatch.version import __version__
from autobatch.wording import format_bytes
from autobatch.workload.batch_norm import batch_norms_in_train_mode, warn_of_batch_norms
from autobatch.workload.batches import Layout, count_bytes, tensors_of
from autobatch.workload.default_step import default_step, explain_default
from autobatch.workload.example import find_example
from autobatch.workload.fingerprint import fingerprint
from autobatch.workload.reading import ListReading
from autobatch.workload.step import Step, Weigh, Workload
from autobatch.workload.training_state import TrainingState

__all__ = ["fit"]


def fit(
    model: nn.Module,
    target_batch: int,
    *,
    batch: Any | None = None,
    step: Step | None = None,
    optimizer: Any | None = None,
    weigh: Weigh | None = None,
    device: torch.device | str | Device | None = None,
    budget: int | str | None = None,
    headroom: float | str | None = None,
    max_micro_batch: int | None = None,
    objective: Objective = "throughput",
    accumulate_in_float32: bool = True,
    check: Literal["warn", "raise"] | None = "warn",
    reuse: bool = True,  # noqa: ARG001 - the contract has it from the start; no plan is remembered yet
    progress: bool = True,
) -> Plan:
    """Find how to split a target batch so that one optimizer step fits the device.

    A few sizes are run for real: two micro-batches with gradients and optimizer state resident, then the optimizer's
    step, inside the budget. Afterwards everything is bit for bit as before: parameters, buffers, ``.grad``, optimizer
    state, random generators, train/eval flags, hooks, and the device's memory.

    Args:
        model: The model, on its device.
        target_batch: Samples one optimizer step should see, over all ranks.
        batch: An example batch: any nest of tensors, arrays, lists, dicts, dataclasses with one row a sample. Or a
            Dataset or DataLoader, whose largest samples are used. ``None``: inferred from the model where it tells.
        step: ``step(model, micro_batch) -> loss``: the mean over ``weigh(micro_batch)`` units, or ``(loss, aux)``.
            ``None``: the output's ``.loss``, else the output itself if scalar, else the mean of its floats;
            ``plan.warnings`` says which.
        optimizer: Its state and its step's own peak are measured. It is stepped on your tensors only inside a trial,
            and put back.
        weigh: What the mean is over, ``weigh(micro_batch) -> float``; default: samples.
        device: Where the model is; default: where its parameters are.
        budget: What this process may hold, in bytes or as ``"8GiB"``; default: what is free to it plus what it holds
            now.
        headroom: Left free of the budget: bytes, a text, or a fraction; default 5 %.
        max_micro_batch: Never try more samples than this.
        objective: ``"throughput"``: the fewest accumulation steps. ``"memory"``: the smallest micro-batch within 2 % of
            the best rate.
        accumulate_in_float32: Add up gradients of bfloat16 and float16 parameters in float32, where there is more than
            one micro-batch: 4 bytes a parameter, which the trials measure. A sum of many small gradients in bfloat16
            loses most of them.
        check: What to do where splitting is known not to be exact: ``"warn"`` (in ``plan.warnings``), ``"raise"``, or
            ``None``.
        reuse: Whether a remembered plan may be confirmed instead of searched for. No plan is remembered in this
            version.
        progress: One line a trial on stderr, when that is a terminal.

    Returns:
        The plan. Its size has run.

    Raises:
        NeedsBatch: No batch was given and the model does not tell what it takes.
        DoesNotFit: Not even one sample fits; the message says what it needed, what there was, and what would help.
        InexactSplit: ``check="raise"`` and the split would change the gradient.
        InvalidArgument: An argument cannot mean anything.
        InvalidBatch: The batch cannot be counted.
    """
    started = time.perf_counter()
    refuse_many_ranks()
    target_batch = check_count("target_batch", target_batch)
    check_choice("objective", objective, ("throughput", "memory"))
    check_choice("check", check, ("warn", "raise", None))
    bound = (
        target_batch if max_micro_batch is None else min(target_batch, check_count("max_micro_batch", max_micro_batch))
    )
    workload = Workload(model, step or default_step, weigh, optimizer)
    memory = find_device(workload.parameters(), type(model).__name__, device)
    memory.watch(workload.resident_tensors())
    hooks = (_show_progress,) if progress and sys.stderr.isatty() else ()
    host_bytes = read_host_memory().available_bytes // 2
    with TrainingState(model, optimizer, memory.torch_device, host_bytes=host_bytes) as state:
        # Only now: the copies of the state are in host memory, and on the CPU that is the memory to be divided.
        allowance = find_allowance(memory, budget, headroom)
        search = _Search(
            workload, memory, allowance, state, target_batch, bound, objective, accumulate_in_float32, hooks
        )
        found = search.run(batch)
    memory.reclaim()
    inexact = _explain_inexactness(found, target_batch)
    if check == "raise" and inexact:
        raise InexactSplit(inexact[0])
    told = inexact if check is not None else ()
    seconds = time.perf_counter() - started
    plan = _make_plan(
        workload,
        memory,
        allowance,
        found,
        target_batch,
        in_float32=accumulate_in_float32,
        warnings=told,
        seconds=seconds,
    )
    emit(PlanMade(summary=str(plan), warnings=told))
    return plan


@dataclass(frozen=True)
class _Found:
    """What the trials answered, and what else the plan has to say."""

    size: int
    trials: tuple[Trial, ...]
    fingerprint: str
    batch_lists: dict[str, ListReading]
    state_bytes: int
    batch_norms: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass
class _Search:
    """Tries sizes of one workload until the question is answered."""

    workload: Workload
    memory: Device
    allowance: Allowance
    state: TrainingState
    target: int
    bound: int
    objective: Objective
    in_float32: bool
    hooks: tuple[Hook, ...]

    def run(self, batch: Any | None) -> _Found:
        model = self.workload.model
        example = find_example(model, batch, self.target)
        warnings = [*self.allowance.warnings, *example.warnings]
        if not model.training:
            warnings.append("the model was in eval mode: sizes were tried in train mode, which needs more memory")
            model.train()
        batch_norms = tuple(batch_norms_in_train_mode(model))
        layout = self._hold_whole_batch(example.layout, warnings)
        self.workload.weights_of(
            example.layout.batch, example.layout.count
        )  # a weigh() that cannot count is told first
        question = Question(
            bound=self.bound,
            limit_bytes=self.allowance.limit_bytes,
            measures=self.memory.measures,
            smallest_probe=min(2 if batch_norms else 1, self.bound),
            candidates=useful_sizes(self.target, self.bound),
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
        return _Found(
            size, tuple(trials), identity, dict(layout.lists), probe.state_bytes, batch_norms, tuple(warnings)
        )

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
                f"by "
                f"itself, and was left out of the trials: hand it over in parts with runner.step_over()"
            )
            return layout
        return layout.grown(self.target)

    def _refuse(self, trials: Sequence[Trial], probe: Probe) -> str:
        smallest = min(trials, key=lambda trial: trial.micro_batch_size)
        reason = probe.reasons.get(smallest.micro_batch_size, f"it ended as {smallest.outcome!r}")
        allowance = self.allowance
        return explain_refusal(smallest, reason, allowance.limit_bytes, allowance.budget_bytes, self.memory.describe())


def _explain_inexactness(found: _Found, target: int) -> tuple[str, ...]:
    if not found.batch_norms or found.size >= target:
        return ()
    return (warn_of_batch_norms(found.batch_norms, found.size, target),)


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


def _make_plan(
    workload: Workload,
    memory: Device,
    allowance: Allowance,
    found: _Found,
    target: int,
    *,
    in_float32: bool,
    warnings: tuple[str, ...],
    seconds: float,
) -> Plan:
    sizes = balance(target, found.size)
    measured = [trial for trial in found.trials if ran(trial)]
    peaks = [trial.peak_reserved for trial in measured if trial.micro_batch_size == found.size]
    if workload.optimizer is None:
        warnings += (
            (
                "no optimizer= was given: its state and its step are not counted; AdamW holds two more copies of the "
                "parameters"
            ),
        )
    return Plan(
        target_batch=target,
        world_size=1,
        micro_batch_size=max(sizes),
        micro_batch_sizes=sizes,
        accumulation_steps=len(sizes),
        budget_bytes=allowance.budget_bytes,
        headroom_bytes=allowance.headroom_bytes,
        peak_bytes=max(peaks),
        curve=fit_curve(measured) if memory.measures else None,
        trials=found.trials,
        device=memory.describe(),
        warnings=(*found.warnings, *warnings),
        state_bytes=found.state_bytes,
        weighed=workload.weigh is not None,
        accumulate_in_float32=in_float32,
        batch_lists=found.batch_lists,
        fingerprint=found.fingerprint,
        seconds=seconds,
        version=__version__,
    )


def _show_progress(event: Event) -> None:
    sys.stderr.write(f"{event}\n")
