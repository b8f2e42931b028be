"""Decides which parts of a batch have one entry a sample; if the batch does not show it, the error says what to pass.

- A tensor or array with dimensions has one row a sample; a registered type's ``count`` counts its samples.
- Mappings, dataclasses and namedtuples are *fields*: each value belongs to all samples.
- A list or tuple is fields, as in ``(inputs, labels)``, or has one entry for each of its *samples*:

  1. ``batches.Samples([...])`` and ``batches.Fields([...])`` say it. Other lists are read as in an earlier batch.
  2. Entries unlike each other (other types, dtypes, numbers of dimensions) are fields.
  3. If tensors outside such lists show the number of samples, a list of as many entries has one for each. But if each
     tensor inside has as many rows too: mappings are samples, a single entry is fields, others leave it open.
  4. Else the entries of the list decide, by the table below.

- All else is shared by all samples: numbers, strings, scalar tensors, other objects, and lists of those in another
  number. If no tensor is in the batch, lists of strings or of objects show the number of samples.

Fields read as samples end in an error of the step, which unpacks them. Samples read as fields would each be cut along
their own first dimension, without an error. So a list alone is fields only if a DataLoader or a collate function
returns such a list:

======================================================= ========================================================
entries                                                 read as
======================================================= ========================================================
tensors of unequal length                               samples; at the root in a tuple of two or three an error
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

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from autobatch._formatting import name_type, show_value
from autobatch._wrappers import own_table
from autobatch.batch.registry import ListReading, Marked, find_type
from autobatch.batch.tree import ROOT, Leaf, count_rows, fields_of, is_array, is_record, is_sequence, leaves_of
from autobatch.errors import InvalidArgument

_FEW = 4  # from so many alike tensors on a list is hardly ``x, y, weight``

_NUMBERS = (bool, int, float, complex)
_UNORDERED = (set, frozenset, range)
_KNOWN = (type(None), *_NUMBERS, bytes, str, *_UNORDERED, slice, torch.Tensor, torch.Size)

# How far an unknown object is looked into: torch_geometric's ``Data`` has its tensors in a dict in a store in it.
_DEPTH, _WIDTH = 3, 64


def decide_lists(leaves: Sequence[Leaf], batch: Any, samples: int | None) -> dict[str, ListReading]:
    """Decide how open lists are read: at least one of them, by what is most certain.

    ``samples`` is the number that the batch was made of, if known. Rows of tensors outweigh it.
    """
    lists = [leaf for leaf in leaves if leaf.kind == "open"]
    certain = {leaf.path: leaf.value.reading for leaf in lists if isinstance(leaf.value, Marked)}
    certain |= {leaf.path: "fields" for leaf in lists if leaf.path not in certain and not are_alike(leaf.value)}
    if certain:
        return certain
    if sizes := _sizes_of(leaves):
        samples = _agree(sizes, batch)
    elif samples is None:
        judged = {leaf.path: _judge(leaf) for leaf in lists}
        # Samples first: they show a number, by which lists that could be read in two ways are decided.
        if "samples" in judged.values():
            return {path: reading for path, reading in judged.items() if reading == "samples"}
        samples = _find_only_count(lists)
        if samples is None and "fields" in judged.values():
            return {path: reading for path, reading in judged.items() if reading == "fields"}
        if samples is None:
            _refuse_to_guess([leaf for leaf in lists if judged[leaf.path] == "unclear"])
            # Lists of texts, else of objects, show the number of samples where no tensor does.
            samples = _agree(_lengths_of(lists, str) or _lengths_of(lists, "object"), batch)
    return {path: _decide(entries, samples) for path, entries, _ in lists}


def count_samples(leaves: Sequence[Leaf], batch: Any) -> int:
    """Count the samples, once every list is decided."""
    count = _agree(_sizes_of(leaves), batch)
    for path, value, kind in leaves:
        is_unknown = kind == "shared" and count > 1 and _is_opaque(value)
        if is_unknown and any(count_rows(tensor) == count for tensor in _tensors_held(value)):
            raise InvalidArgument(
                f"{path} is {name_type(value)}, no container that autobatch knows, and a tensor in it has {count} "
                f"rows, as the batch has samples: pass a dict of what it holds, or call "
                f"autobatch.batches.register({type(value).__name__}, count=..., take=...) once"
            )
    return count


def _sizes_of(leaves: Sequence[Leaf]) -> dict[str, int]:
    """Return the number of entries of each part with one a sample, by path."""
    sizes = {}
    for path, value, kind in leaves:
        is_plain = kind != "registered"
        if is_plain and isinstance(value, PackedSequence):
            raise InvalidArgument(
                f"{path} is a PackedSequence, which has no rows: pass it padded and pack it in the step"
            )
        if is_plain and isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided):
            form = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise InvalidArgument(
                f"{path} is a {form} tensor, whose rows are no views: pass a dense one or a list of samples"
            )
        if kind == "rows":
            sizes[path] = int(value.shape[0])
        elif kind == "registered":
            sizes[path] = count_rows(value) or 0
        elif kind in ("samples", "unclear"):
            sizes[path] = len(value)
    return sizes


def _agree(sizes: Mapping[str, int], batch: Any) -> int:
    if not sizes:
        raise InvalidArgument(_explain_nothing(batch))
    firsts: dict[int, str] = {}
    for path, size in sizes.items():
        firsts.setdefault(size, path)
    if len(firsts) > 1:
        shown = ", ".join(f"{path} has {size}" for size, path in [*firsts.items()][:4])
        raise InvalidArgument(
            f"the number of samples is unclear: {shown}; each needs one entry a sample (what all samples share can "
            f"live in the step; samples that are joined, as graphs are, go into a type for autobatch.batches.register)"
        )
    [(size, path)] = firsts.items()
    if size == 0:
        raise InvalidArgument(f"{path} has 0 samples: pass a batch of at least one")
    return size


def _explain_nothing(batch: Any) -> str:
    nothing = "the batch has no samples to count: no tensor or array with dimensions, no list of samples"
    opaque = next((leaf for leaf in leaves_of(batch) if _is_opaque(leaf) or isinstance(leaf, _UNORDERED)), None)
    if opaque is None:
        return nothing if fields_of(batch) else f"{nothing}; pass what a loader yields, not batch={show_value(batch)}"
    if isinstance(opaque, Iterator):
        return f"{nothing}; {name_type(opaque)} can be read only once: pass one batch of it, such as next(iterator)"
    if isinstance(opaque, (*_UNORDERED, deque)):
        return f"{nothing}; {name_type(opaque)} is not read as samples: pass a list"
    return (
        f"{nothing}; {name_type(opaque)} is no container that autobatch knows: pass a dict of what it holds, or call "
        f"autobatch.batches.register({type(opaque).__name__}, count=..., take=...) once"
    )


def _is_opaque(leaf: Any) -> bool:
    return not isinstance(leaf, _KNOWN) and count_rows(leaf) is None


def _tensors_held(node: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yield tensors in the attributes of an object of unknown type, and in what those hold."""
    if isinstance(node, torch.Tensor):
        yield node
    elif depth and not isinstance(node, (type, torch.nn.Module)):
        children = [child for _, child in fields_of(node) or ()] or own_table(node).values()
        for child in islice(children, _WIDTH):
            yield from _tensors_held(child, depth - 1)


def _decide(entries: Sequence[Any], count: int) -> ListReading:
    if len(entries) != count:
        return "fields"
    rows = {*_rows_beneath(entries)}
    if rows != {count} or _are_images(entries):
        return "samples"
    # A record for each sample, as detection targets are: two boxes in each of two images leave nothing open.
    if all(is_record(entry) for entry in entries):
        return "samples"
    return "fields" if count == 1 else "unclear"


def _judge(leaf: Leaf) -> ListReading | None:
    """Return how a list of entries of one kind is read by them alone; ``None`` where it holds no tensor."""
    entries = [entry for entry in leaf.value if entry is not None]
    rows, is_root, is_tuple = {*_rows_beneath(entries)}, leaf.path == ROOT, isinstance(leaf.value, tuple)
    if not rows:
        return _judge_texts(entries) if is_root else None
    # Whether it is what a DataLoader or a collate function returns for a few fields.
    may_be_arguments, equal = is_root and len(leaf.value) < _FEW, len(rows) == 1
    if any(count_rows(entry) is None for entry in entries):
        return _judge_containers(entries, equal=equal, is_tuple=is_tuple, may_be_arguments=may_be_arguments)
    return _judge_tensors(entries, equal=equal, is_tuple=is_tuple, may_be_arguments=may_be_arguments)


def _judge_tensors(entries: Sequence[Any], *, equal: bool, is_tuple: bool, may_be_arguments: bool) -> ListReading:
    if is_tuple and may_be_arguments:
        return "fields"
    if not equal:
        return "samples"
    if all(_ndim(entry) == 3 and count_rows(entry) in (1, 3) for entry in entries):
        return "samples" if not may_be_arguments and _are_images(entries) else "unclear"
    if len(entries) == 1:
        return "fields"
    if len({tuple(entry.shape) if _is_dense(entry) else None for entry in entries}) == 1:
        return "unclear"
    # Crops of several sizes; videos [1 or 3, time, height, width] are single samples.
    are_crops = all(_ndim(entry) >= 4 and count_rows(entry) not in (1, 3) for entry in entries)
    return "fields" if may_be_arguments or are_crops else "unclear"


def _judge_containers(entries: Sequence[Any], *, equal: bool, is_tuple: bool, may_be_arguments: bool) -> ListReading:
    are_sequences = all(is_sequence(entry) for entry in entries)
    if are_sequences and all(_are_images(entry) for entry in entries):
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
    """Judge entries without any tensor, at the root: below it a list of settings looks the same as one of samples."""
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


def _find_only_count(lists: Sequence[Leaf]) -> int | None:
    """Return the only number of samples that several lists beside each other allow; ``None`` if several or none are.

    Images of one size and their masks: three rows in each of the ones, eight in each of the others, two of both.
    """
    shapes = [(len(leaf.value), rows) for leaf in lists if (rows := {*_rows_beneath(leaf.value)})]
    if len(shapes) < 2 or any(is_sequence(entry) for leaf in lists for entry in leaf.value):
        return None
    numbers = {number for length, rows in shapes for number in (length, *rows)}
    possible = [n for n in numbers if all(n == length or {n} == rows for length, rows in shapes)]
    is_clear = len(possible) == 1 and all({length} != rows for length, rows in shapes)
    return possible[0] if is_clear else None


def _lengths_of(lists: Sequence[Leaf], kind: object) -> dict[str, int]:
    return {
        path: len(entries) for path, entries, _ in lists if {_kind(one) for one in entries if one is not None} == {kind}
    }


def _refuse_to_guess(unclear: Sequence[Leaf]) -> None:
    if not unclear:
        return
    path, entries, _ = unclear[0]
    rows = sorted({*_rows_beneath(entries)})
    inside = f", with tensors of {', '.join(map(str, rows[:3]))} rows," if rows else ""
    raise InvalidArgument(
        f"{path} is {name_type(entries)} of {len(entries)} alike entries{inside} and may hold one entry a "
        f"sample, or fields: pass autobatch.batches.Samples({path}) or autobatch.batches.Fields({path}) in its "
        f"stead, or samples stacked into one tensor"
    )


def _rows_beneath(node: Any) -> Iterator[int]:
    rows = count_rows(node)
    if rows is not None:
        yield rows
    for _, child in fields_of(node) or ():
        yield from _rows_beneath(child)


def are_alike(entries: Sequence[Any]) -> bool:
    """Return whether all entries are one kind of thing, as samples are; a missing one (``None``) is like any other."""
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
    """Return whether all have the same container types, keys, dtypes and numbers of dimensions; sizes may differ."""
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


def _is_labelled(entry: Any) -> bool:
    """Return whether a number, a text or a scalar tensor is beside something else, as in ``(image, label)``."""
    is_label = [isinstance(leaf, (str, *_NUMBERS)) or _ndim(leaf) == 0 for leaf in leaves_of(entry)]
    return any(is_label) and not all(is_label)


def _are_images(entries: Sequence[Any]) -> bool:
    """Return whether each entry is or holds an image ``[1 or 3, height, width]``, and they are not all of one size."""
    sizes = []
    for entry in entries:
        shapes = [tuple(leaf.shape) for leaf in leaves_of(entry) if _is_dense(leaf) and leaf.ndim == 3]
        sizes.append(next(((height, width) for channels, height, width in shapes if channels in (1, 3)), None))
    return len(sizes) >= 2 and None not in sizes and len(set(sizes)) > 1


def _ndim(leaf: Any) -> int:
    return leaf.ndim if isinstance(leaf, torch.Tensor) or is_array(leaf) else -1


def _is_dense(leaf: Any) -> bool:
    return is_array(leaf) or (isinstance(leaf, torch.Tensor) and not leaf.is_nested)
