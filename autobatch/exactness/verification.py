"""Asks whether splitting a step is exact, and trimming padding, and if not, why: for users (``verify``) and ``fit``.

A few samples are compared first, and then, as a step may depend on how many samples its micro-batch has, the whole
target or batch, or as many samples as fit at once. Does not cover the comparison itself (``compare_split``), nor a
count that is consistent but not the intended one: class weights with samples as their count split exactly.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autobatch.batch.example import check_values, find_example
from autobatch.batch.layout import Layout
from autobatch.batch.lengths import LengthOf, Lengths
from autobatch.batch.samples_by_length import SamplesByLength
from autobatch.distributed.data_parallel import module_of
from autobatch.exactness.compare_split import SplitComparison
from autobatch.exactness.partitions import divide_at_full_size, wholes_of
from autobatch.memory.device import Device
from autobatch.memory.devices import find_allowance, find_device
from autobatch.memory.host_limit import read_host_memory
from autobatch.records import Verdict
from autobatch.step.default_step import default_step
from autobatch.step.workload import Step, Weigh, Workload
from autobatch.undo.process_lock import one_at_a_time
from autobatch.undo.training_state import TrainingState

__all__ = ["check_split", "check_trimming", "compare_many", "compare_with_parts", "verify"]

_MOST_SAMPLES = 16
"""Enough to distinguish the causes by parts of unlike sizes; few enough to run each sample by itself."""

_MOST_OF_A_READING = 5
"""Enough that no two parts of a division are alike; 12 passes instead of 23."""

_MOST_AT_ONCE = 4096
"""Samples of a user's batch that are compared at once: two training steps of more take longer than anybody expects."""


def verify(
    model: nn.Module,
    batch: Any,
    step: Step | None = None,
    weigh: Weigh | None = None,
    *,
    lengths: Lengths | LengthOf | None = None,
    device: torch.device | str | Device | None = None,
) -> Verdict:
    """Whether splitting a step into micro-batches gives the whole batch's gradient; if not, why.

    At most 16 samples are run whole and in several partitions, in float32 or wider, without dropout and with the same
    random numbers for each sample. Where that is exact, all of the batch is run whole and in one partition: at most
    4096 samples, and fewer where memory ends, which ``not_compared`` says. Exactness is checked with each module in the
    mode, train or eval, in which you left it, here and in ``fit`` (whose sizes are tried in train mode): a BatchNorm
    layer in eval mode splits exactly. Afterwards everything is bit for bit as before.

    Args:
        model: The model, on its device, in the mode in which it is trained.
        batch: An example batch of at least 2 samples that differ, or a Dataset or DataLoader; as for ``fit``.
        step: ``step(model, micro_batch)``; as for ``fit``.
        weigh: What the mean is over; as for ``fit``.
        lengths: How long samples are, as for ``fit``: then all of the batch is run in order of length, and it is
            compared too whether trimming padding is exact.
        device: Where the model is; default: where its parameters are.

    Returns:
        The verdict, with every cause that was found; ``unchecked`` says why, where there is none.

    Raises:
        InvalidArgument: An argument, the batch, a count of ``weigh`` or what the step returns cannot be used. Errors of
            the step itself reach the caller unchanged.
    """
    workload = Workload(module_of(model), step or default_step, weigh, called_by="autobatch.verify")
    return _verify(workload, batch, lengths, device, most=_MOST_SAMPLES)


def compare_with_parts(
    model: nn.Module, batch: Any, step: Step, weigh: Weigh | None, *, device: torch.device | str | Device | None
) -> Verdict:
    """``verify`` without causes and on fewer samples, for an integration that asks it of several readings of a loss."""
    return _verify(Workload(model, step, weigh), batch, None, device, most=_MOST_OF_A_READING, explains=False)


def _verify(
    workload: Workload,
    batch: Any,
    lengths: Lengths | LengthOf | None,
    device: torch.device | str | Device | None,
    *,
    most: int,
    explains: bool = True,
) -> Verdict:
    model = workload.model
    memory = find_device(workload.parameters(), type(model).__name__, device)
    given = None if lengths is None else Lengths.read(lengths)
    example = find_example(model, batch, _MOST_AT_ONCE, given, has_own_step=workload.step is not default_step)
    layout = example.with_smallest or example.layout
    check_values(layout.batch)
    host_bytes = read_host_memory().available_bytes // 2
    samples = None if given is None else SamplesByLength.read(layout, given)
    comparison = SplitComparison(workload, layout, memory, most, explains=explains)
    at_once = min(layout.count, _MOST_AT_ONCE)
    with (
        one_at_a_time(),
        TrainingState(model, None, memory.torch_device, host_bytes=host_bytes, outside=workload.outside()),
    ):
        verdict = comparison.run()
        if verdict.exact and at_once > verdict.samples:
            memory.watch(workload.resident_tensors())
            with memory.limit(find_allowance(memory, None, None).limit_bytes):
                options = {"target": layout.count, "size": at_once, "most": at_once}
                verdict = compare_many(comparison, verdict, samples=samples, **options)
        if verdict.exact and samples is not None and given is not None:
            verdict = check_trimming(verdict, workload, samples, given, memory)
    if explains:  # for the user: a collection of garbage takes longer than the comparison of a small model
        memory.reclaim()
    return verdict


def check_split(
    workload: Workload,
    layout: Layout,
    device: Device,
    samples: SamplesByLength | None = None,
    *,
    target: int,
    size: int,
    most: int,
    smallest: int,
) -> Verdict:
    """``verify`` for ``fit``, which holds a ``TrainingState`` and restores it: the model is changed here.

    Trials have run the step before, so an error does not come out: where the step cannot be made deterministic, or is
    used wrongly in a way that only splitting shows, ``unchecked`` says so.

    Args:
        workload: What is run, in the mode in which its model is.
        layout: Samples of which some are taken.
        device: Where, inside the limit that holds for the comparison.
        samples: The same samples by length, where steps take them in that order: then many are compared in it too.
        target: Samples of the step.
        size: Samples of its micro-batches, which are known to fit.
        most: Samples that should fit at once; fewer are compared where they do not.
        smallest: The fewest samples that the model can run.
    """
    comparison = SplitComparison(workload, layout, device, min(max(2, size), _MOST_SAMPLES), after_trials=True)
    options = {"target": target, "size": size, "most": most, "smallest": smallest}
    return compare_many(comparison, comparison.run(), samples=samples, **options)


def compare_many(
    comparison: SplitComparison,
    few: Verdict,
    *,
    target: int,
    size: int,
    most: int,
    smallest: int = 1,
    samples: SamplesByLength | None = None,
) -> Verdict:
    """The verdict of a few samples together with that of many, or as it is where it was not exact.

    Arguments as in ``check_split``. Raises AutobatchError, except after trials, where the step is used wrongly, which
    only many samples show.
    """
    if not few.exact:
        return few
    started = time.perf_counter()
    layout = comparison.layout if samples is None else samples.in_order()
    larger = replace(comparison, layout=layout, exact_at=few.samples, is_reordered=samples is not None)
    reason, verdict, compared = "no more fit in memory", few, few.samples
    for whole in wholes_of(target, size, most, few.samples):
        sizes = divide_at_full_size(target, size, whole, smallest)
        if not sizes:
            break
        many, _ = larger.attempt(sum(sizes), (sizes,))
        if many is None or many.unchecked:
            comparison.device.reclaim()  # only now, after the ``except`` block, are a failed attempt's frames gone
        else:
            verdict, compared = many, sum(sizes)
            if many.exact:
                error = max(few.relative_error, many.relative_error)
                verdict = few.model_copy(update={"relative_error": error, "larger_partition": sizes})
            break
        reason = many.unchecked if many is not None else reason
    at_most = f"at most {compared} of {target} samples were compared at once: {reason}" if compared < target else ""
    seconds = few.seconds + time.perf_counter() - started
    return verdict.model_copy(update={"not_compared": at_most, "seconds": seconds})


_MOST_TRIMMED = 8
"""Samples, each run by itself: of lengths from the longest to the shortest. Half as many where memory ends."""

_FEWEST_TRIMMED = 2
"""The longest, and a shorter one."""

_CAUSE = (
    "trimming padding changes the gradient: the step looks at padding. A mean over all positions instead of those that "
    "count (ignore_index=, a mask, weigh=), a layer that mixes positions without a mask (attention, convolution, a "
    "recurrent layer that runs backwards, pooling), positions that are counted from the padded end, BatchNorm over "
    "positions, or noise that is drawn for each position: leave padding out of it, or plan without lengths="
)


def check_trimming(
    verdict: Verdict, workload: Workload, samples: SamplesByLength, lengths: Lengths, device: Device
) -> Verdict:
    """The verdict of a split that is exact, or that trimming makes inexact.

    Args:
        verdict: Without trimming; exact.
        workload: What is run, in the mode in which its model is.
        samples: Samples of the example, by length.
        lengths: How long samples are.
        device: Where, inside the limit that holds for the comparison.
    """
    if not samples.padding.dims:
        return verdict
    started, layout = time.perf_counter(), samples.in_order()
    comparison = SplitComparison(
        workload, layout, device, 0, after_trials=True, trim=lambda few: samples.trim_parts(few, lengths)
    )
    found, ended, count = None, "", min(layout.count, _MOST_TRIMMED)
    while found is None and count >= _FEWEST_TRIMMED:
        found, ended = comparison.attempt(count, ((1,) * count,))
        device.reclaim()  # only now, after the ``except`` block, are a failed attempt's frames gone
        count //= 2
    seconds = verdict.seconds + time.perf_counter() - started
    if found is None or found.unchecked:
        reason = f"trimming padding could not be checked: {ended if found is None else found.unchecked}"
        return verdict.model_copy(update={"exact": False, "unchecked": reason, "seconds": seconds})
    if not found.exact:
        return found.model_copy(update={"causes": (_CAUSE,), "seconds": seconds})
    error = max(verdict.relative_error, found.relative_error)
    return verdict.model_copy(update={"relative_error": error, "seconds": seconds})
