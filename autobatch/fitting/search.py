"""Searches the largest micro-batch that fits, by trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autobatch._formatting import format_bytes
from autobatch.batch.example import find_example
from autobatch.batch.lengths import SamplesByLength
from autobatch.batch.samples import Layout, check_values
from autobatch.batch.tree import count_bytes, tensors_of
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.events import PlanRecalled, PlanRefused, emit
from autobatch.fitting.choose_blocks import choose_blocks
from autobatch.fitting.choose_faster import choose_again, choose_faster
from autobatch.fitting.chunk_loss import chunk_loss
from autobatch.fitting.make_plan import ExampleBatch, Found, Request
from autobatch.fitting.trials import Trials, find_candidates
from autobatch.planning.division import balance, least_size
from autobatch.planning.next_trial import Question, choose_size, next_size, next_smaller_size
from autobatch.planning.plan_record import PlanRecord
from autobatch.planning.reuse import choose_remembered, why_not_confirmed
from autobatch.planning.sizes_by_length import halve_lengths
from autobatch.records import SizeAtLength, Summing, Trial
from autobatch.step.default_step import default_step, explain_default
from autobatch.step.fingerprint import fingerprint
from autobatch.step.model_info import (
    batch_norms_in_train_mode,
    explain_smallest,
    may_refuse_one_sample,
)
from autobatch.step.whole_batch import WholeBatch


def search(request: Request) -> Found:
    """Try sizes on real samples until the best one is known; errors are those of ``fit``."""
    workload, target = request.workload, request.wanted.target_batch
    batch, whole = _find_batch(request)
    workload.weights_of(batch.example.batch, batch.example.count)  # raises here if weigh() cannot count
    trials = Trials(request, batch, whole)
    lengths = (request.lengths.length_of, batch.by_length.padding) if request.lengths and batch.by_length else None
    known = fingerprint(
        *(workload, trials.samples, request.memory.describe(), request.division.size),
        lengths=lengths,
        strategies=request.strategies,
    )
    with torch.enable_grad():
        is_doubtful = target > 1 and may_refuse_one_sample(workload.model)
        smallest = trials.probe.find_smallest() if is_doubtful else 1
        confirmed = _confirm(request, trials, known, smallest)
        size = confirmed.micro_batch_size if confirmed else _find_size(request, trials, smallest)
        # With a size of 2 an odd target has a micro-batch of one sample, which has not run.
        if not is_doubtful and min(balance(target, size)) < size == 2:
            smallest = trials.probe.find_smallest()
            if smallest > 1:
                size = _find_size(request, trials, smallest)
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
        earlier_trials=tuple(trials.earlier),
        checkpointing=trials.checkpointing,
        recomputable=trials.recomputable,
        chunked_loss=trials.chunked_loss,
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
    is_faster = found.checkpointing is not None and found.checkpointing.plain_size > 0
    if size in {trial.micro_batch_size for trial in found.trials} and not is_faster:
        return replace(found, size=size)
    request = replace(request, wanted=request.wanted.model_copy(update={"target_batch": samples}))
    trials = Trials(request, found.batch, _hold_whole_batch(request, found.batch.example)[0])
    trials.apply(found.checkpointing, found.recomputable, found.chunked_loss)
    with torch.enable_grad():
        if is_faster:
            return choose_again(trials, found)
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


def _confirm(request: Request, trials: Trials, known: str, smallest: int) -> PlanRecord | None:
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
        trials.apply(plan.checkpointing, plan.recomputable, plan.chunked_loss)
        reason = why_not_confirmed(plan, trials.run(plan.micro_batch_size), request.allowance.limit_bytes)
    if reason:
        trials.apply(None, ())
        emit(PlanRefused(plan_id=plan.id, reason=reason, **request.whose), request.hooks)
        return None
    return plan


def _find_size(request: Request, trials: Trials, smallest: int) -> int:
    """Return the size of the plan; strategies are used where they make a size fit, or a step faster."""
    sizes = find_candidates(request, smallest)
    size = _search_size(request, trials, smallest, sizes)
    allowed, least = request.strategies, min(smallest, sizes[0])
    recomputes = bool(request.ways) and trials.checkpointing is None
    if size is not None and recomputes:
        return choose_faster(request, trials, size, [one for one in sizes if one > size], least)
    if size is None and "chunk_loss" in allowed and trials.chunked_loss is None:
        chunk_loss(request, trials, least)  # costs less than recomputed blocks
        size = _search_size(request, trials, smallest, sizes) if trials.chunked_loss else None
    if size is None and recomputes:
        choose_blocks(request, trials, least)
        size = _search_size(request, trials, smallest, sizes)
    if size is None:
        raise DoesNotFit(trials.explain(explain_smallest(request.workload.model) if smallest > 1 else ""))
    return size


def _search_size(request: Request, trials: Trials, smallest: int, sizes: Sequence[int]) -> int | None:
    """Return the best size with the blocks recomputed that are now; ``None`` if none fits."""
    wanted, memory = request.wanted, request.memory
    question = Question(
        bound=wanted.max_micro_batch,
        limit_bytes=request.allowance.limit_bytes,
        measures=memory.measures,
        smallest_probe=min(smallest, sizes[0]),
        candidates=tuple(sizes),
    )
    # On CUDA a trial costs more than a prediction. A prediction cannot gather sharded parameters from other ranks, and
    # knows no second pass and no strategies.
    is_predictable = not (
        request.division.trials.are_shared
        or isinstance(request.workload.step, WholeBatch)
        or trials.checkpointing
        or trials.chunked_loss
    )
    if memory.measures and memory.describe().kind == "cuda" and is_predictable:
        question = _predict(request, trials, question)
    for policy in (next_size, next_smaller_size) if wanted.objective == "memory" else (next_size,):
        while (size := policy(question, trials.done)) is not None:
            trials.run(size)
    return choose_size(question, trials.done, wanted.objective)


def _predict(request: Request, trials: Trials, question: Question) -> Question:
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


def _try_summings(request: Request, trials: Trials, size: int) -> dict[Summing, Trial]:
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


def _search_lengths(
    request: Request, trials: Trials, samples: SamplesByLength, size: int, smallest: int
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
