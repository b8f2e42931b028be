"""Cuts the batches of a step into micro-batches.

1. A division makes groups of samples that may run together. Each batch is a group (``cut_apart``), or neighbours are
   joined (``cut_joined``), or the user's function makes groups (``cut_as_given``), or samples are sorted by length
   (``lengths.PlannedLengths``).
2. ``divide`` makes each group as few micro-batches as can be, of at most the present size.
3. The samples of a micro-batch are taken when its turn comes (``layout.MicroBatch``).
"""

from __future__ import annotations

import operator
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from autobatch._formatting import name_type, show_value
from autobatch._wrappers import own_table
from autobatch.batch.layout import Layout, MicroBatch, Rows, Trim
from autobatch.batch.registry import find_type
from autobatch.batch.tree import (
    Leaf,
    call_read_only,
    field_names,
    is_array,
)
from autobatch.errors import InvalidArgument
from autobatch.planning.division import balance, least_size
from autobatch.planning.lengths import divide_by_length, scale_of
from autobatch.records import SizeAtLength

CutFunction = Callable[[Any, int], Iterable[Any]]
"""``cut(batch, largest)``: groups of sample indices, each a list, an array or a tensor of whole numbers."""


class Lengths(NamedTuple):
    """Samples of a group whose lengths are known, the longest first.

    Attributes:
        values: The length of each sample.
        trims: For each sample, what is left of a micro-batch of which it is the longest; ``None``: all.
        sizes: How many samples may run together, by length.
        read: Reads the lengths of so many samples, by the user's function.
    """

    values: Sequence[int]
    trims: Sequence[Trim | None]
    sizes: tuple[SizeAtLength, ...]
    read: Callable[[Any, int], list[int]]


class Group(NamedTuple):
    """Samples that may run together.

    Attributes:
        batches: The batch that they are of, or neighbouring batches that can be joined.
        rows: The row of each sample; rows of a second batch count on.
        lengths: How long they are, where that is known.
    """

    batches: Sequence[Layout]
    rows: Rows
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
    batches, rows, lengths = group
    if lengths is None:
        total = len(rows)
        sizes = balance(total, max(largest, least_size(total, smallest)), min(total, smallest))
    else:
        sizes = divide_by_length(lengths.values, lengths.sizes, largest, smallest)
    parts = []
    for size, stop in zip(sizes, accumulate(sizes), strict=True):
        start, trim, scale = stop - size, None, size
        if lengths is not None:
            trim, scale = lengths.trims[start], scale_of(size, lengths.values[start], lengths.sizes)
        parts.append(MicroBatch(batches, _as_range(rows[start:stop]), trim, size, scale, {"": float(size)}))
    return parts


def _as_range(rows: Rows) -> Rows:
    """Return neighbours as a range: they can be viewed."""
    if isinstance(rows, range):
        return rows
    neighbours = range(rows[0], rows[0] + len(rows))
    return neighbours if rows == [*neighbours] else rows


def number_rows(groups: Iterable[Group], micro_batches: Iterable[MicroBatch]) -> tuple[tuple[int, ...], ...]:
    """Return the samples of each micro-batch as rows of the step: those of a second batch count on."""
    firsts: dict[int, int] = {}
    count = 0
    for batch in (batch for group in groups for batch in group.batches):
        if id(batch) not in firsts:
            firsts[id(batch)] = count
            count += batch.count
    return tuple(tuple(firsts[id(part.batches[0])] + row for row in part.rows) for part in micro_batches)


# -------------------------------------------------------------------------------------------------- equal micro-batches


def cut_apart(layouts: Sequence[Layout], _: int = 0) -> list[Group]:
    """Make each batch a group."""
    return [Group([layout], range(layout.count)) for layout in layouts]


def cut_joined(layouts: Sequence[Layout], _: int = 0) -> list[Group]:
    """Make each run of batches that can be joined a group; the order of samples stays.

    Batches are joined only where the batch of all their samples is known:

    - They have the same containers with the same keys, and each list is read in the same way.
    - Tensors have the same dtype, device and shape after the first dimension. So texts padded to the longest sample of
      each batch are joined only if these lengths agree.
    - Values that all samples share are None, texts or truth values, and equal. Numbers and scalar tensors may count the
      samples of their own batch.
    - Nothing else is in them. Registered types have no function that joins two, and subclasses of tensors and arrays
      may hold more than their values.
    """
    runs: list[list[Layout]] = []
    for layout in layouts:
        if runs and _can_join(runs[-1][0], layout):
            runs[-1].append(layout)
        else:
            runs.append([layout])
    return [Group(run, range(sum(layout.count for layout in run))) for run in runs]


def _can_join(one: Layout, other: Layout) -> bool:
    if len(one.leaves) != len(other.leaves) or not _have_same_containers(one.containers, other.containers):
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
    return isinstance(one, type(None) | bool | str) and bool(one == other)


def _have_same_traits(one: Any, other: Any) -> bool:
    """Return whether two tensors, or two arrays, differ in the number of rows at most."""
    if not one.ndim or one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
        return False
    if is_array(one):
        return type(one) is sys.modules["numpy"].ndarray
    are_dense = type(one) is torch.Tensor and one.layout is other.layout
    return are_dense and (one.device, one.requires_grad) == (other.device, other.requires_grad)


# ------------------------------------------------------------------------------------------------- the user's own cut


def cut_as_given(cut: CutFunction, layouts: Sequence[Layout], largest: int) -> list[Group]:
    """Make the groups into which a user's function divides each batch; empty ones are left out.

    Raises:
        InvalidArgument: It gave a sample twice, left one out, returned something else, or wrote into the batch.
    """
    groups = []
    for layout in layouts:
        returned = call_read_only("cut", cut, layout.batch, largest, called_by="autobatch.Runner")
        if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
            raise InvalidArgument(
                f"cut() returned {name_type(returned)}: return lists of sample indices, such as [[0, 2], [1, 3]]"
            )
        found = [_read_group(group, layout.count) for group in returned]
        _check_each_once(found, layout.count)
        groups += [Group([layout], rows) for rows in found if rows]
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
