"""Describes a batch as samples: counts them, takes some of them, and grows the batch to any number.

1. ``describe`` takes the batch apart into leaves, and asks ``rules`` about lists that may hold samples or fields.
2. A ``Layout`` is the batch with its leaves and its number of samples. Parts of it are made from rows.
3. A ``MicroBatch`` is some rows of a batch. Its samples are taken when its turn comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from autobatch.batch.registry import ListReading, Marked, find_type
from autobatch.batch.rules import ROOT, count_samples, decide_lists
from autobatch.batch.tree import (
    Leaf,
    as_leaf,
    fields_of,
    has_rows,
    is_array,
    is_sequence,
    leaves_of,
    map_tensors,
    tensors_of,
    with_fresh_containers,
    with_items,
    with_new_fields,
)
from autobatch.errors import InvalidArgument
from autobatch.planning.division import choose_rows, spread_evenly
from autobatch.records import Padding

_DENSE = (torch.Tensor, torch.nn.Parameter)
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.Tensor)

Rows = range | list[int]


class Trim(NamedTuple):
    """The part of padded dimensions that is left of some samples."""

    padding: Padding
    length: int


class Layout:
    """A batch, and how it divides into samples; made by ``describe``.

    Attributes:
        batch: The batch.
        count: Number of samples.
        lists: The reading of each list, by path; later batches are read in the same way.
    """

    def __init__(self, batch: Any, count: int, lists: Mapping[str, ListReading]) -> None:
        """Note how a batch divides; its leaves are found when they are needed."""
        self.batch, self.count, self.lists = batch, count, lists

    @cached_property
    def leaves(self) -> list[Leaf]:
        """The leaves, in order."""
        return self._taken_apart[0]

    @cached_property
    def _taken_apart(self) -> tuple[list[Leaf], Any]:
        leaves: list[Leaf] = []
        return leaves, _take_apart(self.batch, ROOT, self.lists, leaves)

    @property
    def containers(self) -> Any:
        """The containers around the leaves, each with those in it; ``None`` where the batch is a leaf."""
        return self._taken_apart[1]

    def tensors(self) -> list[torch.Tensor]:
        """List every tensor of the batch, in order."""
        values = [leaf.value for leaf in self.leaves]
        return [one for value in values for one in ([value] if isinstance(value, torch.Tensor) else tensors_of(value))]

    def select(self, rows: Rows, trim: Trim | None = None) -> list[Any]:
        """List the leaves with these rows only: views where the rows are neighbours and nothing is trimmed.

        Raises:
            InvalidArgument: A list can be read both as samples and as fields.
        """
        if trim is None and rows == range(self.count):  # also of lists that may be either
            return [leaf.value for leaf in self.leaves]
        return [leaf.value if leaf.kind == "shared" else _select(leaf, rows, trim) for leaf in self.leaves]

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Return a batch with these leaves, in new containers."""
        return _put_together(self.containers, iter(values))

    def part(self, rows: Rows, trim: Trim | None = None) -> Layout:
        """Return these samples as a batch of their own, whose lists are read as here."""
        return Layout(self.rebuild(self.select(rows, trim)), len(rows), self.lists)

    def take(self, start: int, stop: int) -> Any:
        """Take samples ``start`` to ``stop`` (exclusive) as views; all samples are the batch itself.

        A registered type's own ``take`` may return copies. As ``spread`` and ``grow`` it raises InvalidArgument where a
        list can be read both as samples and as fields.
        """
        if not 0 <= start < stop <= self.count:
            raise InvalidArgument(f"samples {start} to {stop} of a batch of {self.count}: no such part")
        return self.batch if stop - start == self.count else self.part(range(start, stop)).batch

    def pick(self, rows: list[int]) -> Any:
        """Take the samples at these indices, in this order, as new tensors."""
        return self.part(rows).batch

    def spread(self, n: int, order: Sequence[int] | None = None) -> Layout:
        """Take ``n`` samples from everywhere, as new tensors: a batch may be sorted, or repeat with a period.

        Beyond its count each sample comes several times in a row, so that consecutive parts have different samples.
        With an ``order`` of the samples they are spread over that, and stay in it.
        """
        rows = choose_rows(n, self.count) if order is None else [order[index] for index in spread_evenly(n, self.count)]
        return self._with_rows(n, lambda leaf: _as_leaves(_select(leaf, rows)))

    def grown(self, n: int) -> Layout:
        """Return a batch of ``n`` samples: sample ``i`` is this batch's sample ``i`` modulo its count.

        Up to its own count tensors are views, beyond it new tensors of the same memory format; either way leaves, of
        which no gradient reaches the original. Samples in lists are repeated by reference.
        """
        if n < 1:
            raise InvalidArgument(f"a batch cannot have {n} samples: at least 1")
        return self._with_rows(n, lambda leaf: _grow(leaf, n, self.count))

    def grow(self, n: int) -> Any:
        """Return the batch of ``grown(n)``."""
        return self.grown(n).batch

    def _with_rows(self, n: int, function: Callable[[Leaf], Any]) -> Layout:
        values = [leaf.value if leaf.kind == "shared" else function(leaf) for leaf in self.leaves]
        return Layout(self.rebuild(values), n, self.lists)


class MicroBatch(NamedTuple):
    """Samples that run together.

    Attributes:
        batches: The batch that they are of, or neighbouring batches that can be joined.
        rows: The row of each sample; rows of a second batch count on.
        trim: The part of padded dimensions that is left; ``None`` where nothing is trimmed.
        size: Number of samples.
        scale: The least size with which ``divide`` makes such a micro-batch: ``size``, but for samples by length.
        weights: Count of its samples in each term's mean; the name ``""`` is every term.
        counts: Whether any term is a mean over something in it.
    """

    batches: Sequence[Layout]
    rows: Rows
    trim: Trim | None
    size: int
    scale: int
    weights: Mapping[str, float]
    counts: bool = True

    def samples(self) -> Any:
        """Return its samples where they are, in the batch's own containers."""
        return self.batches[0].rebuild(self._select())

    def take(self, move: Callable[[torch.Tensor], torch.Tensor], home: torch.device) -> Any:
        """Return its samples on the device ``home``, in new containers.

        Each tensor is a leaf, so that the step may ask for its gradient and none reaches the user's batch.
        """
        first, moved = self.batches[0], []
        for leaf, part in zip(first.leaves, self._select(), strict=True):
            if isinstance(leaf.value, torch.Tensor):
                own = part.detach()
                own = own if own.device == home else move(own)
                moved.append(own.requires_grad_(leaf.value.requires_grad))
            elif leaf.kind == "shared":
                moved.append(part)
            else:
                moved.append(_move(part, move))
        return first.rebuild(moved)

    def _select(self) -> list[Any]:
        """List its leaves: views where its samples are neighbours in one batch, else new tensors."""
        first, rows = self.batches[0], self.rows
        if len(self.batches) == 1:
            return first.select(rows, self.trim)
        found, begin = [], 0
        for batch in self.batches:
            stop = begin + batch.count
            low, high = max(rows[0], begin), min(rows[-1] + 1, stop)
            if low < high:
                found.append(batch.select(range(low - begin, high - begin)))
            begin = stop
        return [_join(leaf, parts) for leaf, parts in zip(first.leaves, zip(*found, strict=True), strict=True)]


def _move(part: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return with_fresh_containers(map_tensors(part, lambda one: move(one.detach()).requires_grad_(one.requires_grad)))


def describe(batch: Any, lists: Mapping[str, ListReading] | None = None, samples: int | None = None) -> Layout:
    """Find how a batch divides into samples, by the rules at the top of ``rules``.

    Args:
        batch: The batch.
        lists: The readings of lists in an earlier batch; lists of this batch are read in the same way.
        samples: Number of samples from which the batch was made, if known.

    Raises:
        InvalidArgument: It has no number of samples, or cannot be divided.
    """
    lists = {path: reading for path, reading in (lists or {}).items() if reading != "unclear"}
    try:
        while True:
            layout = Layout(batch, 0, lists)
            layout.count = _count_plain(layout.leaves)
            if layout.count:
                return layout
            decided = decide_lists(layout.leaves, batch, samples)
            if not decided:
                layout.count = count_samples(layout.leaves, batch)
                return layout
            lists = {**lists, **decided}  # lists of fields are taken apart further
    except RecursionError as error:
        endless = next((ROOT + suffix for suffix, part in fields_of(batch) or () if _is_endless(part)), ROOT)
        raise InvalidArgument(f"{endless} holds itself or is nested too deep: leave it out of the batch") from error


def _count_plain(leaves: Sequence[Leaf]) -> int:
    """Count samples where every leaf is a dense tensor or a plain value, as in nearly every batch; else return 0."""
    count = 0
    for _, value, kind in leaves:
        if kind == "rows" and type(value) in _DENSE and value.layout is torch.strided and not value.is_nested:
            rows = value.shape[0]
            if not rows or count not in (0, rows):
                return 0
            count = rows
        elif kind != "shared" or type(value) not in _VALUES:
            return 0
    return count


def _take_apart(node: Any, path: str, lists: Mapping[str, ListReading], leaves: list[Leaf]) -> Any:
    """Append the leaves in order; returns the containers around them, ``None`` for a leaf."""
    if type(node) is torch.Tensor:
        leaves.append(Leaf(path, node, "rows" if node.ndim else "shared"))
        return None
    if type(node) not in (dict, list, tuple) and has_rows(node):
        leaves.append(Leaf(path, node, "rows"))
        return None
    if type(node) in (list, tuple) or is_sequence(node):
        reading = lists.get(path)
        if reading is None or (isinstance(node, Marked) and node.reading != reading):
            leaves.append(Leaf(path, node, "open"))
            return None
        if reading != "fields":
            leaves.append(Leaf(path, node, reading))
            return None
    fields = fields_of(node)
    if fields is None:
        leaves.append(Leaf(path, node, "shared"))
        return None
    return node, [_take_apart(child, path + suffix, lists, leaves) for suffix, child in fields]


def _put_together(containers: Any, values: Iterator[Any]) -> Any:
    if containers is None:
        return next(values)
    node, children = containers
    parts = [_put_together(child, values) for child in children]
    if type(node) is dict:
        return dict(zip(node, parts, strict=True))
    return type(node)(parts) if type(node) in (tuple, list) else with_new_fields(node, parts)


def dims_of(layout: Layout) -> dict[str, int]:
    """Return the number of dimensions of each tensor of a batch, by path; tensors in lists of samples are left out."""
    return {leaf.path: leaf.value.ndim for leaf in layout.leaves if isinstance(leaf.value, torch.Tensor)}


def _is_endless(part: Any) -> bool:
    try:
        for _ in leaves_of(part):
            pass
    except RecursionError:
        return True
    return False


def is_one_batch(batches: Any) -> bool:
    """Return whether this is one batch (a tensor, a mapping, a tuple of tensors), no list or loader of several."""
    if find_type(batches) is not None or isinstance(batches, str | bytes) or not isinstance(batches, Iterable):
        return True
    if isinstance(batches, tuple):
        return bool(batches) and all(isinstance(part, torch.Tensor) for part in batches)
    return isinstance(batches, torch.Tensor | Mapping)


def is_empty(batch: Any) -> bool:
    """Return whether it has no samples: ``None``, an empty list or mapping, or tensors of which none has rows."""
    if (registered := find_type(batch)) is not None:
        return registered.count(batch) == 0
    if batch is None or (isinstance(batch, list | tuple | Mapping) and not batch):
        return True
    with_rows = [tensor for tensor in tensors_of(batch) if tensor.ndim]
    return bool(with_rows) and not any(map(len, with_rows))


def check_values(batch: Any) -> None:
    """Raise InvalidArgument if a tensor has no values, or the ``take`` of a registered type ignores its indices."""
    if isinstance(batch, torch.Tensor):
        refuse_meta(batch)
    elif (registered := find_type(batch)) is not None:
        for tensor in registered.tensors(batch):
            refuse_meta(tensor)
        registered.check_take(batch)
    for _, child in fields_of(batch) or ():
        check_values(child)


def refuse_meta(tensor: torch.Tensor) -> None:
    """Raise InvalidArgument if a tensor of a batch is on the meta device."""
    if tensor.is_meta:
        raise InvalidArgument(
            f"a tensor of shape {tuple(tensor.shape)} in the batch is on the meta device and has no values to run: "
            f"pass real samples (predict() needs no values)"
        )


def _select(leaf: Leaf, rows: Rows, trim: Trim | None = None) -> Any:
    """Take rows of a leaf: a view where they are a range and nothing is trimmed."""
    path, value, kind = leaf
    if type(value) is torch.Tensor and type(rows) is range and trim is None:
        return value[rows.start : rows.stop]
    if kind in ("unclear", "open"):
        count = len(value)
        raise InvalidArgument(
            f"{path} has {count} entries, every tensor in it has {count} rows, and the batch has {count} samples: pass "
            f"another number of samples, or autobatch.batches.Samples({path}) or autobatch.batches.Fields({path}) in "
            f"its stead"
        )
    if (registered := find_type(value)) is not None:
        return registered.take_samples(value, rows)
    if is_sequence(value):
        return with_items(value, [value[row] for row in rows])
    dims = () if trim is None else trim.padding.dims.get(path, ())
    if trim is not None and dims:
        length = max(trim.length, 1)  # a tensor without positions is no input for most models
        cuts = [slice(None)] * value.ndim
        for dim in dims:
            is_right = trim.padding.side == "right"
            cuts[dim] = slice(length) if is_right else slice(max(value.shape[dim] - length, 0), None)
        value, rows = value[tuple(cuts)], [*rows]  # copied, so that steps get contiguous memory, as of a loader
    if isinstance(rows, range):
        return value[rows.start : rows.stop]
    if isinstance(value, torch.Tensor):
        return value.index_select(0, torch.tensor(rows, device=value.device))
    return value[rows]


def _as_leaves(part: Any) -> Any:
    """Cut the tensors off from the graph of the batch; samples in lists stay the user's."""
    if is_sequence(part):
        return part
    with torch.enable_grad():  # else no result requires a gradient
        return map_tensors(part, as_leaf)


def _grow(leaf: Leaf, n: int, count: int) -> Any:
    if n > count and isinstance(leaf.value, torch.Tensor) and find_type(leaf.value) is None:
        return _repeat_rows(leaf.value.detach(), n).requires_grad_(leaf.value.requires_grad)
    return _as_leaves(_select(leaf, range(n) if n <= count else [index % count for index in range(n)]))


def _repeat_rows(rows: torch.Tensor, n: int) -> torch.Tensor:
    have = rows.shape[0]
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(rows.ndim, torch.contiguous_format)
    is_last = rows.is_contiguous(memory_format=last) and not rows.is_contiguous()
    memory_format = last if is_last else torch.contiguous_format
    grown = torch.empty((n, *rows.shape[1:]), dtype=rows.dtype, device=rows.device, memory_format=memory_format)
    # Filled in place, not concatenated: a batch may be a large part of memory, and must not be there twice.
    whole = n - n % have
    grown[:whole].unflatten(0, (-1, have)).copy_(rows.expand(whole // have, *rows.shape))
    grown[whole:].copy_(rows[: n - whole])
    return grown


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
