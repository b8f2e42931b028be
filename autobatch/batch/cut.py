"""Cuts the batches of a step into micro-batches.

1. Batches become groups, the samples that may run together: each batch is one, or neighbours are joined (``join``), or
   the user's function says it (``cut_as_given``), or samples are sorted by length (``lengths.PlannedLengths``).
2. Each group becomes as few micro-batches as can be, of at most the present size (``divide``).
3. A micro-batch is some rows of a batch. Its samples are taken when its turn comes (``MicroBatch.take``).
"""

from __future__ import annotations

import operator
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from autobatch._formatting import name_type, show_value
from autobatch._wrappers import own_table
from autobatch.batch.layout import Layout, Leaf, Rows, Trim, move_leaf
from autobatch.batch.registry import find_type
from autobatch.batch.tree import call_read_only, field_names, is_array, is_sequence, with_items
from autobatch.errors import InvalidArgument
from autobatch.planning.lengths import divide_by_length, scale_of
from autobatch.planning.planner import balance, least_size
from autobatch.records import Padding, SizeAtLength

CutFunction = Callable[[Any, int], Iterable[Any]]
"""``cut(batch, largest)``: groups of sample indices, each a list, an array or a tensor of whole numbers."""


class MicroBatch(NamedTuple):
    """Samples that run together.

    Attributes:
        batch: The batch that they are of.
        rows: The row in it of each sample.
        trim: The part of padded dimensions that is left; ``None`` where nothing is trimmed.
        first: Number of samples in the batches of the step before this one.
        size: Number of samples.
        scale: The least size with which ``divide`` makes such a micro-batch: ``size``, but for samples by length.
        weights: Count of its samples in each term's mean; the name ``""`` is every term.
        counts: Whether any term is a mean over something in it.
        parts: Its leaves where they are, if they were cut already; empty once they were taken.
    """

    batch: Layout | Joined
    rows: Rows
    trim: Trim | None
    first: int
    size: int
    scale: int
    weights: Mapping[str, float]
    counts: bool = True
    parts: list[Any] | None = None

    def samples(self) -> Any:
        """Return its samples where they are, in the batch's own containers."""
        return self.batch.rebuild(self.batch.select(self.rows, self.trim))

    def take(self, move: Callable[[torch.Tensor], torch.Tensor], home: torch.device) -> Any:
        """Return its samples on the device ``home``, in new containers; each tensor is a leaf."""
        if self.parts and self.batch.home == home:
            samples = self.batch.rebuild(self.parts, fresh=True)
            self.parts.clear()  # the step may give them gradients, which are not to be held until it ends
            return samples
        parts = self.parts or self.batch.select(self.rows, self.trim)
        moved = [move_leaf(leaf, part, move) for leaf, part in zip(self.batch.leaves, parts, strict=True)]
        return self.batch.rebuild(moved, fresh=True)

    def views(self) -> list[Any]:
        """List its leaves in the user's memory, where they are views of it."""
        return [*self.batch.views(self.rows)]


class Lengths(NamedTuple):
    """Samples of a group whose lengths are known.

    Attributes:
        values: The length of each sample, the longest first.
        padded: The length to which the batch is padded.
        padding: Dimensions and side of the padding.
        sizes: How many samples may run together, by length.
        trims_to_edges: Whether parts are trimmed to lengths that were tried, so that there are few shapes to compile.
        ask: Asks the user for the lengths of a part.
    """

    values: Sequence[int]
    padded: int
    padding: Padding
    sizes: tuple[SizeAtLength, ...]
    trims_to_edges: bool
    ask: Callable[[Any], Any]

    def trim(self, start: int) -> Trim | None:
        """Return what is left of a part that begins at this sample, its longest; ``None`` for all of it."""
        length = self.values[start]
        if self.trims_to_edges:
            length = min((size.length for size in self.sizes if size.length >= length), default=length)
        return Trim(self.padding, length) if self.padding.dims and length < self.padded else None


class Group(NamedTuple):
    """Samples that may run together.

    Attributes:
        batch: The batch that they are of.
        rows: The row in it of each sample.
        first: Number of samples in the batches of the step before this one.
        lengths: How long they are, where that is known: then the longest come first.
    """

    batch: Layout | Joined
    rows: Rows
    first: int = 0
    lengths: Lengths | None = None


Division = Callable[[Sequence[Layout], int], list[Group]]
"""Makes groups of the batches of a step; gets the most samples that run together."""


def divide(group: Group, largest: int, smallest: int = 1) -> list[MicroBatch]:
    """Cut a group into the fewest micro-batches, of sizes as equal as possible.

    Args:
        group: The samples.
        largest: The most samples of a micro-batch, exceeded only where the group cannot be cut otherwise without a
            micro-batch below ``smallest``. For samples by length it is the most at the shortest length that was
            tried, and in proportion at others (``planning.lengths``).
        smallest: The fewest samples that the model can run. A smaller group is one micro-batch; its error is the
            model's own.
    """
    batch, rows, first, lengths = group
    if lengths is None:
        sizes = _balance(len(rows), largest, smallest)
    else:
        sizes = divide_by_length(lengths.values, lengths.sizes, largest, smallest)
    parts = []
    ready = batch.split(sizes) if lengths is None and rows == range(batch.count) else None
    for index, (size, stop) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        start = stop - size
        trim = scale = None
        if lengths is not None:
            trim, scale = lengths.trim(start), scale_of(size, lengths.values[start], lengths.sizes)
        part = _as_range(rows[start:stop])
        leaves = ready[index] if ready else None
        parts.append(MicroBatch(batch, part, trim, first, size, scale or size, {"": float(size)}, True, leaves))
    return parts


@lru_cache(maxsize=256)
def _balance(total: int, largest: int, smallest: int) -> tuple[int, ...]:
    return balance(total, max(largest, least_size(total, smallest)), min(total, smallest))


def _as_range(rows: Rows) -> Rows:
    """Return neighbours as a range: they can be viewed."""
    if isinstance(rows, range):
        return rows
    neighbours = range(rows[0], rows[0] + len(rows))
    return neighbours if rows == [*neighbours] else rows


def cut_apart(layouts: Sequence[Layout], _: int = 0) -> list[Group]:
    """Make each batch a group."""
    return _number(layouts)


def cut_joined(layouts: Sequence[Layout], _: int = 0) -> list[Group]:
    """Make each run of batches that can be joined a group."""
    return _number(join(layouts) if len(layouts) > 1 else layouts)


def _number(batches: Iterable[Layout | Joined]) -> list[Group]:
    groups, first = [], 0
    for batch in batches:
        groups.append(Group(batch, range(batch.count), first))
        first += batch.count
    return groups


# ------------------------------------------------------------------------------------------------- the user's own cut


def cut_as_given(cut: CutFunction, layouts: Sequence[Layout], largest: int) -> list[Group]:
    """Make the groups into which a user's function divides each batch; empty ones are left out.

    Raises:
        InvalidArgument: It gave a sample twice, left one out, returned something else, or wrote into the batch.
    """
    groups, first = [], 0
    for layout in layouts:
        returned = call_read_only("cut", cut, layout.batch, largest, called_by="autobatch.Runner")
        if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
            raise InvalidArgument(
                f"cut() returned {name_type(returned)}: return lists of sample indices, such as [[0, 2], [1, 3]]"
            )
        found = [_read_group(group, layout.count) for group in returned]
        _check_each_once(found, layout.count)
        groups += [Group(layout, rows, first) for rows in found if rows]
        first += layout.count
    return groups


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


def _check_each_once(groups: Sequence[Sequence[int]], count: int) -> None:
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


# ------------------------------------------------------------------------------------------------- joining neighbours
#
# Batches are joined only where the batch of all their samples is known:
#
# - They have the same containers with the same keys, and each list is read in the same way.
# - Tensors have the same dtype, device and shape after the first dimension: text that each batch pads to its own
#   longest sample is joined only where these happen to agree; a larger batch would be padded to that length too.
# - What all samples share is None, a text or a truth value, and the same. Numbers and scalar tensors may count the
#   samples of their own batch.
# - Nothing else is in them: registered types have no function that joins two, subclasses of tensors and arrays may hold
#   more than their values, and so may objects in their attributes.

_SHARED = (type(None), bool, str)


class Joined:
    """Neighbouring batches that are one, of which a part is joined when it is taken.

    Attributes:
        parts: The batches, in order.
        count: Number of samples.
        leaves: Leaves of the first batch.
        home: The one device of all tensors, if there is one.
    """

    def __init__(self, parts: Sequence[Layout]) -> None:
        """Take batches that can be joined."""
        self.parts, self._stops = parts, [*accumulate(part.count for part in parts)]
        self.count, self.leaves, self.home = self._stops[-1], parts[0].leaves, parts[0].home

    def tensors(self) -> list[torch.Tensor]:
        """List every tensor of the batches, in order."""
        return [tensor for part in self.parts for tensor in part.tensors()]

    def select(self, rows: Rows, trim: Trim | None = None) -> list[Any]:
        """List the leaves with these neighbouring rows: views where they lie in one batch, else new tensors."""
        columns = [*zip(*self._select_each(rows), strict=True)]
        return [_join(leaf, column) for leaf, column in zip(self.leaves, columns, strict=True)]

    def split(self, sizes: Sequence[int]) -> None:
        """Return ``None``: samples are joined when their turn comes, so that not all are copied at once."""

    def views(self, rows: Rows) -> Iterable[Any]:
        """List the same rows as they lie in each of the batches."""
        return [part for parts in self._select_each(rows) for part in parts]

    def rebuild(self, values: Sequence[Any], *, fresh: bool = False) -> Any:
        """Return one batch with these leaves."""
        return self.parts[0].rebuild(values, fresh=fresh)

    def _select_each(self, rows: Rows) -> list[list[Any]]:
        found = []
        for part, end in zip(self.parts, self._stops, strict=True):
            begin = end - part.count
            start, stop = max(rows[0], begin), min(rows[-1] + 1, end)
            if start < stop:
                found.append(part.select(range(start - begin, stop - begin)))
        return found


def join(layouts: Iterable[Layout]) -> list[Layout | Joined]:
    """Join each batch to those before it, as long as they can be joined; the order of samples stays."""
    runs: list[list[Layout]] = []
    for layout in layouts:
        if runs and _can_join(runs[-1][0], layout):
            runs[-1].append(layout)
        else:
            runs.append([layout])
    return [run[0] if len(run) == 1 else Joined(run) for run in runs]


def _can_join(one: Layout, other: Layout) -> bool:
    if not _have_same_containers(one.containers, other.containers):
        return False
    pairs = zip(one.leaves, other.leaves, strict=True)
    return all(mine.path == its.path and mine.kind == its.kind and _are_alike(mine, its) for mine, its in pairs)


def _have_same_containers(one: Any, other: Any) -> bool:
    """Return whether both have the same types of containers, known ones, with as many entries."""
    if one is None or other is None:
        return one is other
    (node, children), (twin, others) = one, other
    return (
        type(node) is type(twin)
        and _holds_no_more(node)
        and _holds_no_more(twin)
        and len(children) == len(others)
        and all(map(_have_same_containers, children, others))
    )


def _holds_no_more(node: Any) -> bool:
    """Return whether a container is known, and has nothing in attributes beside what it contains."""
    if isinstance(node, Mapping) and not isinstance(node, dict | UserDict):
        return False
    attributes = {name for name, value in own_table(node).items() if value is not None}
    own = {"data"} if isinstance(node, UserDict) else {*(field_names(node) or ())}
    return attributes <= own


def _are_alike(mine: Leaf, its: Leaf) -> bool:
    """Return whether two leaves can be joined, or are the same for all samples."""
    one, other = mine.value, its.value
    if type(one) is not type(other) or find_type(one) is not None or mine.kind == "unclear":
        return False
    if mine.kind == "samples":
        return _holds_no_more(one) and _holds_no_more(other)
    if isinstance(one, torch.Tensor) or is_array(one):
        return _have_same_traits(one, other)
    return isinstance(one, _SHARED) and bool(one == other)


def _have_same_traits(one: Any, other: Any) -> bool:
    """Return whether two tensors, or two arrays, differ in the number of rows at most."""
    if not one.ndim or one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
        return False
    if is_array(one):
        return type(one) is sys.modules["numpy"].ndarray
    are_dense = type(one) is torch.Tensor and one.layout is other.layout
    return are_dense and (one.device, one.requires_grad) == (other.device, other.requires_grad)


def _join(leaf: Leaf, parts: Sequence[Any]) -> Any:
    """Make one part of several."""
    if len(parts) == 1 or leaf.kind == "shared":
        return parts[0]
    if is_sequence(leaf.value):
        return with_items(leaf.value, [entry for part in parts for entry in part])
    if is_array(leaf.value):
        return sys.modules["numpy"].concatenate(parts)
    with torch.no_grad():  # a leaf, as every micro-batch's tensor is
        return torch.cat([*parts]).requires_grad_(leaf.value.requires_grad)
