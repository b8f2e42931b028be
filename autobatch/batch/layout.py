"""Counts a batch along its samples, takes some of them, and grows it to any number.

A part of a batch may read differently from the whole: two tags beside eight samples are shared, beside two samples they
are split. So parts are not counted: their sizes are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch.utils import _pytree as pytree

from autobatch.batch.layout_rules import read
from autobatch.batch.list_rules import ROOT, ListReading
from autobatch.batch.registry import find_type
from autobatch.batch.tree import (
    as_leaf,
    count_rows,
    fields_of,
    is_sequence,
    leaves_of,
    map_tensors,
    tensors_of,
    with_fields,
    with_fresh_containers,
    with_items,
    with_new_fields,
)
from autobatch.errors import InvalidArgument
from autobatch.records import Padding

_GOLDEN = (5**0.5 - 1) / 2
_VALUES = (type(None), bool, int, float, complex, str, bytes)
_TRAITS = attrgetter("shape", "device", "dtype", "layout", "requires_grad", "is_nested")

Kind = Literal["rows", "samples", "unclear", "shared"]
Rows = range | list[int]


class Leaf(NamedTuple):
    """One part of a batch that is taken apart no further.

    Attributes:
        path: Its place, such as ``batch["x"]``.
        value: A tensor, an array, an object of a registered type, a list of samples, or anything else.
        kind: ``"rows"`` and ``"samples"`` have one entry a sample, ``"shared"`` is the same for all samples;
            ``"unclear"`` could be either, and is refused where the batch is divided.
    """

    path: str
    value: Any
    kind: Kind


class Trim(NamedTuple):
    """The part of padded dimensions that is left of some samples."""

    padding: Padding
    length: int


class _Flat(NamedTuple):
    """One plain container, as nearly every batch is: pytree takes longer than all else that is done for a step."""

    container: type[Any]
    size: int
    keys: list[Any] | None


Spec = _Flat | pytree.TreeSpec


class Form(NamedTuple):
    """The properties that batches of the same containers, shapes and devices share.

    Attributes:
        spec: The containers.
        key: Type, shape, device and so on of each leaf.
        paths: The path of each leaf.
        kinds: The kind of each leaf.
        samples: Number of samples.
        home: The one device of all tensors; ``None`` where there are several, or one requires a gradient.
    """

    spec: Spec
    key: Sequence[Any]
    paths: Sequence[str]
    kinds: Sequence[Kind]
    samples: int
    home: torch.device | None


class Layout:
    """How one batch divides into samples, found by ``describe``.

    Attributes:
        batch: The batch.
        count: Number of samples.
        lists: The reading of each list, by path.
        form: The properties that later batches may share: then they have the very same object. ``None`` where the batch
            holds more than plain containers of tensors, numbers and texts.
    """

    def __init__(self, batch: Any, count: int, lists: Mapping[str, ListReading], form: Form | None = None) -> None:
        """Note how a batch divides."""
        self.batch, self.count, self.lists, self.form = batch, count, lists, form

    @cached_property
    def leaves(self) -> list[Leaf]:
        """The leaves, in order."""
        return self._flat[0]

    @cached_property
    def containers(self) -> Any:
        """The containers around the leaves, each with those in it; ``None`` where the batch is a leaf."""
        return self._flat[1]

    @cached_property
    def _flat(self) -> tuple[list[Leaf], Any]:
        leaves: list[Leaf] = []
        return leaves, _flatten(self.batch, ROOT, self.lists, leaves)

    def tensors(self) -> list[torch.Tensor]:
        """List every tensor of the batch, in order."""
        if self.form is None:
            return [*tensors_of(self.batch)]
        return [leaf.value for leaf in self.leaves if isinstance(leaf.value, torch.Tensor)]

    @property
    def home(self) -> torch.device | None:
        """The one device of all tensors; ``None`` where that is not known, or one requires a gradient."""
        return None if self.form is None else self.form.home

    def without_batch(self) -> Layout:
        """Return how batches of this kind are read, without a reference to this one."""
        return Layout(None, 0, self.lists, self.form)

    def select(self, rows: Rows, trim: Trim | None = None) -> list[Any]:
        """List the leaves with these rows only: views where the rows are neighbours and nothing is trimmed.

        Raises:
            InvalidArgument: A list can be read both as samples and as fields.
        """
        if trim is None and rows == range(self.count):
            return [leaf.value for leaf in self.leaves]
        return [leaf.value if leaf.kind == "shared" else _select(leaf, rows, trim) for leaf in self.leaves]

    def split(self, sizes: Sequence[int]) -> list[list[Any]] | None:
        """List the leaves of consecutive parts, all at once, which is faster; ``None`` where that cannot be done."""
        if self.form is None or self.form.home is None or sum(sizes) != self.count:
            return None
        columns: list[Sequence[Any]] = []
        for _, value, kind in self.leaves:
            if kind == "rows":
                columns.append(torch.split_with_sizes(value, sizes))
            else:
                columns.append([value.detach() if isinstance(value, torch.Tensor) else value for _ in sizes])
        return [list(part) for part in zip(*columns, strict=True)]

    def views(self, rows: Rows) -> Iterable[Any]:
        """List the leaves with these rows in the user's memory, where they are views of it."""
        return self.select(rows)

    def rebuild(self, values: Sequence[Any], *, fresh: bool = False) -> Any:
        """Return the batch with these leaves; with ``fresh`` in new containers even where nothing changes."""
        if self.form is not None and fresh:
            return _put_together(self.form.spec, values)
        return _unflatten(self.containers, iter(values), with_new_fields if fresh else with_fields)

    def take(self, start: int, stop: int) -> Any:
        """Take samples ``start`` to ``stop`` (exclusive) as views; all samples are the batch itself.

        A registered type's own ``take`` may return copies. As ``spread`` and ``grow`` it raises InvalidArgument where a
        list can be read both as samples and as fields.
        """
        if not 0 <= start < stop <= self.count:
            raise InvalidArgument(f"samples {start} to {stop} of a batch of {self.count}: no such part")
        return self.batch if stop - start == self.count else self.rebuild(self.select(range(start, stop)))

    def pick(self, rows: list[int]) -> Any:
        """Take the samples at these indices, in this order, as new tensors."""
        return self.rebuild(self.select(rows))

    def spread(self, n: int, order: Sequence[int] | None = None) -> Layout:
        """Take ``n`` samples from everywhere, as new tensors: a batch may be sorted, or repeat with a period.

        Beyond its count each sample comes several times in a row, so that consecutive parts have different samples.
        With an ``order`` of the samples they are spread over that, and stay in it.
        """
        rows = choose_rows(n, self.count) if order is None else [order[index] for index in spread_evenly(n, self.count)]
        return Layout(self._map_divided(lambda leaf: _as_leaves(_select(leaf, rows))), n, self.lists)

    def grown(self, n: int) -> Layout:
        """Return the layout of ``grow(n)``, with its lists read as here."""
        return Layout(self.grow(n), n, self.lists)

    def grow(self, n: int) -> Any:
        """Return a batch of ``n`` samples: sample ``i`` is this batch's sample ``i`` modulo its count.

        Up to its own count tensors are views, beyond it new tensors of the same memory format; either way leaves, of
        which no gradient reaches the original. Samples in lists are repeated by reference.
        """
        if n < 1:
            raise InvalidArgument(f"a batch cannot have {n} samples: at least 1")
        return self._map_divided(lambda leaf: _grow(leaf, n, self.count))

    def _map_divided(self, function: Callable[[Leaf], Any]) -> Any:
        return self.rebuild([leaf.value if leaf.kind == "shared" else function(leaf) for leaf in self.leaves])


def describe(batch: Any, like: Layout | None = None, samples: int | None = None) -> Layout:
    """Find how this batch divides into samples, by the rules at the top of ``layout_rules``.

    Lists are read as in an earlier batch of the same kind (``like``), also where this one alone could be read
    otherwise. ``samples`` is how many samples the batch was made of, where that is known.

    Raises:
        InvalidArgument: It has no number of samples, or cannot be divided.
    """
    try:
        if (
            like is not None
            and like.form is not None
            and (layout := _describe_again(batch, like, like.form)) is not None
        ):
            return layout
        count, lists = read(batch, like.lists if like is not None else {}, samples)
    except RecursionError as error:
        endless = next((ROOT + suffix for suffix, part in fields_of(batch) or () if _is_endless(part)), ROOT)
        raise InvalidArgument(f"{endless} holds itself or is nested too deep: leave it out of the batch") from error
    layout = Layout(batch, count, lists)
    layout.form = _make_form(layout)
    return layout


def _describe_again(batch: Any, like: Layout, form: Form) -> Layout | None:
    """Describe a batch of the same containers as an earlier one; ``None`` where it has to be read by the rules."""
    values = _take_apart(form.spec, batch)
    found = None if values is None else _find_form(form, values)
    if values is None or found is None:
        return None
    layout = Layout(batch, found.samples, like.lists, found)
    layout.leaves = [*map(Leaf, found.paths, values, found.kinds)]
    return layout


def _find_flat(batch: Any, values: Sequence[Any]) -> _Flat | None:
    if type(batch) not in {tuple, list, dict}:
        return None
    flat = _Flat(type(batch), len(batch), [*batch] if type(batch) is dict else None)
    children = _take_apart(flat, batch) or ()
    are_leaves = len(children) == len(values) and all(one is other for one, other in zip(children, values, strict=True))
    return flat if are_leaves else None


def _take_apart(spec: Spec, batch: Any) -> Sequence[Any] | None:
    """List the leaves of a batch in the same containers; ``None`` where they are others."""
    if not isinstance(spec, _Flat):
        values, found = pytree.tree_flatten(batch)
        return values if found == spec else None
    if type(batch) is not spec.container or len(batch) != spec.size:
        return None
    if spec.keys is None:
        return batch  # type: ignore[no-any-return]
    return [*batch.values()] if [*batch] == spec.keys else None


def _put_together(spec: Spec, values: Sequence[Any]) -> Any:
    if not isinstance(spec, _Flat):
        return pytree.tree_unflatten(values, spec)
    return spec.container(values) if spec.keys is None else dict(zip(spec.keys, values, strict=True))


def _find_form(form: Form, values: Sequence[Any]) -> Form | None:
    """Return the form of a later batch of the same containers, if they hold the same kinds of values."""
    key = _read_key(values)
    if key == form.key:
        return form
    if key is None or not all(map(_is_plain, values)):
        return None
    kinds: list[Kind] = ["rows" if type(value) is torch.Tensor and value.ndim else "shared" for value in values]
    counts = {value.shape[0] for value, kind in zip(values, kinds, strict=True) if kind == "rows"}
    if len(counts) != 1 or 0 in counts:
        return None
    return Form(form.spec, key, form.paths, kinds, counts.pop(), _find_home(values))


def _make_form(layout: Layout) -> Form | None:
    """Return the form of a batch in plain containers, without lists of samples; ``None`` of others."""
    if not {*layout.lists.values()} <= {"fields"}:
        return None
    values, spec = pytree.tree_flatten(layout.batch)
    leaves = layout.leaves
    is_same = len(leaves) == len(values) and all(one.value is other for one, other in zip(leaves, values, strict=True))
    key = _read_key(values)
    if key is None or not is_same or not all(map(_is_plain, values)):
        return None
    paths, kinds = [leaf.path for leaf in leaves], [leaf.kind for leaf in leaves]
    return Form(_find_flat(layout.batch, values) or spec, key, paths, kinds, layout.count, _find_home(values))


def _find_home(values: Sequence[Any]) -> torch.device | None:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    homes = {None if tensor.requires_grad else tensor.device for tensor in tensors}
    return homes.pop() if len(homes) == 1 else None


def _read_key(values: Sequence[Any]) -> list[Any] | None:
    """List what is compared of each leaf; ``None`` where a tensor's shape cannot be read."""
    try:
        return [_TRAITS(value) if type(value) is torch.Tensor else type(value) for value in values]
    except RuntimeError:  # a nested tensor of the strided layout
        return None


def _is_plain(value: Any) -> bool:
    if type(value) is torch.Tensor:
        return value.layout is torch.strided and not value.is_nested
    return type(value) in _VALUES


def _flatten(node: Any, path: str, lists: Mapping[str, ListReading], leaves: list[Leaf]) -> Any:
    """Append the leaves in order; returns the containers around them, ``None`` for a leaf."""
    reading = lists.get(path, "fields") if is_sequence(node) else "fields"
    if reading != "fields":
        leaves.append(Leaf(path, node, reading))
        return None
    has_rows = count_rows(node) is not None
    fields = None if has_rows else fields_of(node)
    if fields is None:
        leaves.append(Leaf(path, node, "rows" if has_rows else "shared"))
        return None
    return node, [_flatten(child, path + suffix, lists, leaves) for suffix, child in fields]


def _unflatten(containers: Any, values: Iterator[Any], make: Callable[[Any, Sequence[Any]], Any]) -> Any:
    if containers is None:
        return next(values)
    node, children = containers
    return make(node, [_unflatten(child, values, make) for child in children])


def dims_of(layout: Layout) -> dict[str, int]:
    """Return the number of dimensions of each tensor of a batch, by path; tensors in lists of samples are left out."""
    return {leaf.path: leaf.value.ndim for leaf in layout.leaves if isinstance(leaf.value, torch.Tensor)}


def _is_endless(part: Any) -> bool:
    try:
        deque(leaves_of(part), maxlen=0)
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


def move_leaf(leaf: Leaf, part: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a part of a leaf on a device; each tensor of it is a leaf without a graph.

    The step may ask for its gradient, and none is accumulated in the user's batch.
    """
    if isinstance(part, torch.Tensor) and isinstance(leaf.value, torch.Tensor):
        return move(part.detach()).requires_grad_(leaf.value.requires_grad)
    if leaf.kind == "shared":
        return part
    return with_fresh_containers(map_tensors(part, lambda one: move(one.detach()).requires_grad_(one.requires_grad)))


def _select(leaf: Leaf, rows: Rows, trim: Trim | None = None) -> Any:
    """Take rows of a leaf with one entry a sample: a view where they are a range and nothing is trimmed."""
    path, value, kind = leaf
    if kind == "unclear":
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


def choose_rows(n: int, count: int) -> list[int]:
    """Choose ``n`` of ``count`` samples that show what all are like, in order; beyond the count each several times.

    Samples that belong together must be chosen together, or they do not show it. So four or more are rows 2i and
    2i + 1. If the batch is large enough, half of them are half a batch further on (of an odd half, one of the two).
    """
    if not 4 <= n < count:
        return [index * count // n for index in range(n)]
    pairs, of_half = (n + 1) // 2, count // 4
    if (pairs + 1) // 2 <= of_half:
        firsts = [2 * pair for pair in spread_evenly((pairs + 1) // 2, of_half)]
        firsts += [count // 4 * 2 + first for first in firsts]
    else:
        firsts = [2 * pair for pair in spread_evenly(pairs, count // 2)]
    return [first + side for first in firsts for side in (0, 1)][:n]


def spread_evenly(n: int, count: int) -> list[int]:
    """Choose ``n`` of the indices below ``count``, one from each of ``n`` equal ranges, the first among them.

    The distance is not fixed: samples that repeat with a period (one of each class in turn) could all be the same. The
    golden ratio places each index in its range, since its multiples are spread over 0 to 1 without a period. If the
    distance still varies, each index has another remainder when divided by ``n``: a period of ``n`` is seen whole.
    """
    bounds = [*pairwise(index * count // n for index in range(n + 1))]
    anywhere = [low + int(index * _GOLDEN % 1 * (high - low)) for index, (low, high) in enumerate(bounds)]
    unlike = [_move(row, bounds[index], (index - row) % n, n) for index, row in enumerate(anywhere)]
    distances = {after - before for before, after in pairwise(unlike)}
    return anywhere if len(distances) == 1 < n - 1 else unlike


def _move(row: int, bounds: tuple[int, int], distance: int, back: int) -> int:
    """Return ``distance`` rows on, or ``back`` from there, wherever that is inside its range."""
    choices = (row + distance, row + distance - back)
    return next((choice for choice in choices if bounds[0] <= choice < bounds[1]), row)
