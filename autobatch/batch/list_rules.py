"""Decides whether the entries of a list are samples or fields, by the entries alone or by a mark of the user's.

Covers lists of alike entries in batches without a tensor outside them that shows the number of samples. Does not cover
lists beside such tensors, nor lists that were read in an earlier batch (``layout_rules``).

The entries of a list are its samples where they are containers of one structure: the same container types, keys, dtypes
and numbers of dimensions. That they were meant as fields cannot always be seen; but fields read as samples end in an
error of the step, which unpacks them, while samples read as fields would each be cut along its own first dimension, and
training would go on. So a list is read as fields only where that is what a DataLoader or a collate function returns:

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

"Length" is the first dimension of every tensor inside. What is unclear is an error that says what to pass, unless
another list beside it leaves only one number of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from autobatch._formatting import name_type
from autobatch.batch.list_structure import (
    are_alike,
    are_images,
    count_rows,
    have_one_structure,
    have_shapes_of_images,
    is_labelled,
    is_record,
    rows_beneath,
    shapes_of,
)
from autobatch.batch.tree import fields_of, is_sequence
from autobatch.errors import InvalidArgument, InvalidBatch

__all__ = ["ROOT", "Fields", "ListReading", "OpenList", "Samples", "find_only_count", "judge", "refuse_to_guess"]

ROOT = "batch"

_FEW = 4
"""From so many alike tensors on a list is hardly ``x, y, weight``."""

ListReading = Literal["samples", "fields", "unclear"]


class _Marked(list[Any]):
    def __init__(self, entries: Iterable[Any] = (), /) -> None:
        """Refuse a text or a mapping, which would be taken apart, and what is no list."""
        if not isinstance(entries, Iterable) or isinstance(entries, str | bytes | Mapping):
            name = type(self).__name__
            raise InvalidArgument(f"autobatch.batches.{name}() takes a list of entries, not {name_type(entries)}")
        super().__init__(entries)


class Samples(_Marked):
    """A list in a batch with one entry for each sample.

    It is a ``list`` in every other way: ``step`` is called with one, and a collate function may return one. A plan
    holds how its example batch was read (``plan.batch_lists``), so batches of later steps need no mark.
    """


class Fields(_Marked):
    """A list in a batch whose entries are fields, such as inputs and targets: each holds all samples."""


class OpenList(NamedTuple):
    """A list of alike entries, which may be fields or samples."""

    path: str
    entries: Sequence[Any]

    @property
    def may_be_arguments(self) -> bool:
        """Whether it is what a DataLoader or a collate function returns for a few fields."""
        return self.path == ROOT and len(self.entries) < _FEW


def judge(found: OpenList) -> ListReading | None:
    """How the list is read; ``"unclear"`` where it may be either, ``None`` where it holds no tensor."""
    entries = [entry for entry in found.entries if entry is not None]
    rows = {*rows_beneath(entries)}
    if not rows:
        return _judge_texts(found, entries)
    if all(count_rows(entry) is not None for entry in entries):
        return _judge_tensors(found, entries, equal=len(rows) == 1)
    if all(is_sequence(entry) for entry in entries):
        return _judge_sequences(found, entries, equal=len(rows) == 1)
    return _judge_records(found, entries, equal=len(rows) == 1)


def find_only_count(lists: Sequence[OpenList]) -> int | None:
    """The only number of samples that several lists beside each other allow; ``None`` where several or none are.

    Images of one size and their masks: three rows in each of the ones, eight in each of the others, two of both.
    """
    shapes = [(len(entries), rows) for _, entries in lists if (rows := {*rows_beneath(entries)})]
    if len(shapes) < 2 or any(is_sequence(entry) for found in lists for entry in found.entries):
        return None
    numbers = {number for length, rows in shapes for number in (length, *rows)}
    possible = [n for n in numbers if all(n == length or {n} == rows for length, rows in shapes)]
    if len(possible) != 1 or any({length} == rows for length, rows in shapes):
        return None
    return possible[0]


def refuse_to_guess(unclear: Sequence[OpenList]) -> None:
    """Raise InvalidBatch with what to pass for the first of these lists, if any."""
    for path, entries in unclear:
        rows = sorted({*rows_beneath(entries)})
        inside = f", with tensors of {', '.join(map(str, rows[:3]))} rows," if rows else ""
        raise InvalidBatch(
            f"{path} is {name_type(entries)} of {len(entries)} alike entries{inside} and may hold one entry a "
            f"sample, or fields: pass autobatch.batches.Samples({path}) or autobatch.batches.Fields({path}) in its "
            f"stead, or samples stacked into one tensor"
        )


def _judge_tensors(found: OpenList, entries: Sequence[Any], *, equal: bool) -> ListReading:
    """Tensors, arrays or registered objects, all of one dtype and number of dimensions."""
    is_tuple = isinstance(found.entries, tuple)
    if not equal:
        return "fields" if is_tuple and found.may_be_arguments else "samples"
    if is_tuple and found.may_be_arguments:
        return "fields"
    if have_shapes_of_images(entries):
        return "samples" if not found.may_be_arguments and are_images(entries) else "unclear"
    if len(entries) == 1:
        return "fields"
    if len(shapes_of(entries)) == 1:
        return "unclear"
    return "fields" if found.may_be_arguments or _are_batches_of_images(entries) else "unclear"


def _are_batches_of_images(entries: Sequence[Any]) -> bool:
    """Crops of several sizes; videos ``[1 or 3, time, height, width]`` are single samples."""
    return all(getattr(entry, "ndim", 0) >= 4 and count_rows(entry) not in (1, 3) for entry in entries)


def _judge_sequences(found: OpenList, entries: Sequence[Any], *, equal: bool) -> ListReading:
    """Lists or tuples: samples such as ``(image, label)``, or fields with one entry a sample in each."""
    if all(are_images(entry) for entry in entries):
        return "fields"
    if not have_one_structure(entries):
        return _judge_unlike(entries, equal=equal)
    if len(entries) == 1:
        return _judge_single(found, entries[0], equal=equal)
    if all(is_labelled(entry) for entry in entries) and len(entries) >= _FEW:
        return "samples"
    # torch's default_collate makes lists of what a dataset gives as tuples: a tuple inside is one sample, not a column.
    may_be_columns = isinstance(found.entries, tuple) or any(isinstance(entry, list) for entry in entries)
    if _may_be_transposed(entries) and (may_be_columns or len(entries[0]) >= _FEW):
        return "unclear"
    return "unclear" if equal and may_be_columns else "samples"


def _may_be_transposed(entries: Sequence[Any]) -> bool:
    """Whether each entry may itself be the list of samples: alike, and as many in each; few columns, not many."""
    is_even = len({len(entry) for entry in entries}) == 1
    return is_even and all(are_alike(entry) for entry in entries) and not len(entries) >= _FEW > len(entries[0])


def _judge_records(found: OpenList, entries: Sequence[Any], *, equal: bool) -> ListReading:
    """Mappings, dataclasses, namedtuples."""
    if not have_one_structure(entries):
        return _judge_unlike(entries, equal=equal)
    if len(entries) == 1:
        return _judge_single(found, entries[0], equal=equal)
    return "unclear" if equal and isinstance(found.entries, tuple) and found.may_be_arguments else "samples"


def _judge_unlike(entries: Sequence[Any], *, equal: bool) -> ListReading:
    """Containers with other keys or types: fields, but many are rather samples with something optional in them."""
    if len(entries) < _FEW:
        return "fields"
    return "unclear" if equal else "samples"


def _judge_single(found: OpenList, entry: Any, *, equal: bool) -> ListReading:
    """One entry that is itself a container."""
    if not equal or (is_labelled(entry) and isinstance(found.entries, list)):
        return "samples"
    return "fields" if isinstance(found.entries, tuple) else "unclear"


def _judge_texts(found: OpenList, entries: Sequence[Any]) -> ListReading | None:
    """Entries without any tensor; below the root a list of settings looks the same as one of samples."""
    if found.path != ROOT:
        return None
    if all(is_record(entry) for entry in entries):
        return "samples" if have_one_structure(entries) and not _is_column(entries) else "unclear"
    if not all(is_sequence(entry) for entry in entries):
        return None
    return "unclear" if len(entries) == 1 or _may_be_transposed(entries) else "samples"


def _is_column(entries: Sequence[Any]) -> bool:
    """Whether it is one record with lists in it, which may hold one entry a sample."""
    return len(entries) == 1 and any(is_sequence(child) for _, child in fields_of(entries[0]) or ())
