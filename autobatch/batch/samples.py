"""Describes a batch as samples: counts them, takes some of them, and grows the batch to any number.

``describe`` takes a batch apart into leaves, and asks ``rules`` about lists that may hold samples or fields. The result
is a ``Layout``: the batch, its leaves and its number of samples, of which any rows can be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autobatch.batch.registry import ListReading, find_type
from autobatch.batch.rules import count_samples, decide_lists
from autobatch.batch.tree import (
    ROOT,
    Container,
    Leaf,
    as_leaf,
    fields_of,
    leaves_of,
    map_tensors,
    take_apart,
    tensors_of,
    with_fields,
    with_items,
)
from autobatch.errors import InvalidArgument
from autobatch.planning.division import choose_rows, spread_evenly
from autobatch.records import Padding

Rows = range | list[int]


class Trim(NamedTuple):
    """The part of padded dimensions that is left of some samples."""

    padding: Padding
    length: int


class Layout:
    """A batch, and how it divides into samples; made by ``describe``.

    Attributes:
        lists: The reading of each list, by path; later batches are read in the same way.
        leaves: The parts that are taken apart no further, in order.
        containers: ``None`` for each leaf, and after its parts each container with the number of those.
    """

    def __init__(
        self, batch: Any, count: int, lists: Mapping[str, ListReading], leaves: Sequence[Leaf] | None = None
    ) -> None:
        """Take a batch apart; with ``leaves`` it is one container of these."""
        self.batch, self.count, self.lists = batch, count, lists
        self.leaves: Sequence[Leaf] = leaves or ()
        self.containers: Sequence[Container | None] = [*[None] * len(self.leaves), (batch, len(self.leaves))]
        if leaves is None:
            self.leaves, self.containers = take_apart(batch, lists)

    def tensors(self) -> list[torch.Tensor]:
        values = [leaf.value for leaf in self.leaves]
        return [one for value in values for one in ([value] if isinstance(value, torch.Tensor) else tensors_of(value))]

    def select(self, rows: Rows, trim: Trim | None = None) -> list[Any]:
        """List the leaves with these rows only: views where the rows are neighbours and nothing is trimmed."""
        if trim is None and rows == range(self.count):  # also of lists that may be either
            return [leaf.value for leaf in self.leaves]
        return [_select(leaf, rows, trim) for leaf in self.leaves]

    def split(self, sizes: Sequence[int]) -> Sequence[Sequence[Any] | None]:
        """List the leaves of parts of these sizes that make up the batch; ``None`` for each unless all are views.

        One call splits a tensor in a third of the time that one call for each part takes.
        """
        columns: list[Sequence[Any]] = []
        for _, value, kind in self.leaves:
            if kind == "rows" and type(value) is torch.Tensor:
                columns.append(value.detach().split(sizes))
            elif kind == "shared":
                columns.append([value] * len(sizes))
            else:
                return [None] * len(sizes)
        return [*zip(*columns, strict=True)]

    def rebuild(self, values: Iterable[Any]) -> Any:
        built: list[Any] = []
        leaves = iter(values)
        for container in self.containers:
            if container is None:
                built.append(next(leaves))
            else:
                node, size = container
                parts = built[len(built) - size :]
                del built[len(built) - size :]
                if type(node) is dict:
                    built.append(dict(zip(node, parts, strict=True)))
                else:
                    built.append(type(node)(parts) if type(node) in (list, tuple) else with_fields(node, parts))
        return built[0]

    def part(self, rows: Rows, trim: Trim | None = None) -> Layout:
        return Layout(self.rebuild(self.select(rows, trim)), len(rows), self.lists)

    def take(self, rows: Sequence[int]) -> Any:
        """Take the samples at these indices: views where they are neighbours; all samples are the batch itself."""
        if not rows or min(rows) < 0 or max(rows) >= self.count:
            raise InvalidArgument(f"samples {rows} of a batch of {self.count}: no such part")
        if rows == range(self.count):
            return self.batch
        return self.part(rows if isinstance(rows, range) and rows.step == 1 else [*rows]).batch

    def spread(self, n: int, order: Sequence[int] | None = None) -> Layout:
        """Take ``n`` samples from everywhere, as new tensors: a batch may be sorted, or repeat with a period.

        Beyond its count each sample comes several times in a row. With an ``order`` of the samples they stay in it.
        """
        rows = choose_rows(n, self.count) if order is None else [order[index] for index in spread_evenly(n, self.count)]
        return self._cut_off(self.select(rows), n)

    def grown(self, n: int) -> Layout:
        """Return a batch of ``n`` samples: sample ``i`` is this batch's sample ``i`` modulo its count.

        Up to its own count tensors are views, beyond it new tensors of the same memory format; either way leaves, of
        which no gradient reaches the original. Samples in lists are repeated by reference.
        """
        if n < 1:
            raise InvalidArgument(f"a batch cannot have {n} samples: at least 1")
        values = []
        rows = range(n) if n <= self.count else [index % self.count for index in range(n)]
        for leaf in self.leaves:
            if n > self.count and leaf.kind == "rows" and isinstance(leaf.value, torch.Tensor):
                values.append(_repeat_rows(leaf.value, n))
            else:
                values.append(_select(leaf, rows))
        return self._cut_off(values, n)

    def _cut_off(self, values: Sequence[Any], n: int) -> Layout:
        """Return a batch of leaves to which no gradient of the batch belongs; samples in lists stay the user's."""
        with torch.enable_grad():  # else no result requires a gradient
            cut = [
                map_tensors(value, as_leaf) if leaf.kind in ("rows", "registered") else value
                for leaf, value in zip(self.leaves, values, strict=True)
            ]
        return Layout(self.rebuild(cut), n, self.lists)


class MicroBatch(NamedTuple):
    """Samples that run together."""

    batch: Layout
    rows: Rows
    trim: Trim | None  # the part of padded dimensions that is left
    size: int
    scale: int  # the least size with which ``divide`` makes it: ``size``, but for samples by length
    weights: Mapping[str, float]  # count of its samples in each term's mean; the name "" is every term
    counts: bool = True  # whether any term is a mean over something in it
    views: Sequence[Any] | None = None  # the leaves of its samples, where they were split already

    def samples(self) -> Any:
        return self.batch.rebuild(self.batch.select(self.rows, self.trim))

    def take(self, move: Callable[[torch.Tensor], torch.Tensor], home: torch.device) -> Any:
        """Return its samples on the device ``home``, in new containers.

        Each tensor is a leaf, so that the step may ask for its gradient and none reaches the user's batch.
        """
        moved = []
        views = self.views if self.trim is None else None
        parts = self.batch.select(self.rows, self.trim) if views is None else views
        for leaf, part in zip(self.batch.leaves, parts, strict=True):
            if isinstance(leaf.value, torch.Tensor):
                own = part.detach()
                own = own if own.device == home else move(own)
                moved.append(own.requires_grad_() if leaf.value.requires_grad else own)
            elif leaf.kind == "shared":
                moved.append(part)
            else:
                moved.append(map_tensors(part, lambda one: move(one.detach()).requires_grad_(one.requires_grad)))
        return self.batch.rebuild(moved)


class Outline(NamedTuple):
    """The form of a tuple, list or dict of tensors; the next such batch is described by a look at its tensors alone."""

    kind: Any  # ``tuple``, ``list`` or ``dict``
    keys: Sequence[Any]  # of a dict
    paths: Sequence[str]
    lists: Mapping[str, ListReading]

    @classmethod
    def of(cls, layout: Layout) -> Outline | None:
        """Return the form of a batch; ``None`` of one that has another."""
        batch, paths = layout.batch, [leaf.path for leaf in layout.leaves]
        if type(batch) not in (tuple, list, dict) or not batch or len(batch) != len(paths):
            return None
        if any(leaf.kind != "rows" for leaf in layout.leaves):  # a list of one sample has one leaf, too: itself
            return None
        outline = cls(type(batch), [*batch] if type(batch) is dict else (), paths, layout.lists)
        return outline if outline.describe(batch) else None

    def describe(self, batch: Any) -> Layout | None:
        """Describe another batch as ``describe`` does; ``None`` if it has another form."""
        if type(batch) is not self.kind or len(batch) != len(self.paths) or (self.keys and [*batch] != self.keys):
            return None
        values: Sequence[Any] = [*batch.values()] if self.keys else batch
        if any(type(value) is not torch.Tensor or value.is_nested for value in values):
            return None
        counts = {value.shape[0] if value.layout is torch.strided and value.ndim else 0 for value in values}
        if len(counts) > 1 or 0 in counts:
            return None
        leaves = [Leaf(path, value, "rows") for path, value in zip(self.paths, values, strict=True)]
        return Layout(batch, counts.pop(), self.lists, leaves)


def describe(batch: Any, lists: Mapping[str, ListReading] | None = None, samples: int | None = None) -> Layout:
    """Find how a batch divides into samples, by the rules at the top of ``rules``.

    ``lists`` has the readings of lists in an earlier batch, which hold here too. ``samples`` is the number of samples
    from which the batch was made, if known.
    """
    lists = {path: reading for path, reading in (lists or {}).items() if reading != "unclear"}
    try:
        layout = Layout(batch, 0, lists)
        while any(leaf.kind == "open" for leaf in layout.leaves):
            lists = {**lists, **decide_lists(layout.leaves, batch, samples)}
            layout = Layout(batch, 0, lists)  # lists of fields are taken apart further
        layout.count = count_samples(layout.leaves, batch)
        return layout
    except RecursionError as error:
        endless = next((ROOT + suffix for suffix, part in fields_of(batch) or () if _is_endless(part)), ROOT)
        raise InvalidArgument(f"{endless} holds itself or is nested too deep: leave it out of the batch") from error


def _is_endless(part: Any) -> bool:
    try:
        for _ in leaves_of(part):
            pass
    except RecursionError:
        return True
    return False


def _select(leaf: Leaf, rows: Rows, trim: Trim | None = None) -> Any:
    path, value, kind = leaf
    if kind == "shared":
        return value
    if kind in ("unclear", "open"):
        count = len(value)
        raise InvalidArgument(
            f"{path} has {count} entries, every tensor in it has {count} rows, and the batch has {count} samples: pass "
            f"another number of samples, or autobatch.batches.Samples({path}) or autobatch.batches.Fields({path}) in "
            f"its stead"
        )
    if kind == "registered" and (registered := find_type(value)) is not None:
        return registered.take_samples(value, rows)
    if kind == "samples":
        return with_items(value, [value[row] for row in rows])
    if trim is not None and path in trim.padding.dims:
        length = max(trim.length, 1)  # a tensor without positions is no input for most models
        for dim in trim.padding.dims[path]:
            extra = max(value.shape[dim] - length, 0) if trim.padding.side == "left" else 0
            value = value[(slice(None),) * dim + (slice(extra, extra + length),)]
        rows = [*rows]  # copied, so that steps get contiguous memory, as of a loader
    if isinstance(rows, range):
        return value[rows.start : rows.stop]
    if isinstance(value, torch.Tensor):
        return value.index_select(0, torch.tensor(rows, device=value.device))
    return value[rows]


def _repeat_rows(rows: torch.Tensor, n: int) -> torch.Tensor:
    have = rows.shape[0]
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(rows.ndim, torch.contiguous_format)
    is_last = rows.is_contiguous(memory_format=last) and not rows.is_contiguous()
    memory_format = last if is_last else torch.contiguous_format
    grown = torch.empty((n, *rows.shape[1:]), dtype=rows.dtype, device=rows.device, memory_format=memory_format)
    # Filled in place, not concatenated: a batch may be a large part of memory, and must not be there twice.
    whole = n - n % have
    grown[:whole].unflatten(0, (-1, have)).copy_(rows.detach().expand(whole // have, *rows.shape))
    grown[whole:].copy_(rows.detach()[: n - whole])
    return grown.requires_grad_(rows.requires_grad)


def dims_of(layout: Layout) -> dict[str, int]:
    return {leaf.path: leaf.value.ndim for leaf in layout.leaves if isinstance(leaf.value, torch.Tensor)}


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
    return bool(with_rows) and not any(len(tensor) for tensor in with_rows)


def check_values(layout: Layout) -> None:
    """Raise InvalidArgument if a tensor has no values, or the ``take`` of a registered type ignores its indices."""
    for tensor in layout.tensors():
        refuse_meta(tensor)
    for leaf in layout.leaves:
        if leaf.kind == "registered" and (registered := find_type(leaf.value)) is not None:
            registered.check_take(leaf.value)


def refuse_meta(tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise InvalidArgument(
            f"a tensor of shape {tuple(tensor.shape)} in the batch is on the meta device and has no values to run: "
            f"pass real samples (predict() needs no values)"
        )
