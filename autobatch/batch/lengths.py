"""Cuts by length: reads how long samples are and which dimensions are padded, and sorts samples.

The padded length is the one size, of dimensions after the first, that no sample exceeds. Dimensions of that size are
found in the example once. They count as padded only if the values show it: beyond a sample's length a padded tensor has
one value, or the same values in each sample (positions). Else the message says which dimensions to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch

from autobatch._arguments import is_function_of
from autobatch._formatting import name_type, show_value
from autobatch.batch.cut import Group, Lengths
from autobatch.batch.samples import Layout, MicroBatch, Trim, describe
from autobatch.batch.tree import call_read_only, is_array
from autobatch.errors import InvalidArgument
from autobatch.records import Padding, SizeAtLength

LengthOf = Callable[[Any], Any]
"""``length_of(batch)``: one whole number for each sample, in order: a tensor, an array or a list."""

_EXAMPLE = 'such as lambda batch: batch["attention_mask"].sum(1)'
Side = Literal["right", "left"]
_SIDES: tuple[Side, ...] = ("right", "left")


@dataclass(frozen=True)
class ByLength:
    """A cut by length; made by ``autobatch.by_length``."""

    length_of: Any  # a LengthOf; in ``map`` also one length a sample
    dims: Mapping[str, int | Sequence[int]] | None = None
    padding: Side | None = None

    def read(self, batch: Any, count: int) -> list[int]:
        """Read the length of each sample; raises InvalidArgument where the function gave something else."""
        return read_answer(call_read_only("length_of", self.length_of, batch), count)


def read_by_length(cut: Any) -> ByLength | None:
    """Return what was given as ``cut=`` if it is by length; ``None`` for a function of the user's, or none."""
    if isinstance(cut, ByLength):
        if not is_function_of(cut.length_of, 1):
            _refuse_length_of(cut.length_of)
        return cut
    if cut is not None and (cut is by_length or not is_function_of(cut, 2)):
        raise InvalidArgument(
            f"cut= is {show_value(cut)}, which cannot be called with a batch and a size: pass "
            f"autobatch.by_length(length_of), or cut(batch, largest) -> lists of sample indices"
        )
    return None


def _refuse_length_of(length_of: Any) -> NoReturn:
    raise InvalidArgument(
        f"by_length({show_value(length_of)}): length_of cannot be called with a batch; pass length_of(batch) -> one "
        f"length a sample"
    )


def by_length(
    length_of: LengthOf | Sequence[int],
    dims: Mapping[str, int | Sequence[int]] | None = None,
    padding: Side | None = None,
) -> ByLength:
    """Let samples of similar length run together, without the padding that none of them needs.

    Pass it as ``cut=`` to ``fit`` and to ``Runner``. ``fit`` finds how many samples of each of a few lengths run
    together. Each step sorts its samples, divides them by that, and trims each micro-batch to its longest sample. The
    gradient stays the same.

    Args:
        length_of: ``length_of(batch)`` gives one whole number for each sample: a 1-dim tensor, an array or a list. In
            ``map`` also ``length_of(sample)``, or one whole number a sample in a list.
        dims: The dimension, or dimensions, with the padded length of each padded tensor, by its path:
            ``{'batch["inputs"]': 1, 'batch["mask"]': (1, 2)}``. Tensors that are left out are not trimmed. ``None``:
            they are found in the example batch.
        padding: ``"right"`` where padding comes after a sample's own values, ``"left"`` where before; ``None``: found
            in the example batch.

    Raises:
        InvalidArgument: An argument is of a wrong type.
    """
    is_list = hasattr(length_of, "__len__") and not isinstance(length_of, str | bytes | Mapping)
    if not (is_list or is_function_of(length_of, 1)):
        _refuse_length_of(length_of)
    if padding not in (None, "right", "left"):
        raise InvalidArgument(f"padding={show_value(padding)}: pass 'right', 'left' or None")
    if not isinstance(dims, Mapping | None):
        raise InvalidArgument(
            f"dims={show_value(dims)}: pass dimensions by path, such as {{'batch[\"inputs\"]': 1}}, or None"
        )
    return ByLength(length_of, dims, padding)


@dataclass(frozen=True)
class PlannedLengths:
    """Divides the batches of a runner by length, as its plan says."""

    cut: ByLength
    sizes: tuple[SizeAtLength, ...]  # how many samples may run together, by length
    padding: Padding
    trims_to_edges: bool = False  # to lengths that were tried, so that there are few shapes to compile

    def __call__(self, layouts: Sequence[Layout], largest: int = 0) -> list[Group]:
        """Make each batch a group, its samples in order of their lengths."""
        groups = []
        for layout in layouts:
            values, longest = self.cut.read(layout.batch, layout.count), self.sizes[-1].length
            if max(values) > longest:
                raise InvalidArgument(
                    f"a sample is {max(values)} long, and the longest that fit() tried is {longest}: nothing untried "
                    f"is run; cut the sample, or give fit() an example batch with the longest sample"
                )
            groups.append(self.sort(layout, values))
        return groups

    def sort(self, layout: Layout, values: Sequence[int]) -> Group:
        if layout.count > 1:
            layout.take(range(1))  # raises where a list can be read in two ways
        padded, rows = padded_length(layout, self.padding, values), sort_rows(values)
        ordered = [values[row] for row in rows]
        trims = [self._trim(length, padded) for length in ordered]
        return Group(layout, rows, Lengths(ordered, trims, self.sizes, self.cut.read))

    def _trim(self, length: int, padded: int) -> Trim | None:
        if self.trims_to_edges:
            length = min((size.length for size in self.sizes if size.length >= length), default=length)
        return Trim(self.padding, length) if self.padding.dims and length < padded else None


def sort_rows(values: Sequence[int]) -> list[int]:
    return sorted(range(len(values)), key=lambda row: -values[row])


def check_trimmed(lengths: Lengths, part: MicroBatch, values: Sequence[int], samples: Any) -> None:
    """Raise InvalidArgument if a sample of a trimmed micro-batch is of another length than in ``values``.

    Then the padding is on the other side, or lengths count positions of padding too.
    """
    for before, after in zip(values, lengths.read(samples, part.size), strict=True):
        if max(before, 1) != max(after, 1) and part.trim is not None:
            raise InvalidArgument(
                f"length_of() gives {after} for a sample, and gave {before} before its padding was trimmed on the "
                f"{part.trim.padding.side}: leave padding out of the count, or pass autobatch.by_length(length_of, "
                f"padding='left') if padding comes first"
            )


@dataclass(frozen=True)
class SamplesByLength:
    """The samples of an example batch, from which trials of any length are made."""

    example: Layout
    values: Sequence[int]  # the length of each sample
    padding: Padding
    longest: int  # the padded length; for samples in lists the longest one's length

    @classmethod
    def read(cls, example: Layout, cut: ByLength) -> SamplesByLength:
        """Read lengths and padding, and check by three samples that trimming leaves their lengths."""
        values = cut.read(example.batch, example.count)
        padding = find_padding(example, cut, values)
        group = PlannedLengths(cut, (), padding).sort(example, values)
        assert group.lengths is not None  # noqa: S101 - narrows for mypy
        for index in sorted({0, (example.count - 1) // 2, example.count - 1}):
            alone = MicroBatch(example, [group.rows[index]], group.lengths.trims[index], 1, 1, {})
            check_trimmed(group.lengths, alone, [group.lengths.values[index]], alone.samples())
        return cls(example, values, padding, max(padded_length(example, padding, values), 1))

    @property
    def order(self) -> list[int]:
        return sort_rows(self.values)

    def at(self, length: int) -> tuple[Layout, int]:
        """Return samples that fill this length, cut to it, and how long they are: in lists as long as they come."""
        if not self.padding.dims:
            length = max([value for value in self.values if value <= length], default=min(self.values))
            rows = [row for row, value in enumerate(self.values) if value == length]
        else:
            rows = [row for row, value in enumerate(self.values) if value >= length]
            rows = rows or self.order[:1]
        length = max(length, 1)
        return self.example.part(rows, Trim(self.padding, length)), length

    def trim(self, batch: Any, cut: ByLength, whole: int) -> Any:
        """Trim a part of the example to its longest sample; a batch of ``whole`` samples stays whole."""
        layout = describe(batch, self.example.lists)
        if layout.count == whole:
            return batch
        length = max(cut.read(batch, layout.count))
        return layout.part(range(layout.count), Trim(self.padding, length)).batch


def read_answer(given: Any, count: int) -> list[int]:
    listed = given.tolist() if isinstance(given, torch.Tensor) or is_array(given) else given
    if not isinstance(listed, list | tuple):
        raise InvalidArgument(f"length_of() gave {name_type(given)}: return one whole number a sample, {_EXAMPLE}")
    if len(listed) != count:
        raise InvalidArgument(
            f"length_of() gave {len(listed)} lengths for {count} samples: return one whole number a sample, {_EXAMPLE}"
        )
    # Python's own number for one of NumPy's or of a tensor without dimensions.
    is_scalar = [getattr(value, "ndim", None) == 0 and hasattr(value, "item") for value in listed]
    values = [value.item() if scalar else value for value, scalar in zip(listed, is_scalar, strict=True)]
    wrong = next((n for n, value in enumerate(values) if type(value) is not int or value < 0), None)
    if wrong is not None:
        value = values[wrong]
        shown = show_value(value) if isinstance(value, int | float) else name_type(value)
        raise InvalidArgument(
            f"length_of() gave {shown} as a sample's length: return whole numbers from 0 on, {_EXAMPLE}"
        )
    return values


def _sized_parts(layout: Layout) -> dict[str, Any]:
    return {leaf.path: leaf.value for leaf in layout.leaves if leaf.kind == "rows"}


def padded_length(layout: Layout, padding: Padding, values: Sequence[int]) -> int:
    if not padding.dims:
        return max(values)
    parts, found = _sized_parts(layout), dict[int, str]()
    for path, dims in padding.dims.items():
        if path not in parts or parts[path].ndim <= max(dims):
            what = f"of shape {tuple(parts[path].shape)}" if path in parts else "not in the batch"
            raise InvalidArgument(f"{path} is {what}, and dimension {max(dims)} of it is what by_length() trims")
        found.update((int(parts[path].shape[dim]), path) for dim in dims)
    if len(found) > 1:
        shown = ", ".join(f"{path} to {size}" for size, path in found.items())
        raise InvalidArgument(f"the batch is padded to different lengths: {shown}; pad all of its tensors to one")
    [length] = found
    if max(values) > length:
        raise InvalidArgument(f"length_of() gave {max(values)} for a sample of a batch that is padded to {length}")
    return length


def find_padding(layout: Layout, cut: ByLength, values: Sequence[int]) -> Padding:
    parts = _sized_parts(layout)
    dims = _find_dims(layout, parts, values) if cut.dims is None else _check_dims(cut.dims, parts)
    if not dims:
        return Padding()
    length = padded_length(layout, Padding(dims=dims), values)
    if cut.dims is not None and cut.padding is not None:
        return Padding(dims=dims, side=cut.padding)
    if min(values) == length:
        raise InvalidArgument(
            f"all samples of the example batch are {length} long, so that it does not show what padding is: pass a "
            f"batch with shorter samples, or {_spell(dims, cut.padding or 'right')}"
        )
    against = {side: _find_unpadded(parts, dims, values, length, side) for side in _SIDES}
    fitting = [side for side, paths in against.items() if not paths and cut.padding in (None, side)]
    if len(fitting) != 1:
        fewest: Side = min(_SIDES, key=lambda side: len(against[side]))
        likely = cut.padding or fewest
        path = next(iter(against[likely]), None)
        what = (
            f"{path} has other values than padding beyond its samples' lengths in dimensions {[*dims[path]]}"
            if path is not None
            else "the values do not show on which side padding is"
        )
        raise InvalidArgument(f"{what}: pass {_spell(dims, likely)}, with what is true of your batch")
    return Padding(dims=dims, side=fitting[0])


def _find_dims(layout: Layout, parts: Mapping[str, Any], values: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Find the dimensions with the one size that no sample exceeds; none where samples are in lists alone."""
    longest = max(values)
    sizes: dict[int, str] = {}
    for path, part in parts.items():
        sizes.update((int(size), path) for size in part.shape[1:] if size >= longest)
    if not sizes:
        if "samples" in layout.lists.values() or not parts or any(leaf.kind == "registered" for leaf in layout.leaves):
            return {}
        shown = ", ".join(f"{path} {tuple(part.shape)}" for path, part in [*parts.items()][:4])
        raise InvalidArgument(
            f"the longest sample is {longest} by length_of(), and no tensor has a dimension for it: {shown}"
        )
    dims = {
        path: tuple(dim for dim, size in enumerate(part.shape) if dim and int(size) in sizes)
        for path, part in parts.items()
    }
    dims = {path: found for path, found in dims.items() if found}
    if len(sizes) > 1:
        shown = " or ".join(f"{size} ({path})" for size, path in sizes.items())
        raise InvalidArgument(
            f"the padded length of a batch whose longest sample is {longest} could be {shown}: pass "
            f"{_spell(dims, 'right')}, with the dimensions that are padded"
        )
    return dims


def _check_dims(given: Mapping[str, int | Sequence[int]], parts: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    dims: dict[str, tuple[int, ...]] = {}
    for path, named in given.items():
        if path not in parts:
            raise InvalidArgument(f"dims has {show_value(path)}, and the batch has {', '.join(parts) or 'no tensors'}")
        found = tuple(named) if isinstance(named, Sequence) and not isinstance(named, str) else (named,)
        if not found or any(type(dim) is not int or not 0 < dim < parts[path].ndim for dim in found):
            raise InvalidArgument(
                f"dims[{path!r}]={show_value(named)}, and {path} has dimensions 1 to {parts[path].ndim - 1} after "
                f"that of its samples"
            )
        dims[path] = found
    return dims


def _find_unpadded(
    parts: Mapping[str, Any], dims: Mapping[str, Sequence[int]], values: Sequence[int], length: int, side: Side
) -> list[str]:
    unpadded = list[str]()
    for path, found in dims.items():
        rows = torch.as_tensor(parts[path]).detach()
        if bool((rows == rows[:1]).all()):  # positions, the same in each sample, are right on either side
            continue
        tried = [_is_padded(rows, dim, values, length, side) for dim in found]
        # In a square mask, what a position of padding looks at may be anything: one of its dimensions shows padding.
        is_mask = len(found) == 2 and rows.dtype == torch.bool
        if not (any(tried) if is_mask else all(tried)):
            unpadded.append(path)
    return unpadded


def _is_padded(rows: torch.Tensor, dim: int, values: Sequence[int], length: int, side: Side) -> bool:
    for row, value in zip(rows, values, strict=True):
        beyond = row.narrow(dim - 1, value if side == "right" else 0, length - value).flatten()
        if bool((beyond != beyond[:1]).any()):
            return False
    return True


def _spell(dims: Mapping[str, Sequence[int]], side: Side) -> str:
    shown = {path: found[0] if len(found) == 1 else tuple(found) for path, found in dims.items()}
    return f"cut=autobatch.by_length(length_of, dims={shown!r}, padding={side!r})"
