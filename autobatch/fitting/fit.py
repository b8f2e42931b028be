"""Fits a plan to a model and a target batch, and leaves the model as it was.

Covers the way from arguments to a plan. Does not cover the search (``size_search``), how a trial is run (``probe``),
whether splitting is exact (``split_check``), nor how a plan is applied (``training.runner``).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from autobatch._arguments import check_micro_batches
from autobatch._version import __version__
from autobatch._wrappers import unwrap_model, unwrap_optimizer, warn_of_wrapper
from autobatch.batch.largest import count_dataset
from autobatch.batch.layout import dims_of
from autobatch.batch.lengths import LengthOf, Lengths
from autobatch.distributed.division import Division
from autobatch.distributed.ranks import Ranks, all_or_none, find_ranks, several_blocks, take_module
from autobatch.errors import InvalidArgument
from autobatch.events import PlanMade, emit
from autobatch.events.progress import progress_hooks
from autobatch.fitting.loader_sizes import source_of, warn_of_loader
from autobatch.fitting.options import check_choices, check_sizes
from autobatch.fitting.size_search import SizeSearch
from autobatch.fitting.split_check import Checked, check_found
from autobatch.ledger.ledger import Ledger
from autobatch.memory.device import Device, collecting_new_objects
from autobatch.memory.devices import Allowance, find_allowance, find_device
from autobatch.memory.host_limit import read_host_memory
from autobatch.plan import Plan
from autobatch.planning.planner import Objective, balance
from autobatch.planning.rank_plan import RankPlan
from autobatch.planning.reuse import Wanted
from autobatch.planning.shares import Share
from autobatch.records import Padding
from autobatch.step.default_step import NO_LOSS, default_step
from autobatch.step.gradient_hooks import refuse_sample_gradients
from autobatch.step.model_info import identify_model
from autobatch.step.workload import Step, Weigh, Workload, warn_of_no_optimizer
from autobatch.torch_internals.storages import bytes_of
from autobatch.undo.process_lock import one_at_a_time
from autobatch.undo.training_state import TrainingState

__all__ = ["fit"]

_FEW_BYTES = 2**16
"""Tensors beside the model and the optimizer that are no reason to look for garbage."""


def fit(
    model: nn.Module,
    target_batch: int,
    *,
    batch: Any | None = None,
    step: Step | None = None,
    optimizer: Any | None = None,
    weigh: Weigh | None = None,
    lengths: Lengths | LengthOf | None = None,
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
) -> Plan:
    """Find how to split a target batch so that one optimizer step fits the device.

    A few sizes are run for real: two micro-batches with gradients and optimizer state resident, then the optimizer's
    step, inside the budget. Sizes are tried in train mode; exactness is checked with each module in the mode, train or
    eval, in which you left it, as ``verify`` does. Afterwards everything is bit for bit as before: parameters, buffers,
    ``.grad``, optimizer state, random generators, train/eval flags, hooks, and the device's memory.

    With several ranks every one of them calls this with its own ``DistributedDataParallel`` model. Each finds its own
    size on its own device, and gets its own plan.

    Args:
        model: The model, on its device.
        target_batch: Samples one optimizer step should see, over all ranks.
        batch: An example batch: tensors and arrays with one row a sample, in lists, dicts, dataclasses; or an object of
            a type that ``autobatch.batches`` knows. Or a Dataset or DataLoader, whose largest samples are used; of a
            stream one batch is read.
            ``None``: inferred from the model where it describes its inputs.
        step: ``step(model, micro_batch) -> loss``: the mean over ``weigh(micro_batch)`` units, or ``(loss, aux)``.
            ``None``: the output's ``.loss``, else the output itself if scalar, else the mean of its floats;
            ``plan.warnings`` says which.
        optimizer: Its state and its step's own peak are measured. It is stepped on your tensors only inside a trial,
            and put back. Of the wrappers of Lightning and accelerate the torch optimizer inside is stepped, so that
            trainers count no step.
        weigh: What the mean is over, ``weigh(micro_batch) -> float``; default: samples.
        lengths: Where samples of different lengths are padded to one: ``lengths(batch)`` gives one whole number for
            each sample, of the whole batch and of any part of it. Then the plan says how many samples of up to each of
            a few lengths run together; ``Runner`` sorts, trims and divides by that, and gives the same gradient. Where
            the example does not show which dimensions are padded, pass ``autobatch.Lengths``.
        device: Where the model is; default: where its parameters are.
        budget: What this process may hold, in bytes or as ``"8GiB"``; default: what is free to it plus what it holds
            now. On a CPU ``Runner`` enforces one that you pass in every step, and the default in its first two steps.
        headroom: Left free of the budget: bytes, a text, or a fraction; default 5 %.
        max_micro_batch: Never more samples than this in a micro-batch, in a trial or in training.
        objective: ``"throughput"``: the fewest accumulation steps. ``"memory"``: the smallest micro-batch within 2 % of
            the best rate.
        accumulate_in_float32: Add up gradients of bfloat16 and float16 parameters in float32, where there is more than
            one micro-batch: 4 bytes a parameter, which the trials measure. A sum of many small gradients in bfloat16
            loses most of them.
        check: What to do where splitting is not exact, or could not be checked: ``"warn"`` (in ``plan.warnings``),
            ``"raise"``, or ``None``.
        reuse: Whether a plan that an earlier run found for the same step may be confirmed by one trial at its size,
            instead of a search. What was tried is logged, and so is why a plan did not serve.
        progress: One line a trial on stderr, when that is a terminal.
        share: How several ranks divide the target: ``"equal"``, to one sample; ``"speed"``, by the rates measured in
            the trials, so that all end at about the same time; or a number of samples for each rank.

    Returns:
        The plan. Its size has run.

    Raises:
        NeedsBatch: No batch was given and the model does not describe its inputs.
        DoesNotFit: Not even one sample fits, or the fewest that the model can run; the message says what it needed,
            what there was, and what would help.
        InexactSplit: ``check="raise"`` and the split would change the gradient, or that could not be checked.
        InvalidArgument: An argument cannot be used, or the batch cannot be counted.
        RankFailed: Another rank has raised one of these.
        RankLost: Another rank is gone or did not answer.
    """
    started = time.perf_counter()
    ranks = find_ranks(model)
    with several_blocks(ranks, "fit()"), all_or_none(ranks, "fit(), its arguments") as said:
        target_batch, bound = check_sizes(target_batch, max_micro_batch)
        check_choices(
            objective,
            check,
            budget,
            headroom,
            accumulate_in_float32=accumulate_in_float32,
            reuse=reuse,
            progress=progress,
        )
        workload = _make_workload(take_module(model, ranks), step, weigh, optimizer)
        division = Division(ranks, target_batch, share)
        said.extend(
            division.describe(
                workload,
                device,
                objective=objective,
                float32=accumulate_in_float32,
                has_lengths=lengths is not None,
            )
        )
    division.hear(said)
    ledger = Ledger(None) if isinstance(device, Device) else Ledger.open()  # plans of a substitute are not recorded
    # Where all ranks try the same sizes, a plan that only some of them remember could not be confirmed.
    remembered = ledger if reuse and division.is_known and not division.trials.are_shared else Ledger(None)
    wanted = Wanted(
        target_batch=division.samples,
        max_micro_batch=min(bound, division.samples),
        objective=objective,
        accumulate_in_float32=accumulate_in_float32,
        limit_bytes=0,
    )
    with several_blocks(ranks, "fit()"), one_at_a_time():
        memory = _open_memory(workload, device, division, ranks)
        with collecting_new_objects():
            with _record(workload, memory) as state:
                with all_or_none(ranks, "fit(), the search") as said:
                    # Only now: the copies of the state are in host memory, and on the CPU that is what is divided.
                    allowance = _find_allowance(memory, division, budget, headroom)
                    found = SizeSearch(
                        *(workload, memory, allowance, state),
                        wanted=wanted.model_copy(update={"limit_bytes": allowance.limit_bytes}),
                        hooks=progress_hooks(progress=progress),
                        recall=lambda measured: remembered.recall(measured, division.rank),
                        rank=division.rank,
                        world_size=division.size,
                        shared=division.trials,
                        lengths=_read_lengths(lengths, division),
                    )
                    found.run(source_of(batch))
                    said.append({"rate": found.rate})
                with all_or_none(ranks, "fit(), the check", is_last=True) as plans:
                    checked = _check(found, division, said, check, batch)
                    plans.append(_describe_own(found, division).model_dump())
            memory.reclaim()
    plan = _make_plan(
        found,
        division,
        division.read_plans(plans),
        checked,
        time.perf_counter() - started,
        dataset_samples=count_dataset(batch),
        budget_passed=budget is not None,
    )
    ledger.remember(plan)
    no_loss = (NO_LOSS,) if optimizer is not None and NO_LOSS in plan.warnings else ()  # it would train on nothing
    emit(
        PlanMade(
            summary=str(plan).removeprefix("autobatch: "),
            warnings=(*no_loss, *checked[1]),
            rank=plan.rank,
            world_size=plan.world_size,
        )
    )
    return plan


def _make_workload(model: nn.Module, step: Step | None, weigh: Weigh | None, optimizer: Any | None) -> Workload:
    workload = Workload(model, step or default_step, weigh, unwrap_optimizer(optimizer), "autobatch.fit")
    refuse_sample_gradients(model.named_parameters())
    return workload


def _check(found: SizeSearch, division: Division, said: Any, check: Any, batch: Any) -> Checked:
    """What is known of the split, with a warning where the user's data will not make up the target."""
    verdict, warnings = check_found(found, division.divide(said), check)
    return verdict, (*warnings, *warn_of_loader(batch, division.target, division.samples, division.size))


def _read_lengths(lengths: Any | None, division: Division) -> Lengths | None:
    if lengths is None:
        return None
    if division.trials.are_shared:
        raise InvalidArgument(
            "lengths= is not supported where parameters are sharded: ranks run their micro-batches together, and each "
            "would divide its samples otherwise"
        )
    return Lengths.read(lengths)


def _open_memory(workload: Workload, device: Any, division: Division, ranks: Ranks | None) -> Device:
    """The memory of the trials, without what an earlier model that was deleted may still take of it."""
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
    """What this process may hold; where all ranks try the same sizes, no more than the rank that may hold the least."""
    own = find_allowance(memory, division.budget(memory, budget), headroom)
    if not division.trials.are_shared:
        return own
    limit_bytes = division.trials.smallest(own.limit_bytes)
    return own.model_copy(update={"headroom_bytes": own.budget_bytes - limit_bytes})


def _record(workload: Workload, memory: Device) -> TrainingState:
    host_bytes = read_host_memory().available_bytes // 2
    return TrainingState(
        workload.model, workload.optimizer, memory.torch_device, host_bytes=host_bytes, outside=workload.outside()
    )


def _balance(found: SizeSearch) -> tuple[int, ...]:
    """The micro-batches of this rank's share."""
    samples = found.wanted.target_batch
    check_micro_batches(samples, found.size)
    if found.sizes:  # of the worst step: only lengths say how many run together
        rest = samples % found.size
        return (found.size,) * (samples // found.size) + ((rest,) if rest else ())
    return balance(samples, found.size, min(found.smallest, samples))


def _describe_own(found: SizeSearch, division: Division) -> RankPlan:
    return division.describe_plan(
        secrets.token_hex(6),
        found.memory.describe().name,
        _balance(found),
        found.rate,
        peak_bytes=found.peak_bytes,
        budget_bytes=found.allowance.budget_bytes,
    )


def _make_plan(
    found: SizeSearch,
    division: Division,
    plans: Sequence[RankPlan],
    checked: Checked,
    seconds: float,
    *,
    dataset_samples: int,
    budget_passed: bool,
) -> Plan:
    """The plan of this rank, which has what each runs; ``plans`` of one rank are its own alone."""
    wanted, allowance, memory, workload = found.wanted, found.allowance, found.memory, found.workload
    (verdict, warnings), sizes = checked, _balance(found)
    return Plan(
        target_batch=division.target,
        world_size=division.size,
        rank=division.rank,
        shares=division.shares,
        ranks=tuple(plans) if division.size > 1 else (),
        micro_batch_size=max(sizes),
        micro_batch_sizes=sizes,
        accumulation_steps=len(sizes),
        budget_bytes=allowance.budget_bytes,
        budget_passed=budget_passed,
        headroom_bytes=allowance.headroom_bytes,
        peak_bytes=found.peak_bytes,
        curve=found.curve if memory.measures else None,
        trials=(*found.trials, *found.shorter_trials),
        device=memory.describe(),
        warnings=(*found.warnings, *warnings, *warn_of_no_optimizer(workload), *warn_of_wrapper(workload.optimizer)),
        state_bytes=found.state_bytes,
        trained=found.trained,
        weighed=workload.weigh is not None,
        accumulate_in_float32=wanted.accumulate_in_float32,
        verdict=verdict,
        batch_lists=dict(found.example.lists),
        batch_dims=dims_of(found.example),
        fingerprint=found.fingerprint,
        seconds=seconds,
        version=__version__,
        id=plans[division.rank].plan_id,
        made_at=time.time(),
        model=type(unwrap_model(workload.model)).__name__,
        objective=wanted.objective,
        max_micro_batch=wanted.max_micro_batch,
        failing_size=found.failing_size,
        searched_bytes=found.confirmed.searched_bytes if found.confirmed else allowance.limit_bytes,
        confirms=found.confirmed.id if found.confirmed else "",
        identity=identify_model(workload.model, workload.optimizer),
        smallest_micro_batch=found.smallest,
        lengths=found.sizes,
        padding=found.samples.padding if found.samples else Padding(),
        savings=found.savings,
        dataset_samples=dataset_samples,
    )
