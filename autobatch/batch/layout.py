"""Counts, cuts and grows a batch along its samples.

Covers ``Layout``, the one description from which all three follow. Does not cover how a batch is read
(``layout_rules``), containers (``tree``), types of the user's own (``registry``), or when a micro-batch is moved.

A part of a batch may read differently from the whole: two tags beside eight samples are shared, beside two samples they
are split. So do not count micro-batches, their sizes are known; or describe them ``like`` the whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from autobatch.batch.chosen_rows import choose_rows
from autobatch.batch.layout_rules import read
from autobatch.batch.list_rules import ROOT, ListReading
from autobatch.batch.registry import find_type
from autobatch.batch.tree import (
    TreeSpec,
    as_leaf,
    count_bytes,
    count_elements,
    count_rows,
    fields_of,
    is_sequence,
    leaves_of,
    map_tensors,
    tensors_of,
    with_fields,
    with_fresh_containers,
    with_items,
)
from autobatch.errors import InvalidArgument

__all__ = [
    "Layout",
    "count_bytes",
    "count_elements",
    "describe",
    "dims_of",
    "is_empty",
    "is_one_batch",
    "map_tensors",
    "tensors_of",
]


_KEY = attrgetter("shape", "device", "layout", "requires_grad", "is_nested")


class _Traits(NamedTuple):
    """What holds for all batches of one spec whose tensors have the same key.

    Attributes:
        key: Shape, device, layout, and whether a gradient is required and whether it is nested, of each tensor.
        rows: Of all tensors with dimensions, where they are dense and agree, else 0.
        home: ``Layout.home``.
        elements: Of all tensors together.
        are_rows: Whether each leaf is a tensor with dimensions.
    """

    key: list[Any]
    rows: int
    home: torch.device | None
    elements: int
    are_rows: bool


@dataclass(eq=False)  # not frozen: one is made in every step, and each field of a frozen one costs a call
class Layout:
    """How one batch divides into samples, found once by ``describe``.

    Attributes:
        batch: The batch it describes.
        count: How many samples it has.
        lists: What each list holds, by path.
        spec: Its containers, where they are plain ones; a later batch of the same spec is described in a few calls.
        leaves: The leaves of the spec, in order.
        home: The one device of all tensors of the spec; ``None`` if they are on several or one requires a gradient.
        traits: The very same object for a later batch with the same spec, shapes and devices; ``None`` without a spec.
    """

    batch: Any
    count: int
    lists: Mapping[str, ListReading]
    spec: TreeSpec | None = None
    leaves: Sequence[Any] = field(default=(), repr=False)
    home: torch.device | None = None
    traits: _Traits | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the batch, in order."""
        if self.spec is None:
            return [*tensors_of(self.batch)]
        return [*compress(self.leaves, map(isinstance, self.leaves, repeat(torch.Tensor)))]

    @property
    def elements(self) -> int:
        """Elements of all tensors and NumPy arrays together."""
        return count_elements(self.batch) if self.traits is None else self.traits.elements

    def without_batch(self) -> Layout:
        """How batches of this kind are read, without a reference to this one."""
        return Layout(None, 0, self.lists, self.spec, traits=self.traits)

    def split_leaves(self, start: int, sizes: Sequence[int]) -> Iterable[Sequence[Any]]:
        """The leaves of its spec, cut into parts of these sizes from a sample on: views that carry no graph."""
        if self.spec is None:
            return [()] * len(sizes)
        total = sum(sizes)
        if self.traits is not None and self.traits.are_rows and total == self.count:  # nearly always: in C alone
            views = map(torch.Tensor.detach, self.leaves)
            return zip(*map(torch.split_with_sizes, views, repeat(sizes)), strict=True)
        columns: list[Iterable[Any]] = []
        for leaf in self.leaves:
            if not isinstance(leaf, torch.Tensor):
                columns.append(repeat(leaf, len(sizes)))
            elif not leaf.ndim:
                columns.append([leaf.detach() for _ in sizes])
            else:
                rows = leaf.detach()
                if total != self.count:
                    rows = rows.narrow(0, start, total)
                columns.append(torch.split_with_sizes(rows, sizes))
        return zip(*columns, strict=True)

    def micro_batch(
        self,
        start: int,
        stop: int,
        leaves: Sequence[Any],
        move: Callable[[torch.Tensor], torch.Tensor],
        home: torch.device,
    ) -> Any:
        """Samples ``start`` to ``stop``, as ``split_leaves`` gave them, in new containers.

        Each tensor is a leaf on the device ``home``, to which ``move`` moves what is not there already.
        """
        if self.spec is None:
            taken = self.take(start, stop)
            return with_fresh_containers(map_tensors(taken, lambda leaf: _move_like(leaf, leaf.detach(), move)))
        if self.home != home:
            leaves = [_move_like(leaf, part, move) for leaf, part in zip(self.leaves, leaves, strict=True)]
        return tuple(leaves) if self.spec.pair_size else self.spec.unflatten(leaves)

    def take(self, start: int, stop: int) -> Any:
        """Samples ``start`` to ``stop`` (exclusive), as views; all samples are the batch itself.

        Of a registered type they are what its ``take`` returns, which may be copies. As ``spread`` and ``grow`` it
        raises InvalidArgument where a list can be read both as samples and as fields.
        """
        if not 0 <= start < stop <= self.count:
            raise InvalidArgument(f"samples {start} to {stop} of a batch of {self.count}: no such part")
        if stop - start == self.count:
            return self.batch
        return self._replace(self.batch, ROOT, lambda part: _entries(part, range(start, stop)))

    def views(self, start: int, stop: int) -> Any:
        """Samples ``start`` to ``stop`` as they lie in the user's memory, where that is not what ``take`` returns."""
        return self.take(start, stop)

    def pick(self, rows: list[int]) -> Any:
        """The samples at these indices, in this order, as new tensors."""
        return self._replace(self.batch, ROOT, lambda part: _entries(part, rows))

    def spread(self, n: int) -> Layout:
        """``n`` samples from everywhere, as new tensors: a batch may be sorted, or repeat with a period.

        Beyond its count each sample comes several times in a row, so that consecutive parts have different samples.
        """
        rows = choose_rows(n, self.count)
        return Layout(self._replace(self.batch, ROOT, lambda part: _pick_entries(part, rows)), n, self.lists)

    def grown(self, n: int) -> Layout:
        """The layout of ``grow(n)``, with its lists read as here."""
        return Layout(self.grow(n), n, self.lists)

    def grow(self, n: int) -> Any:
        """A batch of ``n`` samples: sample ``i`` is this batch's sample ``i`` modulo its count.

        Up to its own count tensors are views, beyond it new tensors of the same memory format; either way leaves, of
        which no gradient reaches the original. Samples in lists are repeated by reference.
        """
        if n < 1:
            raise InvalidArgument(f"a batch cannot have {n} samples: at least 1")
        return self._replace(self.batch, ROOT, lambda part: _repeat_entries(part, n, self.count))

    def _replace(self, node: Any, path: str, function: Callable[[Any], Any]) -> Any:
        """The same tree with ``function(part)`` for each part that has one entry a sample."""
        reading = self.lists.get(path)
        if reading == "unclear":
            raise InvalidArgument(
                f"{path} has {self.count} entries, every tensor in it has {self.count} rows, and the batch has "
                f"{self.count} samples: pass another number of samples, or autobatch.batches.Samples({path}) or "
                f"autobatch.batches.Fields({path}) in its stead"
            )
        if reading == "samples" or count_rows(node) is not None:
            return function(node)
        fields = fields_of(node)
        replaced = [self._replace(child, path + suffix, function) for suffix, child in fields or ()]
        return node if fields is None else with_fields(node, replaced)


def dims_of(layout: Layout) -> dict[str, int]:
    """Return the number of dimensions of each tensor of a batch, by path; tensors in lists of samples are left out."""
    found, waiting = dict[str, int](), [(ROOT, layout.batch)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, torch.Tensor):
            found[path] = node.ndim
        elif layout.lists.get(path) != "samples":
            waiting += [(path + suffix, child) for suffix, child in fields_of(node) or ()]
    return found


def describe(batch: Any, like: Layout | None = None, samples: int | None = None) -> Layout:
    """How this batch divides into samples, by the rules at the top of ``layout_rules``; raises what ``read`` does.

    Lists are read as in an earlier batch of the same kind (``like``), also where this one alone could be read
    otherwise. ``samples`` is how many samples the batch was made of, where that is known.
    """
    if like is not None and like.spec is not None:
        leaves: Any = []
        if like.spec.pair_size and type(batch) is tuple and [*map(type, batch)] == [torch.Tensor] * like.spec.pair_size:
            leaves = batch
        if leaves or like.spec.flatten(batch, leaves):
            traits = _read_traits(leaves, like.traits)
            if traits is not None and traits.rows:
                return Layout(batch, traits.rows, like.lists, like.spec, leaves, traits.home, traits)
    try:
        count, lists = read(batch, like.lists if like is not None else {}, samples)
    except RecursionError as error:
        endless = next((ROOT + suffix for suffix, part in fields_of(batch) or () if _is_endless(part)), ROOT)
        raise InvalidArgument(f"{endless} holds itself or is nested too deep: leave it out of the batch") from error
    spec, leaves = TreeSpec.of(batch) if {*lists.values()} <= {"fields"} else None, []
    if spec is None or not spec.flatten(batch, leaves) or (traits := _read_traits(leaves)) is None:
        return Layout(batch, count, lists)
    return Layout(batch, count, lists, spec, leaves, traits.home, traits)


def _is_endless(part: Any) -> bool:
    try:
        deque(leaves_of(part), maxlen=0)
    except RecursionError:
        return True
    return False


def is_one_batch(batches: Any) -> bool:
    """Whether this is one batch (such as a tensor, a mapping, a tuple of tensors), no list or loader of several."""
    if find_type(batches) is not None or isinstance(batches, str | bytes) or not isinstance(batches, Iterable):
        return True
    if isinstance(batches, tuple):
        return bool(batches) and all(isinstance(part, torch.Tensor) for part in batches)
    return isinstance(batches, torch.Tensor | Mapping)


def is_empty(batch: Any) -> bool:
    """Whether it has no samples: ``None``, an empty list or mapping, or tensors of which none has rows."""
    if (registered := find_type(batch)) is not None:
        return registered.count(batch) == 0
    if batch is None or (isinstance(batch, list | tuple | Mapping) and not batch):
        return True
    with_rows = [tensor for tensor in tensors_of(batch) if tensor.ndim]
    return bool(with_rows) and not any(map(len, with_rows))


def _read_traits(leaves: Sequence[Any], latest: _Traits | None = None) -> _Traits | None:
    """What holds for these leaves: ``latest`` where it does; ``None`` where a tensor's shape cannot be read."""
    tensors = [*compress(leaves, map(isinstance, leaves, repeat(torch.Tensor)))]
    try:
        key = [*map(_KEY, tensors)]
    except RuntimeError:  # a nested tensor of the strided layout
        return None
    if latest is not None and latest.key == key:
        return latest
    rows = {shape[0] for shape, *_ in key if shape}
    are_dense = all(layout is torch.strided and not is_nested for _, _, layout, _, is_nested in key)
    homes = {None if requires_grad else device for _, device, _, requires_grad, _ in key}
    return _Traits(
        key,
        rows=rows.pop() if are_dense and len(rows) == 1 else 0,
        home=homes.pop() if are_dense and len(homes) == 1 else None,
        elements=sum(map(torch.numel, tensors)),
        are_rows=len(tensors) == len(leaves) and all(shape for shape, *_ in key),
    )


def _move_like(leaf: Any, part: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    # A leaf of its own: the step may ask for its gradient, and none is accumulated in the user's batch.
    return move(part).requires_grad_(leaf.requires_grad) if isinstance(part, torch.Tensor) else part


def _entries(part: Any, rows: range | list[int]) -> Any:
    """Rows of what has one entry a sample: of tensors and arrays a view, if they are a range."""
    registered = find_type(part)
    if registered is not None:
        return registered.take_samples(part, rows)
    if is_sequence(part):
        return with_items(part, [part[row] for row in rows])
    return part[rows.start : rows.stop] if isinstance(rows, range) else part[rows]


def _pick_entries(part: Any, rows: range | list[int]) -> Any:
    """The same as leaves, but for samples in lists."""
    if is_sequence(part):
        return _entries(part, rows)
    with torch.enable_grad():  # else no result requires a gradient
        return map_tensors(_entries(part, rows), as_leaf)


def _repeat_entries(part: Any, n: int, count: int) -> Any:
    if n <= count:
        return _pick_entries(part, range(n))
    if isinstance(part, torch.Tensor) and find_type(part) is None:
        return _repeat_rows(part.detach(), n).requires_grad_(part.requires_grad)
    return _pick_entries(part, [index % count for index in range(n)])


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
