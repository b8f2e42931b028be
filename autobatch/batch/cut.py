"""Cuts the batches of a step into micro-batches.

1. A division says which samples may run together. Each batch is a group (``cut_apart``), or neighbours are joined
   (``cut_joined``), or the user's function makes groups (``cut_as_given``), or samples are sorted by length
   (``lengths.PlannedLengths``).
2. ``divide`` makes each group as few micro-batches as can be, of at most the present size.
3. ``MicroBatch.take`` takes its samples out of the batch when its turn comes.
"""

from __future__ import annotations

import sys
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from autobatch._formatting import name_type, plural, show_value
from autobatch._wrappers import own_table
from autobatch.batch.samples import Layout, MicroBatch, Rows, Trim
from autobatch.batch.tree import Leaf, call_read_only, field_names, is_array, with_items
from autobatch.errors import InvalidArgument
from autobatch.planning.division import as_index, balance, least_size
from autobatch.planning.sizes_by_length import divide_by_length, scale_of
from autobatch.records import SizeAtLength

CutFunction = Callable[[Any, int], Iterable[Any]]
"""``cut(batch, largest)``: groups of sample indices, each a list, an array or a tensor of whole numbers."""


class Lengths(NamedTuple):
    """Lengths of the samples of a group, the longest first."""

    values: Sequence[int]
    trims: Sequence[Trim | None]  # what is left of a micro-batch whose longest sample this is
    sizes: tuple[SizeAtLength, ...]  # how many samples may run together, by length
    read: Callable[[Any, int], list[int]]  # reads the lengths of so many samples, by the user's function


class Group(NamedTuple):
    """Samples of a batch that may run together, and their lengths where those are known."""

    batch: Layout
    rows: Rows
    lengths: Lengths | None = None


Division = Callable[[Sequence[Layout], int], list[Group]]
"""Makes groups of the batches of a step; gets the most samples that run together."""


def divide(group: Group, largest: int, smallest: int = 1) -> list[MicroBatch]:
    """Cut a group into the fewest micro-batches of at most ``largest`` samples, of sizes as equal as possible.

    ``smallest`` is the fewest samples that the model can run, and goes before ``largest``. A smaller group is one
    micro-batch; its error is the model's own. For samples by length ``largest`` is the most at the shortest length that
    was tried, and in proportion at others (``planning.sizes_by_length``).
    """
    batch, rows, lengths = group
    if lengths is None:
        total = len(rows)
        sizes = balance(total, max(largest, least_size(total, smallest)), min(total, smallest))
    else:
        sizes = divide_by_length(lengths.values, lengths.sizes, largest, smallest)
    parts = []
    is_whole = lengths is None and len(sizes) > 1 and rows == range(batch.count)
    all_views = batch.split(sizes) if is_whole else [None] * len(sizes)
    for size, stop, views in zip(sizes, accumulate(sizes), all_views, strict=True):
        start, trim, scale = stop - size, None, size
        if lengths is not None:
            trim, scale = lengths.trims[start], scale_of(size, lengths.values[start], lengths.sizes)
        own = rows[start:stop]
        if isinstance(own, list) and own == [*range(own[0], own[0] + size)]:
            own = range(own[0], own[0] + size)  # neighbours can be viewed
        parts.append(MicroBatch(batch, own, trim, size, scale, {"": float(size)}, views=views))
    return parts


def number_rows(groups: Iterable[Group], micro_batches: Iterable[MicroBatch]) -> tuple[tuple[int, ...], ...]:
    """Return the samples of each micro-batch as rows of the step: those of a second batch count on."""
    firsts: dict[int, int] = {}
    count = 0
    for group in groups:
        if id(group.batch) not in firsts:
            firsts[id(group.batch)] = count
            count += group.batch.count
    return tuple(tuple(firsts[id(part.batch)] + row for row in part.rows) for part in micro_batches)


def cut_apart(layouts: Sequence[Layout], _: int = 0) -> list[Group]:
    return [Group(layout, range(layout.count)) for layout in layouts]


def cut_joined(layouts: Sequence[Layout], _: int = 0) -> list[Group]:
    """Make each run of batches that can be joined a group; the order of samples stays.

    They have the same containers and keys, and tensors of one dtype, device and shape after the first dimension.
    Values that all samples share are equal. A shared number may count the samples of its batch, so batches with one are
    not joined. Registered types and subclasses of tensors and arrays are not either.
    """
    runs: list[list[Layout]] = []
    for layout in layouts:
        if runs and _can_join(runs[-1][0], layout):
            runs[-1].append(layout)
        else:
            runs.append([layout])
    return cut_apart([run[0] if len(run) == 1 else _Joined(run) for run in runs])


class _Joined(Layout):
    """Neighbouring batches as one; rows of a second batch count on."""

    def __init__(self, batches: Sequence[Layout]) -> None:
        super().__init__(batches[0].batch, sum(batch.count for batch in batches), batches[0].lists)
        self._batches = batches

    def split(self, sizes: Sequence[int]) -> Sequence[Sequence[Any] | None]:
        """Return no views: parts of several batches are copied."""
        return [None] * len(sizes)

    def select(self, rows: Rows, trim: Trim | None = None) -> list[Any]:
        found, begin = [], 0
        for batch in self._batches:
            low, high = max(rows[0] - begin, 0), min(rows[-1] + 1 - begin, batch.count)
            if low < high:
                found.append(batch.select(range(low, high), trim))
            begin += batch.count
        return [_join(leaf, parts) for leaf, parts in zip(self.leaves, zip(*found, strict=True), strict=True)]


def _join(leaf: Leaf, parts: Sequence[Any]) -> Any:
    if len(parts) == 1 or leaf.kind == "shared":
        return parts[0]
    if leaf.kind == "samples":
        return with_items(leaf.value, [entry for part in parts for entry in part])
    if is_array(leaf.value):
        return sys.modules["numpy"].concatenate(parts)
    with torch.no_grad():  # a leaf, as every micro-batch's tensor is
        return torch.cat([*parts]).requires_grad_(leaf.value.requires_grad)


def _can_join(one: Layout, other: Layout) -> bool:
    return (
        [made and (type(made[0]), made[1]) for made in one.containers]
        == [made and (type(made[0]), made[1]) for made in other.containers]
        and all(_holds_no_more(made[0]) for made in (*one.containers, *other.containers) if made)
        and all(map(_are_alike, one.leaves, other.leaves))
    )


def _holds_no_more(node: Any) -> bool:
    """Return whether a container is known, and has nothing in attributes beside what it contains."""
    if isinstance(node, Mapping) and not isinstance(node, dict | UserDict):
        return False
    attributes = {name for name, value in own_table(node).items() if value is not None}
    own = {"data"} if isinstance(node, UserDict) else {*(field_names(node) or ())}
    return attributes <= own


def _are_alike(mine: Leaf, its: Leaf) -> bool:
    one, other = mine.value, its.value
    is_like = (mine.path, mine.kind, type(one)) == (its.path, its.kind, type(other))
    if not is_like or mine.kind in ("registered", "unclear"):
        return False
    if mine.kind == "samples":
        return _holds_no_more(one) and _holds_no_more(other)
    if not isinstance(one, torch.Tensor) and not is_array(one):
        return isinstance(one, type(None) | bool | str) and bool(one == other)
    if not one.ndim or one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
        return False
    if is_array(one):
        return type(one) is sys.modules["numpy"].ndarray
    has_no_more = type(one) is torch.Tensor and one.layout is other.layout
    return has_no_more and (one.device, one.requires_grad) == (other.device, other.requires_grad)


def cut_as_given(cut: CutFunction, layouts: Sequence[Layout], largest: int) -> list[Group]:
    """Make the groups into which a user's function divides each batch; raise InvalidArgument if a sample is lost."""
    groups = []
    for layout in layouts:
        returned = call_read_only("cut", cut, layout.batch, largest, called_by="autobatch.Runner")
        if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
            raise InvalidArgument(
                f"cut() returned {name_type(returned)}: return lists of sample indices, such as [[0, 2], [1, 3]]"
            )
        found = [_read_group(group, layout.count) for group in returned]
        _check_each_once(found, layout.count)
        groups += [Group(layout, rows) for rows in found if rows]
    return groups


def _read_group(group: Any, count: int) -> list[int]:
    listed = group.tolist() if isinstance(group, torch.Tensor) or is_array(group) else group
    if not isinstance(listed, list | tuple | range):
        raise InvalidArgument(
            f"cut() gave {name_type(group)} as a group of samples: return lists of sample indices, such as "
            f"[[0, 2], [1, 3]]"
        )
    rows = [as_index(index) for index in listed]
    for index, row in zip(listed, rows, strict=True):
        if not 0 <= row < count:
            shown = show_value(index) if isinstance(index, bool | int | float | str) else name_type(index)
            raise InvalidArgument(
                f"cut() gave {shown} as the index of a sample: the batch has {count}, with the indices 0 to {count - 1}"
            )
    return rows


def _check_each_once(groups: Sequence[Sequence[int]], count: int) -> None:
    times = Counter(row for rows in groups for row in rows)
    wrong = next((row for row in range(count) if times[row] != 1), None)
    if wrong is not None:
        given = f"gave sample {wrong} {plural(times[wrong], 'time')}" if times[wrong] else f"left out sample {wrong}"
        raise InvalidArgument(
            f"cut() {given}: each of the batch's {count} samples belongs to "
            f"one group, or the gradient would be that of another batch"
        )
