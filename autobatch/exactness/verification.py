"""Checks whether splitting a step is exact, and if not, why: ``_check`` tells the story."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autobatch.batch.example import find_example
from autobatch.batch.lengths import ByLength, SamplesByLength, read_by_length
from autobatch.batch.samples import Layout, check_values
from autobatch.distributed.data_parallel import module_of
from autobatch.exactness.comparison import SplitComparison, unchecked
from autobatch.exactness.partitions import Planned, divisions_of
from autobatch.exactness.updates import check_update
from autobatch.memory.device import Device
from autobatch.memory.devices import find_allowance, find_device
from autobatch.memory.host_limit import read_host_memory
from autobatch.records import Verdict
from autobatch.step.default_step import default_step
from autobatch.step.workload import Step, Weigh, Workload
from autobatch.undo.process_lock import one_at_a_time
from autobatch.undo.training_state import TrainingState

_MOST_SAMPLES = 16
"""Enough to distinguish causes by parts of unlike sizes; few enough to run each sample alone."""

_MOST_OF_A_READING = 5
"""Enough that no two parts of a division are of one size."""

_MOST_AT_ONCE = 4096
"""Most samples of a user's batch that are compared at once: two training steps of more take longer than expected."""

_MOST_TRIMMED = 8
"""Most samples that run alone to see what trimming does, from the longest to the shortest."""

_TRIMMING = (
    "trimming padding changes the gradient: the step looks at padding. A mean over all positions instead of those that "
    "count (ignore_index=, a mask, weigh=), a layer that mixes positions without a mask (attention, convolution, a "
    "recurrent layer that runs backwards, pooling), positions that are counted from the padded end, BatchNorm over "
    "positions, or noise that is drawn for each position: leave padding out of it, or plan without by_length()"
)


def verify(
    model: nn.Module,
    batch: Any,
    step: Step | None = None,
    weigh: Weigh | None = None,
    *,
    cut: ByLength | None = None,
    device: torch.device | str | Device | None = None,
) -> Verdict:
    """Check whether splitting a step into micro-batches gives the whole batch's gradient; if not, why.

    At most 16 samples run whole and in several partitions, without dropout and with the same random numbers for each
    sample. If that is exact, all of the batch runs whole and in one partition: at most 4096 samples, and fewer if
    memory runs out, as ``not_compared`` says. Each module is in the mode, train or eval, in which you left it, here and
    in ``fit`` (which tries sizes in train mode): a BatchNorm layer in eval mode splits exactly. Afterwards the model,
    generators and everything else are restored bit for bit.

    Args:
        model: The model, on its device, in the mode in which it is trained.
        batch: An example batch of at least 2 samples that differ, or a Dataset or DataLoader; as for ``fit``.
        step: ``step(model, micro_batch)``; as for ``fit``.
        weigh: Unit of the mean; as for ``fit``.
        cut: ``autobatch.by_length`` as for ``fit``. Then all of the batch runs in order of length, and trimming
            padding is compared too.
        device: The device of the model; default: that of its parameters.

    Returns:
        The verdict, with every cause that was found; ``unchecked`` says why there is none.

    Raises:
        InvalidArgument: An argument is not valid, the batch cannot be counted, or ``weigh`` does not count.
            Errors of the step itself reach the caller unchanged.
    """
    workload = Workload(module_of(model), step or default_step, weigh, called_by="autobatch.verify")
    return _verify(workload, batch, cut, device)


def compare_with_parts(
    model: nn.Module, batch: Any, step: Step, weigh: Weigh | None, *, device: torch.device | str | Device | None
) -> Verdict:
    """``verify`` without causes and on fewer samples, for an integration that compares several readings of a loss."""
    return _verify(Workload(model, step, weigh), batch, None, device, explains=False)


def verify_in_training(workload: Workload, batch: Any, *, device: Device, budget_bytes: int, most: int) -> Verdict:
    """``verify`` between steps: inside a budget, on at most so many samples at once. The step is known to run."""
    layout = find_example(workload.model, batch, _MOST_AT_ONCE, None, has_own_step=True).layout
    comparison = SplitComparison(workload, layout, device, after_trials=True)
    host_bytes = read_host_memory().available_bytes // 2
    with (
        one_at_a_time(),
        TrainingState(workload.model, None, device.torch_device, host_bytes=host_bytes, outside=workload.outside()),
    ):
        device.watch([*workload.resident_tensors(), *layout.tensors()])
        few = min(max(2, most), _MOST_SAMPLES)
        with device.limit(budget_bytes):
            verdict = _check(comparison, few, Planned(layout.count, most, most), None, None)
    device.reclaim()
    return verdict


def _verify(workload: Workload, batch: Any, cut: ByLength | None, device: Any, *, explains: bool = True) -> Verdict:
    model = workload.model
    memory = find_device(workload.parameters(), type(model).__name__, device)
    given = read_by_length(cut)
    example = find_example(model, batch, _MOST_AT_ONCE, given, has_own_step=workload.step is not default_step)
    layout = example.with_smallest or example.layout
    check_values(layout.batch)
    samples = None if given is None else SamplesByLength.read(layout, given)
    comparison = SplitComparison(workload, layout, memory, explains=explains)
    at_once, host_bytes = min(layout.count, _MOST_AT_ONCE), read_host_memory().available_bytes // 2
    planned = Planned(layout.count, at_once, at_once)
    with (
        one_at_a_time(),
        TrainingState(model, None, memory.torch_device, host_bytes=host_bytes, outside=workload.outside()),
    ):
        verdict = _check(comparison, _MOST_SAMPLES if explains else _MOST_OF_A_READING, planned, samples, given)
    if explains:  # for the user: a collection of garbage takes longer than the comparison of a small model
        memory.reclaim()
    return verdict


def check_split(
    workload: Workload,
    layout: Layout,
    device: Device,
    state: TrainingState,
    planned: Planned,
    *,
    samples: SamplesByLength | None = None,
    lengths: ByLength | None = None,
) -> Verdict:
    """``verify`` for ``fit``, which restores the model; it compares the optimizer's update too.

    Trials have run the step before, so no error reaches the caller: ``unchecked`` says why there is no verdict.

    Args:
        workload: The workload, in the mode in which its model is.
        layout: Samples, of which some are taken.
        device: Device of the runs, inside the limit of the comparison.
        state: The state at the start of ``fit``.
        planned: Division that the step will run.
        samples: The same samples by length, if steps take them in that order.
        lengths: The lengths of samples, if padding is trimmed.
    """
    few = min(max(2, planned.size), _MOST_SAMPLES)
    comparison = SplitComparison(workload, layout, device, after_trials=True)
    verdict = _check(comparison, few, planned, samples, lengths)
    return check_update(verdict, workload, layout, device, state) if verdict.exact else verdict


def _check(
    comparison: SplitComparison,
    most: int,
    planned: Planned,
    samples: SamplesByLength | None,
    lengths: ByLength | None,
) -> Verdict:
    """Compare a few samples, then many, then trimmed ones; the first difference decides."""
    device, started = comparison.device, time.perf_counter()
    # 1. A few samples, whole and in parts of every kind. If they differ, causes are looked for.
    verdict = compare_few(comparison, most)
    # 2. A step may depend on how many samples its micro-batch has. So the whole target is compared too, or as many of
    #    its samples as fit at once, in the plan's division. A fit has set the limit of memory already.
    if verdict.exact:
        limit: AbstractContextManager[None] = nullcontext()
        if not comparison.after_trials and min(planned.target, planned.most) > verdict.samples:
            device.watch(comparison.workload.resident_tensors())
            limit = device.limit(find_allowance(device, None, None).limit_bytes)
        with limit:
            verdict = compare_many(comparison, verdict, planned, samples)
    # 3. If padding is trimmed, each of a few samples is compared trimmed and padded.
    if verdict.exact and samples is not None and lengths is not None and samples.padding.dims:
        verdict = _compare_trimmed(comparison, verdict, samples, lengths)
    return verdict.model_copy(update={"seconds": time.perf_counter() - started})


def compare_few(comparison: SplitComparison, most: int) -> Verdict:
    """Return the verdict of at most so many samples; of fewer if memory runs out."""
    for parameter in comparison.workload.parameters():
        parameter.grad = None
    samples, reason = min(comparison.layout.count, most), "the batch has one sample, and one cannot be split"
    while samples >= 2:
        verdict, shortage = comparison.attempt(samples)
        if verdict is not None:
            return verdict
        comparison.device.reclaim()  # only now, after the ``except`` block, are the failed attempt's frames gone
        samples, reason = samples // 2, f"memory ran out with two samples at once ({shortage})"
    return unchecked(reason)


def compare_many(
    comparison: SplitComparison, few: Verdict, planned: Planned, samples: SamplesByLength | None = None
) -> Verdict:
    """Return the verdict of a few samples, which is exact, together with that of many."""
    larger = replace(comparison, exact_at=few.samples, order=None if samples is None else samples.order)
    reason, verdict, compared = "no more fit in memory", few, few.samples
    for sizes in divisions_of(planned, few.samples):
        many, _ = larger.attempt(sum(sizes), (sizes,))
        if many is not None and not many.unchecked:
            verdict, compared = many, sum(sizes)
            if many.exact:
                error = max(few.relative_error, many.relative_error)
                verdict = few.model_copy(update={"relative_error": error, "larger_partition": sizes})
            break
        comparison.device.reclaim()
        reason = many.unchecked if many is not None else reason
    at_most = f"at most {compared} of {planned.target} samples were compared at once: {reason}"
    return verdict.model_copy(update={"not_compared": at_most if compared < planned.target else ""})


def _compare_trimmed(
    comparison: SplitComparison, verdict: Verdict, samples: SamplesByLength, lengths: ByLength
) -> Verdict:
    """Return the verdict of a split that is exact, or that trimming makes inexact."""
    workload, layout = comparison.workload, samples.example
    found, reason, count = None, "", min(layout.count, _MOST_TRIMMED)
    while found is None and count >= 2:  # the longest sample, and a shorter one
        trimming = _trim_parts(workload, samples, lengths, count)
        trimmed = SplitComparison(trimming, layout, comparison.device, True, explains=False, order=samples.order)
        found, reason = trimmed.attempt(count, ((1,) * count,))
        comparison.device.reclaim()
        count //= 2
    if found is None or found.unchecked:
        reason = f"trimming padding could not be checked: {reason if found is None else found.unchecked}"
        return verdict.model_copy(update={"exact": False, "unchecked": reason})
    if not found.exact:
        return found.model_copy(update={"causes": (_TRIMMING,)})
    return verdict.model_copy(update={"relative_error": max(verdict.relative_error, found.relative_error)})


def _trim_parts(workload: Workload, samples: SamplesByLength, lengths: ByLength, whole: int) -> Workload:
    """Return the same step and weights on batches of which each part is trimmed."""
    weigh = workload.weigh

    def trim(batch: Any) -> Any:
        return samples.trim(batch, cut=lengths, whole=whole)

    def step(model: nn.Module, batch: Any) -> Any:
        return workload.step(model, trim(batch))

    return workload.around(step, weigh=None if weigh is None else lambda batch: weigh(trim(batch)))
