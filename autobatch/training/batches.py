"""Reads the batches of a step, and cuts them into weighed micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from autobatch.batch.cut import Division, Group, cut_apart, cut_as_given, cut_joined, divide
from autobatch.batch.example import is_source
from autobatch.batch.lengths import ByLength, PlannedLengths, check_trimmed, read_by_length
from autobatch.batch.registry import ListReading
from autobatch.batch.samples import Layout, MicroBatch, Outline, describe, is_empty, is_one_batch
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.plan import Plan
from autobatch.planning.division import least_size
from autobatch.step.model_info import explain_smallest, is_compiled
from autobatch.step.workload import Workload


class GivenBatches:
    """The batches of a Runner.

    Attributes:
        lists: The readings of lists in the last batch.
    """

    def __init__(self, lists: Mapping[str, ListReading]) -> None:
        self.lists = dict(lists)
        self._outline: Outline | None = None  # of the last batch

    def describe(self, batch: Any) -> Layout:
        """Describe one batch: lists as in the plan's example, later batches as earlier ones."""
        last, layout = self._outline, None
        if last is not None and last.lists == self.lists:  # they may have been loaded since
            layout = last.describe(batch)
        if layout is None:
            layout = describe(batch, self.lists)
            self.lists, self._outline = dict(layout.lists), Outline.of(layout)
        return layout

    def read(self, batches: Sequence[Any], *, leaves_out_empty: bool) -> list[Layout]:
        layouts = []
        for number, batch in enumerate(batches, 1):
            if isinstance(batch, Layout):
                layouts.append(batch)
                continue
            if leaves_out_empty and is_empty(batch):
                continue
            try:
                layouts.append(self.describe(batch))
            except InvalidArgument as error:
                if is_source(batch):
                    raise InvalidArgument(
                        f"a step takes one batch, and was given a {type(batch).__name__}: pass one batch of it, or "
                        f"call runner.run(loader), which runs a step for every target batch"
                    ) from None
                if len(batches) == 1:
                    raise
                raise InvalidArgument(
                    f"{error} (batch {number} of the {len(batches)} that this step was given)"
                ) from None
        return layouts


def read_division(cut: Any, plan: Plan, workload: Workload, *, is_sharded: bool) -> Division:
    if plan.lengths and not isinstance(cut, ByLength):
        raise InvalidArgument(
            "the plan was made with cut=by_length(), and this Runner has another cut=: pass the same cut= to both"
        )
    if cut is None:
        return cut_apart if is_sharded else cut_joined
    lengths = read_by_length(cut)
    if is_sharded:
        raise InvalidArgument(
            "cut= is not supported where parameters are sharded: ranks run their micro-batches together, and each "
            "would divide its samples otherwise"
        )
    if lengths is None or not isinstance(cut, ByLength):
        return partial(cut_as_given, cut)
    if not plan.lengths:
        raise InvalidArgument(
            "the plan was made without by_length(), so nothing is known of shorter samples: pass the same cut= to "
            "fit() and Runner"
        )
    compiles = is_compiled(workload.model, workload.step)  # each new shape is compiled
    return PlannedLengths(lengths, plan.lengths, plan.padding, trims_to_edges=compiles)


def several(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of ``step_over``; refused when they are read, where the other ranks of a step learn of it."""
    if is_one_batch(batches):
        raise InvalidArgument("step_over() takes several batches, such as a list of them; for one batch call step()")
    yield from batches


def cut_weighed(workload: Workload, groups: Iterable[Group], largest: int, smallest: int = 1) -> list[MicroBatch]:
    """Cut groups into the fewest micro-batches, of sizes as equal as possible."""
    micro_batches: list[MicroBatch] = []
    for group in groups:
        start = 0
        for part in divide(group, largest, smallest):
            if workload.weigh is None and part.trim is None:
                micro_batches.append(part)  # nothing is counted in its samples: they are not taken out of the batch yet
            else:
                samples = part.samples()
                if part.trim is not None and group.lengths is not None:
                    check_trimmed(group.lengths, part, group.lengths.values[start : start + part.size], samples)
                weights = workload.weights_of(samples, part.size)
                micro_batches.append(part._replace(weights=weights, counts=max(weights.values()) > 0))
            start += part.size
    return micro_batches


def find_least_size(groups: Iterable[Group], smallest: int) -> int:
    """Return the smallest size into which all groups can be cut without a micro-batch below ``smallest``."""
    return max(least_size(len(group.rows), smallest) for group in groups)


def find_bound(plan: Plan) -> int | None:
    """Return the ``max_micro_batch`` of the user; ``None`` where it is all of this rank's share, as fit's own is."""
    most = plan.max_micro_batch
    return None if most is None or most >= sum(plan.micro_batch_sizes) else most


def refuse_larger_micro_batches(groups: Iterable[Group], most: int, smallest: int, model: nn.Module) -> None:
    """Refuse samples that can only be cut into micro-batches larger than the user's ``max_micro_batch``."""
    for group in groups:
        least = least_size(len(group.rows), smallest)
        if least > most:
            raise DoesNotFit(
                f"a batch of {len(group.rows)} samples in micro-batches of at most {most} (the plan's max_micro_batch) "
                f"leaves one of a single sample, and {explain_smallest(model)}: pass an even number of samples, or "
                f"plan with fit(max_micro_batch={least}) or more"
            )
