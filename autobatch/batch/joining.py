"""Joins neighbouring batches into one, as a loader with a larger batch size would have given it.

Covers which batches can be joined, and ``JoinedLayout``, which copies no more than the micro-batch that is asked for.
Does not cover how a batch is read (``layout_rules``) nor how many samples go together (``planning.planner``).

Batches are joined only where the batch of all their samples is known:

- They have the same containers with the same keys, and each list is read in the same way.
- Tensors have the same dtype, device and shape after the first dimension: text that each batch pads to its own longest
  sample is joined only where these happen to agree, and then a larger batch would be padded to that length too.
- Lists with one entry a sample are appended.
- What all samples share is ``None``, a text or a truth value, and the same. Numbers and scalar tensors may count the
  samples of their own batch, so batches with any are not joined.
- Nothing else is in them: registered types have no function that joins two, subclasses of tensors and arrays may hold
  more than their values, and so may objects in their attributes.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch

from autobatch._wrappers import own_table
from autobatch.batch.layout import Layout
from autobatch.batch.list_rules import ROOT, ListReading
from autobatch.batch.registry import find_type
from autobatch.batch.tree import field_names, fields_of, is_array, is_sequence, with_fields, with_items

__all__ = ["JoinedLayout", "join_neighbours"]

_SHARED = (type(None), bool, str)
_Lists = Mapping[str, ListReading]


@dataclass(eq=False)
class JoinedLayout(Layout):
    """Batches that are one, of which a part is joined when it is taken.

    Attributes:
        batch: ``None``: the whole of it is nowhere.
        parts: The batches, in order.
        stops: For each the number of samples in it and in those before it.
    """

    parts: Sequence[Layout] = ()
    stops: Sequence[int] = ()

    @classmethod
    def of(cls, parts: Sequence[Layout]) -> JoinedLayout:
        """Batches that can be joined."""
        stops = [*accumulate(part.count for part in parts)]
        return cls(None, stops[-1], parts[0].lists, parts=parts, stops=stops)

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the batches, in order."""
        return [*chain.from_iterable(part.tensors() for part in self.parts)]

    def take(self, start: int, stop: int) -> Any:
        """Samples ``start`` to ``stop``: views where they lie in one batch, else new tensors."""
        views = self.views(start, stop)
        return views[0] if len(views) == 1 else _join(views, ROOT, self.lists)

    def views(self, start: int, stop: int) -> list[Any]:
        """The same samples, as they lie in each of the batches."""
        return [part.take(first, last) for part, first, last in self._ranges(start, stop)]

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[Layout, int, int]]:
        index = bisect_right(self.stops, start)
        while start < stop:
            part, end = self.parts[index], self.stops[index]
            begin = end - part.count
            yield part, start - begin, min(stop, end) - begin
            start, index = end, index + 1


def join_neighbours(layouts: Iterable[Layout]) -> list[Layout]:
    """Join each batch to those before it, as long as they can be joined; the order of samples stays."""
    runs: list[list[Layout]] = []
    for layout in layouts:
        if runs and _can_join(runs[-1][0], layout):
            runs[-1].append(layout)
        else:
            runs.append([layout])
    return [run[0] if len(run) == 1 else JoinedLayout.of(run) for run in runs]


def _can_join(one: Layout, other: Layout) -> bool:
    if "unclear" in one.lists.values() or "unclear" in other.lists.values():
        return False
    return _are_alike(one.batch, other.batch, ROOT, one.lists, other.lists)


def _are_alike(one: Any, other: Any, path: str, its_lists: _Lists, other_lists: _Lists) -> bool:
    """Whether two parts at the same path can be joined."""
    if type(one) is not type(other) or find_type(one) is not None:
        return False
    if isinstance(one, torch.Tensor) or is_array(one):
        return _have_same_traits(one, other)
    if isinstance(one, _SHARED):
        return bool(one == other)
    reading = its_lists.get(path)
    if not _holds_no_more(one) or not _holds_no_more(other) or reading != other_lists.get(path):
        return False
    if reading == "samples":
        return True
    fields, others = fields_of(one) or [], fields_of(other) or []
    return (
        fields_of(one) is not None
        and [suffix for suffix, _ in fields] == [suffix for suffix, _ in others]
        and all(
            _are_alike(child, its_twin, path + suffix, its_lists, other_lists)
            for (suffix, child), (_, its_twin) in zip(fields, others, strict=True)
        )
    )


def _have_same_traits(one: Any, other: Any) -> bool:
    """Whether two tensors, or two arrays, differ in the number of rows at most."""
    if not one.ndim or one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
        return False
    if is_array(one):
        return type(one) is sys.modules["numpy"].ndarray
    are_dense = type(one) is torch.Tensor and one.layout is other.layout
    return are_dense and (one.device, one.requires_grad) == (other.device, other.requires_grad)


def _holds_no_more(node: Any) -> bool:
    """Whether a container is known, and has nothing in attributes beside what it contains."""
    if isinstance(node, Mapping) and not isinstance(node, dict | UserDict):
        return False
    attributes = {name for name, value in own_table(node).items() if value is not None}
    own = {"data"} if isinstance(node, UserDict) else {*(field_names(node) or ())}
    return attributes <= own


def _join(nodes: Sequence[Any], path: str, lists: _Lists) -> Any:
    """One part made of parts that are alike."""
    first = nodes[0]
    if isinstance(first, torch.Tensor):
        with torch.no_grad():  # a leaf of its own, as every micro-batch's tensor is
            return torch.cat([*nodes]).requires_grad_(first.requires_grad)
    if is_array(first):
        return sys.modules["numpy"].concatenate(nodes)
    if is_sequence(first) and lists.get(path) == "samples":
        return with_items(first, [*chain.from_iterable(nodes)])
    columns = [fields_of(node) for node in nodes]
    fields = columns[0]
    if fields is None:
        return first
    children = zip(*([child for _, child in column or ()] for column in columns), strict=True)
    return with_fields(
        first, [_join(parts, path + suffix, lists) for (suffix, _), parts in zip(fields, children, strict=True)]
    )
