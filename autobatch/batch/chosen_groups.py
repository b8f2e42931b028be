"""Divides a batch into groups of samples that the user chose.

Covers what a user's function returns, and ``PickedLayout``, the samples of one group. Does not cover groups that are
divided further, as every batch is (``training.micro_batches``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autobatch._formatting import name_type, show_value
from autobatch.batch.layout import Layout
from autobatch.batch.read_only_call import call_read_only
from autobatch.batch.tree import is_array
from autobatch.errors import InvalidArgument

__all__ = ["CutFunction", "PickedLayout", "cut_batch"]

CutFunction = Callable[[Any, int], Iterable[Any]]
"""``cut(batch, largest)``: groups of sample indices, each a list, an array or a tensor of whole numbers."""


@dataclass(eq=False)
class PickedLayout(Layout):
    """Some samples of a batch, in an order of their own.

    Attributes:
        whole: The batch.
        rows: The row in it of each sample.
        before: Samples of the batches before it.
    """

    whole: Layout | None = None
    rows: Sequence[int] = ()
    before: int = 0

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the batch."""
        assert self.whole is not None  # noqa: S101 - narrows for mypy
        return self.whole.tensors()

    def take(self, start: int, stop: int) -> Any:
        """Samples ``start`` to ``stop``: views where they are neighbours in the batch, else new tensors."""
        assert self.whole is not None  # noqa: S101 - narrows for mypy
        rows = [*self.rows[start:stop]]
        if rows == [*range(rows[0], rows[-1] + 1)]:
            return self.whole.take(rows[0], rows[-1] + 1)
        return self.whole.pick(rows)


def cut_batch(cut: CutFunction, layout: Layout, largest: int, before: int = 0) -> list[PickedLayout]:
    """The groups into which a user's function divides a batch; empty ones are left out.

    Args:
        cut: The function.
        layout: The batch.
        largest: The most samples that run together: what the function is given.
        before: Samples of the batches before it.

    Raises:
        InvalidArgument: It gave a sample twice, left one out, returned something else, or wrote into the batch.
    """
    returned = call_read_only("cut", cut, layout.batch, largest, called_by="autobatch.Runner")
    if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
        raise InvalidArgument(
            f"cut() returned {name_type(returned)}: return lists of sample indices, such as [[0, 2], [1, 3]]"
        )
    groups = [_read_group(group, layout.count) for group in returned]
    _check(groups, layout.count)
    return [
        PickedLayout(layout.batch, len(rows), layout.lists, whole=layout, rows=rows, before=before)
        for rows in groups
        if rows
    ]


def _read_group(group: Any, count: int) -> list[int]:
    listed = group.tolist() if isinstance(group, torch.Tensor) or is_array(group) else group
    if not isinstance(listed, list | tuple | range):
        raise InvalidArgument(
            f"cut() gave {name_type(group)} as a group of samples: return lists of sample indices, such as "
            f"[[0, 2], [1, 3]]"
        )
    return [_read_index(index, count) for index in listed]


def _read_index(index: Any, count: int) -> int:
    try:
        row = -1 if isinstance(index, bool) else operator.index(index)
    except TypeError:
        row = -1
    if not 0 <= row < count:
        shown = show_value(index) if isinstance(index, bool | int | float | str) else name_type(index)
        raise InvalidArgument(
            f"cut() gave {shown} as the index of a sample: the batch has {count}, with the indices 0 to {count - 1}"
        )
    return row


def _check(groups: Sequence[Sequence[int]], count: int) -> None:
    seen: set[int] = set()
    for row in (row for rows in groups for row in rows):
        if row in seen:
            raise InvalidArgument(
                f"cut() gave sample {row} twice: each sample of the batch belongs to one group, or the gradient would "
                f"be that of another batch"
            )
        seen.add(row)
    if len(seen) < count:
        lost = next(row for row in range(count) if row not in seen)
        raise InvalidArgument(
            f"cut() left out {count - len(seen)} of {count} samples, such as sample {lost}: each sample of the batch "
            f"belongs to one group, or the gradient would be that of another batch"
        )
