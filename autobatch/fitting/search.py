"""Searches the largest micro-batch that fits, by trials."""

from __future__ import annotations

from dataclasses import replace

import torch

from autobatch._formatting import format_bytes
from autobatch.batch.example import find_example
from autobatch.batch.lengths import SamplesByLength
from autobatch.batch.samples import Layout, check_values
from autobatch.batch.tree import count_bytes, tensors_of
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.events import PlanRecalled, PlanRefused, TrialFinished, emit
from autobatch.fitting.make_plan import ExampleBatch, Found, Request
from autobatch.fitting.probe import Probe
from autobatch.planning.division import balance, least_size, useful_sizes
from autobatch.planning.next_trial import Question, choose_size, next_size, next_smaller_size
from autobatch.planning.plan_record import PlanRecord
from autobatch.planning.reuse import choose_remembered, why_not_confirmed
from autobatch.planning.sizes_by_length import halve_lengths
from autobatch.records import IN_EACH, SizeAtLength, Summing, Trial
from autobatch.report.advice import explain_refusal
from autobatch.step.default_step import default_step, explain_default
from autobatch.step.fingerprint import fingerprint
from autobatch.step.model_info import (
    batch_norms_in_train_mode,
    explain_smallest,
    may_refuse_one_sample,
    refuses_one_sample,
)
from autobatch.step.whole_batch import WholeBatch


def search(request: Request) -> Found:
    """Try sizes on real samples until the best one is known; errors are those of ``fit``."""
    workload, target = request.workload, request.wanted.target_batch
    batch, whole = _find_batch(request)
    workload.weights_of(batch.example.batch, batch.example.count)  # raises here if weigh() cannot count
    trials = _Trials(request, batch, whole)
    lengths = (request.lengths.length_of, batch.by_length.padding) if request.lengths and batch.by_length else None
    known = fingerprint(workload, trials.samples, request.memory.describe(), request.division.size, lengths)
    with torch.enable_grad():
        is_doubtful = target > 1 and may_refuse_one_sample(workload.model)
        smallest = trials.probe.find_smallest() if is_doubtful else 1
        confirmed = _confirm(request, trials, known, smallest)
        size = confirmed.micro_batch_size if confirmed else _search_size(request, trials, smallest)
        # With a size of 2 an odd target has a micro-batch of one sample, which has not run.
        if not is_doubtful and min(balance(target, size)) < size == 2:
            smallest = trials.probe.find_smallest()
            if smallest > 1:
                size = _search_size(request, trials, smallest)
                confirmed = confirmed if size == 2 else None
        summing_trials = _try_summings(request, trials, size) if target > size else {}
        sizes: tuple[SizeAtLength, ...] = ()
        if batch.by_length is not None:
            by_length = batch.by_length
            sizes = confirmed.lengths if confirmed else _search_lengths(request, trials, by_length, size, smallest)
    explained = (
        [explain_default(workload.model, trials.samples.grown(2).batch)] if workload.step is default_step else []
    )
    return Found(
        samples=target,
        size=size,
        smallest=smallest,
        sizes=sizes,
        trials=tuple(trials.done),
        shorter_trials=tuple(trials.shorter),
        confirmed=confirmed,
        batch=batch,
        fingerprint=known,
        state_bytes=trials.probe.state_bytes,
        trained=trials.probe.trained,
        aux_bytes=trials.probe.aux_bytes,
        summing_trials=summing_trials,
        savings=tuple(sorted(trials.probe.savings)),
        warnings=(*request.allowance.warnings, *batch.warnings, *explained),
        forecast=trials.forecast,
    )


def settle(request: Request, found: Found, samples: int) -> Found:
    """Take so many samples a step; try their micro-batches if the search was for another number.

    Raises:
        DoesNotFit: The size does not fit, though a larger one did.
    """
    if samples == found.samples:
        return found
    found = replace(found, samples=samples)
    # With sharded parameters all ranks tried the largest share together. With lengths, batches are cut greedily.
    if request.division.trials.are_shared or found.sizes:
        return found
    size = max(balance(samples, found.size, min(found.smallest, samples)))
    if size in {trial.micro_batch_size for trial in found.trials}:
        return replace(found, size=size)
    request = replace(request, wanted=request.wanted.model_copy(update={"target_batch": samples}))
    trials = _Trials(request, found.batch, _hold_whole_batch(request, found.batch.example)[0])
    with torch.enable_grad():
        trial = trials.run(size)
    if trial.outcome != "fits":
        raise DoesNotFit(trials.explain())
    return replace(found, size=size, trials=(*found.trials, trial))


def _find_batch(request: Request) -> tuple[ExampleBatch, Layout]:
    model, lengths, target = request.workload.model, request.lengths, request.wanted.target_batch
    has_own_step = request.workload.step is not default_step
    found = find_example(model, request.batch, target, lengths, has_own_step=has_own_step)
    check_values(found.layout)
    whole, warnings = _hold_whole_batch(request, found.layout)
    if not model.training:
        warnings = ("the model was in eval mode: sizes were tried in train mode, which needs more memory", *warnings)
    batch = ExampleBatch(
        example=found.layout,
        compared=found.with_smallest or found.layout,
        by_length=None if lengths is None else SamplesByLength.read(found.layout, lengths),
        norms=batch_norms_in_train_mode(model),
        warnings=(*found.warnings, *warnings),
    )
    return batch, whole


def _hold_whole_batch(request: Request, example: Layout) -> tuple[Layout, tuple[str, ...]]:
    """Return the batch that trials hold, the whole one if it comes on the model's device; and warnings."""
    if all(tensor.device != request.memory.torch_device for tensor in tensors_of(example.batch)):
        return example, ()
    target, limit = request.wanted.target_batch, request.allowance.limit_bytes
    whole = count_bytes(example.batch) * target // example.count
    if limit and whole > limit // 2:
        warning = (
            f"the whole batch of {target} would take {format_bytes(whole)} of {request.memory.describe().name} "
            f"by itself, and was left out of the trials: hand it over in parts with runner.step_over(), or pass a "
            f"smaller target_batch="
        )
        return example, (warning,)
    return example.grown(target), ()


class _Trials:
    """Runs the trials of one search."""

    def __init__(self, request: Request, batch: ExampleBatch, whole: Layout) -> None:
        self.done: list[Trial] = []  # of the longest samples if lengths differ
        self.shorter: list[Trial] = []
        self.forecast: tuple[tuple[int, int], ...] = ()  # predicted bytes by size
        self.batch, self.samples = batch, whole  # a trial of any size repeats these samples
        if batch.by_length is not None:
            self.samples, self._whole = batch.by_length.at(batch.by_length.longest)[0], whole  # a step holds both
            request.memory.watch(tensors_of(whole.batch))
        allowance, wanted = request.allowance, request.wanted
        options = allowance.limit_bytes, request.state, wanted.accumulate_in_float32, wanted.target_batch
        division = request.division
        self.probe = Probe(
            *(request.workload, self.samples, request.memory, *options, division.target), shared=division.trials
        )
        self._request = request

    def run(self, size: int) -> Trial:
        """Try a size; raise DoesNotFit instead of the error of a layer that needs more than one sample."""
        try:
            trial = self.probe.run(size)
        except ValueError as error:
            if size > 1 or self._request.wanted.target_batch == 1 or not refuses_one_sample(error):
                raise
            _find_candidates(self._request, smallest=2)  # if nothing is left, max_micro_batch= is to blame
            raise DoesNotFit(self.explain(explain_smallest(self._request.workload.model))) from error
        longest = None if self.batch.by_length is None else self.batch.by_length.longest
        return self._note(trial, longest, self.done)

    def run_shorter(self, samples: SamplesByLength, length: int, size: int) -> Trial:
        self.probe.example, length = samples.at(length)
        return self._note(self.probe.run(size), length, self.shorter)

    def try_summing(self, size: int, summing: Summing) -> Trial:
        self.probe.summing = summing
        try:
            return self.probe.run(size)
        finally:
            self.probe.summing = IN_EACH

    def explain(self, why_no_smaller: str = "") -> str:
        smallest = min(self.done, key=lambda trial: trial.micro_batch_size)
        reason = self.probe.errors.get(smallest.micro_batch_size, f"it ended as {smallest.outcome!r}")
        if why_no_smaller:
            reason = f"{reason}; {why_no_smaller}"
        allowance, device = self._request.allowance, self._request.memory.describe()
        limits = allowance.limit_bytes, allowance.budget_bytes
        return explain_refusal(smallest, reason, *limits, device, savings=self.probe.savings)

    def _note(self, trial: Trial, length: int | None, trials: list[Trial]) -> Trial:
        trial = trial.model_copy(update={"length": length})
        trials.append(trial)
        limit_bytes = self._request.allowance.limit_bytes
        emit(TrialFinished(trial=trial, limit_bytes=limit_bytes, **self._request.whose), self._request.hooks)
        return trial


def _confirm(request: Request, trials: _Trials, known: str, smallest: int) -> PlanRecord | None:
    least = least_size(request.wanted.target_batch, smallest)
    plans = [plan for plan in request.ledger.recall(known, request.division.rank) if plan.micro_batch_size >= least]
    plan, reason = choose_remembered(plans, request.wanted)
    if plan is None or reason:
        others = [plan for plan in request.ledger.recall_from_team(known) if plan.micro_batch_size >= least]
        plan, reason = choose_remembered([*plans, *others], request.wanted)
    if plan is None:
        return None
    if not reason:
        emit(PlanRecalled(plan_id=plan.id, micro_batch_size=plan.micro_batch_size, **request.whose), request.hooks)
        reason = why_not_confirmed(plan, trials.run(plan.micro_batch_size), request.allowance.limit_bytes)
    if reason:
        emit(PlanRefused(plan_id=plan.id, reason=reason, **request.whose), request.hooks)
        return None
    return plan


def _search_size(request: Request, trials: _Trials, smallest: int) -> int:
    wanted, memory = request.wanted, request.memory
    sizes = _find_candidates(request, smallest)
    question = Question(
        bound=wanted.max_micro_batch,
        limit_bytes=request.allowance.limit_bytes,
        measures=memory.measures,
        smallest_probe=min(smallest, sizes[0]),
        candidates=sizes,
    )
    # On CUDA a trial costs more than a prediction. A prediction cannot gather sharded parameters from other ranks, and
    # knows no second pass.
    is_predictable = not request.division.trials.are_shared and not isinstance(request.workload.step, WholeBatch)
    if memory.measures and memory.describe().kind == "cuda" and is_predictable:
        question = _predict(request, trials, question)
    for policy in (next_size, next_smaller_size) if wanted.objective == "memory" else (next_size,):
        while (size := policy(question, trials.done)) is not None:
            trials.run(size)
    chosen = choose_size(question, trials.done, wanted.objective)
    if chosen is None:
        raise DoesNotFit(trials.explain(explain_smallest(request.workload.model) if smallest > 1 else ""))
    return chosen


def _predict(request: Request, trials: _Trials, question: Question) -> Question:
    from autobatch.prediction.prior import FirstStep, expect_largest  # noqa: PLC0415 - a CPU needs none of it

    request.announce("predicting which sizes fit")
    sizes = question.candidates
    first = FirstStep(request.memory.usage().allocated, trials.probe.measure_forward() if sizes[-1] > 1 else None)
    expected = expect_largest(request.workload, trials.batch.example, question.limit_bytes, sizes, first)
    trials.forecast = expected.forecast.points
    return question.model_copy(
        update={
            "expected": expected.largest,
            "expects_no_more": not expected.knows_no_larger,
            "forecast": expected.forecast,
        }
    )


def _try_summings(request: Request, trials: _Trials, size: int) -> dict[Summing, Trial]:
    """Try a size with gradients of sharded parameters summed in each micro-batch, and as rarely as fits."""
    summings = request.division.trials.summings()
    if len(summings) == 1 or request.wanted.objective == "memory":
        return {}
    request.announce("comparing how often gradients are summed")
    found = {}
    for summing in summings:
        found[summing] = trials.try_summing(size, summing)
        if found[summing].outcome != "fits":
            break
    return found


def _find_candidates(request: Request, smallest: int) -> tuple[int, ...]:
    target, bound = request.wanted.target_batch, request.wanted.max_micro_batch
    least = least_size(target, smallest)
    if bound < least:
        raise DoesNotFit(
            f"max_micro_batch={bound} leaves a micro-batch of one sample of target_batch={target}, and "
            f"{explain_smallest(request.workload.model)}: pass max_micro_batch={least} or more"
        )
    # With lengths each micro-batch has as many samples as ran at their length: any number may be useful.
    sizes = useful_sizes(target, bound) if request.lengths is None else range(1, bound + 1)
    return tuple(size for size in sizes if size >= least)


def _search_lengths(
    request: Request, trials: _Trials, samples: SamplesByLength, size: int, smallest: int
) -> tuple[SizeAtLength, ...]:
    """Try as many samples of each shorter length as the longest have positions together; the shortest comes first."""
    if smallest > 1:
        raise InvalidArgument(
            f"by_length() divides a batch into parts of any size, and {explain_smallest(request.workload.model)}: plan "
            f"without it"
        )
    bound = request.wanted.max_micro_batch
    peak_bytes = max(trial.peak_reserved for trial in trials.done if trial.micro_batch_size == size)
    found = [SizeAtLength(length=samples.longest, micro_batch_size=size, peak_bytes=peak_bytes)]
    for length in halve_lengths(samples.longest, size, bound)[1:]:
        tried = min(size * samples.longest // length, bound)
        if tried <= found[-1].micro_batch_size:
            continue
        trial = trials.run_shorter(samples, length, tried)
        at = trial.length or length
        if trial.outcome == "fits" and at < found[-1].length:
            found.append(SizeAtLength(length=at, micro_batch_size=tried, peak_bytes=trial.peak_reserved))
    return tuple(reversed(found))
