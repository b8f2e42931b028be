"""Compares the entries of a list: one kind, one structure, images of differing sizes, records with a label.

Covers what the entries themselves show. Does not cover what follows from it for how a list is read (``list_rules``,
``layout_rules``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from autobatch.batch.registry import find_type
from autobatch.batch.tree import fields_of, is_array, is_sequence, leaves_of

__all__ = [
    "are_alike",
    "are_images",
    "count_rows",
    "have_one_structure",
    "have_shapes_of_images",
    "is_labelled",
    "is_record",
    "rows_beneath",
    "shapes_of",
    "tensors_held",
]

_NUMBERS = (bool, int, float, complex)

_DEPTH, _WIDTH = 3, 64
"""How far an unknown object is looked into: torch_geometric's ``Data`` has its tensors in a dict in a store in it."""


def count_rows(leaf: Any) -> int | None:
    """Rows of a tensor or array, samples of a registered type; ``None`` of anything else and of scalars."""
    registered = find_type(leaf)
    if registered is not None:
        return registered.count_samples(leaf)
    if isinstance(leaf, torch.Tensor) or is_array(leaf):
        return int(leaf.shape[0]) if leaf.ndim > 0 else None
    return None


def rows_beneath(node: Any) -> Iterator[int]:
    """Rows of every tensor, array and registered object, as if all lists were fields."""
    rows = count_rows(node)
    if rows is not None:
        yield rows
    for _, child in fields_of(node) or ():
        yield from rows_beneath(child)


def tensors_held(node: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Tensors in the attributes of an object of unknown type, and in what those hold, up to a depth and a width."""
    if isinstance(node, torch.Tensor):
        yield node
    elif depth and not isinstance(node, (type, torch.nn.Module)):
        children = [child for _, child in fields_of(node) or ()] or getattr(node, "__dict__", {}).values()
        for child in islice(children, _WIDTH):
            yield from tensors_held(child, depth - 1)


def are_alike(entries: Sequence[Any]) -> bool:
    """Whether all entries are one kind of thing, as samples are; a missing one (``None``) is like any other."""
    return len({_kind(entry) for entry in entries if entry is not None}) == 1


def _kind(entry: Any) -> object:
    if find_type(entry) is not None:
        return type(entry)
    if isinstance(entry, torch.Tensor) or is_array(entry):
        return type(entry), str(entry.dtype), entry.ndim
    if isinstance(entry, _NUMBERS):
        return "number"
    if isinstance(entry, Mapping):
        return "mapping"
    if is_sequence(entry):
        return "list"
    # Images of one batch may be objects of several classes, a JPEG beside a PNG.
    return type(entry) if isinstance(entry, str | bytes) or _has_fields(entry) else "object"


def have_one_structure(entries: Sequence[Any]) -> bool:
    """Whether all entries have the same container types, keys, dtypes and numbers of dimensions; sizes may differ."""
    present = [entry for entry in entries if entry is not None]
    return all(_match(present[0], entry) for entry in present[1:])


def _match(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return True
    if _kind(one) != _kind(other):
        return False
    ours, theirs = fields_of(one), fields_of(other)
    if ours is None or theirs is None:
        return True
    if type(one) is not type(other):
        return False
    if is_sequence(one) and len(ours) != len(theirs):  # as many words or boxes as a sample has
        everything = [*one, *other]
        return are_alike(everything) and have_one_structure(everything)
    return {name for name, _ in ours} == {name for name, _ in theirs} and all(
        _match(child, dict(theirs)[name]) for name, child in ours
    )


def is_record(entry: Any) -> bool:
    """Whether it is a container with named fields: a mapping, a dataclass, a namedtuple."""
    return find_type(entry) is None and (isinstance(entry, Mapping) or _has_fields(entry))


def _has_fields(entry: Any) -> bool:
    is_named = isinstance(entry, tuple) and hasattr(entry, "_fields")
    return is_named or (dataclasses.is_dataclass(entry) and not isinstance(entry, type))


def is_labelled(entry: Any) -> bool:
    """Whether a number, a text or a scalar tensor is beside something else, as in ``(image, label)``."""
    is_label = [isinstance(leaf, (str, *_NUMBERS)) or getattr(leaf, "ndim", None) == 0 for leaf in leaves_of(entry)]
    return any(is_label) and not all(is_label)


def are_images(entries: Sequence[Any]) -> bool:
    """Whether each entry is or holds an image ``[1 or 3, height, width]``, and they are not all of one size."""
    sizes = [_image_size(entry) for entry in entries]
    return len(sizes) >= 2 and None not in sizes and len(set(sizes)) > 1


def have_shapes_of_images(entries: Sequence[Any]) -> bool:
    """Whether each entry is itself a tensor ``[1 or 3, height, width]``, which may be an image."""
    return all(getattr(entry, "ndim", None) == 3 and count_rows(entry) in (1, 3) for entry in entries)


def shapes_of(entries: Sequence[Any]) -> set[tuple[Any, ...] | None]:
    """The different shapes of tensors and arrays; ``None`` stands for anything else."""
    return {tuple(entry.shape) if _is_dense(entry) else None for entry in entries}


def _image_size(entry: Any) -> tuple[int, int] | None:
    shapes = (tuple(leaf.shape) for leaf in leaves_of(entry) if _is_dense(leaf) and leaf.ndim == 3)
    return next(((height, width) for channels, height, width in shapes if channels in (1, 3)), None)


def _is_dense(leaf: Any) -> bool:
    """Whether its shape has only numbers: a nested tensor's has symbols."""
    return is_array(leaf) or (isinstance(leaf, torch.Tensor) and not leaf.is_nested)
