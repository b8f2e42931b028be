"""Predicts what a training step would need on a card, without one: trace, estimate, choice of a size, all cards."""

from __future__ import annotations

import numbers
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autobatch._arguments import check_micro_batches, check_switch, check_target
from autobatch._bounds import LONGEST_LIST
from autobatch._formatting import show_value
from autobatch._version import __version__
from autobatch._wrappers import unwrap_model, unwrap_optimizer
from autobatch.batch.example import find_example
from autobatch.batch.samples import Layout, dims_of
from autobatch.errors import InvalidArgument
from autobatch.events import Hook, StageBegan, emit
from autobatch.events.progress import showing_progress
from autobatch.plan import Plan
from autobatch.planning.curve import MemoryCurve, fit_curve
from autobatch.planning.division import balance, share_target
from autobatch.prediction.cards import Gpu, explain_choice, find_gpu
from autobatch.prediction.child_process import begin_apart, run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.prediction import Part, Prediction, Strategy
from autobatch.prediction.prior import read_card
from autobatch.prediction.sizing import Proof, Sizing, find_limit, find_smallest, prove_sizing, trace_savings
from autobatch.prediction.tracing.ranks import Parallelism, find_units, read_parallelism
from autobatch.prediction.tracing.trace import Circumstances, explain_loss, trace_timeline, trace_whole
from autobatch.prediction.what_if import try_changes
from autobatch.records import DeviceInfo, Trial
from autobatch.step.default_step import default_step
from autobatch.step.fingerprint import identify_step
from autobatch.step.model_info import (
    batch_norms_in_train_mode,
    identify_model,
    may_refuse_one_sample,
    warn_of_batch_norms,
)
from autobatch.step.whole_batch import WholeBatch
from autobatch.step.workload import Step, Weigh, Workload, check_model, warn_of_no_optimizer

MARGIN = 0.10  # left free on top of the predicted peak of the process, as a fraction of it
MARGIN_REASON = "at which 2.8 % of 363 published peaks were above the prediction, of models that nothing was fitted to"
"""``make accuracy``, in benchmarks/RESULTS.md."""

_MODULES = 10
_INDEX = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # the index of a module in a container, in its path
_HELD = "held by the allocator beside them"
_NOT_TRACED = "the step was not traced at the predicted size, which follows from other sizes"
_NEVER_RAN = "predicted: this size has never run; fit() on the card would try it"


def predict(
    model: nn.Module,
    batch: Any | None = None,
    step: Step | None = None,
    optimizer: Any | None = None,
    *,
    weigh: Weigh | None = None,
    target_batch: int = 256,
    world_size: int | None = None,
    data_parallel: Strategy | None = None,
    gpu: str | int | None = None,
    margin: float = MARGIN,
    expandable_segments: bool = False,
    scaler: bool = False,
    what_if: bool = False,
    all_cards: bool = False,
    progress: bool = True,
) -> Prediction:
    """Predict what one training step would need on a card, and what fits there; no card is needed.

    Your own step runs a few times on tensors without memory, with CUDA's kernels. The recorded allocations are replayed
    at any size in a simulation of CUDA's caching allocator, and the step is traced once more at the size that fits.
    Model, optimizer and generators are not touched.

    Args:
        model: The model, on any device, ``meta`` included.
        batch: An example batch, as for ``fit``; only shapes and dtypes count.
        step: ``step(model, micro_batch)``, as for ``fit``.
        optimizer: Its state and the memory of its step are part of the prediction.
        weigh: As for ``fit``; it is not called.
        target_batch: Samples of an optimizer step over all ranks.
        world_size: Ranks that share the target; default: those of a ``DistributedDataParallel``, else one. The
            prediction is about the rank with the largest share.
        data_parallel: ``"ddp"`` (the default with several ranks): each rank has the whole model and buckets of
            gradients. ``"fsdp2"``: each has its shard of parameters, gradients and optimizer state, as if
            ``fully_shard`` had been called with each of the model's repeated blocks, and then with the model.
        gpu: A card's name (``"H100-80GB"``; ``"H100"`` means the commonest, and ``warnings`` names it), all of its
            memory (``"24GiB"``), or ``None`` for the card of this machine.
        margin: The fraction of the predicted peak of the process that is left free on top of it.
        expandable_segments: Whether ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` will be set.
        scaler: Whether a ``GradScaler`` will scale the loss.
        what_if: Whether to trace other ways to do the same step too, which takes some times as long.
        all_cards: Whether ``cards`` lists all known cards, not just the common ones.
        progress: Show one line a trace on stderr, if that is a terminal.

    Raises:
        InvalidArgument: An argument cannot be used, or the batch cannot be counted. Or the step cannot be traced: it
            needs values of tensors or operators that cannot run without memory, calls ``backward()``, or trains a
            tensor that neither the model nor the optimizer has. Errors of the step pass through as they were raised.
        NeedsBatch: No batch was given and the input cannot be inferred from the model.
    """
    started = time.perf_counter()
    target_batch = check_target(target_batch)
    if isinstance(margin, bool) or not isinstance(margin, numbers.Real) or not 0 <= margin < 1:
        raise InvalidArgument(f"margin={show_value(margin)} must be a fraction from 0 to less than 1, such as 0.1")
    names = ("expandable_segments", "scaler", "what_if", "all_cards", "progress")
    for name, switch in zip(names, (expandable_segments, scaler, what_if, all_cards, progress), strict=True):
        check_switch(name, switch)
    check_model(model)
    model, parallelism = read_parallelism(model, world_size, data_parallel)
    if parallelism is not None and isinstance(step, WholeBatch):
        raise InvalidArgument("WholeBatch is predicted on one rank only: leave out world_size= and data_parallel=")
    shares = share_target(target_batch, "equal", [1.0] * (parallelism.world_size if parallelism else 1))
    if gpu is None and not torch.cuda.is_available():
        raise InvalidArgument("no CUDA card here: name one as gpu='H100-80GB', or its memory as gpu='24GiB'")
    card = read_card() if gpu is None else find_gpu(gpu)
    workload = Workload(model, default_step if step is None else step, weigh, unwrap_optimizer(optimizer))
    example = find_example(model, batch, shares[0], has_own_step=step is not None)
    whole = shares[0] if isinstance(step, WholeBatch) else 0
    circumstances = Circumstances(scaler=scaler, parallelism=parallelism, whole=whole)
    with showing_progress(progress=progress) as hooks:
        sizing, proof = _find_sizing(
            workload,
            example.layout,
            circumstances,
            card=card,
            share=shares[0],
            margin=float(margin),
            expandable_segments=expandable_segments,
            all_cards=all_cards,
            hooks=hooks,
        )
        explained = (
            (run_apart(lambda: explain_loss(workload, example.layout)),) if workload.step is default_step else ()
        )
        warnings = (*explain_choice(gpu), *example.warnings, *explained, *warn_of_no_optimizer(workload))
        prediction = _predict(workload, example.layout, sizing, proof, warnings, all_cards=all_cards)
        if parallelism is not None:
            prediction = _share(prediction, parallelism, shares, model)
        changes = try_changes(workload, example.layout, sizing, circumstances, hooks) if what_if else ()
    known = {"model": type(unwrap_model(workload.model)).__name__, "step": identify_step(workload, example.layout)}
    seconds = time.perf_counter() - started
    plan = prediction.plan and prediction.plan.model_copy(update={"seconds": seconds})
    return prediction.model_copy(update={"changes": changes, "seconds": seconds, "plan": plan, **known})


def _find_sizing(
    workload: Workload,
    layout: Layout,
    circumstances: Circumstances,
    *,
    card: Gpu,
    share: int,
    margin: float,
    expandable_segments: bool,
    all_cards: bool,
    hooks: Sequence[Hook],
) -> tuple[Sizing, Proof]:
    """Trace the step, estimate it, and trace it once more at the size that fits; the rank has ``share`` samples."""

    def prove(sizing: Sizing) -> tuple[Sizing, Proof]:
        # While another process traces, this one makes the tables for the first time: half a second.
        return prove_sizing(
            sizing, workload, layout, circumstances, lambda now: (now.points(), now.cards(every=all_cards)), hooks=hooks
        )

    model = workload.model
    emit(StageBegan(stage="tracing the step"), hooks)
    # A doubtful single sample is tried, as by ``fit``: beside the trace, which takes most of the time.
    is_doubtful = share > 1 and (may_refuse_one_sample(model) or not model.training)  # traced in train mode
    with begin_apart(lambda: find_smallest(workload, layout)) if is_doubtful else nullcontext() as ask_smallest:
        timeline = run_apart(lambda: trace_timeline(workload, layout, circumstances))
        whole = run_apart(lambda: trace_whole(workload, layout, circumstances))
        smallest = ask_smallest() if ask_smallest else None
    estimate = Estimate(timeline, expandable_segments=expandable_segments, target=share, whole=whole).on_card(card)
    sizing, proof = prove(Sizing(estimate, card, share, margin, smallest or 1))
    # A division that ends in one sample needs a model that can run it.
    ends_in_one = sizing.largest > 0 and min(balance(share, sizing.largest)) == 1 < share
    if smallest is None and ends_in_one and run_apart(lambda: find_smallest(workload, layout)) > 1:
        sizing, proof = prove(replace(sizing, smallest=2))
    return sizing, proof


def _predict(
    workload: Workload, layout: Layout, sizing: Sizing, proof: Proof, warnings: tuple[str, ...], *, all_cards: bool
) -> Prediction:
    estimate, points, judged = sizing.estimate, sizing.points(), sizing.judged
    by_kind, held_bytes = estimate.by_kind(judged)
    kinds = [*by_kind.most_common(), *([(_HELD, held_bytes)] if held_bytes else [])]
    modules = _group_alike(estimate.by_module(judged))
    norms = batch_norms_in_train_mode(workload.model) if 0 < sizing.largest < sizing.target else []
    split = [warn_of_batch_norms(norms, max(balance(sizing.target, sizing.largest)), sizing.target)] if norms else []
    trials = [
        Trial(micro_batch_size=at.size, outcome="fits", peak_allocated=at.allocated, peak_reserved=at.reserved)
        for at in points
    ]
    curve, per_sample = fit_curve(trials), estimate.changed(target=0)
    untraced = (f"{_NOT_TRACED}: {proof.doubt}",) if proof.doubt else ()
    warnings = (*split, *warnings, *untraced)
    return Prediction(
        gpu=sizing.gpu,
        target_batch=sizing.target,
        curve=curve,
        points=points,
        plan=_make_plan(workload, layout, sizing, curve, (*warnings, _NEVER_RAN)) if sizing.largest else None,
        largest_judged=sizing.bound,
        reach=sizing.reach,
        judged_size=judged,
        peak_bytes=estimate.reserved(judged) + sizing.gpu.context_bytes,
        breakdown=tuple(Part(name=name, byte_count=count) for name, count in kinds),
        modules=tuple(Part(name=name, byte_count=count) for name, count in modules),
        per_sample_bytes=per_sample.tensor_bytes(judged + 1) - per_sample.tensor_bytes(judged),
        context_bytes=sizing.gpu.context_bytes,
        margin=sizing.margin,
        margin_reason=MARGIN_REASON if sizing.margin == MARGIN else f"because margin={sizing.margin:g} was asked for",
        cards=sizing.cards(every=all_cards),
        peaks_in_loss=estimate.ends_in_loss(judged),
        interpolated=estimate.timeline.interpolated,
        cudnn_version=estimate.workspaces.version,
        has_convolutions=estimate.timeline.has_convolutions,
        proven_at=proof.proven_at,
        doubt=proof.doubt,
        warnings=warnings,
    )


def _share(prediction: Prediction, parallelism: Parallelism, shares: tuple[int, ...], model: nn.Module) -> Prediction:
    names = {id(module): name for name, module in model.named_modules()}
    units = find_units(model) if parallelism.strategy == "fsdp2" else []
    ranks = {"target_batch": sum(shares), "world_size": parallelism.world_size, "shares": shares}
    plan = prediction.plan and prediction.plan.model_copy(update=ranks)
    own = {"data_parallel": parallelism.strategy, "units": tuple(names[id(unit)] for unit in units[:LONGEST_LIST])}
    return prediction.model_copy(update={**ranks, **own, "plan": plan})


def _group_alike(by_module: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """The largest groups of modules with the same place in blocks and as many bytes, then all others as one."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name, count in by_module.items():
        groups.setdefault((_INDEX.sub("*", name), count), []).append(name)
    ordered = sorted(groups.items(), key=lambda group: -group[0][1] * len(group[1]))
    shown = ordered if len(ordered) <= _MODULES else ordered[: _MODULES - 1]
    for (_, count), names in shown:
        columns = zip(*(name.split(".") for name in names), strict=True)
        joined = ".".join(parts[0] if len({*parts}) == 1 else "*" for parts in columns)
        yield (f"{joined} ({len(names)} alike)" if len(names) > 1 else joined), count * len(names)
    if others := [(count, names) for (_, count), names in ordered[len(shown) :]]:
        number = sum(len(names) for _, names in others)
        yield f"{number} other modules", sum(count * len(names) for count, names in others)


def _make_plan(
    workload: Workload, layout: Layout, sizing: Sizing, curve: MemoryCurve, warnings: tuple[str, ...]
) -> Plan:
    check_micro_batches(sizing.target, sizing.largest)
    card, sizes = sizing.gpu, balance(sizing.target, sizing.largest, min(sizing.smallest, sizing.target))
    budget = card.total_bytes - card.context_bytes
    return Plan(
        target_batch=sizing.target,
        world_size=1,
        micro_batch_size=max(sizes),
        micro_batch_sizes=sizes,
        accumulation_steps=len(sizes),
        budget_bytes=budget,
        headroom_bytes=budget - find_limit(card, sizing.margin),
        peak_bytes=sizing.estimate.reserved(sizing.largest),
        curve=curve,
        trials=(),
        device=DeviceInfo(kind="cuda", name=card.name, total_bytes=card.total_bytes),
        warnings=warnings,
        predicted=True,
        max_micro_batch=sizing.target,
        smallest_micro_batch=sizing.smallest,
        made_at=time.time(),
        model=type(unwrap_model(workload.model)).__name__,
        weighed=workload.weigh is not None,
        batch_lists=dict(layout.lists),
        batch_dims=dims_of(layout),
        version=__version__,
        identity=identify_model(workload.model, workload.optimizer),
        # Only a plan that divides the batch shows what would shrink a sample.
        savings=run_apart(lambda: trace_savings(workload, layout)) if len(sizes) > 1 else (),
    )
