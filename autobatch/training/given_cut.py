"""Divides each batch of a runner as the user's own function says.

Covers what it can be used with. Does not cover what the function returns (``batch.chosen_groups``), nor groups that are
too large to run together: each is divided as a batch is (``micro_batches``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autobatch._formatting import name_type
from autobatch.batch.chosen_groups import CutFunction, PickedLayout, cut_batch
from autobatch.batch.layout import Layout
from autobatch.errors import InvalidArgument

__all__ = ["GivenCut"]


@dataclass(frozen=True)
class GivenCut:
    """A user's ``cut(batch, largest)``."""

    cut: CutFunction

    @classmethod
    def of(cls, cut: CutFunction | None, *, has_lengths: bool, is_sharded: bool) -> GivenCut | None:
        """What was given to a runner as ``cut=``.

        Raises:
            InvalidArgument: It cannot be called, or not be used here.
        """
        if cut is None:
            return None
        if not callable(cut):
            raise InvalidArgument(
                f"cut= is {name_type(cut)}, which cannot be called: pass cut(batch, largest) -> lists of sample indices"
            )
        if has_lengths:
            raise InvalidArgument("cut= and lengths= both say which samples run together: pass one of them")
        if is_sharded:
            raise InvalidArgument(
                "cut= is not supported where parameters are sharded: ranks run their micro-batches together, and each "
                "would divide its samples otherwise"
            )
        return cls(cut)

    def cut_all(self, layouts: Iterable[Layout], largest: int) -> list[PickedLayout]:
        """The groups of each batch, in order; raises InvalidArgument as ``cut_batch``."""
        groups: list[PickedLayout] = []
        samples = 0
        for layout in layouts:
            groups += cut_batch(self.cut, layout, largest, samples)
            samples += layout.count
        return groups
