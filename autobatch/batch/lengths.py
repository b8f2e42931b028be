"""Reads how long each sample of a batch is, and which dimensions of it are padded.

Covers ``Lengths``, what a user's function returns, and the padding of an example, which later batches share. Does not
cover trimming (``trimming``) nor how many samples run at which length (``planning.lengths``).

The padded length is the one size, of dimensions after the first, that no sample exceeds. Which dimensions have it is
read from the example once, and believed only where the values show it: beyond a sample's length a padded tensor has one
value, or the same values in each sample (positions). All else is refused, with the dimensions to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from autobatch._formatting import name_type, show_value
from autobatch.batch.layout import Layout
from autobatch.batch.list_rules import ROOT
from autobatch.batch.read_only_call import call_read_only
from autobatch.batch.registry import find_type
from autobatch.batch.tree import fields_of, is_array
from autobatch.errors import InvalidArgument
from autobatch.records import Padding

__all__ = [
    "LengthOf",
    "Lengths",
    "ask_lengths",
    "find_padding",
    "padded_length",
    "read_answers",
    "read_lengths",
    "sized_parts",
]

LengthOf = Callable[[Any], Any]
"""``lengths(batch)``: one whole number for each sample, in order: a tensor, an array or a list."""

_EXAMPLE = 'such as lambda batch: batch["attention_mask"].sum(1)'
Side = Literal["right", "left"]
_SIDES: tuple[Side, ...] = ("right", "left")


@dataclass(frozen=True)
class Lengths:
    """How long samples are, where the batch does not show which of its dimensions are padded.

    Attributes:
        of: ``of(batch)`` gives one whole number for each sample: a 1-dim tensor, an array or a list.
        dims: The dimension, or dimensions, with the padded length of each padded tensor, by its path:
            ``{'batch["inputs"]': 1, 'batch["mask"]': (1, 2)}``. Tensors that are left out are not trimmed. ``None``:
            they are found in the example batch.
        padding: ``"right"`` where padding comes after a sample's own values, ``"left"`` where before; ``None``: found
            in the example batch.
    """

    of: LengthOf
    dims: Mapping[str, int | Sequence[int]] | None = None
    padding: Side | None = None

    @classmethod
    def read(cls, lengths: Any) -> Lengths:
        """What was given as ``lengths=``; raises InvalidArgument for what cannot be called, or is of a wrong type."""
        if not isinstance(lengths, Lengths):
            shown = show_value(lengths) if isinstance(lengths, str | int | float) else name_type(lengths)
            _check_callable(lengths, shown)
            return cls(lengths)
        given = lengths.of
        _check_callable(given, f"Lengths({name_type(given) if isinstance(given, Lengths) else show_value(given)})")
        if lengths.padding not in (None, "right", "left"):
            raise InvalidArgument(f"padding={show_value(lengths.padding)}: pass 'right', 'left' or None")
        if not isinstance(lengths.dims, Mapping | None):
            raise InvalidArgument(
                f"dims={show_value(lengths.dims)}: pass dimensions by path, such as {{'batch[\"inputs\"]': 1}}, or None"
            )
        return lengths


def _check_callable(value: Any, shown: str) -> None:
    if not callable(value):
        raise InvalidArgument(f"lengths={shown} cannot be called: pass lengths(batch) -> one length a sample")


def read_lengths(lengths: Lengths, batch: Any, count: int) -> list[int]:
    """The length of each sample; raises InvalidArgument where the function gave something else."""
    return _read_answer(ask_lengths(lengths, batch), count)


def ask_lengths(lengths: Lengths, batch: Any) -> Any:
    """What the function returns for a batch, as it is; raises InvalidArgument where it wrote into the batch."""
    return call_read_only("lengths", lengths.of, batch)


def read_answers(answers: Sequence[Any], counts: Sequence[int]) -> list[int]:
    """The lengths of the samples of several batches, one after the other; raises InvalidArgument as ``read_lengths``.

    Args:
        answers: What the function returned for each.
        counts: How many samples each has.
    """
    if all(map(_is_row, answers, counts)) and len({(answer.device, answer.dtype) for answer in answers}) == 1:
        return _read_answer(torch.cat([*answers]), sum(counts))  # one wait for a device, not one for each batch
    return [value for answer, count in zip(answers, counts, strict=True) for value in _read_answer(answer, count)]


def _is_row(answer: Any, count: int) -> bool:
    return type(answer) is torch.Tensor and answer.shape == (count,)


def _read_answer(given: Any, count: int) -> list[int]:
    listed = given.tolist() if isinstance(given, torch.Tensor) or is_array(given) else given
    if not isinstance(listed, list | tuple):
        raise InvalidArgument(f"lengths() gave {name_type(given)}: return one whole number a sample, {_EXAMPLE}")
    if len(listed) != count:
        raise InvalidArgument(
            f"lengths() gave {len(listed)} lengths for {count} samples: return one whole number a sample, {_EXAMPLE}"
        )
    values = [value if type(value) is int else _as_number(value) for value in listed]
    wrong = next((n for n, value in enumerate(values) if type(value) is not int or value < 0), None)
    if wrong is not None:
        value = values[wrong]
        shown = show_value(value) if isinstance(value, int | float) else name_type(value)
        raise InvalidArgument(
            f"lengths() gave {shown} as a sample's length: return whole numbers from 0 on, {_EXAMPLE}"
        )
    return values


def _as_number(value: Any) -> Any:
    """Python's own number, for one of NumPy's or of a tensor without dimensions; all else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def sized_parts(layout: Layout) -> Iterator[tuple[str, Any]]:
    """Every tensor and array with one row a sample, by path; none inside lists with one entry a sample."""

    def walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
        if layout.lists.get(path) == "samples" or find_type(node) is not None:
            return
        if isinstance(node, torch.Tensor) or is_array(node):
            if node.ndim and node.shape[0] == layout.count:
                yield path, node
            return
        for suffix, child in fields_of(node) or ():
            yield from walk(child, path + suffix)

    yield from walk(layout.batch, ROOT)


def padded_length(layout: Layout, padding: Padding, values: Sequence[int]) -> int:
    """The size of the padded dimensions of a batch; of samples in lists the longest.

    Raises:
        InvalidArgument: They differ, a tensor is missing or has fewer dimensions than the example, or a sample is
            longer.
    """
    if not padding.dims:
        return max(values)
    parts, found = dict(sized_parts(layout)), dict[int, str]()
    for path, dims in padding.dims.items():
        if path not in parts or parts[path].ndim <= max(dims):
            what = f"of shape {tuple(parts[path].shape)}" if path in parts else "not in the batch"
            raise InvalidArgument(f"{path} is {what}, and dimension {max(dims)} of it is what lengths= trims")
        found.update((int(parts[path].shape[dim]), path) for dim in dims)
    if len(found) > 1:
        shown = ", ".join(f"{path} to {size}" for size, path in found.items())
        raise InvalidArgument(f"the batch is padded to different lengths: {shown}; pad all of its tensors to one")
    [length] = found
    if max(values) > length:
        raise InvalidArgument(f"lengths() gave {max(values)} for a sample of a batch that is padded to {length}")
    return length


def find_padding(layout: Layout, lengths: Lengths, values: Sequence[int]) -> Padding:
    """The padding of an example batch, as it was given or as its values show it.

    Raises:
        InvalidArgument: The values leave it open or contradict it, or the batch lacks what ``lengths.dims`` names.
    """
    parts = dict(sized_parts(layout))
    dims = _find_dims(layout, parts, values) if lengths.dims is None else _check_dims(lengths.dims, parts)
    if not dims:
        return Padding()
    length = padded_length(layout, Padding(dims=dims), values)
    if lengths.dims is not None and lengths.padding is not None:
        return Padding(dims=dims, side=lengths.padding)
    if min(values) == length:
        raise InvalidArgument(
            f"all samples of the example batch are {length} long, so that it does not show what padding is: pass a "
            f"batch with shorter samples, or {_spell(dims, lengths.padding or 'right')}"
        )
    against = {side: _find_unpadded(parts, dims, values, length, side) for side in _SIDES}
    fitting = [side for side, paths in against.items() if not paths and lengths.padding in (None, side)]
    if len(fitting) != 1:
        fewest: Side = min(_SIDES, key=lambda side: len(against[side]))
        likely = lengths.padding or fewest
        path = next(iter(against[likely]), None)
        what = (
            f"{path} has other values than padding beyond its samples' lengths in dimensions {[*dims[path]]}"
            if path is not None
            else "the values do not show on which side padding is"
        )
        raise InvalidArgument(f"{what}: pass {_spell(dims, likely)}, with what is true of your batch")
    return Padding(dims=dims, side=fitting[0])


def _find_dims(layout: Layout, parts: Mapping[str, Any], values: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The dimensions with the one size that no sample exceeds; none where samples are in lists alone."""
    longest = max(values)
    sizes: dict[int, str] = {}
    for path, part in parts.items():
        sizes.update((int(size), path) for size in part.shape[1:] if size >= longest)
    if not sizes:
        if "samples" in layout.lists.values() or not parts or layout.spec is None:
            return {}
        shown = ", ".join(f"{path} {tuple(part.shape)}" for path, part in [*parts.items()][:4])
        raise InvalidArgument(
            f"the longest sample is {longest} by lengths(), and no tensor has a dimension for it: {shown}"
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
    """The tensors that have more than padding where a sample's padding would be."""
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
        size = length - value
        beyond = row.narrow(dim - 1, value if side == "right" else 0, size)
        if size and bool((beyond != beyond.flatten()[0]).any()):
            return False
    return True


def _spell(dims: Mapping[str, Sequence[int]], side: Side) -> str:
    shown = {path: found[0] if len(found) == 1 else tuple(found) for path, found in dims.items()}
    return f"lengths=autobatch.Lengths(length_of, dims={shown!r}, padding={side!r})"
