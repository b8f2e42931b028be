"""Fits a plan to a model and a target batch, and leaves the model unchanged."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from autobatch._formatting import plural
from autobatch._wrappers import unwrap_optimizer
from autobatch.batch.cut import CutFunction
from autobatch.batch.example import is_source
from autobatch.batch.lengths import ByLength, read_by_length
from autobatch.distributed.division import Division
from autobatch.distributed.parallelism import find_ranks, take_module
from autobatch.distributed.ranks import Ranks, all_or_none
from autobatch.distributed.share_sampler import ShareSampler
from autobatch.errors import InexactSplit, InvalidArgument
from autobatch.events import PlanMade, emit
from autobatch.events.progress import showing_progress
from autobatch.exactness.verification import Planned, check_split
from autobatch.fitting.choose_blocks import allow_strategies
from autobatch.fitting.make_plan import Checked, Found, Request, make_plan
from autobatch.fitting.options import check_options, check_sizes
from autobatch.fitting.search import search, settle
from autobatch.ledger.ledger import Ledger
from autobatch.memory.device import ONE_AT_A_TIME, Device, collecting_new_objects
from autobatch.memory.devices import Allowance, find_allowance, find_device
from autobatch.memory.host_limit import read_host_memory
from autobatch.plan import Plan
from autobatch.planning.division import Objective, Share
from autobatch.planning.plan_record import RankPlan
from autobatch.planning.reuse import Wanted
from autobatch.records import Strategy, Verdict
from autobatch.step.default_step import NO_LOSS, default_step
from autobatch.step.loop_guard import refuse_sample_gradients
from autobatch.step.model_info import warn_of_batch_norms
from autobatch.step.workload import Step, Weigh, Workload
from autobatch.strategies.checkpointing import recompute
from autobatch.strategies.choice import whole
from autobatch.strategies.chunked_loss import chunked
from autobatch.torch_internals.storages import bytes_of
from autobatch.undo.training_state import TrainingState

_FEW_BYTES = 2**16
"""Tensors beside the model and the optimizer that are no reason to look for garbage."""

_FAR = 6
"""A comparison in float64 takes at most twice a step's memory, and one gradient. A limit that is this many times larger
than a step's peak is not counted: on a CPU that takes longer than the passes of a small model."""

_NOT_CHECKED = Verdict(
    exact=False,
    relative_error=0.0,
    unchecked="parameters are sharded; run autobatch.verify() on the model in one process, before fully_shard()",
)


@dataclass(frozen=True)
class ForRun:
    """An example that ``Runner.run`` joins and cuts in training, so that its batch size does not matter."""

    source: Any


def fit(
    model: nn.Module,
    target_batch: int,
    *,
    batch: Any | None = None,
    step: Step | None = None,
    optimizer: Any | None = None,
    weigh: Weigh | None = None,
    cut: ByLength | CutFunction | None = None,
    device: torch.device | str | Device | None = None,
    budget: int | str | None = None,
    headroom: float | str | None = None,
    max_micro_batch: int | None = None,
    objective: Objective = "throughput",
    accumulate_in_float32: bool = True,
    check: Literal["warn", "raise"] | None = "warn",
    reuse: bool = True,
    progress: bool = True,
    share: Share = "equal",
    strategies: Literal["auto"] | Sequence[Strategy] | None = None,
) -> Plan:
    """Find how to split a target batch so that one optimizer step fits the device.

    A few sizes are run for real: two micro-batches with gradients and optimizer state resident, then the optimizer's
    step, inside the budget. Sizes are tried in train mode. The check of exactness runs each module in the mode, train
    or eval, in which you left it. Afterwards everything has its old value bit for bit: parameters, buffers, ``.grad``,
    optimizer state, random generators, train/eval flags, hooks, and the device's memory.

    With several ranks each rank calls this with its own ``DistributedDataParallel`` model. Each finds its own size on
    its own device, and gets its own plan.

    Args:
        model: Model on its device.
        target_batch: Samples of one optimizer step, over all ranks.
        batch: Example batch: tensors and arrays with one row a sample, in lists, dicts and dataclasses; or an object of
            a type that was registered with ``autobatch.batches``. A Dataset or DataLoader gives its largest samples; a
            stream gives one batch. ``None``: the batch is inferred from the model if it describes its inputs.
        step: ``step(model, micro_batch) -> loss``: the mean over ``weigh(micro_batch)`` units, or ``(loss, aux)``.
            ``None``: the output's ``.loss``, else the output itself if scalar, else the mean of its floats;
            ``plan.warnings`` names the one that is used.
        optimizer: Optimizer, whose state and peak are measured. It is stepped on your tensors only inside a trial, and
            its step is undone. Trials step the torch optimizer inside a wrapper of Lightning or accelerate, so that
            trainers count no step.
        weigh: Unit of the mean: ``weigh(micro_batch) -> float``. Default: number of samples.
        cut: Samples that run together. Pass ``autobatch.by_length(length_of)`` if samples of different lengths are
            padded to one. The plan then has a number of samples for each of a few lengths. ``Runner`` sorts, trims and
            divides batches by it, with the same gradient. Trials do not call a function of your own: they run the
            largest samples.
        device: Device of the model; default: that of its parameters.
        budget: Bytes that this process may hold, as an int or as ``"8GiB"``. Default: the free memory and the memory
            that this process holds now. On a CPU ``Runner`` enforces a budget that you pass in every step, and the
            default in its first two steps.
        headroom: Part of the budget to leave free: bytes, a text, or a fraction; default 5 %.
        max_micro_batch: Most samples in a micro-batch, in trials and in training.
        objective: ``"throughput"``: the fewest accumulation steps. ``"memory"``: the smallest micro-batch within 2 % of
            the best rate.
        accumulate_in_float32: Add up gradients of bfloat16 and float16 parameters in float32 if there are several
            micro-batches. This takes 4 bytes a parameter, which the trials measure. A sum of many small gradients in
            bfloat16 loses most of them.
        check: Reaction to a split that is not exact or cannot be checked: ``"warn"`` (in ``plan.warnings``),
            ``"raise"``, or ``None``.
        reuse: Confirm a plan that an earlier run found for the same step by one trial, instead of a search. The log
            names the plan, and the reason if it is refused.
        progress: Write one line a trial to stderr if that is a terminal.
        share: Division of the target among ranks: ``"equal"``, to one sample; ``"speed"``, by the rates of the trials,
            so that all ranks finish at about the same time; or a number of samples for each rank.
        strategies: Changes of the step that may be made so that it fits or is faster: ``"auto"``, or a list.
            ``"chunk_loss"`` computes a cross entropy in chunks of its classes where one sample does not fit;
            ``plan.chunked_loss`` names the layer.
            ``"checkpoint"`` recomputes blocks of the model in the backward pass, with the same gradient.
            ``"selective"`` keeps their matrix products and attention, and recomputes the rest. ``"offload"`` recomputes
            nothing: what the backward pass needs goes from a CUDA card to host memory, and comes back. Blocks that
            draw from NumPy or move statistics can run so too. If the smallest micro-batch does not fit, the cheapest
            choice of blocks and ways whose trial fits is taken, by times that were measured on this device. If it does,
            ``objective="throughput"`` uses these ways for larger micro-batches only where trials show that a step
            takes 5 % less time. ``plan.checkpointing`` names the blocks. ``Runner`` runs them so, and recomputes all
            of ``plan.recomputable``, whole, where one sample does not fit any more. With ``fully_shard`` ``"auto"``
            leaves ``"chunk_loss"`` and ``"offload"`` out.

    Returns:
        The plan. Its size has run.

    Raises:
        NeedsBatch: No batch was given and the model does not describe its inputs.
        DoesNotFit: The fewest samples that the model can run do not fit. The message names the memory that they
            needed, the memory there was, and what would help.
        InexactSplit: ``check="raise"`` was passed, and the split would change the gradient or could not be checked.
        InvalidArgument: An argument cannot be used, or the batch cannot be counted.
        RankFailed: Another rank has raised one of these.
        RankLost: Another rank ended or did not answer.
    """
    started = time.perf_counter()
    ranks = find_ranks(model)
    with all_or_none(ranks, "fit(), the check") as plans:
        with all_or_none(ranks, "fit(), its arguments") as gathered:
            target_batch, bound = check_sizes(target_batch, max_micro_batch)
            same = {"objective": objective, "accumulate_in_float32": accumulate_in_float32, "strategies": strategies}
            own = {"check": check, "budget": budget, "headroom": headroom, "reuse": reuse, "progress": progress}
            check_options({**same, **own})
            module, own_optimizer = take_module(model, ranks), unwrap_optimizer(optimizer)
            workload = Workload(module, default_step if step is None else step, weigh, own_optimizer, "autobatch.fit")
            refuse_sample_gradients(module.named_parameters())
            division = Division(ranks, target_batch, share)
            kind = "None" if cut is None else "by_length()" if isinstance(cut, ByLength) else "a function"
            gathered.extend(division.describe(workload, device, **same, cut=kind))
        division.compare(gathered)
        ledger = Ledger(None) if isinstance(device, Device) else Ledger.open()  # plans of a substitute are not recorded
        # If all ranks try the same sizes, a plan that only some of them remember could not be confirmed.
        remembered = ledger if reuse and division.is_known and not division.trials.are_shared else Ledger(None)
        with ONE_AT_A_TIME, showing_progress(progress=progress) as hooks:
            memory = _open_memory(workload, device, division, ranks)
            with collecting_new_objects():
                host_bytes = read_host_memory().available_bytes // 2
                with TrainingState(
                    module, own_optimizer, memory.torch_device, host_bytes=host_bytes, outside=workload.outside()
                ) as state:  # restores everything, whatever happens
                    with all_or_none(ranks, "fit(), the search") as rates:
                        # Only now: the copies of the state are in host memory, which a CPU budget has to leave to them.
                        allowance = _find_allowance(memory, division, budget, headroom)
                        wanted = Wanted(
                            target_batch=division.samples,
                            max_micro_batch=min(bound, division.samples),
                            objective=objective,
                            accumulate_in_float32=accumulate_in_float32,
                            limit_bytes=allowance.limit_bytes,
                        )
                        lengths, source = _read_cut(cut, division), batch.source if isinstance(batch, ForRun) else batch
                        request = Request(
                            *(workload, memory, allowance, state, division, wanted, source, lengths, hooks),
                            ledger=remembered,
                            budget_passed=budget is not None,
                            strategies=allow_strategies(
                                strategies, workload, memory, are_sharded=division.trials.are_shared
                            ),
                        )
                        found = search(request)
                        rates.append({"rate": found.rate})
                    found = settle(request, found, division.divide(rates))
                    verdict, warnings = _check_split(request, found, check)
                    warnings = (*warnings, *warn_of_loader(batch, target_batch, division.samples, division.size))
                    plans.append(_describe_own(request, found))
                memory.reclaim()
    seconds = time.perf_counter() - started
    plan = make_plan(request, found, (verdict, warnings), [RankPlan(**fields) for fields in plans], seconds)
    ledger.remember(plan, found.forecast)
    # A step without a loss trains on nothing, which matters once there is an optimizer.
    no_loss = (NO_LOSS,) if optimizer is not None and NO_LOSS in plan.warnings else ()
    emit(PlanMade(summary=str(plan)[len("autobatch: ") :], warnings=(*no_loss, *warnings), **request.whose))
    return plan


def _read_cut(cut: Any | None, division: Division) -> ByLength | None:
    lengths = read_by_length(cut)
    if lengths is not None and division.trials.are_shared:
        raise InvalidArgument(
            "cut= is not supported where parameters are sharded: ranks run their micro-batches together, and each "
            "would divide its samples otherwise"
        )
    return lengths


def _open_memory(workload: Workload, device: Any, division: Division, ranks: Ranks | None) -> Device:
    """Find the memory of the trials, and free what a deleted model may still hold of it."""
    with all_or_none(ranks, "fit(), the device"):
        memory = find_device(workload.parameters(), type(workload.model).__name__, device)
        resident = [*workload.resident_tensors(), *division.reserve(workload)]
        memory.watch(resident)
        # A full garbage collection takes up to a second in a process with many objects.
        others = memory.usage().allocated - sum(map(bytes_of, resident))
        if not memory.measures or others > _FEW_BYTES:
            memory.reclaim()
    return memory


def _find_allowance(memory: Device, division: Division, budget: Any, headroom: Any) -> Allowance:
    """Find what this process may hold; if all ranks try the same sizes, the least that any of them may hold."""
    own = find_allowance(memory, division.budget(memory, budget), headroom)
    if not division.trials.are_shared:
        return own
    limit_bytes = division.trials.smallest(own.limit_bytes)
    return own.model_copy(update={"headroom_bytes": own.budget_bytes - limit_bytes})


def _check_split(request: Request, found: Found, check: str | None) -> Checked:
    """Compare gradients of a few samples whole and in parts, unless ``check`` is ``None``.

    Raises:
        InexactSplit: ``check="raise"``, the plan splits, and that is not exact or could not be checked.
    """
    if check is None or found.samples == 1:
        return None, ()
    verdict = _NOT_CHECKED if request.division.trials.are_shared else _compare(request, found)
    if verdict.exact:
        return verdict, ()
    warnings: tuple[str, ...] = ()
    if found.size < found.samples and not verdict.unchecked:
        warnings = (str(verdict),)
    elif found.size < found.samples and found.batch.norms:  # these are known to be inexact without a comparison
        warnings = (warn_of_batch_norms(found.batch.norms, found.size, found.samples),)
    if found.size < found.samples and check == "raise":
        why = f"it could not be checked whether splitting is exact: {verdict.unchecked}; check='warn' plans without"
        raise InexactSplit(warnings[0] if warnings else why)
    # A retry may split a step that the plan runs whole, so a missing check is a warning there too.
    return verdict, (*warnings, str(verdict)) if verdict.unchecked else warnings


def _compare(request: Request, found: Found) -> Verdict:
    memory, limit = request.memory, request.wanted.limit_bytes
    planned = Planned(found.samples, found.size, found.most_at_once(limit), found.smallest)
    request.announce("comparing the gradients of the whole and of its parts")
    is_far = found.curve is not None and _FAR * found.curve.peak_reserved(planned.most) < limit
    # With all blocks recomputed that can be: the check holds more than a step, and the gradient is the same.
    ways = {**(found.checkpointing.ways if found.checkpointing else {}), **whole(found.recomputable)}
    workload = recompute(chunked(request.workload, found.chunked_loss), ways)
    with nullcontext() if is_far else memory.limit(limit):
        return check_split(
            workload,
            found.batch.compared,
            memory,
            request.state,
            planned,
            samples=found.batch.by_length,
            lengths=request.lengths,
        )


def warn_of_loader(given: Any, target: int, share: int, world_size: int) -> Iterator[str]:
    """Yield a sentence for each reason why steps on this loader or dataset would miss the target.

    A step has ``target`` samples over all ranks, and ``share`` on this one.
    """
    source = given.source if isinstance(given, ForRun) else given
    if not is_source(source):
        return
    size = source.batch_size if isinstance(source, DataLoader) else None
    if size is not None and size != share and not isinstance(given, ForRun):
        planned = f"a step has {share}" if world_size == 1 else f"this rank's share of {target} is {share}"
        yield (
            f"the loader has batch_size={size}, and {planned}: train with runner.run(loader), which joins and cuts its "
            f"batches, or give the loader batch_size={share}"
        )
    # A sampler of the user's may be one rank's.
    is_whole = world_size == 1 or isinstance(getattr(source, "batch_sampler", None), ShareSampler)
    samples, needed = _count_samples(source), target if is_whole else share
    if 0 < samples < needed:
        step = "a step" if needed == target else "a step on this rank"
        yield (
            f"the data has {plural(samples, 'sample')}, fewer than the {needed} of {step}: no step can have "
            f"target_batch={target}; take a smaller target_batch, or more data"
        )


def _count_samples(source: Any) -> int:
    if isinstance(source, DataLoader):
        sampler = source.batch_sampler
        if type(sampler) is not BatchSampler and not isinstance(sampler, ShareSampler):
            return 0
        source = sampler.sampler if type(sampler) is BatchSampler else source.dataset
    with suppress(Exception):  # of the user's __len__, which nothing else here needs
        return len(source)
    return 0


def _describe_own(request: Request, found: Found) -> dict[str, Any]:
    own = request.division.describe_plan(
        secrets.token_hex(6),
        request.memory.describe().name,
        found.micro_batches(),
        found.rate,
        peak_bytes=found.peak_bytes,
        budget_bytes=request.allowance.budget_bytes,
    )
    return own.model_dump()
