"""Decides whether the entries of a list are samples or fields, by the entries alone or by a mark of the user's.

It judges lists of entries of one kind in batches in which no tensor outside them shows the number of samples.

The entries of a list are its samples where they are containers of one structure: the same container types, keys, dtypes
and numbers of dimensions. They may have been meant as fields. Fields read as samples end in an error of the step, which
unpacks them. Samples read as fields would each be cut along its own first dimension, without an error. So a list is
read as fields only if a DataLoader or a collate function returns such a list:

======================================================= ========================================================
entries                                                 read as
======================================================= ========================================================
tensors of unequal length                               samples; at the root in a tuple of two or three an error:
                                                        inputs and labels of unequal length
at the root a tuple of two or three of equal length     fields: ``(inputs, targets)``
at the root a list of those, of unlike shapes           fields: a DataLoader's ``[inputs, targets]``
one tensor                                              fields: a DataLoader's ``[inputs]``
batches of images of unlike shapes                      fields: crops
images of differing sizes                               samples; at the root in a list of two or three unclear
other tensors of equal length                           unclear: two samples, or two fields?
records (mapping, dataclass, namedtuple), one structure samples; at the root in a tuple of two or three of equal
                                                        length unclear
a list of tuples of one structure                       samples, unless it may be ``list(zip(*samples))``
other lists of lists or tuples of one structure         fields where those hold images of differing sizes; samples
                                                        where they cannot be fields; else unclear
containers of unlike structure                          fields; four or more: samples, of equal length unclear
one container                                           samples where it cannot be fields; in a tuple fields; else
                                                        unclear
======================================================= ========================================================

"Length" is the first dimension of every tensor inside. An unclear list is an error that says what to pass, unless
another list beside it leaves only one number of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from autobatch._formatting import name_type
from autobatch.batch.registry import find_type
from autobatch.batch.tree import count_rows, field_names, fields_of, is_array, is_sequence, leaves_of
from autobatch.errors import InvalidArgument

ROOT = "batch"

_FEW = 4
"""From so many alike tensors on a list is hardly ``x, y, weight``."""

_NUMBERS = (bool, int, float, complex)

ListReading = Literal["samples", "fields", "unclear"]


class Marked(list[Any]):
    """A list that says itself how it is read."""

    reading: ClassVar[ListReading]

    def __init__(self, entries: Iterable[Any] = (), /) -> None:
        """Refuse a text or a mapping, which would be taken apart, and other types than lists."""
        if not isinstance(entries, Iterable) or isinstance(entries, str | bytes | Mapping):
            name = type(self).__name__
            raise InvalidArgument(f"autobatch.batches.{name}() takes a list of entries, not {name_type(entries)}")
        super().__init__(entries)


class Samples(Marked):
    """A list in a batch with one entry for each sample.

    It is a ``list`` in every other way: ``step`` is called with one, and a collate function may return one. A plan
    holds how its example batch was read (``plan.batch_lists``), so batches of later steps need no mark.
    """

    reading = "samples"


class Fields(Marked):
    """A list in a batch whose entries are fields, such as inputs and targets: each holds all samples."""

    reading = "fields"


class OpenList(NamedTuple):
    """A list of entries of one kind, which may be fields or samples."""

    path: str
    entries: Sequence[Any]


def judge(found: OpenList) -> ListReading | None:
    """How the list is read; ``"unclear"`` where it may be either, ``None`` where it holds no tensor."""
    entries = [entry for entry in found.entries if entry is not None]
    rows = {*rows_beneath(entries)}
    if not rows:
        return _judge_texts(entries) if found.path == ROOT else None
    # Whether it is what a DataLoader or a collate function returns for a few fields.
    may_be_arguments = found.path == ROOT and len(found.entries) < _FEW
    judge_entries = _judge_containers if any(count_rows(entry) is None for entry in entries) else _judge_tensors
    return judge_entries(
        entries, equal=len(rows) == 1, is_tuple=isinstance(found.entries, tuple), may_be_arguments=may_be_arguments
    )


def _judge_tensors(entries: Sequence[Any], *, equal: bool, is_tuple: bool, may_be_arguments: bool) -> ListReading:
    """Tensors, arrays or registered objects, all of one dtype and number of dimensions."""
    if is_tuple and may_be_arguments:
        return "fields"
    if not equal:
        return "samples"
    if all(_ndim(entry) == 3 and count_rows(entry) in (1, 3) for entry in entries):
        return "samples" if not may_be_arguments and are_images(entries) else "unclear"
    if len(entries) == 1:
        return "fields"
    if len({tuple(entry.shape) if _is_dense(entry) else None for entry in entries}) == 1:
        return "unclear"
    # Crops of several sizes; videos [1 or 3, time, height, width] are single samples.
    are_crops = all(_ndim(entry) >= 4 and count_rows(entry) not in (1, 3) for entry in entries)
    return "fields" if may_be_arguments or are_crops else "unclear"


def _judge_containers(entries: Sequence[Any], *, equal: bool, is_tuple: bool, may_be_arguments: bool) -> ListReading:
    """Lists or tuples, such as ``(image, label)``, or records."""
    are_sequences = all(is_sequence(entry) for entry in entries)
    if are_sequences and all(are_images(entry) for entry in entries):
        return "fields"
    if not _have_one_structure(entries):  # many are rather samples with something optional in them
        return "fields" if len(entries) < _FEW else "unclear" if equal else "samples"
    if len(entries) == 1:
        is_sample = not equal or (_is_labelled(entries[0]) and not is_tuple)
        return "samples" if is_sample else "fields" if is_tuple else "unclear"
    if not are_sequences:
        return "unclear" if equal and is_tuple and may_be_arguments else "samples"
    if all(_is_labelled(entry) for entry in entries) and len(entries) >= _FEW:
        return "samples"
    # torch's default_collate makes lists of what a dataset gives as tuples: a tuple inside is one sample, not a column.
    may_be_columns = is_tuple or any(isinstance(entry, list) for entry in entries)
    is_transposed = _may_be_transposed(entries) and (may_be_columns or len(entries[0]) >= _FEW)
    return "unclear" if is_transposed or (equal and may_be_columns) else "samples"


def _judge_texts(entries: Sequence[Any]) -> ListReading | None:
    """Entries without any tensor, at the root: below it a list of settings looks the same as one of samples."""
    if all(is_record(entry) for entry in entries):
        # One record with lists in it, which may hold one entry a sample.
        is_column = len(entries) == 1 and any(is_sequence(child) for _, child in fields_of(entries[0]) or ())
        return "samples" if _have_one_structure(entries) and not is_column else "unclear"
    if not all(is_sequence(entry) for entry in entries):
        return None
    return "unclear" if len(entries) == 1 or _may_be_transposed(entries) else "samples"


def _may_be_transposed(entries: Sequence[Any]) -> bool:
    """Return whether each entry may itself be the list of samples: of one kind, as many in each, few columns."""
    is_even = len({len(entry) for entry in entries}) == 1
    return is_even and all(are_alike(entry) for entry in entries) and not len(entries) >= _FEW > len(entries[0])


def find_only_count(lists: Sequence[OpenList]) -> int | None:
    """The only number of samples that several lists beside each other allow; ``None`` where several or none are.

    Images of one size and their masks: three rows in each of the ones, eight in each of the others, two of both.
    """
    shapes = [(len(entries), rows) for _, entries in lists if (rows := {*rows_beneath(entries)})]
    if len(shapes) < 2 or any(is_sequence(entry) for found in lists for entry in found.entries):
        return None
    numbers = {number for length, rows in shapes for number in (length, *rows)}
    possible = [n for n in numbers if all(n == length or {n} == rows for length, rows in shapes)]
    is_clear = len(possible) == 1 and all({length} != rows for length, rows in shapes)
    return possible[0] if is_clear else None


def refuse_to_guess(unclear: OpenList) -> None:
    """Raise InvalidArgument with what to pass for this list."""
    path, entries = unclear
    rows = sorted({*rows_beneath(entries)})
    inside = f", with tensors of {', '.join(map(str, rows[:3]))} rows," if rows else ""
    raise InvalidArgument(
        f"{path} is {name_type(entries)} of {len(entries)} alike entries{inside} and may hold one entry a "
        f"sample, or fields: pass autobatch.batches.Samples({path}) or autobatch.batches.Fields({path}) in its "
        f"stead, or samples stacked into one tensor"
    )


def rows_beneath(node: Any) -> Iterator[int]:
    """Rows of every tensor, array and registered object, as if all lists were fields."""
    rows = count_rows(node)
    if rows is not None:
        yield rows
    for _, child in fields_of(node) or ():
        yield from rows_beneath(child)


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
    return type(entry) if isinstance(entry, str | bytes) or is_record(entry) else "object"


def _have_one_structure(entries: Sequence[Any]) -> bool:
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
        return are_alike(everything) and _have_one_structure(everything)
    named = dict(theirs)
    return dict(ours).keys() == named.keys() and all(_match(child, named[name]) for name, child in ours)


def is_record(entry: Any) -> bool:
    """Whether it is a container with named fields: a mapping, a dataclass, a namedtuple."""
    return find_type(entry) is None and (isinstance(entry, Mapping) or field_names(entry) is not None)


def _is_labelled(entry: Any) -> bool:
    """Whether a number, a text or a scalar tensor is beside something else, as in ``(image, label)``."""
    is_label = [isinstance(leaf, (str, *_NUMBERS)) or _ndim(leaf) == 0 for leaf in leaves_of(entry)]
    return any(is_label) and not all(is_label)


def are_images(entries: Sequence[Any]) -> bool:
    """Whether each entry is or holds an image ``[1 or 3, height, width]``, and they are not all of one size."""
    sizes = [_image_size(entry) for entry in entries]
    return len(sizes) >= 2 and None not in sizes and len(set(sizes)) > 1


def _image_size(entry: Any) -> tuple[int, int] | None:
    shapes = (tuple(leaf.shape) for leaf in leaves_of(entry) if _is_dense(leaf) and leaf.ndim == 3)
    return next(((height, width) for channels, height, width in shapes if channels in (1, 3)), None)


def _ndim(leaf: Any) -> int:
    """The dimensions of a tensor or array, -1 of anything else, which is not asked."""
    return leaf.ndim if isinstance(leaf, torch.Tensor) or is_array(leaf) else -1


def _is_dense(leaf: Any) -> bool:
    """Whether its shape has only numbers: a nested tensor's has symbols."""
    return is_array(leaf) or (isinstance(leaf, torch.Tensor) and not leaf.is_nested)
