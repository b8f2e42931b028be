"""Sorts each batch of a runner by the lengths of its samples, as its plan says.

Covers what plan and runner must agree on, and the sizes from which a step's size is chosen. Does not cover the division
(``planning.lengths``), nor trimming (``batch.trimming``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autobatch.batch.layout import Layout
from autobatch.batch.lengths import Lengths, read_lengths
from autobatch.batch.trimming import SortedLayout
from autobatch.errors import InvalidArgument
from autobatch.plan import Plan
from autobatch.planning.lengths import scale_curve, scale_ladder
from autobatch.planning.pacing import CLEAN_STEPS, Pace
from autobatch.step.model_info import is_compiled
from autobatch.step.workload import Workload

__all__ = ["SampleLengths"]


@dataclass(frozen=True)
class SampleLengths:
    """How long samples are, and how many of each length a plan lets run together.

    Attributes:
        lengths: The user's.
        plan: With ``lengths``.
        is_compiled: Whether each new shape is compiled: then samples are trimmed to lengths that were tried.
    """

    lengths: Lengths
    plan: Plan
    is_compiled: bool

    @classmethod
    def of(cls, lengths: Any | None, plan: Plan, workload: Workload, *, is_sharded: bool) -> SampleLengths | None:
        """What was given to a runner as ``lengths=``.

        Raises:
            InvalidArgument: The plan was made without it, or with it and there is none now.
        """
        if lengths is None and not plan.lengths:
            return None
        if lengths is None:
            raise InvalidArgument(
                "the plan was made with lengths=, and this Runner has none: pass the same lengths= to both"
            )
        read = Lengths.read(lengths)
        if not plan.lengths:
            raise InvalidArgument(
                "the plan was made without lengths=, so nothing is known of shorter samples: pass the same lengths= to "
                "fit() and Runner"
            )
        if is_sharded:
            raise InvalidArgument(
                "lengths= is not supported where parameters are sharded: ranks run their micro-batches together, and "
                "each would divide its samples otherwise"
            )
        return cls(read, plan, is_compiled(workload.model, workload.step))

    def sort_all(self, layouts: Iterable[Layout]) -> list[SortedLayout]:
        """Each batch with its samples in order of their lengths; raises InvalidArgument as ``sort``."""
        return [*map(self.sort, layouts)]

    def sort(self, layout: Layout) -> SortedLayout:
        """The batch with its samples in order of their lengths.

        Raises:
            InvalidArgument: A length is none, or longer than every one that was tried.
        """
        values, longest = read_lengths(self.lengths, layout.batch, layout.count), self.plan.lengths[-1].length
        if max(values) > longest:
            raise InvalidArgument(
                f"a sample is {max(values)} long, and the longest that fit() tried is {longest}: nothing untried is "
                f"run; cut the sample, or give fit() an example batch with the longest sample"
            )
        sizes, padding = self.plan.lengths, self.plan.padding
        return SortedLayout.of(layout, values, padding, sizes, trims_to_edges=self.is_compiled, lengths=self.lengths)

    def set_pace(self, smallest: int) -> Pace:
        """Sizes are those at the shortest length; others in proportion."""
        sizes = self.plan.lengths
        most, curve = sizes[0].micro_batch_size, scale_curve(self.plan.curve, sizes)
        return Pace(
            scale_ladder(most), most, curve, min(smallest, most), patience=CLEAN_STEPS if self.is_compiled else 0
        )
