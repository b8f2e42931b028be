"""Reads the batches that a step is given, and which of their samples may run together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from autobatch.batch.cut import Division, cut_apart, cut_as_given, cut_joined
from autobatch.batch.example import is_source
from autobatch.batch.lengths import ByLength, PlannedLengths, read_by_length
from autobatch.batch.registry import ListReading
from autobatch.batch.samples import Layout, describe, is_empty, is_one_batch
from autobatch.errors import InvalidArgument
from autobatch.plan import Plan
from autobatch.step.model_info import is_compiled
from autobatch.step.workload import Workload


class GivenBatches:
    """The batches of a Runner.

    Attributes:
        lists: The readings of lists in the last batch.
    """

    def __init__(self, lists: Mapping[str, ListReading]) -> None:
        """Begin with the way in which the lists of the plan's example were read."""
        self.lists = dict(lists)

    def describe(self, batch: Any) -> Layout:
        """Describe one batch: lists as in the plan's example, later batches as earlier ones.

        Raises:
            InvalidArgument: It cannot be counted.
        """
        layout = describe(batch, self.lists)
        self.lists = dict(layout.lists)
        return layout

    def read(self, batches: Sequence[Any], *, leaves_out_empty: bool) -> list[Layout]:
        """Describe the batches of one step.

        Args:
            batches: The batches; described ones are returned unchanged.
            leaves_out_empty: Whether one without samples is left out; else it is refused.

        Raises:
            InvalidArgument: One cannot be counted; which one, where there are several.
        """
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
    """Return how a Runner makes groups of its batches.

    Raises:
        InvalidArgument: ``cut`` cannot be called, or not be used here, or is another than the plan was made with.
    """
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
    """Yield the batches of ``step_over``; refused when they are read, where the other ranks of a step learn of it.

    Raises:
        InvalidArgument: They are one batch.
    """
    if is_one_batch(batches):
        raise InvalidArgument("step_over() takes several batches, such as a list of them; for one batch call step()")
    yield from batches
