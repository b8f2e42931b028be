"""Which parts of a batch hold one entry a sample: the rules, and the errors where they do not decide.

Does not cover containers (``nests``) nor what is then done with the parts (``batches``).

How a batch is read:

- A tensor or NumPy array with dimensions has one row a sample; all of them agree on how many.
- Mappings, dataclasses and namedtuples are *fields*: each value stands for all samples.
- A list or tuple is fields, as in ``[x, y]``, or holds one entry *a sample*, as detection targets do:

  1. Unlike entries (other types, dtypes, numbers of dimensions) are fields; so is a batch that is a list of lists.
  2. Alike entries, where tensors outside such lists tell the number of samples: one a sample if there are that many,
     else fields. If there are that many and every tensor inside has that many rows too: one a sample if the entries are
     mappings, else it can be counted, not split.
  3. Alike entries and nothing else to go by: fields if all leading dimensions agree, else one a sample. But four or
     more tensors of one length are an error, unless each is a batch of images: they may be either. So are four or more
     lists or tuples of such tensors; with a number or text in each, as in ``(image, label)``, they are one a sample,
     and so are four or more mappings. Two more exceptions. Images ``[1 or 3, height, width]`` of differing sizes are
     one a sample though their channels agree. And a batch that is itself a list of fewer than four tensors is always
     fields: ``x, y, weight``.

- Everything else is shared by all samples: numbers, strings, scalar tensors, any other object, and lists of those that
  are longer or shorter than the number of samples. Without any tensor, lists of strings tell that number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from autobatch.batch.tree import fields_of, is_array, is_sequence, leaves_of
from autobatch.errors import InvalidBatch

__all__ = ["ROOT", "ListReading", "count_rows", "read"]

ROOT = "batch"

_FEW = 4
"""From so many alike tensors on a list is hardly ``x, y, weight``."""

ListReading = Literal["samples", "fields", "unclear"]


class _Part(NamedTuple):
    """Something with one entry a sample: how it is reached, and how many it has."""

    path: str
    size: int


class _OpenList(NamedTuple):
    """A list of alike entries: by itself it does not tell whether they are fields or samples."""

    path: str
    entries: Sequence[Any]


def read(batch: Any, earlier: Mapping[str, ListReading]) -> tuple[int, dict[str, ListReading]]:
    """The number of samples, and what each list of alike entries holds, by path.

    Args:
        batch: Any nest.
        earlier: Lists that are already decided, by path.

    Raises:
        InvalidBatch: Nothing to count, no samples, unequal numbers, or a tensor whose rows cannot be viewed (sparse,
            nested, packed); with the paths and sizes.
    """
    lists: dict[str, ListReading] = {path: reading for path, reading in earlier.items() if reading != "unclear"}
    found = list(_survey(batch, ROOT, lists))
    certain = [entry for entry in found if isinstance(entry, _Part)]
    unsettled = [entry for entry in found if isinstance(entry, _OpenList)]
    rows = [part for entry in unsettled for part in _rows_beneath(entry.entries, entry.path)]
    fields_agree = not certain and len({part.size for part in rows}) == 1 and not any(map(_are_images, unsettled))
    if fields_agree and (records := [entry for entry in unsettled if _are_records(entry)]):
        certain, fields_agree = [_Part(entry.path, len(entry.entries)) for entry in records], False
        lists |= dict.fromkeys((entry.path for entry in records), "samples")
    elif fields_agree:
        _refuse_riddles(unsettled)
    count = _agreed(certain or (rows if fields_agree else _counted(unsettled, rows)))
    return _agreed(list(_settle(batch, ROOT, count, lists, fields_agree=fields_agree))), lists


def count_rows(leaf: Any) -> int | None:
    """Rows of a tensor or array, ``None`` of anything else and of scalars."""
    if isinstance(leaf, torch.Tensor) or is_array(leaf):
        return int(leaf.shape[0]) if leaf.ndim > 0 else None
    return None


def _survey(node: Any, path: str, lists: Mapping[str, ListReading]) -> Iterator[_Part | _OpenList]:
    """What is certain to have one entry a sample, and which lists are still to be decided."""
    _refuse_unviewable(node, path)
    rows = count_rows(node)
    if rows is not None:
        yield _Part(path, rows)
    elif is_sequence(node) and lists.get(path) == "samples":
        yield _Part(path, len(node))
    elif is_sequence(node) and path not in lists and _are_alike(node, path):
        yield _OpenList(path, node)
    else:
        for suffix, child in fields_of(node) or ():
            yield from _survey(child, path + suffix, lists)


def _settle(node: Any, path: str, count: int, lists: dict[str, ListReading], *, fields_agree: bool) -> Iterator[_Part]:
    """Decide every open list now that the count is known; yields all that will be split."""
    for found in _survey(node, path, lists):
        if isinstance(found, _Part):
            yield found
            continue
        lists[found.path] = _decide(found, count, fields_agree=fields_agree)
        if lists[found.path] != "fields":
            yield _Part(found.path, len(found.entries))
            continue
        for index, child in enumerate(found.entries):
            yield from _settle(child, f"{found.path}[{index}]", count, lists, fields_agree=fields_agree)


def _decide(found: _OpenList, count: int, *, fields_agree: bool) -> ListReading:
    if len(found.entries) != count:
        return "fields"
    rows = list(_rows_beneath(found.entries, found.path))
    if not rows or any(part.size != count for part in rows) or _are_images(found):
        return "samples"
    if fields_agree:
        return "fields"
    # A record for each sample, as detection targets are; two boxes in each of two images are then no riddle.
    return "samples" if all(isinstance(entry, Mapping) for entry in found.entries) else "unclear"


def _counted(unsettled: Sequence[_OpenList], rows: Sequence[_Part]) -> Sequence[_Part]:
    """What tells the number of samples where no tensor does: the lists that hold samples."""
    for found in unsettled:
        holds_tensors = any(count_rows(entry) is not None for entry in found.entries)
        if found.path == ROOT and holds_tensors and len(found.entries) < _FEW:
            return rows
    images = [found for found in unsettled if _are_images(found)]
    tensors = [found for found in unsettled if any(_rows_beneath(found.entries, found.path))]
    texts = [found for found in unsettled if any(isinstance(entry, str) for entry in found.entries)]
    return [_Part(found.path, len(found.entries)) for found in images or tensors or texts]


def _refuse_riddles(unsettled: Sequence[_OpenList]) -> None:
    """Many tensors of one length are rather samples than fields, and to read them wrong would be silent."""
    for found in unsettled:
        rows = {part.size for part in _rows_beneath(found.entries, found.path)}
        batched_images = all(getattr(leaf, "ndim", 0) >= 4 for leaf in leaves_of(found.entries))
        if len(found.entries) >= _FEW and len(rows) == 1 and not batched_images:
            what = "tensors" if count_rows(found.entries[0]) is not None else "entries with tensors"
            raise InvalidBatch(
                f"{found.path} has {len(found.entries)} {what} of {rows.pop()} rows each, and nothing tells which of "
                f"the two is the number of samples: stack samples into one tensor, or pass fields as a dict"
            )


def _are_records(found: _OpenList) -> bool:
    """Many entries that are what a dataset gives for a sample: a mapping, or tensors with a number or text beside."""
    if len(found.entries) < _FEW:
        return False
    return all(isinstance(entry, Mapping) or (is_sequence(entry) and _has_label(entry)) for entry in found.entries)


def _has_label(entry: Sequence[Any]) -> bool:
    leaves = [*leaves_of(entry)]
    is_label = [isinstance(leaf, (str, int, float)) or getattr(leaf, "ndim", None) == 0 for leaf in leaves]
    return any(is_label) and not all(is_label)


def _agreed(parts: Sequence[_Part]) -> int:
    """The size that all parts have."""
    if not parts:
        raise InvalidBatch("the batch has no samples to count: no tensor or array with dimensions, no list of samples")
    firsts = {part.size: part for part in reversed(parts)}
    if len(firsts) > 1:
        shown = ", ".join(f"{path} has {size}" for path, size in sorted(firsts.values(), key=parts.index)[:4])
        raise InvalidBatch(
            f"the number of samples is unclear: {shown}; each needs one entry a sample (what all samples share can "
            "live in the step)"
        )
    if parts[0].size == 0:
        raise InvalidBatch(f"{parts[0].path} has 0 samples: pass a batch of at least one")
    return parts[0].size


def _rows_beneath(node: Any, path: str) -> Iterator[_Part]:
    """Every tensor and array with dimensions, as if all lists were fields."""
    rows = count_rows(node)
    if rows is not None:
        yield _Part(path, rows)
    for suffix, child in fields_of(node) or ():
        yield from _rows_beneath(child, path + suffix)


def _are_alike(entries: Sequence[Any], path: str) -> bool:
    """Whether all entries are the same kind of thing, as samples are; a missing one (``None``) is like any other."""
    kinds = {_kind(entry) for entry in entries if entry is not None}
    return len(kinds) == 1 and not (path == ROOT and kinds == {"list"} and len(entries) < _FEW)


def _kind(entry: Any) -> object:
    if isinstance(entry, torch.Tensor) or is_array(entry):
        return type(entry), str(entry.dtype), entry.ndim
    if isinstance(entry, bool | int | float | complex):
        return "number"
    if isinstance(entry, Mapping):
        return "mapping"
    if is_sequence(entry):
        return "list"
    # Images of one batch may be objects of several classes, a JPEG beside a PNG.
    return type(entry) if isinstance(entry, str | bytes) or dataclasses.is_dataclass(entry) else "object"


def _are_images(found: _OpenList) -> bool:
    """Whether each entry is or holds an image, not all of one size; a short list at the root is ``x, y, weight``."""
    sizes = [_image_size(entry) for entry in found.entries]
    return len(sizes) >= (_FEW if found.path == ROOT else 2) and None not in sizes and len(set(sizes)) > 1


def _image_size(entry: Any) -> tuple[int, int] | None:
    shapes = (tuple(leaf.shape) for leaf in leaves_of(entry) if count_rows(leaf) in (1, 3) and leaf.ndim == 3)
    return next(((height, width) for _, height, width in shapes), None)


def _refuse_unviewable(node: Any, path: str) -> None:
    if isinstance(node, PackedSequence):
        raise InvalidBatch(f"{path} is a PackedSequence, which has no rows: pass it padded and pack it in the step")
    if isinstance(node, torch.Tensor) and (node.is_nested or node.layout is not torch.strided):
        kind = "nested" if node.is_nested else str(node.layout).removeprefix("torch.")
        raise InvalidBatch(f"{path} is a {kind} tensor, whose rows are no views: pass a dense one or a list of samples")
