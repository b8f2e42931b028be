"""Reads the batches that a step is given: how many samples they have, and which of these run together.

It remembers from batch to batch how lists are read and how large samples were. Micro-batches are ``micro_batches``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autobatch.batch.joining import join_neighbours
from autobatch.batch.largest import is_source
from autobatch.batch.layout import Layout, describe, is_empty, is_one_batch
from autobatch.batch.list_rules import ListReading
from autobatch.errors import InvalidArgument
from autobatch.training.given_cut import GivenCut
from autobatch.training.sample_lengths import SampleLengths

__all__ = ["GivenBatches", "several"]


class GivenBatches:
    """The batches of a Runner.

    Attributes:
        cut: The user's division, if there is one.
        lengths: How long samples are, if the plan knows.
    """

    def __init__(
        self,
        lists: Mapping[str, ListReading],
        cut: GivenCut | None,
        lengths: SampleLengths | None,
        *,
        joins: bool,
    ) -> None:
        """Have seen nothing but the plan's example.

        Args:
            lists: How its lists are read.
            cut: The user's division.
            lengths: How long samples are.
            joins: Whether neighbouring batches may be joined.
        """
        self.cut, self.lengths = cut, lengths
        self._layout, self._joins = Layout(None, 0, lists), joins

    @property
    def lists(self) -> dict[str, ListReading]:
        """How lists are read, as the last batch had them."""
        return dict(self._layout.lists)

    @lists.setter
    def lists(self, lists: Mapping[str, ListReading]) -> None:
        self._layout = Layout(None, 0, lists)

    def describe(self, batch: Any) -> Layout:
        """Describe one batch: lists as in the plan's example, later batches as earlier ones.

        Raises:
            InvalidArgument: It cannot be counted.
        """
        layout = describe(batch, like=self._layout)
        if layout.traits is None or layout.traits is not self._layout.traits:
            self._layout = layout.without_batch()
        return layout

    def read(self, batches: Sequence[Any], *, leaves_out_empty: bool) -> list[Layout]:
        """Describe the batches of one step.

        Args:
            batches: Those that are described already stay as they are.
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

    def divide(
        self, layouts: Sequence[Layout], largest: int, try_twice: Callable[..., Sequence[Layout]]
    ) -> Sequence[Layout]:
        """Put together the samples that run together.

        Args:
            layouts: One step's batches.
            largest: The most samples of a micro-batch.
            try_twice: Calls a function of the user's, whose name comes first, a second time where memory ends in it.
        """
        if self.cut is not None:
            return try_twice("dividing with cut()", self.cut.cut_all, layouts, largest)
        if self.lengths is not None:
            return try_twice("reading lengths with lengths()", self.lengths.sort_all, layouts)
        return join_neighbours(layouts) if self._joins and len(layouts) > 1 else layouts


def several(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches of ``step_over``; refused when they are read, where the other ranks of a step hear of it.

    Raises:
        InvalidArgument: They are one batch.
    """
    if is_one_batch(batches):
        raise InvalidArgument("step_over() takes several batches, such as a list of them; for one batch call step()")
    yield from batches
