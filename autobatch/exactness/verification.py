"""Checks whether splitting a step is exact, and if not, why: ``_check`` tells the story.

1. A few samples run whole and in parts of every kind (``comparison``). The first difference decides.
2. A step may depend on how many samples its micro-batch has. So the whole target, or as many of its samples as fit at
   once, is compared with the division that the step will run.
3. If padding is trimmed, a few samples run padded together and each trimmed and alone.
4. ``fit`` also compares the update of an optimizer that is not torch's (``updates``).

The model, the generators and everything else are restored bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from autobatch._bounds import LONGEST_LIST
from autobatch._user_errors import contextmanager
from autobatch.batch.example import find_example
from autobatch.batch.lengths import ByLength, SamplesByLength, read_by_length
from autobatch.batch.samples import Layout, check_values
from autobatch.distributed.data_parallel import module_of
from autobatch.exactness.comparison import SplitComparison, unchecked
from autobatch.exactness.measurement import Sizes
from autobatch.exactness.updates import check_update
from autobatch.memory.device import ONE_AT_A_TIME, Device
from autobatch.memory.devices import find_allowance, find_device
from autobatch.memory.host_limit import read_host_memory
from autobatch.planning.division import balance
from autobatch.records import Verdict
from autobatch.step.default_step import default_step
from autobatch.step.workload import Step, Weigh, Workload
from autobatch.undo.training_state import TrainingState

_FEW = 16  # samples that are compared first: enough to distinguish causes, and few enough to run each alone
_FEW_WITHOUT_CAUSES = 5  # the same if no cause is asked for: enough that no two parts of a division are of one size
# Most samples of a user's batch that are compared at once: two training steps of more take longer than expected.
_MOST_AT_ONCE = 4096
_MOST_TRIMMED = 8  # most samples that run alone to see what trimming does, from the longest to the shortest
# A part of so many samples is not halved again: the comparison of a few samples has looked at smaller ones.
_SMALLEST_HALVED = 16
_HOLDS = (
    "memory ran out for what the check holds at once: two samples, a second gradient and copies of parameters ({}): "
    "call autobatch.verify(), which has no budget, where more memory is free"
)
_TRIMMING = (
    "trimming padding changes the gradient: the step looks at padding. A mean over all positions instead of those that "
    "count (ignore_index=, a mask, weigh=), a layer that mixes positions without a mask (attention, convolution, a "
    "recurrent layer that runs backwards, pooling), positions that are counted from the padded end, BatchNorm over "
    "positions, or noise that is drawn for each position: leave padding out of it, or plan without by_length()"
)


class Planned(NamedTuple):
    """The division that a step will run."""

    target: int
    size: int  # of its micro-batches, which are known to fit
    most: int  # samples that should fit at once; fewer are compared if they do not
    smallest: int = 1  # samples that the model can run


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
    workload = Workload(module_of(model), default_step if step is None else step, weigh, called_by="autobatch.verify")
    verdict, memory = _verify(workload, batch, cut, device, explains=True)
    memory.reclaim()  # for the user: a collection of garbage takes longer than the comparison of a small model
    return verdict


def compare_with_parts(
    workload: Workload, batch: Any, *, device: torch.device | str | Device | None, explains: bool = False
) -> Verdict:
    """``verify`` for an integration, whose optimizer may hold parameters that the model does not.

    Without causes (``explains``) it compares fewer samples: an integration compares several readings of a loss.
    """
    return _verify(workload, batch, None, device, explains=explains)[0]


def _verify(
    workload: Workload, batch: Any, cut: ByLength | None, device: Any, *, explains: bool
) -> tuple[Verdict, Device]:
    memory, given = find_device(workload.parameters(), type(workload.model).__name__, device), read_by_length(cut)
    has_own_step = workload.step is not default_step
    example = find_example(workload.model, batch, _MOST_AT_ONCE, given, has_own_step=has_own_step)
    layout = example.with_smallest or example.layout
    check_values(layout)
    samples = None if given is None else SamplesByLength.read(layout, given)
    at_once = min(layout.count, _MOST_AT_ONCE)
    with _undone(workload, memory):
        comparison = SplitComparison(workload, layout, memory, explains=explains)
        return _check(comparison, Planned(layout.count, at_once, at_once), samples, given), memory


def verify_in_training(workload: Workload, batch: Any, *, device: Device, budget_bytes: int, most: int) -> Verdict:
    """``verify`` between steps: inside a budget, on at most so many samples at once. The step is known to run."""
    layout = find_example(workload.model, batch, _MOST_AT_ONCE, None, has_own_step=True).layout
    with _undone(workload, device):
        device.watch([*workload.resident_tensors(), *layout.tensors()])
        with device.limit(budget_bytes):
            comparison = SplitComparison(workload, layout, device, after_trials=True)
            verdict = _check(comparison, Planned(layout.count, most, most))
    device.reclaim()
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

    Trials have run the step before, so no error reaches the caller: ``unchecked`` says why there is no verdict. The
    limit of memory is set, ``state`` is that of the start of ``fit``, and ``samples`` are ``layout`` by length.
    """
    comparison = SplitComparison(workload, layout, device, after_trials=True)
    verdict = _check(comparison, planned, samples, lengths)
    return check_update(verdict, workload, layout, device, state) if verdict.exact else verdict


@contextmanager
def _undone(workload: Workload, device: Device) -> Iterator[None]:
    """Restore everything that the runs in this block have changed."""
    host_bytes, outside = read_host_memory().available_bytes // 2, workload.outside()
    with (
        ONE_AT_A_TIME,
        TrainingState(workload.model, None, device.torch_device, host_bytes=host_bytes, outside=outside),
    ):
        yield


def _check(
    comparison: SplitComparison,
    planned: Planned,
    samples: SamplesByLength | None = None,
    lengths: ByLength | None = None,
) -> Verdict:
    """Compare a few samples, then many, then trimmed ones; the first difference decides."""
    device, started = comparison.device, time.perf_counter()
    # 1. A few samples, whole and in parts of every kind. If they differ, causes are looked for.
    few = _FEW if comparison.explains else _FEW_WITHOUT_CAUSES
    verdict = compare_few(comparison, min(max(2, planned.size), few))
    # 2. As many samples as fit at once, in the division that the step will run. A fit has set the limit of memory.
    if verdict.exact:
        limit: Any = nullcontext()
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
    comparison.workload.drop_gradients()
    samples, reason = min(comparison.layout.count, most), "the batch has one sample, and one cannot be split"
    while samples >= 2:
        verdict, shortage = comparison.attempt(samples)
        if verdict is not None:
            return verdict
        comparison.device.reclaim()  # only now, after the ``except`` block, are the failed attempt's frames gone
        samples, reason = samples // 2, _HOLDS.format(shortage)
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


def divisions_of(planned: Planned, compared: int) -> Iterator[Sizes]:
    """Yield the partitions to compare at full size: the best choice first, then what to try if memory runs out.

    The plan's own of the whole target; planned micro-batches if at least two fit at once; else what retries would run.
    """
    target, size, most, smallest = planned
    wholes, fewer = [min(target, most)], min(size, target)
    while fewer > compared:
        wholes.append(fewer)
        fewer //= 2
    for whole in dict.fromkeys(whole for whole in wholes if whole > compared):
        if whole == target > size:
            yield balance(target, size, smallest)[:LONGEST_LIST]  # more than a verdict can list
        elif whole >= 2 * size:
            yield (size,) * min(whole // size, LONGEST_LIST)
        elif sizes := halvings(whole, smallest):
            yield sizes


def halvings(samples: int, smallest: int) -> Sizes:
    """Return a half, a quarter, an eighth and so on, to see a dependence on any size; empty without two parts."""
    rest, sizes = samples, list[int]()
    while rest >= 2 * smallest and (rest > _SMALLEST_HALVED or not sizes):
        sizes.append(rest - rest // 2)
        rest //= 2
    return (*sizes, rest) if sizes else ()


def _compare_trimmed(
    comparison: SplitComparison, verdict: Verdict, samples: SamplesByLength, lengths: ByLength
) -> Verdict:
    """Return the verdict of a split that is exact, or that trimming makes inexact."""
    workload, layout = comparison.workload, samples.example
    weigh, found, reason, count = workload.weigh, None, "", min(layout.count, _MOST_TRIMMED)

    def trim(batch: Any) -> Any:
        return samples.trim(batch, cut=lengths, whole=count)

    trimming = workload.around(
        lambda model, batch: workload.step(model, trim(batch)),
        weigh=None if weigh is None else lambda batch: weigh(trim(batch)),
    )
    trimmed = SplitComparison(trimming, layout, comparison.device, True, explains=False, order=samples.order)
    while found is None and count >= 2:  # the longest sample, and a shorter one
        found, reason = trimmed.attempt(count, ((1,) * count,))
        comparison.device.reclaim()
        count //= 2
    if found is None or found.unchecked:
        reason = f"trimming padding could not be checked: {reason if found is None else found.unchecked}"
        return verdict.model_copy(update={"exact": False, "unchecked": reason})
    if not found.exact:
        return found.model_copy(update={"causes": (_TRIMMING,)})
    return verdict.model_copy(update={"relative_error": max(verdict.relative_error, found.relative_error)})
